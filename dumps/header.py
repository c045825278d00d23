"""The header of a safetensors file, parsed by code that trusts nothing in it. No torch, no unpickling, no map.

Format: 8 bytes little-endian length n, n bytes of JSON ``{name: {dtype, shape, data_offsets}, "__metadata__": {...}}``,
then the bytes of the tensors, back to back. Nothing larger than the file is ever allocated.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rollout_is.dumps.dtypes import BITS
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.sniff import age, what_is_it
from rollout_is.dumps.text import show, shown

MAX_HEADER = 100_000_000  # the limit of the safetensors library itself
MAX_SIZE = 2**63 - 1
MAX_DIMS = 32
MAX_VALUES = 1_000_000  # of JSON in a header: parsed, each costs up to a hundred bytes
_FIRST_READ = 16_384  # one read holds the whole header of any sane shard


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its dtype name, shape, and the absolute byte range [start, stop) of its data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count


@dataclass(frozen=True)
class Header:
    """What the header of one file says, checked against the size of the file."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    size: int
    mtime_ns: int


def read_header(path: str, name: str | None = None) -> Header:
    """Read and check the header of one safetensors file.

    Args:
        path: the file.
        name: how errors call it; the path by default.

    Raises:
        DumpError: the file is absent, unreadable, not safetensors, incomplete, or its header contradicts itself.
    """
    fd = open_regular(path, name or path)
    try:
        return header_of(fd, name or path)
    finally:
        os.close(fd)


def open_regular(path: str, name: str) -> int:
    """Open a regular file for reading; a pipe or device is refused instead of waited for. Returns the descriptor."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.path.islink(path):
            raise DumpError(
                name,
                f"expected a file, found a link to {os.readlink(path)}, which does not exist",
                "the target was moved or deleted",
                "remove the link or restore its target",
                code="file-missing",
            ) from None
        raise DumpError(name, "expected a file, found nothing", code="file-missing") from None
    except PermissionError:
        raise DumpError(
            name,
            "expected a readable file, found one that may not be opened (permission denied)",
            "it belongs to another user",
            "chmod +r the file, or run as its owner",
            code="file-unreadable",
        ) from None
    except (OSError, ValueError) as error:
        raise DumpError(
            name, f"expected a readable file, but opening it failed: {error}", code="file-unreadable"
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DumpError(name, "expected a file, found a folder, pipe or device of that name", code="not-a-file")
    return fd


def header_of(fd: int, name: str) -> Header:
    """The checked header of an open file; errors call the file ``name``."""
    status = os.fstat(fd)
    try:
        first = os.pread(fd, _FIRST_READ, 0)
        return _parse(fd, name, status.st_size, status.st_mtime_ns, first)
    except OSError as error:
        raise DumpError(
            name, f"expected a readable file, but reading it failed: {error}", code="file-unreadable"
        ) from None


def _parse(fd: int, name: str, size: int, mtime_ns: int, first: bytes) -> Header:
    if size < 8:
        found = "an empty file" if size == 0 else f"{size} bytes"
        raise DumpError(
            name,
            f"expected a safetensors file, found {found}",
            f"the file is still being written? ({age(mtime_ns)})",
            "wait for the writer, or delete the file",
            code="file-empty" if size == 0 else "file-too-small",
        )
    length = int.from_bytes(first[:8], "little")
    other = what_is_it(first)
    if other is not None:
        raise DumpError(name, f"expected a safetensors file, found {other[0]}", other[1], other[2], code=other[3])
    if length > MAX_HEADER:
        raise DumpError(
            name,
            f"expected a header of at most {MAX_HEADER:,} bytes, found {length:,}",
            "this is not a safetensors file, or it holds a tensor for every sequence",
            "pack: a few long tensors per shard",
            code="header-too-large",
        )
    if 8 + length > size:
        raise DumpError(
            name,
            f"expected a header of {length:,} bytes, found a file of {size:,} bytes: short by {8 + length - size:,}",
            f"the file is truncated or still being written? ({age(mtime_ns)})",
            "wait for the writer, or dump this shard again",
            code="file-truncated",
        )
    text = first[8 : 8 + length] if 8 + length <= len(first) else _read_exactly(fd, name, length, 8)
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if values > MAX_VALUES:
        raise DumpError(
            name,
            f"expected a header of at most {MAX_VALUES:,} values, found {values:,}",
            "it holds a tensor for every sequence",
            "pack: a few long tensors per shard",
            code="header-too-large",
        )
    tensors, metadata = _decode(text, name)
    entries = _entries(tensors, name, 8 + length, size, mtime_ns)
    return Header(entries, metadata, size, mtime_ns)


def _read_exactly(fd: int, name: str, count: int, offset: int) -> bytes:
    parts = []
    while count:
        part = os.pread(fd, count, offset)
        if not part:
            raise DumpError(name, f"expected {count:,} more header bytes, found the end", code="file-truncated")
        parts.append(part)
        count -= len(part)
        offset += len(part)
    return b"".join(parts)


class _Repeated(ValueError):
    """A JSON object holds one key twice; json.loads would keep the last and hide it."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Repeated(key)
            seen.add(key)
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _decode(text: bytes, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    why = "the header was damaged, or written by something other than a safetensors writer"
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {8 + error.start}"
        raise DumpError(
            name,
            f"expected a UTF-8 header, found byte 0x{text[error.start]:02x} at {where}",
            why,
            "dump this shard again",
            code="header-not-utf8",
        ) from None
    try:
        # parse_int bounds digits: int() of thousands of digits is slow and then refused by Python itself
        header = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_small_int)
    except _Repeated as error:
        raise DumpError(
            f"{name}: {shown(error.args[0])}",
            "expected every tensor name and key once, found it twice in the header",
            "the writer merged two dumps; readers disagree on which one counts",
            "dump this shard again",
            code="header-repeated-name",
        ) from None
    except (ValueError, RecursionError) as error:
        raise DumpError(
            name,
            f"expected a JSON header, found one that cannot be parsed: {shown(str(error))}",
            why,
            "dump this shard again",
            code="header-not-json",
        ) from None
    if not isinstance(header, dict):
        raise DumpError(
            name, f"expected a JSON object as header, found {type(header).__name__}", why, code="header-not-json"
        )
    metadata = header.pop("__metadata__", {})
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise DumpError(
            name,
            f"expected __metadata__ to be an object, found {type(metadata).__name__}",
            why,
            code="metadata-not-strings",
        )
    for tensor in header:
        _check_text(tensor, name)
    for key, value in metadata.items():
        _check_text(key, name)
        if not isinstance(value, str):
            raise DumpError(
                f"{name}: __metadata__[{shown(key)}]",
                f"expected a string, found {show(value)}",
                "safetensors metadata holds strings only, numbers too",
                f'write "{shown(str(value))}" in quotes',
                code="metadata-not-strings",
            )
        _check_text(value, name)
    return header, metadata


def _check_text(text: str, name: str) -> None:
    try:  # JSON can spell half a surrogate pair, which no output can print
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DumpError(
            f"{name}: {shown(text)}", "expected a UTF-8 header, found half a surrogate pair", code="header-not-utf8"
        ) from None


def _small_int(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _entries(tensors: dict[str, Any], name: str, base: int, size: int, mtime_ns: int) -> dict[str, TensorEntry]:
    entries = {tensor: _entry(tensor, spec, name, base) for tensor, spec in tensors.items()}
    at = base
    for tensor, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            what = "overlaps the tensor before it" if entry.start < at else "leaves a gap before it"
            raise DumpError(
                f"{name}: {shown(tensor)}",
                f"expected data_offsets from {at - base:,}, found {entry.start - base:,}: it {what}",
                "the header was damaged or written by hand",
                "dump this shard again",
                code="header-offsets",
            )
        at = entry.stop
    if at > size:
        raise DumpError(
            name,
            f"expected {at:,} bytes, found {size:,}: short by {at - size:,}",
            f"the file is truncated or still being written? ({age(mtime_ns)})",
            "wait for the writer, or dump this shard again",
            code="file-truncated",
        )
    if at < size:
        raise DumpError(
            name,
            f"expected {at:,} bytes, found {size:,}: {size - at:,} extra bytes",
            "something was appended, or a longer file was overwritten in place",
            "dump this shard again",
            code="file-overlong",
        )
    return entries


def _entry(tensor: str, spec: Any, name: str, base: int) -> TensorEntry:
    where = f"{name}: {shown(tensor)}"

    def bad(problem: str, code: str = "header-entry") -> NoReturn:
        raise DumpError(where, problem, "the header was damaged or written by hand", "dump this shard again", code=code)

    if not isinstance(spec, dict) or not {"dtype", "shape", "data_offsets"} <= spec.keys():
        bad(f"expected dtype, shape and data_offsets, found {show(spec)}")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        bad(f"expected a safetensors dtype, found {show(dtype)}", "dtype-unknown")
    if not isinstance(shape, list) or not all(type(dim) is int and 0 <= dim <= MAX_SIZE for dim in shape):
        bad(f"expected a shape of whole numbers >= 0, found {show(shape)}", "header-shape")
    if len(shape) > MAX_DIMS:
        bad(f"expected at most {MAX_DIMS} dimensions, found {len(shape)}", "header-shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(at) is int for at in offsets):
        bad(f"expected two data_offsets, found {show(offsets)}", "header-offsets")
    start, stop = offsets
    if not 0 <= start <= stop <= MAX_SIZE:
        bad(f"expected 0 <= start <= end in data_offsets, found {start}, {stop}", "header-offsets")
    entry = TensorEntry(dtype, tuple(shape), base + start, base + stop)
    bits = entry.numel * BITS[dtype]
    if bits != (stop - start) * 8:
        bad(f"expected {bits / 8:,g} bytes for shape {shape} of {dtype}, found {stop - start:,}", "header-shape")
    return entry
