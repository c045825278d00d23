"""JSON lines, a row a sequence, streamed: one cheap pass over the bytes finds the rows; a row is parsed when it is read.

A step file can be half a gigabyte of text. The index holds two numbers a row, and only the rows of the range being read are
parsed, so memory is bounded by the longest rows and not by the file.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from rollout_is.dumps.errors import DumpError

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.dumps.shard import ShardInfo

Row = dict[str, NDArray[Any]]
_LONGEST_LINE = 1 << 30


@dataclass(frozen=True)
class Index:
    """Where the rows of a file are.

    Attributes:
        starts: byte offset of each row; rows that are blank are not in it.
        sizes: bytes of each row.
        lengths: positions of each row.
        scalars: key -> one number a row, where every row has it.
        flags: how many rows showed each property that the format asked to watch.
        keys: keys of the first row.
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    lengths: NDArray[np.int64]
    scalars: Mapping[str, NDArray[np.float64]]
    flags: Mapping[str, int]
    keys: tuple[str, ...]


def array_text(line: bytes, key: bytes) -> bytes | None:
    """The text between the brackets of the array under a key, wrapped in one more list or not; None without the key.

    A key cannot be mistaken for text in a string: there its quotes are escaped.

    >>> array_text(b'{"a": [[1, 2]], "b": [3]}', b"a"), array_text(b'{"a":[1]}', b"c")
    (b'1, 2', None)
    """
    at = line.find(b'"' + key + b'"')
    if at < 0:
        return None
    start = line.find(b"[", at)
    if start < 0 or line[at + len(key) + 2 : start].strip(b" :\t"):
        return None
    while line[start : start + 1] in (b"[", b" "):
        start += 1
    return line[start : line.find(b"]", start)]


def scalar(line: bytes, key: bytes) -> float | None:
    """The number under a key, bare or in a list of one; None when there is none."""
    at = line.find(b'"' + key + b'"')
    if at < 0:
        return None
    text = line[at + len(key) + 2 : at + len(key) + 48].lstrip(b" :[\t")
    end = min((i for i in (text.find(c) for c in (b",", b"]", b"}")) if i >= 0), default=-1)
    try:
        return float(text[:end]) if end > 0 else None
    except ValueError:
        return None


def build_index(
    path: Path,
    where: str,
    length_key: bytes,
    scalar_keys: tuple[bytes, ...] = (),
    watch: Mapping[str, Callable[[bytes], bool]] | None = None,
) -> Index:
    """Find the rows of a file and their lengths without parsing their values.

    Raises:
        DumpError: a row without the array, or a last row that was cut off.
    """
    starts: list[int] = []
    sizes: list[int] = []
    lengths: list[int] = []
    scalars: dict[bytes, list[float]] = {key: [] for key in scalar_keys}
    flags = dict.fromkeys(watch or {}, 0)
    keys: tuple[str, ...] = ()
    at = 0
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
            text = line.strip()
            if text:
                if not (text.startswith(b"{") and text.endswith(b"}")):
                    raise _cut(f"{where}:{number}", text)
                values = array_text(text, length_key)
                if values is None:
                    raise DumpError(
                        f"{where}:{number}",
                        f"expected an array {length_key.decode()} in every row, found a row without it",
                        "rows of another kind were appended to the file",
                        "remove the row, or dump the step again",
                        code="row-without-column",
                    )
                if not starts:
                    keys = _keys(text, f"{where}:{number}")
                starts.append(at)
                sizes.append(len(line))
                lengths.append(values.count(b",") + 1 if values.strip() else 0)
                for key, numbers in scalars.items():
                    number_found = scalar(text, key)
                    if number_found is not None:
                        numbers.append(number_found)
                for name, test in (watch or {}).items():
                    flags[name] += test(text)
            at += len(line)
    if not starts:
        raise DumpError(
            where, "expected rows, found none", "the file is empty", "dump the step again", code="no-sequences"
        )
    return Index(
        np.array(starts, np.int64),
        np.array(sizes, np.int64),
        np.array(lengths, np.int64),
        {key.decode(): np.array(v, np.float64) for key, v in scalars.items() if len(v) == len(starts)},
        flags,
        keys,
    )


def _keys(text: bytes, where: str) -> tuple[str, ...]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, error) from None
    return tuple(row)


def _damaged(where: str, error: Exception) -> DumpError:
    return DumpError(
        where, f"expected JSON, found: {error}", "the line is damaged", "dump it again", code="json-damaged"
    )


def _cut(where: str, text: bytes) -> DumpError:
    return DumpError(
        where,
        f"expected a JSON object on one line, found a line of {len(text)} bytes that does not end in }}",
        "the file was cut off or is still being written",
        "wait until the step is written, or remove the last line",
        code="json-truncated",
    )


class JsonlShard:
    """An ``OpenShard`` that parses rows as they are read.

    Args:
        info: the shard as the scan knows it.
        index: where its rows are.
        parse: turns a parsed JSON row into 1-D arrays by role (float64 log-probs, bool mask, ...).
        segments: role -> [S] column.
        packs: int64 [P+1] token offsets, or None.
    """

    def __init__(
        self,
        info: ShardInfo,
        index: Index,
        parse: Callable[[Mapping[str, Any], str], Row],
        segments: Mapping[str, NDArray[Any]],
    ) -> None:
        self.info = info
        self._index = index
        self._parse = parse
        self._segments = segments
        self._offsets = np.concatenate([[0], np.cumsum(index.lengths)]).astype(np.int64)
        self._rows: dict[int, Row] = {}
        self._file = open(info.path, "rb")  # noqa: SIM115  closed by close()

    def offsets(self) -> Tensor:
        """int64 [S+1]."""
        import torch

        return torch.from_numpy(self._offsets.copy())

    def pack_offsets(self) -> Tensor | None:
        """None: the file knows no packs."""
        return None

    def segment_column(self, role: str) -> Tensor | None:
        """A whole [S] column, or None when it is not in the file."""
        import torch

        column = self._segments.get(role)
        return None if column is None else torch.from_numpy(column.copy())

    def read(self, role: str, start: int, stop: int) -> Tensor:
        """Positions [start, stop) of a column; rows outside the range are forgotten.

        Raises:
            DumpError: the file changed since the scan, a row that is no JSON, or a row whose columns differ in length.
        """
        import torch

        if role not in self.info.columns:
            raise DumpError(self.info.name, f"expected a column {role}, found none", code="column-missing")
        first = max(bisect_right(self._offsets, start) - 1, 0)
        last = max(int(np.searchsorted(self._offsets, stop, side="left")), first)
        self._rows = {number: row for number, row in self._rows.items() if first <= number < last}
        pieces: list[NDArray[Any]] = []
        for number in range(first, last):
            begin = int(self._offsets[number])
            column = self._row(number)[role]
            pieces.append(column[max(start - begin, 0) : stop - begin])
        joined = np.concatenate(pieces) if pieces else np.zeros(0, np.float64)
        return torch.from_numpy(joined)

    def _row(self, number: int) -> Row:
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = self._load(number)
        return row

    def _load(self, number: int) -> Row:
        where = f"{self.info.name}: row {number}"
        stat = os.fstat(self._file.fileno())
        if self.info.size and (stat.st_size, stat.st_mtime_ns) != (self.info.size, self.info.mtime_ns):
            raise DumpError(
                self.info.name,
                "expected the file as it was scanned, found that it changed while it was read",
                "the trainer is still writing this step",
                "wait until the step is written",
                code="file-changed",
            )
        self._file.seek(int(self._index.starts[number]))
        try:
            values = json.loads(self._file.read(int(self._index.sizes[number])))
        except (ValueError, RecursionError) as error:
            raise _damaged(where, error) from None
        row = self._parse(values, where)
        expected = int(self._index.lengths[number])
        for role, column in row.items():
            if column.shape != (expected,):
                raise DumpError(
                    f"{where}: {self.info.columns.get(role, role)}",
                    f"expected {expected} values, found {column.size}",
                    "columns of one row must be equally long",
                    "dump the step again",
                    code="row-lengths-differ",
                )
        return row

    def close(self) -> None:
        """Close the file and forget the rows."""
        self._file.close()
        self._rows = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def numbers(row: Mapping[str, Any], key: str, where: str, *, dtype: Any = np.float64) -> NDArray[Any]:
    """The array under a key as numbers, unwrapped from a list of one list; null is NaN, true and false are 1 and 0.

    Raises:
        DumpError: no such array, or something else than numbers in it.
    """
    value = row.get(key)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list):
        raise DumpError(f"{where}: {key}", f"expected an array, found {type(value).__name__}", code="not-numbers")
    try:
        found = np.array(value, dtype=np.float64)  # None becomes NaN
        if found.ndim != 1:
            raise ValueError(f"{found.ndim} dimensions")
        return found if dtype is np.float64 else found.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise DumpError(
            f"{where}: {key}", f"expected an array of numbers, found: {error}", code="not-numbers"
        ) from None
