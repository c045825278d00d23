"""The mask of a unit as runs, and each block laid out with its valid tokens first: which positions go where, in which pieces."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Ints

FEW_RUNS = 512  # mask runs of a block up to which copying runs beats picking by index

DENSE = 64  # mean length of a run below which runs are short


@dataclass(frozen=True)
class Layout:
    """A block of n positions, reordered: valid tokens in place order, then masked-out ones in place order.

    Attributes:
        split: how many are valid.
        runs: (first, stop) slices in the new order, where there are few; None when ``index`` is used or nothing moves.
        index: int64 [n] positions in the new order, or None.
        starts: int64 [k] first index of each piece, in the new order.
        sequence: int64 [k] the sequence of each piece.
        valid_pieces: how many of the pieces are of valid tokens.
    """

    split: int
    runs: list[tuple[int, int]] | None
    index: Ints | None
    starts: Ints
    sequence: Ints
    valid_pieces: int

    @property
    def moves(self) -> bool:
        return self.runs is not None or self.index is not None

    def positions(self, n: int) -> Ints:
        """int64 [n] the block's position of each token in the new order."""
        if self.index is not None:
            return self.index
        if self.runs is None:
            return np.arange(n)
        return np.concatenate([np.arange(a, b) for a, b in self.runs])


class MaskRuns:
    """The runs of a mask, and how many valid positions come before any place.

    Args:
        valid: bool [n].

    >>> runs = MaskRuns(np.array([0, 1, 1, 0, 1], bool))
    >>> runs.before(np.array([0, 2, 5])).tolist()
    [0, 1, 3]
    """

    def __init__(self, valid: Any) -> None:
        self.valid = valid
        n = len(valid)
        changes = np.flatnonzero(valid[1:] != valid[:-1])
        self.edges = np.empty(len(changes) + 2, dtype=np.int64)
        self.edges[0], self.edges[-1] = 0, n
        np.add(changes, 1, out=self.edges[1:-1])
        self._first_valid = bool(n and valid[0])
        self._on = np.empty(len(self.edges) - 1, dtype=np.int64)  # 1 for valid runs
        self._on[0::2], self._on[1::2] = int(self._first_valid), int(not self._first_valid)
        lengths = (self.edges[1:] - self.edges[:-1]) * self._on
        self._before = np.zeros(len(self.edges), dtype=np.int64)
        np.cumsum(lengths, out=self._before[1:])
        self._prefix: Any = None
        if len(changes) > n // DENSE:  # many short runs: a running count is faster than looking runs up
            self._prefix = np.zeros(n + 1, dtype=np.int32)
            np.cumsum(valid, out=self._prefix[1:], dtype=np.int32)

    def before(self, at: Ints) -> Ints:
        """int64 [k]: valid positions before each place."""
        if self._prefix is not None:
            counted: Ints = self._prefix[at].astype(np.int64)
            return counted
        run = np.minimum(self.edges.searchsorted(at, side="right") - 1, len(self._on) - 1)
        out: Ints = self._before[run] + (at - self.edges[run]) * self._on[run]
        return out

    def lay_out(self, start: int, stop: int, bounds: Ints, first: int) -> Layout:
        """The layout of positions [start, stop).

        Args:
            bounds: int64 [k+1] ends of the segments inside, clipped to [start, stop]; empty ones may be among them.
            first: number of the first of them.
        """
        n = stop - start
        lengths = bounds[1:] - bounds[:-1]
        counted = self.before(bounds)
        own = counted[1:] - counted[:-1]
        split = int(counted[-1] - counted[0])
        sequence = np.arange(first, first + len(lengths))
        if split in (0, n):
            some = lengths > 0
            pieces = int(np.count_nonzero(some)) if split else 0
            return Layout(split, None, None, bounds[:-1][some] - start, sequence[some], pieces)
        counts = np.concatenate((own, lengths - own))
        has = counts > 0
        counts, sequence = counts[has], np.concatenate((sequence, sequence))[has]
        inner = np.zeros(len(counts), dtype=np.int64)
        np.cumsum(counts[:-1], out=inner[1:])
        runs, index = self._order(start, stop)
        return Layout(split, runs, index, inner, sequence, int(np.count_nonzero(own)))

    def _order(self, start: int, stop: int) -> tuple[list[tuple[int, int]] | None, Ints | None]:
        a, b = int(self.edges.searchsorted(start, side="right")), int(self.edges.searchsorted(stop, side="left"))
        if b - a >= FEW_RUNS:
            valid = self.valid[start:stop]
            return None, np.concatenate((np.flatnonzero(valid), np.flatnonzero(~valid)))
        edges = [0, *(self.edges[a:b] - start).tolist(), stop - start]
        pairs = list(pairwise(edges))
        at = 0 if self.valid[start] else 1
        return pairs[at::2] + pairs[1 - at :: 2], None
