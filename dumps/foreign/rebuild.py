"""Tensors out of the inert tree of a pickle: every size is checked against the bytes that are there."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign.unpickle import Node

if TYPE_CHECKING:
    from torch import Tensor

_NUMPY = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy._core.numeric", "numpy.core.numeric")
TENSOR_NAMES = frozenset(
    {"torch.device", "torch._utils._rebuild_tensor_v2", "torch.storage._load_from_bytes", "collections.OrderedDict"}
    | {"torch.float64", "torch.float32", "torch.float16", "torch.bfloat16", "torch.int64", "torch.int32"}
    | {"torch.int16", "torch.int8", "torch.uint8", "torch.bool", "torch.Size"}
    | {
        f"{module}.{name}"
        for module in _NUMPY
        for name in ("_reconstruct", "scalar", "ndarray", "dtype", "_frombuffer")
    }
    | {"_codecs.encode"}
)


def tensor(value: Any, where: str) -> Tensor:
    """A tensor from any of the forms in which trainers pickle one.

    Args:
        value: ``{format, data, shape, dtype}`` (SkyRL), a recorded numpy array, or a recorded torch tensor.
        where: file and key for messages.
    Raises:
        DumpError: another form, or a shape that the bytes do not fill.
    """
    if isinstance(value, dict) and {"data", "shape", "dtype"} <= set(value):
        if value.get("format", "numpy") == "numpy":
            return from_bytes(value["data"], value["shape"], value["dtype"], where)
        return _saved(value["data"], where)
    if isinstance(value, dict) and value.get("format") and isinstance(value.get("data"), bytes):
        return _saved(value["data"], where)
    if isinstance(value, Node):
        if value.name.endswith("._reconstruct"):
            return _numpy(value, where)
        if value.name == "torch._utils._rebuild_tensor_v2":
            return _torch(value, where)
    raise DumpError(where, f"expected a tensor, found {_kind(value)}", code="not-a-tensor")


def from_bytes(data: Any, shape: Any, dtype: Any, where: str) -> Tensor:
    """A tensor over raw bytes in C order.

    Raises:
        DumpError: an unknown dtype, or a shape that the bytes do not fill exactly.
    """
    import torch

    name = dtype.name if isinstance(dtype, Node) else dtype if isinstance(dtype, str) else _kind(dtype)
    name = name.removeprefix("torch.").removeprefix("<class 'numpy.")
    kind = getattr(torch, name.rstrip("'>"), None)
    if not isinstance(kind, torch.dtype):
        raise DumpError(where, f"expected a dtype of torch, found {name[:40]}", code="wrong-dtype")
    try:
        sizes = [int(size) for size in shape]
        buffer = bytearray(data)
    except (TypeError, ValueError):
        raise DumpError(where, "expected a shape and bytes, found other values", code="wrong-structure") from None
    if min(sizes, default=0) < 0 or math.prod(sizes) * kind.itemsize != len(buffer):
        raise DumpError(
            where,
            f"expected {math.prod(sizes) * kind.itemsize} bytes for shape {tuple(sizes)} of {name}, found {len(buffer)}",
            "the file is damaged",
            "dump it again",
            code="tensor-not-stored",
        )
    if not buffer:
        return torch.zeros(sizes, dtype=kind)
    return torch.frombuffer(buffer, dtype=kind).reshape(sizes)


# numpy's one-letter dtypes, little-endian or without order
_CODES = {
    "f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u1": "uint8", "b1": "bool",
}  # fmt: skip


def objects(value: Any, where: str) -> list[Any] | None:
    """The values of a recorded numpy array of any kind as a list; None when it is no array."""
    if not (isinstance(value, Node) and value.name.endswith("._reconstruct")):
        return None
    state = value.state
    if isinstance(state, tuple) and len(state) == 5 and isinstance(state[4], list):
        return state[4]
    found: list[Any] = tensor(value, where).flatten().tolist()
    return found


def _numpy(node: Node, where: str) -> Tensor:
    state = node.state
    if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[2], Node)):
        raise DumpError(where, "expected the state of a numpy array, found another structure", code="wrong-structure")
    _, shape, dtype, fortran, data = state
    code = dtype.args[0] if dtype.args and isinstance(dtype.args[0], str) else ""
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    if code.lstrip("<|=") not in _CODES or order == ">" or not isinstance(data, bytes):
        raise DumpError(where, f"expected a numeric little-endian array, found dtype {code[:20]}", code="wrong-dtype")
    if fortran:
        return from_bytes(data, tuple(reversed(shape)), _CODES[code.lstrip("<|=")], where).permute(
            *reversed(range(len(shape)))
        )
    return from_bytes(data, shape, _CODES[code.lstrip("<|=")], where)


def _saved(data: Any, where: str) -> Tensor:
    """A tensor that was written by torch.save into bytes."""
    import torch

    loaded = _weights_only(data, where)
    if not isinstance(loaded, torch.Tensor):
        raise DumpError(where, f"expected a saved tensor, found {type(loaded).__name__}", code="not-a-tensor")
    if loaded.numel() * loaded.element_size() > loaded.untyped_storage().nbytes():
        raise DumpError(where, "expected a tensor that is stored, found a larger view", code="tensor-not-stored")
    return loaded


def _weights_only(data: Any, where: str) -> Any:
    import torch

    if not isinstance(data, bytes | bytearray):
        raise DumpError(where, f"expected the bytes of torch.save, found {_kind(data)}", code="not-a-tensor")
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001  torch raises many kinds; each becomes one named error
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DumpError(where, f"expected what torch.load(weights_only=True) takes, found: {text[:160]}",
                        code="torch-file-unreadable") from None  # fmt: skip


def _torch(node: Node, where: str) -> Tensor:
    """torch's own rebuild, over a storage that was pickled as bytes."""
    import torch

    if len(node.args) < 4 or not (
        isinstance(node.args[0], Node) and node.args[0].name == "torch.storage._load_from_bytes"
    ):
        raise DumpError(where, "expected a tensor over stored bytes, found another structure", code="wrong-structure")
    storage = _weights_only(node.args[0].args[0] if node.args[0].args else None, where)
    _, offset, size, stride = node.args[:4]
    try:
        flat = torch.tensor([], dtype=storage.dtype).set_(storage)
        reach = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if math.prod(size) else 0
        if min((offset, *size, *stride)) < 0 or reach >= max(flat.numel(), 1) or math.prod(size) > flat.numel():
            raise ValueError(f"shape {tuple(size)} over {flat.numel()} elements")
        return flat.as_strided(size, stride, offset)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise DumpError(
            where, f"expected a tensor inside its storage, found: {error}", code="tensor-not-stored"
        ) from None


def _kind(value: Any) -> str:
    return value.name if isinstance(value, Node) else type(value).__name__
