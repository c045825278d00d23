"""Where the mismatch sits among whole sequences: sums of mean |d| a sequence, by rank, step and length, and the bad ones by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints, SequenceTable
from rollout_is.analysis.doctor.state import MAGNITUDES, State, counts, magnitudes, table, totals
from rollout_is.analysis.doctor.window import Window

OCTAVES = 32
CATASTROPHIC = math.log(1.5)  # mean |d| of a sequence: every token off by a factor of 1.5
LISTED = 12
GROUPS = 256


class Worst:
    """The worst sequences, largest mean |d| first; ``+`` keeps the LISTED worst of both."""

    def __init__(self, rows: list[dict[str, Any]] | None = None) -> None:
        self.rows = rows or []

    def __add__(self, other: Worst) -> Worst:
        both = sorted(self.rows + other.rows, key=lambda x: (-x["mean_abs_d"], x["shard"], x["sequence"]))
        return Worst(both[:LISTED])


@dataclass
class Spread(State):
    """Per-sequence means of |d|, every sequence of the dump.

    Attributes:
        tokens: valid finite tokens; absolute: sum of |d|.
        sequences, means, squares: number, sum and sum of squares of the sequence means.
        histogram: of the sequence means.
        by_length: float64 [OCTAVES, 3] number, sum and sum of squares of the means by octave of the valid length.
        bad: sequences with mean above CATASTROPHIC; bad_length: their summed lengths.
        groups: group id -> int64 [2] sequences, bad ones, for groups that hold a bad one (at most GROUPS a unit).
        worst: "all" -> Worst.
    """

    tokens: Ints = counts(1)
    absolute: Floats = totals(1)
    sequences: Ints = counts(1)
    means: Floats = totals(1)
    squares: Floats = totals(1)
    histogram: Ints = counts(MAGNITUDES)
    by_length: Floats = totals(OCTAVES, 3)
    bad: Ints = counts(1)
    bad_length: Ints = counts(1)
    groups: dict[int, Ints] = table()
    worst: dict[str, Worst] = table()
    places: dict[str, Any] = table()

    def finished(self, table: SequenceTable, shard: str, groups: Ints | None) -> None:
        """Take in the unit's finished sequences.

        Args:
            groups: int64 [s] group id of each segment of the table, or None.
        """
        some = np.flatnonzero(table.n > 0)
        if not len(some):
            return
        n = table.n[some]
        mean = table.sum_abs[some] / n
        self.tokens[0] += int(n.sum())
        self.absolute[0] += float(table.sum_abs[some].sum())
        self.sequences[0] += len(some)
        self.means[0] += float(mean.sum())
        self.squares[0] += float((mean * mean).sum())
        self.histogram += magnitudes(mean)
        octave = np.minimum(np.log2(n).astype(np.int64), OCTAVES - 1)
        for i, x in enumerate((np.ones(len(n)), mean, mean * mean)):
            self.by_length[:, i] += np.bincount(octave, weights=x, minlength=OCTAVES)
        bad = mean > CATASTROPHIC
        if not bad.any():
            return
        self.bad[0] += int(bad.sum())
        self.bad_length[0] += int(n[bad].sum())
        order = np.flatnonzero(bad)
        order = order[np.lexsort((order, -mean[order]))][:LISTED]
        rows = [
            {
                "shard": shard,
                "sequence": int(table.first + some[i]),
                "mean_abs_d": float(mean[i]),
                "tokens": int(n[i]),
                "group": None if groups is None else int(groups[some[i]]),
            }
            for i in order
        ]
        self.worst["all"] = self.worst.get("all", Worst()) + Worst(rows)
        if groups is not None:
            mine = groups[some]
            hit, times = np.unique(mine[bad], return_counts=True)
            for g, k in list(zip(hit.tolist(), times.tolist(), strict=True))[:GROUPS]:
                self.groups[g] = np.array([int((mine == g).sum()), k], np.int64)

    def look(self, window: Window) -> None:
        """Remember a place inside each of the first three bad sequences that were read again."""
        kept = self.places.setdefault("bad", Kept())
        if len(kept.rows) >= 3:
            return
        mean = np.add.reduceat(window.abs_d, window.starts) / window.size
        for p in np.flatnonzero(mean > CATASTROPHIC)[: 3 - len(kept.rows)]:
            kept.rows.append(window.place(int(window.starts[p] + window.size[p] // 2)))


class Kept:
    """The first three rows; ``+`` keeps the first three of both."""

    def __init__(self, rows: list[dict[str, Any]] | None = None) -> None:
        self.rows = rows or []

    def __add__(self, other: Kept) -> Kept:
        return Kept((self.rows + other.rows)[:3])
