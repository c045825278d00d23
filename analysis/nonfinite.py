"""Tokens whose log-probs or log-ratio are not finite: counted, and taken out of the block before it is summed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.ops import Ops
from rollout_is.analysis.sums import Workspace


@dataclass(frozen=True)
class Dropped:
    """What was taken out of a block.

    Attributes:
        kept: int64 [k] places in the block of the tokens that stay.
        places: int64 [b] of the others; ``sequence`` int64 [b], ``train`` and ``rollout`` float64 [b] theirs.
        low, high: how many have d = -inf and +inf.
    """

    kept: Ints
    places: Ints
    sequence: Ints
    train: Floats
    rollout: Floats
    low: int
    high: int


class Nonfinite:
    """Counts by segment of a unit, for one population.

    Attributes:
        count: int64 [s] tokens left out.
        low, high: int64 [s] of them, d = -inf and +inf.
    """

    def __init__(self, segments: int) -> None:
        self.count = np.zeros(segments, dtype=np.int64)
        self.low = np.zeros(segments, dtype=np.int64)
        self.high = np.zeros(segments, dtype=np.int64)

    def drop(self, ops: Ops, work: Workspace, v: int, starts: Ints, sequence: Ints) -> Dropped:
        """Move the finite ones of the v tokens in the workspace together; count the others."""
        train, rollout, d = (ops.host(x[:v]) for x in (work.train, work.rollout, work.d))
        finite = np.isfinite(train) & np.isfinite(rollout) & np.isfinite(d)
        bad, kept = np.flatnonzero(~finite), np.flatnonzero(finite)
        own = sequence[starts.searchsorted(bad, side="right") - 1]
        down, up = d[bad] == -np.inf, d[bad] == np.inf
        np.add.at(self.count, own, 1)
        np.add.at(self.low, own[down], 1)
        np.add.at(self.high, own[up], 1)
        dropped = Dropped(kept, bad, own, train[bad], rollout[bad], int(down.sum()), int(up.sum()))
        for buffer, values in ((work.train, train), (work.rollout, rollout), (work.d, d)):
            ops.take_in(values[kept], buffer[: len(kept)])
        return dropped


def pieces_left(kept: Ints, starts: Ints, sequence: Ints) -> tuple[Ints, Ints]:
    """Starts and sequences of the pieces that still hold a token."""
    piece = starts.searchsorted(kept, side="right") - 1
    first = np.flatnonzero(np.diff(piece, prepend=-1))
    return first, sequence[piece[first]]
