"""Rows and packs of any trainer, gathered into the packed columns of one shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.notes import Note

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_NAMES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}


@dataclass
class Packed:
    """The content of one foreign file as one shard.

    Attributes:
        columns: role -> [T] tensor; train, rollout and mask always.
        segments: role of SEGMENT_ROLES -> [S] tensor.
        offsets: int64 [S+1].
        packs: int64 [P+1], or None when the shard is one pack.
        names: role -> what it is called in the file.
        layout: ``packed`` or ``rectangular``.
        metadata: strings for the shard's metadata.
        notes: what a reader of the figures must know.
        dropped: names of data in the file that the shard does not carry.
    """

    columns: dict[str, Tensor]
    segments: dict[str, Tensor]
    offsets: Tensor
    packs: Tensor | None
    names: dict[str, str]
    layout: str = "packed"
    metadata: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    @property
    def positions(self) -> int:
        """T, the number of positions."""
        return int(self.columns["train"].numel())

    @property
    def nbytes(self) -> int:
        """Bytes that the columns hold in memory."""
        return sum(column.numel() * column.element_size() for column in self.columns.values())


def dtype_name(tensor: Tensor) -> str:
    """The safetensors name of a tensor's dtype."""
    return DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]


class Rows:
    """Gathers sequences one by one into a ``Packed``.

    Args:
        where: file name for messages.
        names: role -> name in the file, for messages and for ``ShardInfo.columns``.
    """

    def __init__(self, where: str, names: Mapping[str, str]) -> None:
        self._where = where
        self._names = dict(names)
        self._columns: dict[str, list[Tensor]] = {}
        self._segments: dict[str, list[float | int | bool]] = {}
        self._lengths: list[int] = []
        self._packs: list[int] = [0]
        self._counts: dict[str, int] = {}

    def add(self, columns: Mapping[str, Any], segment: Mapping[str, float | int | bool | None] | None = None) -> None:
        """Append one sequence: 1-D columns of equal length, and values of the sequence as a whole.

        Raises:
            DumpError: a column that is no 1-D tensor of numbers, or lengths that differ.
        """
        row = len(self._lengths)
        length: int | None = None
        for role, value in columns.items():
            if value is None:
                continue
            tensor = vector(value, f"{self._where}: {self._names.get(role, role)}[{row}]", role)
            if length is None:
                length = int(tensor.numel())
            elif tensor.numel() != length:
                raise DumpError(
                    f"{self._where}: {self._names.get(role, role)}[{row}]",
                    f"expected {length} positions as in {self._names.get('train', 'train')}, found {tensor.numel()}",
                    "a context-parallel slice, or columns of different batches",
                    "give the folder with the files of every rank, or dump whole responses",
                    code="row-lengths-differ",
                )
            self._columns.setdefault(role, []).append(tensor)
            self._counts[role] = self._counts.get(role, 0) + 1
        self._lengths.append(length or 0)
        for role, number in (segment or {}).items():
            if number is not None:
                self._segments.setdefault(role, []).append(number)

    def add_block(self, columns: Mapping[str, Tensor], lengths: list[int], segment: Mapping[str, list[Any]]) -> None:
        """Append several sequences that lie one behind the other in flat, checked columns of equal length."""
        self._lengths.extend(lengths)
        for role, column in columns.items():
            self._columns.setdefault(role, []).append(column)
            self._counts[role] = self._counts.get(role, 0) + len(lengths)
        for role, values in segment.items():
            self._segments.setdefault(role, []).extend(values)

    def close_pack(self) -> None:
        """The rows so far are a pack of their own."""
        self._packs.append(len(self._lengths))

    def finish(self, metadata: Mapping[str, str], *, layout: str = "packed") -> Packed:
        """The gathered rows as one shard. Columns that only some rows have are dropped and named."""
        import torch

        total = len(self._lengths)
        if not total:
            raise DumpError(self._where, "expected at least one sequence, found none", code="no-sequences")
        offsets = torch.zeros(total + 1, dtype=torch.int64)
        offsets[1:] = torch.tensor(self._lengths, dtype=torch.int64).cumsum(0)
        columns = {r: torch.cat(pieces) for r, pieces in self._columns.items() if self._counts[r] == total}
        segments = {r: _whole_column(values) for r, values in self._segments.items() if len(values) == total}
        for role in ("train", "rollout", "mask"):
            if role not in columns:
                raise DumpError(
                    self._where,
                    f"expected {self._names.get(role, role)} in each of {total} rows, found it in {self._counts.get(role, 0)}",
                    code="column-missing",
                )
        dropped = [
            self._names.get(r, r) for r in (*self._columns, *self._segments) if r not in columns and r not in segments
        ]
        names = {role: self._names.get(role, role) for role in (*columns, *segments)}
        names["offsets"] = self._names.get("offsets", "lengths of the rows")
        if packs_known := len(self._packs) > 1:
            names["packs"] = self._names.get("packs", "one a list item")
        packs = offsets[torch.tensor(self._packs)].clone() if packs_known else None
        return Packed(columns, segments, offsets, packs, names, layout, dict(metadata), dropped=dropped)


def _whole_column(values: list[float | int | bool]) -> Tensor:
    """Flags as bool, whole numbers as int64, anything else as float64: what Python held, unrounded."""
    import torch

    if any(isinstance(value, float) for value in values):
        return torch.tensor(values, dtype=torch.float64)
    return torch.tensor(values)


def vector(value: Any, where: str, role: str) -> Tensor:
    """A 1-D tensor of a dtype that the role may have, from a tensor or a list of numbers.

    Raises:
        DumpError: another shape, or values that are no numbers.
    """
    import torch

    if isinstance(value, list | tuple):
        if not all(item is None or isinstance(item, int | float) for item in value):
            raise DumpError(where, "expected a list of numbers, found other values in it", code="not-numbers")
        try:
            kind = torch.float64 if role in ("train", "rollout", "advantages", "entropy") else None
            value = torch.tensor([float("nan") if item is None else item for item in value], dtype=kind)
            if not value.numel() and kind is None:
                value = value.to(torch.int64)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise DumpError(where, "expected a list of numbers, found other values in it", code="not-numbers") from None
    if not isinstance(value, torch.Tensor):
        raise DumpError(where, f"expected a tensor of numbers, found {type(value).__name__}", code="not-a-tensor")
    if value.is_nested or value.layout is not torch.strided:
        raise DumpError(where, "expected a dense tensor, found a nested or sparse one", code="not-dense")
    if value.dim() == 2 and value.shape[0] == 1:
        value = value[0]
    if value.dim() != 1:
        raise DumpError(where, f"expected one dimension, found shape {tuple(value.shape)}", code="wrong-shape")
    if str(value.dtype).removeprefix("torch.") not in DTYPE_NAMES:
        raise DumpError(where, f"expected plain numbers, found {value.dtype}", code="wrong-dtype")
    if role in ("train", "rollout") and not value.is_floating_point():
        raise DumpError(where, f"expected floating-point log-probs, found {value.dtype}", code="wrong-dtype")
    flat: Tensor = value.detach().cpu()
    return flat
