"""A unit's tokens as two populations, each a series of runs of positions: its pieces, its blocks, and how to pick it out.

The valid tokens (and, apart from them, the masked-out ones) are numbered in place order; that number is a token's *rank*. A
unit is read in chunks of positions; the tokens of a population in a chunk are cut into blocks, and a block into pieces, one for
each sequence. All of that is worked out for the whole unit at once, by a few passes over its edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Ints

FEW_RUNS = 2048  # runs of a chunk up to which copying runs beats picking by index
DENSE = 64  # mean length of a run below which runs are short
SLACK = 8  # a cut moves back by up to one such part of a block to where a sequence starts


class Runs:
    """The positions of a unit at which a mask is set, as runs.

    Args:
        on: bool [n].
        scratch: bool [n] memory that may be written, where the caller has some.

    >>> runs = Runs(np.array([0, 1, 1, 0, 1], bool))
    >>> runs.before(np.array([0, 2, 5])).tolist(), runs.inverse().before(np.array([0, 2, 5])).tolist()
    ([0, 1, 3], [0, 1, 2])
    """

    def __init__(self, on: Any, scratch: Any = None) -> None:
        n = len(on)
        changes = np.not_equal(on[1:], on[:-1], out=None if scratch is None else scratch[: max(n - 1, 0)])
        found = changes.nonzero()[0]
        edges = np.empty(len(found) + 2, dtype=np.int64)
        edges[0], edges[-1] = 0, n
        np.add(found, 1, out=edges[1:-1])
        self._inverse: Runs | None = None
        self._cut(on, edges)

    def _cut(self, on: Any, edges: Ints) -> None:
        self.on = on
        self._edges = edges
        first = 0 if len(on) and on[0] else 1
        self.starts, self.stops = edges[first:-1:2], edges[first + 1 :: 2]
        self._before = np.zeros(len(self.starts) + 1, dtype=np.int64)
        np.cumsum(self.stops - self.starts, out=self._before[1:])

    def inverse(self, scratch: Any = None) -> Runs:
        """The other positions; ``scratch`` takes them as bool [n]."""
        out = object.__new__(Runs)
        out._inverse = self
        out._cut(np.logical_not(self.on, out=scratch), self._edges)
        return out

    @cached_property
    def _running(self) -> Any:
        """int32 [n+1] set positions before each place, where runs are so short that looking them up is slower; else None."""
        n = len(self.on)
        if len(self._edges) <= n // DENSE:
            return None
        out = np.zeros(n + 1, dtype=np.int32)
        np.cumsum(self.on, out=out[1:], dtype=np.int32)
        return out

    def before(self, at: Ints) -> Ints:
        """int64 [k]: set positions before each place."""
        if self._inverse is not None:
            others: Ints = at - self._inverse.before(at)
            return others
        if self._running is not None:
            counted: Ints = self._running[at].astype(np.int64)
            return counted
        run = self.starts.searchsorted(at, side="right")  # runs begun before the place
        out: Ints = self._before[run].copy()
        inside = np.flatnonzero(run)
        last = run[inside] - 1
        out[inside] -= np.maximum(self.stops[last] - at[inside], 0)
        return out

    def pick(self, start: int, stop: int) -> Picks:
        """Which of positions [start, stop) are set, counted from ``start``."""
        first = int(self.stops.searchsorted(start, side="right"))
        last = int(self.starts.searchsorted(stop, side="left"))
        if last - first > FEW_RUNS:
            index = self.on[start:stop].nonzero()[0]
            none = np.zeros(0, dtype=np.int64)
            return Picks(self.on[start:stop], none, none, len(index), index)
        starts, stops = self.starts[first:last] - start, self.stops[first:last] - start
        if len(starts):
            starts[0], stops[-1] = max(int(starts[0]), 0), min(int(stops[-1]), stop - start)
        return Picks(self.on[start:stop], starts, stops, int(stops.sum() - starts.sum()))

    def place_of(self, rank: int) -> int:
        """The position of the set position with so many before it."""
        run = int(self._before.searchsorted(rank, side="right")) - 1
        return int(self.starts[run] + rank - self._before[run])


@dataclass(frozen=True)
class Picks:
    """Positions of a chunk, bool [n] ``on``: as runs [starts, stops) where they are few, else as int64 [count] places."""

    on: Any
    starts: Ints
    stops: Ints
    count: int
    index: Ints | None = None

    def some(self, first: int, last: int) -> Ints:
        """int64 [last - first] the positions of a few of them, by rank."""
        if self.index is not None:
            return self.index[first:last]
        ends = np.cumsum(self.stops - self.starts)
        ranks = np.arange(first, last)
        run = ends.searchsorted(ranks, side="right")
        out: Ints = self.stops[run] - ends[run] + ranks
        return out

    @cached_property
    def positions(self) -> Ints:
        """int64 [count], ascending."""
        out: Ints = self.on.nonzero()[0] if self.index is None else self.index
        return out


@dataclass(frozen=True)
class Pieces:
    """How one population of a unit is cut.

    Attributes:
        bounds: int64 [b+1] ranks at which blocks start, and the end.
        chunks: int64 [c+1] number of the first block of each chunk.
        first: int64 [b+1] number of the first piece of each block.
        starts: int64 [k] first token of each piece, counted from its block.
        sequence: int64 [k] the sequence of each piece, counted from the unit's first segment.
    """

    bounds: Ints
    chunks: Ints
    first: Ints
    starts: Ints
    sequence: Ints

    @staticmethod
    def cut(ranks: Ints, chunks: Ints, block: int) -> Pieces:
        """Cut a population.

        Args:
            ranks: int64 [s+1] its tokens before each segment of the unit, and in all.
            chunks: int64 [c+1] its tokens before each chunk, and in all.
            block: tokens of a block, at most; an eighth more where a cut moves to the start of a sequence.

        >>> p = Pieces.cut(np.array([0, 3, 3, 8]), np.array([0, 8]), 4)
        >>> p.bounds.tolist(), p.starts.tolist(), p.sequence.tolist()
        ([0, 4, 8], [0, 3, 0], [0, 2, 2])
        """
        sizes = np.diff(chunks)
        parts = -(-sizes // block)  # blocks of each chunk; none where it has no such token
        numbers = np.zeros(len(chunks), dtype=np.int64)
        np.cumsum(parts, out=numbers[1:])
        owner = np.repeat(np.arange(len(sizes)), parts)
        inner = np.arange(len(owner)) - numbers[owner]
        bounds = np.append(chunks[owner] + sizes[owner] * inner // np.maximum(parts[owner], 1), chunks[-1])
        # Back to the start of a sequence where one is near: sequences in one block need no joining.
        near = ranks[ranks.searchsorted(bounds, side="right") - 1]
        moves = (bounds - near <= block // SLACK) & np.append(inner > 0, False)
        bounds = np.where(moves, near, bounds)
        starts, sequence = ranks[:-1], np.arange(len(ranks) - 1)
        at = ranks.searchsorted(bounds[:-1], side="right")
        inside = ranks[at - 1] != bounds[:-1]  # blocks that begin inside a sequence cut it in two
        if inside.any():
            starts = np.insert(starts, at[inside], bounds[:-1][inside])
            sequence = np.insert(sequence, at[inside], at[inside] - 1)
        some = np.diff(starts, append=ranks[-1]) > 0
        starts, sequence = starts[some], sequence[some]
        first = starts.searchsorted(bounds)
        for bound, (a, b) in zip(bounds[:-1].tolist(), pairwise(first.tolist()), strict=True):
            starts[a:b] -= bound
        return Pieces(bounds, numbers, first, starts, sequence)
