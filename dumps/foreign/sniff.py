"""What a file is, from its first bytes: never from its name, never by executing anything in it, without torch.

A torch file is recognised by the strings in its pickle, a plain pickle by the globals it asks for, JSON lines by the keys
of the first rows. The pickles are only walked opcode by opcode here; nothing is built.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollout_is.dumps.foreign.opcodes import outline

Kind = Literal["torch", "pickle", "jsonl", "parquet", "sqlite", "msgpack", "other"]

_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number that torch.save wrote before zip files
_OPCODES = 40_000  # enough to see the class that a plain pickle is of
_LARGEST_PICKLE = 64 << 20
_FIRST_ROWS = 2  # xtuner puts a summary object before its rows
_LONGEST_ROW = 256 << 20
_TAIL = 64 << 10


@dataclass(frozen=True)
class Sniffed:
    """One file as its first bytes show it.

    Attributes:
        path: the file.
        kind: container: ``torch``, ``pickle``, ``jsonl``, ``parquet``, ``sqlite``, ``msgpack`` or ``other``.
        names: globals that its pickle asks for, as ``module.name``.
        keys: strings of its pickle, or keys of its first JSON rows.
        row: the first JSON row, else empty.
    """

    path: Path
    kind: Kind
    names: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)


def sniff(path: Path) -> Sniffed:
    """Look at the head of a file and say what container it is and which names stand in it.

    Args:
        path: a regular file.
    Returns:
        the kind, names and keys; kind ``other`` when it is none of the containers known here.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(16)
            if head[:4] == b"PK\x03\x04":
                return _zip(path, file)
            if head[: len(_LEGACY_TORCH)] == _LEGACY_TORCH:
                file.seek(0)
                return _torch(path, file.read(_LARGEST_PICKLE))
            if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
                file.seek(0)
                seen = outline(file.read(4 << 20), limit=_OPCODES)
                return Sniffed(path, "pickle", frozenset(seen.names), frozenset(seen.strings))
            if head[:1] in (b"{", b"["):
                return _jsonl(path)
            if _is_msgpack_batch(head):
                return Sniffed(path, "msgpack")
            if head[:4] == b"PAR1":
                return Sniffed(path, "parquet", keys=_words(file, _TAIL))
            if head.startswith(b"SQLite format 3"):
                return Sniffed(path, "sqlite", keys=_words(file, 0))
    except OSError:
        return Sniffed(path, "other")
    return Sniffed(path, "other")


def _is_msgpack_batch(head: bytes) -> bool:
    """Three arrays inside each other: a list of structs whose first field is a list."""

    def array(at: int) -> int:
        """Where the array that starts here has its first item; -1 when there is none."""
        if 0x91 <= head[at] <= 0x9F:
            return at + 1
        return {0xDC: at + 3, 0xDD: at + 5}.get(head[at], -1)

    at = 0
    for _ in range(3):
        if at < 0 or at >= len(head):
            return False
        at = array(at)
    return at > 0


def _words(file: io.BufferedReader, tail: int) -> frozenset[str]:
    """Names in the plain text of a footer or a first page, where column and table names stand."""
    if tail:
        file.seek(max(os.fstat(file.fileno()).st_size - tail, 0))
    else:
        file.seek(0)
    text = file.read(tail or _TAIL)
    return frozenset(word.decode() for word in re.findall(rb"[A-Za-z_]{4,64}", text))


# A short string and a global as protocol 2, which torch.save writes, puts them. A match inside other bytes does no harm here.
_STRING = re.compile(rb"X([\x01-\x50])\0\0\0(?=([ -~]+))")
_GLOBAL = re.compile(rb"c(?=([A-Za-z_][\w.]*)\n([A-Za-z_][\w.]*)\n)")


def _torch(path: Path, pickle: bytes) -> Sniffed:
    """Every key and global of a torch pickle by pattern: the last key may stand after millions of opcodes."""
    keys = {text[: size[0]] for size, text in _STRING.findall(pickle) if len(text) >= size[0]}
    names = {b".".join(found) for found in _GLOBAL.findall(pickle)}
    return Sniffed(path, "torch", frozenset(n.decode() for n in names), frozenset(key.decode() for key in keys))


def _zip(path: Path, file: io.BufferedReader) -> Sniffed:
    try:
        with zipfile.ZipFile(file) as archive:
            record = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
            if record is None:
                return Sniffed(path, "other")
            with archive.open(record) as pickle:
                return _torch(path, pickle.read(_LARGEST_PICKLE))
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError):
        # A cut-off torch.save: the zip directory at its end is missing. Named .pt it is worth an error of its own.
        if os.path.splitext(path)[1] in (".pt", ".pth", ".bin"):
            return Sniffed(path, "torch", keys=frozenset({"<truncated>"}))
        return Sniffed(path, "other")


def _jsonl(path: Path) -> Sniffed:
    keys: set[str] = set()
    first: Mapping[str, Any] = {}
    with open(path, "rb") as file:
        for _ in range(_FIRST_ROWS):
            line = file.readline(_LONGEST_ROW)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                break
            if isinstance(row, list) and row:  # PipelineRL: a list of samples on a line
                row = row[0]
            if not isinstance(row, dict):
                break
            first = first or row
            keys.update(row)
    return Sniffed(path, "jsonl" if keys else "other", keys=frozenset(keys), row=first)
