"""Writing one safetensors file so that no reader ever sees a part of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.memory import dtype_name

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 8


def save_shard(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Write tensors and metadata to a safetensors file: temporary name, flush to disk, rename.

    The temporary name is hidden, so that a scan passes over it. An existing file is replaced in one step.

    Args:
        path: where the file shall stand; folders are made.
        tensors: name -> tensor on the CPU.
        metadata: strings.

    Returns:
        Bytes of the file.

    Raises:
        OSError: the disk is full, or may not be written to; nothing is left behind.
        DumpError: a tensor of a dtype that no column may have.
    """
    path = Path(path)
    header, chunks = _layout(tensors, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            size = _write_all(fd, memoryview(header))
            for chunk in chunks:
                size += _write_all(fd, chunk)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return size


def _layout(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[memoryview]]:
    """The header and the bytes after it; wide dtypes first, so that every tensor is aligned to its element."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    chunks = []
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        dtype = dtype_name(tensor)
        if dtype is None:
            raise DumpError(name, f"expected real numbers, found {tensor.dtype}", code="dtype-unsupported")
        chunk = _bytes_of(tensor)
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + len(chunk)]}
        chunks.append(chunk)
        at += len(chunk)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, chunks


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    raw: memoryview = (flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)).numpy().data
    return raw


def _write_all(fd: int, chunk: memoryview) -> int:
    done = 0
    while done < len(chunk):
        done += os.write(fd, chunk[done:])
    return done


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last through a power cut, where the file system can."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(
            OSError
        ):  # some network file systems refuse to sync a folder; the file itself is synced
            os.fsync(fd)
    finally:
        os.close(fd)
