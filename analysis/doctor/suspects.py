"""A second look at the few worst sequences of a unit, read again once their sums are known: rare faults fall outside any sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollout_is.analysis.batch import Ints, SequenceTable
from rollout_is.analysis.doctor.lag import Lag, judge_kind
from rollout_is.analysis.doctor.spread import Spread
from rollout_is.analysis.doctor.verdict import Draft, Scene
from rollout_is.analysis.doctor.window import Window

if TYPE_CHECKING:
    from rollout_is.dumps.shard import OpenShard

MOST = 8  # sequences read again in a unit
LONGEST = 1 << 15  # positions read of each
BAD = 0.2  # mean |d| ...
TIMES = (
    10.0  # ... and this many times the unit's median sequence: else the unit is bad as a whole, and the sample shows it
)
SHORTEST = 24


@dataclass
class RareLag(Lag):
    """Lags of suspicious sequences only: never pooled with those of the sample."""


def judge(scene: Scene) -> list[Draft]:
    """``alignment.*`` of a few sequences, where the sample has found no lag."""
    if judge_kind(scene, Lag):
        return []
    return judge_kind(scene, RareLag, among=int(scene.pooled(Spread).tokens[0]))


def suspicious(table: SequenceTable) -> Ints:
    """int64: up to MOST rows of the table, worst first, whose mean |d| stands far out of the unit."""
    n = np.maximum(table.n, 1)
    mean = table.sum_abs / n
    rows = np.flatnonzero((mean > BAD) & (table.n >= SHORTEST))
    if not len(rows):  # most often; a median of all costs more than the rest
        return rows
    rows = rows[mean[rows] > TIMES * float(np.median(mean[table.n > 0]))]
    chosen: Ints = rows[np.lexsort((rows, -mean[rows]))][:MOST]
    return chosen


def read_again(shard: OpenShard, segment: int, start: int, stop: int) -> Window | None:
    """The valid, finite tokens of one segment as a window; None when it holds none."""
    import torch

    stop = min(stop, start + LONGEST)
    mask = shard.read("mask", start, stop)
    t = shard.read("train", start, stop).to(torch.float64).numpy()
    r = shard.read("rollout", start, stop).to(torch.float64).numpy()
    with np.errstate(invalid="ignore"):
        at = np.flatnonzero((mask != 0).numpy() & np.isfinite(t) & np.isfinite(r) & np.isfinite(t - r))
    if not len(at):
        return None
    t, r = t[at], r[at]
    one = np.ones(1, np.bool_)
    return Window(
        shard.info,
        t,
        r,
        t - r,
        at,
        np.zeros(1, np.int64),
        np.array([segment]),
        np.array([start]),
        one,
        one,
        np.zeros(1, np.int64),
        base=start,
    )
