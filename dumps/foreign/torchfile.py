"""``.pt`` files: checked from outside first, then ``torch.load(weights_only=True, map_location="cpu")`` and nothing else."""

from __future__ import annotations

import zipfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign.consolidated import ZIP_ERRORS
from rollout_is.dumps.foreign.opcodes import Outline, outline, outline_all
from rollout_is.dumps.foreign.unpickle import refusal

if TYPE_CHECKING:
    from torch import Tensor

# What tensors, nested ones included, need. Anything else is refused by name before torch opens the file.
_TENSOR_NAMES = frozenset(
    {
        "collections.OrderedDict",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_nested_tensor",
        "torch.nested._internal.nested_tensor._rebuild_njt",
        "torch._tensor._rebuild_from_type_v2",
        "torch.nested._internal.nested_tensor.NestedTensor",
        "torch._dynamo.decorators._DimRange",
        "torch.Tensor",
        "__builtin__.set",
        "torch.device",
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.storage.UntypedStorage",
    }
)
_DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]
_STORAGES = ["Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"]
ALLOWED_NAMES = _TENSOR_NAMES | {f"torch.{name}" for name in _DTYPES} | {f"torch.{name}Storage" for name in _STORAGES}
_DEPTH = 32


def load(path: Path, where: str) -> Any:
    """Read a ``torch.save`` file of tensors and plain values onto the CPU.

    Args:
        path: the file.
        where: its name for messages.
    Returns:
        nested dicts and lists of tensors, numbers and strings.
    Raises:
        DumpError: a compressed or cut-off archive, a global that tensors do not need (named), tensors that claim more
            elements than are stored, nesting without end.
    """
    names, opcodes = check(path, where)
    import torch

    if any("nested" in name or "njt" in name for name in names):
        # torch refuses jagged tensors under weights_only until these are imported.
        import torch._dynamo
        import torch.nested
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  torch raises many kinds for damaged files; each becomes one named error
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DumpError(
            where,
            f"expected a file that torch.load(weights_only=True) takes, found: {text[:200]}",
            "the file was cut off or is still being written, or it holds more than tensors and plain values",
            "dump it again; save only tensors, numbers and strings",
            code="torch-file-unreadable",
        ) from None
    _check_tree(loaded, where, 1000 + 4 * opcodes)  # each value takes an opcode; what is shared counts again
    return loaded


def check(path: Path, where: str) -> tuple[frozenset[str], int]:
    """Look at a file from outside, without torch.

    Returns:
        the globals that it names, all of them allowed, and how many opcodes its pickle has.
    Raises:
        DumpError: as ``load``.
    """
    stat = path.stat()
    return _check_file(path, where, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1024)
def _check_file(path: Path, where: str, size: int, mtime_ns: int) -> tuple[frozenset[str], int]:
    """Names and opcodes of a file that passed; a file is looked at once while it does not change."""
    seen = _check_archive(path, where)
    return frozenset(seen.names), seen.opcodes


def _check_archive(path: Path, where: str) -> Outline:
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return _check_legacy(path, where)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            packed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise DumpError(
                    f"{where}: {packed[0].filename}",
                    f"expected a stored record, found one compressed from {packed[0].file_size} bytes",
                    "torch.save never compresses; a compressed record can expand without bound",
                    "save it again with torch.save",
                    code="compressed-archive",
                )
            if sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise cut_off(where)
            record = next((entry for entry in entries if entry.filename.endswith("data.pkl")), None)
            if record is None:
                raise cut_off(where)
            seen = outline(archive.read(record))
    except ZIP_ERRORS:
        raise cut_off(where) from None
    _check_names(seen, where)
    return seen


def _check_legacy(path: Path, where: str) -> Outline:
    """The format before zip files: five pickles (magic, protocol, system, object, storage keys), then raw bytes."""
    seen = outline_all(path.read_bytes(), 5)
    _check_names(seen, where)
    return seen


def _check_names(seen: Outline, where: str) -> None:
    for name in seen.names:
        if name not in ALLOWED_NAMES:
            raise refusal(where, name)
    if seen.problem or not seen.complete:
        raise cut_off(where)


def _check_tree(loaded: Any, where: str, most: int) -> None:
    """Refuse cycles, endless nesting and tensors that are larger than their storage, before anyone walks the values."""
    import torch

    stack: list[tuple[Any, int]] = [(loaded, 0)]
    count = 0
    while stack:
        value, depth = stack.pop()
        count += 1
        if depth > _DEPTH or count > most:
            raise DumpError(
                where,
                f"expected at most {_DEPTH} levels and {most} values, found more",
                "a dump of log-probs is a few levels deep; this one refers to itself or was made to exhaust readers",
                "dump the tensors alone",
                code="nesting-too-deep",
            )
        if isinstance(value, dict):
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list | tuple):
            stack.extend((item, depth + 1) for item in value if isinstance(item, dict | list | tuple | torch.Tensor))
        elif isinstance(value, torch.Tensor) and _claims_more(value):
            raise DumpError(
                where,
                f"expected a tensor that is stored, found {tuple(value.shape)} over "
                f"{value.untyped_storage().nbytes()} stored bytes",
                "an expanded view was saved, or the file was made to exhaust memory",
                "save it with .contiguous() or .clone()",
                code="tensor-not-stored",
            )


def _claims_more(value: Tensor) -> bool:
    """Whether a tensor has more elements than its storage, or reaches beyond it."""
    import torch

    if value.layout is torch.jagged:
        return _claims_more(value.values())
    if value.is_nested:  # sizes, strides and offsets are taken from the file as they stand
        stored = value.values().untyped_storage().nbytes() // value.element_size()
        sizes, strides = value._nested_tensor_size(), value._nested_tensor_strides()
        reach = value._nested_tensor_storage_offsets() + ((sizes - 1) * strides).sum(-1)
        return bool((sizes < 0).any() or (strides < 0).any() or (reach[sizes.prod(-1) > 0] >= stored).any())
    if value.layout is not torch.strided:
        return False
    return value.numel() * value.element_size() > value.untyped_storage().nbytes()


def cut_off(where: str) -> DumpError:
    return DumpError(
        where,
        "expected a whole torch.save archive, found one that ends early or has no data.pkl",
        "the file was cut off or is still being written (slime and miles write in place)",
        "wait until the step is written, or leave the file out",
        code="torch-file-unreadable",
    )
