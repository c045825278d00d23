"""Per-sequence sums of a whole dump, keyed so that two dumps can be joined: what a paired test is made from.

A ``Consumer`` of the one pass: a few numbers a sequence stay (about 150 bytes), no token does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_is.analysis.batch import Block, Floats, Ints, SequenceTable, Unit
from rollout_is.analysis.settings import Settings
from rollout_is.dumps.shard import OpenShard, ShardInfo

Words = NDArray[np.uint64]

# Sums over the valid tokens of a sequence, in this order; the first five come from the engine's own table.
QUANTITIES = ("d", "abs", "d2", "e", "train", "e2", "exp_abs", "extreme", "high", "low", "prob_abs")
_FROM_TABLE = 5
# Beyond this many sequences a dump is not paired: their sums would take more memory than a comparison may.
MOST = 4_000_000
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SequenceSums:
    """One row a sequence (segments without a valid, finite token are left out).

    Attributes:
        step: int64 [V]; -1 when the shard has no step.
        place: uint64 [V] shard and segment: equal for two passes over one dump.
        ids: int64 [V] ``sequence_ids``; None when a shard lacks them.
        groups: int64 [V] ``group_ids``; None when a shard lacks them.
        tokens: uint64 [V] hash of the segment's token ids; None when a shard lacks them.
        n: int64 [V] valid finite tokens.
        sums: float64 [len(QUANTITIES), V].
    """

    step: Ints
    place: Words
    ids: Ints | None
    groups: Ints | None
    tokens: Words | None
    n: Ints
    sums: Floats

    def __len__(self) -> int:
        return len(self.n)

    @property
    def clusters(self) -> int:
        """How many clusters the standard errors of the summary rest on: groups where they were dumped, else sequences."""
        return len(self) if self.groups is None else len(np.unique(self.groups))

    def select(self, rows: NDArray[Any]) -> SequenceSums:
        """The rows of an index or a boolean selection."""
        return SequenceSums(
            self.step[rows],
            self.place[rows],
            None if self.ids is None else self.ids[rows],
            None if self.groups is None else self.groups[rows],
            None if self.tokens is None else self.tokens[rows],
            self.n[rows],
            self.sums[:, rows],
        )


@dataclass
class _Part:
    """One unit's rows, one a segment (segments without a token included: fragments are joined later)."""

    n: Ints
    sums: Floats
    ids: Ints | None
    groups: Ints | None
    tokens: Words | None


class SequenceConsumer:
    """Collects ``SequenceSums`` while the engine reads.

    Args:
        settings: the bounds of the high and low fractions.
    """

    name = "sequence_sums"

    def __init__(self, settings: Settings) -> None:
        lower, upper = settings.bounds
        self._log_low, self._log_high = math.log(lower), math.log(upper)
        self._part: _Part | None = None
        self._seen = 0

    def begin(self, unit: Unit, shard: OpenShard) -> None:
        segments = unit.last - unit.first
        self._seen += segments
        if self._seen > MOST:  # this worker alone has seen too many: the result is None already
            self._part = None
            return
        self._part = _Part(
            n=np.zeros(segments, np.int64),
            sums=np.zeros((len(QUANTITIES), segments)),
            ids=_column(shard, "sequence_ids", unit),
            groups=_column(shard, "group_ids", unit),
            tokens=_token_hashes(unit, shard),
        )

    def block(self, block: Block) -> None:
        if self._part is None or not len(block.starts):
            return
        d, e = _array(block.d), _array(block.e)
        size = np.abs(d)
        with np.errstate(over="ignore", invalid="ignore"):
            train, rollout = np.exp(_array(block.train)), np.exp(_array(block.rollout))
            rows = (
                e * e,
                np.exp(size),
                (size > math.log(2.0)).astype(np.float64),
                (d > self._log_high).astype(np.float64),
                (d < self._log_low).astype(np.float64),
                np.abs(train - rollout),
            )
            for row, values in enumerate(rows, _FROM_TABLE):
                self._part.sums[row, block.sequence] += np.add.reduceat(values, block.starts)  # one piece a sequence

    def end(self, table: SequenceTable) -> _Part | None:
        part, self._part = self._part, None
        if part is None:
            return None
        part.n[:] = table.n
        for row, values in enumerate((table.sum_d, table.sum_abs, table.sum_d2, table.sum_e, table.sum_train)):
            part.sums[row] = values
        return part

    def finish(self, partials: list[tuple[Unit, ShardInfo, Any]]) -> SequenceSums | None:
        """The whole table; None for more than ``MOST`` segments, however they were spread over workers."""
        if any(part is None for _, _, part in partials) or sum(len(part.n) for _, _, part in partials) > MOST:
            return None
        parts = [(unit, info, part) for unit, info, part in partials if len(part.n)]
        n = _joined([part.n for _, _, part in parts], np.int64)
        place = [
            mix(np.full(len(part.n), unit.id.shard, np.uint64), np.arange(unit.first, unit.last, dtype=np.uint64))
            for unit, _, part in parts
        ]
        step = [np.full(len(part.n), -1 if info.step is None else info.step, np.int64) for _, info, part in parts]
        sums = np.concatenate([part.sums for _, _, part in parts], axis=1) if parts else np.zeros((len(QUANTITIES), 0))
        whole = SequenceSums(
            _joined(step, np.int64),
            _joined(place, np.uint64),
            _optional([part.ids for _, _, part in parts], np.int64),
            _optional([part.groups for _, _, part in parts], np.int64),
            _optional([part.tokens for _, _, part in parts], np.uint64),
            n,
            sums,
        )
        whole = _join_fragments(whole)
        return whole.select(whole.n > 0)


def _join_fragments(rows: SequenceSums) -> SequenceSums:
    """A segment that was cut into several units becomes one row again; its parts stand next to each other."""
    if len(rows) < 2:
        return rows
    first = np.flatnonzero(np.concatenate([[True], rows.place[1:] != rows.place[:-1]]))
    if len(first) == len(rows):
        return rows
    out = rows.select(first)
    return SequenceSums(
        out.step,
        out.place,
        out.ids,
        out.groups,
        None if rows.tokens is None else np.add.reduceat(rows.tokens, first),
        np.add.reduceat(rows.n, first),
        np.add.reduceat(rows.sums, first, axis=1),
    )


def _column(shard: OpenShard, role: str, unit: Unit) -> Ints | None:
    if role not in shard.info.columns:
        return None
    column = shard.segment_column(role)
    return None if column is None else _array(column[unit.first : unit.last]).astype(np.int64)


def _token_hashes(unit: Unit, shard: OpenShard) -> Words | None:
    """A hash a segment that adds up over its fragments: the sum of the mixed (place in the segment, token) pairs."""
    if "token_ids" not in shard.info.columns:
        return None
    tokens = _array(shard.read("token_ids", unit.start, unit.stop)).astype(np.int64).view(np.uint64)
    offsets = _array(shard.offsets()[unit.first : unit.last + 1]).astype(np.int64)
    out = np.zeros(unit.last - unit.first, np.uint64)
    if unit.fragment:
        place = np.arange(unit.start, unit.stop, dtype=np.int64) - offsets[0]
        out[0] = np.add.reduce(mix(tokens, place.astype(np.uint64)), dtype=np.uint64)
        return out
    lengths = np.diff(offsets)
    place = np.arange(unit.start, unit.start + int(lengths.sum()), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
    mixed = mix(tokens[: len(place)], place.astype(np.uint64))
    filled = lengths > 0
    if filled.any():
        out[filled] = np.add.reduceat(mixed, (offsets[:-1] - unit.start)[filled])
    return out


def mix(a: Words, b: Words) -> Words:
    """Mix two words into one, well spread (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        z = a * np.uint64(0xD1342543DE82EF95) + b * _GOLDEN + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _array(tensor: Any) -> NDArray[Any]:
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def _joined(arrays: list[Any], dtype: type) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _optional(arrays: list[Any], dtype: type) -> NDArray[Any] | None:
    return None if not arrays or any(array is None for array in arrays) else _joined(arrays, dtype)
