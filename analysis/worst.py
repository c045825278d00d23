"""The worst tokens and sequences, bounded: K are kept however many there are, ties broken by place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout_is.analysis import populations as sums
from rollout_is.analysis.batch import Floats, Ints, Unit
from rollout_is.analysis.ops import Ops
from rollout_is.analysis.populations import Table
from rollout_is.analysis.sums import Workspace

# badness (inf where not finite), shard, segment, position, t, r
TokenEntry = tuple[float, int, int, int, float, float]


@dataclass
class WorstTokens:
    """The ``k`` valid tokens with the largest |log-ratio|; those with a non-finite log-prob come first."""

    k: int
    entries: list[TokenEntry] = field(default_factory=list)

    def _keep(self, entries: list[TokenEntry]) -> None:
        self.entries = sorted(self.entries + entries, key=lambda e: (-e[0], e[1], e[3]))[: self.k]

    def merge(self, other: WorstTokens) -> None:
        self._keep(other.entries)

    def see(
        self, ops: Ops, work: Workspace, v: int, starts: Ints, segments: Ints, index: Ints | None, start: int, shard: int
    ) -> None:  # fmt: skip
        """Tokens of a block that stand in the workspace."""
        d = ops.host(work.d[:v])
        magnitude = np.abs(d)
        bound = self.entries[-1][0] if len(self.entries) == self.k else -1.0
        at = np.flatnonzero(magnitude > bound)
        if len(at) > self.k:
            # Not argpartition alone: among equals the first positions are the ones to keep.
            cut = np.partition(magnitude[at], len(at) - self.k)[len(at) - self.k]
            above = at[magnitude[at] > cut]
            at = np.concatenate((above, at[magnitude[at] == cut][: self.k - len(above)]))
        if not len(at):
            return
        train, rollout = ops.host(work.train[:v]), ops.host(work.rollout[:v])
        piece = np.searchsorted(starts, at, side="right") - 1
        position = (at if index is None else index[at]) + start
        self._keep(
            [
                (float(magnitude[i]), shard, int(segments[p]), int(x), float(train[i]), float(rollout[i]))
                for i, p, x in zip(at, piece, position, strict=True)
            ]
        )

    def see_nonfinite(self, positions: Ints, segments: Ints, train: Floats, rollout: Floats, shard: int) -> None:
        few = slice(0, self.k)
        self._keep(
            [
                (math.inf, shard, int(s), int(p), float(t), float(r))
                for p, s, t, r in zip(positions[few], segments[few], train[few], rollout[few], strict=True)
            ]
        )


@dataclass
class WorstSequences:
    """The ``k`` sequences with the largest mean |log-ratio|; those with a non-finite valid token come first."""

    k: int
    # badness, shard, segment, n, sum of d, sum of w as mean, non-finite tokens
    entries: list[tuple[float, int, int, int, float, float, int]] = field(default_factory=list)

    def merge(self, other: WorstSequences) -> None:
        self.entries = sorted(self.entries + other.entries, key=lambda e: (-e[0], e[1], e[2]))[: self.k]

    @staticmethod
    def of(k: int, unit: Unit, table: Table, nonfinite: Ints) -> WorstSequences:
        """From the per-sequence sums of a finished unit."""
        n = table.sums[sums.N]
        has = (n > 0) | (nonfinite > 0)
        size = np.maximum(n, 1)
        badness = np.where(nonfinite > 0, np.inf, table.sums[sums.ABS] / size)
        badness[~has] = -np.inf
        order: Any = np.lexsort((np.arange(len(n)), -badness))[:k]
        entries = [
            (
                float(badness[i]),
                unit.id.shard,
                int(table.sequence[i]) + unit.first,
                int(n[i]),
                float(table.sums[sums.D, i]),
                float(table.sums[sums.ABS, i] / size[i]),
                int(nonfinite[i]),
            )
            for i in order
            if has[i]
        ]
        return WorstSequences(k, entries)
