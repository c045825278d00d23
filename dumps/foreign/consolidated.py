"""A consolidated TensorDict in a torch zip file: one byte storage and a table of where each tensor lies in it."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING, Any

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import unpickle
from rollout_is.dumps.foreign.rebuild import from_bytes

if TYPE_CHECKING:
    from torch import Tensor

# What zipfile raises for damaged archives, beside its own error: names that are no text, unknown methods, passwords.
ZIP_ERRORS = (zipfile.BadZipFile, KeyError, EOFError, ValueError, NotImplementedError, RuntimeError, OSError)
_REBUILD = "tensordict._reductions._rebuild_tensordict_files_consolidated"
_ALLOWED = frozenset({_REBUILD, "torch._utils._rebuild_tensor_v2", "torch.ByteStorage", "torch.storage.UntypedStorage",
                      "collections.OrderedDict"})  # fmt: skip


def tensors(data: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of a consolidated TensorDict.

    Args:
        data: the bytes of the torch.save archive.
        where: file name for messages.
    Raises:
        DumpError: a TensorDict that was not consolidated (the blocking name is said), compressed or damaged records, or a
            table that points outside the storage.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            packed = [entry for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise DumpError(
                    f"{where}: {packed[0].filename}",
                    f"expected a stored record, found one compressed from {packed[0].file_size} bytes",
                    "torch.save never compresses; a compressed record can expand without bound",
                    "save it again",
                    code="compressed-archive",
                )
            record = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
            if record is None:
                raise zipfile.BadZipFile("no data.pkl")
            folder = record.removesuffix("data.pkl")

            def storage(pid: Any) -> bytes:
                if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
                    raise DumpError(where, "expected a tensor storage, found another reference", code="wrong-structure")
                return archive.read(f"{folder}data/{pid[2]}")

            tree = unpickle.load(archive.read(record), where, _ALLOWED, storage=storage)
    except ZIP_ERRORS as error:
        raise DumpError(
            where, f"expected a whole torch.save archive inside, found: {error}", code="torch-file-unreadable"
        ) from None
    return _leaves(tree, where)


def _leaves(tree: Any, where: str) -> dict[str, Tensor]:
    try:
        meta, blob = tree.args
        raw = blob.args[0]
        table = meta["leaves"]
        found = {}
        for key, (dtype, shape, start, stop, *_) in table.items():
            if not isinstance(key, str) or not isinstance(dtype, str):
                raise TypeError("key")
            if not 0 <= start <= stop <= len(raw):
                raise DumpError(
                    f"{where}: {key}",
                    f"expected bytes inside {len(raw)}, found {start}..{stop}",
                    code="tensor-not-stored",
                )
            size = _bytes_of(dtype, shape)
            found[key] = from_bytes(
                raw[start : start + size] if size <= stop - start else b"", shape, dtype, f"{where}: {key}"
            )
        return found
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise DumpError(
            where,
            f"expected the table of a consolidated TensorDict, found another structure ({type(error).__name__})",
            "an unknown version of tensordict wrote the file",
            "save plain tensors: docs/trainers/verl.md has the hook",
            code="wrong-structure",
        ) from None


def _bytes_of(dtype: str, shape: Any) -> int:
    """Bytes of a leaf without the padding that follows it in the storage."""
    import math

    import torch

    kind = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise ValueError("dtype")  # noqa: TRY004  the file is at fault, not the caller
    return math.prod(int(size) for size in shape) * kind.itemsize
