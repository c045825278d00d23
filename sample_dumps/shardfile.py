"""A plain safetensors writer for the sample scripts: same input, same bytes, and a header that can be made wrong on purpose.

The library's own writer does not promise the order of metadata, and the broken samples need headers that it refuses.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Little-endian bytes of a contiguous tensor; bf16 goes through its bits, since numpy has no such dtype."""
    flat = tensor.contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    return bytes(flat.numpy().astype(flat.numpy().dtype.newbyteorder("<")).tobytes())


def layout(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[dict[str, object], bytes]:
    """(header, body) of a shard: widest dtype first so that every tensor is aligned, then by name."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    body = b""
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):
        data = raw_bytes(tensors[name])
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    return header, body


def pack(header: dict[str, object] | str, body: bytes) -> bytes:
    """The file: length of the header, the header padded to 8 bytes with spaces, the body."""
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    raw = text.encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + body


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write one shard."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack(*layout(tensors, metadata or {})))


def shard_path(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step_{step:08d}" / f"rank_{rank:05d}.safetensors"


def offsets(lengths: list[int]) -> torch.Tensor:
    """cu_seqlens of these lengths, int32."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def f32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))
