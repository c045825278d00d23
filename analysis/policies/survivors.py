"""What a policy leaves: one applied weight a sequence, kept scaled, and the mismatch sums of the surviving tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.pareto import tail_length
from rollout_is.analysis.policies.gather import Gathered

PLAIN = 300.0  # below this |L| the moments about 1 are exact; above, the sums scaled by the largest L stand
LN2 = math.log(2.0)


@dataclass(frozen=True)
class Level:
    """Weights exp(L), one for each surviving sequence.

    Attributes:
        n: sequences.
        low, high: extremes of L (+inf, -inf when there is none).
        e, e2: sums of expm1(L) and of its square, L held in +-PLAIN.
        first, second: sums of exp(L - high) and of exp(2 (L - high)).
        over, under: how many weights lie outside the bounds.
        top, cut: the largest L, and how many more there are.
    """

    n: int
    low: float
    high: float
    e: float
    e2: float
    first: float
    second: float
    over: int
    under: int
    top: Floats
    cut: int

    @staticmethod
    def of(logs: Floats, bounds: tuple[float, float]) -> Level:
        """Summed up from the L of each sequence, [v]."""
        n = logs.size
        if not n:
            return Level(0, math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0, 0, 0, np.zeros(0), 0)
        high = float(logs.max())
        e = np.expm1(logs.clip(-PLAIN, PLAIN))
        keep = min(n, 2 * tail_length(n) + 64)
        return Level(
            n,
            float(logs.min()),
            high,
            float(e.sum()),
            float(np.square(e).sum()),
            float(np.exp(logs - high).sum()),
            float(np.exp(2.0 * (logs - high)).sum()),
            int((logs > math.log(bounds[1])).sum()),
            int((logs < (math.log(bounds[0]) if bounds[0] > 0 else -math.inf)).sum()),
            np.sort(logs)[n - keep :][::-1].copy(),
            n - keep,
        )

    @staticmethod
    def join(levels: Sequence[Level]) -> Level:
        """Of several units, in their order."""
        high = max(level.high for level in levels)
        known = [level for level in levels if level.n]
        values = np.sort(np.concatenate([level.top for level in levels]))[::-1]
        complete = max((float(level.top[-1]) for level in known if level.cut), default=-math.inf)
        return Level(
            sum(level.n for level in levels),
            min(level.low for level in levels),
            high,
            math.fsum(level.e for level in levels),
            math.fsum(level.e2 for level in levels),
            math.fsum(level.first * math.exp(level.high - high) for level in known),
            math.fsum(level.second * math.exp(2.0 * (level.high - high)) for level in known),
            sum(level.over for level in levels),
            sum(level.under for level in levels),
            values[values >= complete],
            sum(level.cut for level in levels),
        )

    def scaled(self, factor: float) -> Level:
        """All weights divided by a factor; the counts outside the bounds are those before."""
        if not self.n:
            return self
        shift = math.log(factor)
        s1, s2 = self.n + self.e, self.n + 2 * self.e + self.e2
        return Level(
            self.n,
            self.low - shift,
            self.high - shift,
            s1 / factor - self.n,
            s2 / factor**2 - 2 * s1 / factor + self.n,
            self.first,
            self.second,
            self.over,
            self.under,
            self.top - shift,
            self.cut,
        )


@dataclass(frozen=True)
class Survivors:
    """Sums and extremes of the mismatch over the tokens, and the sequences, that keep a weight; raw, not applied, weights."""

    sums: dict[str, float]
    lows: dict[str, float]
    highs: dict[str, float]

    @staticmethod
    def of(unit: Gathered, rows_on: NDArray[np.bool_], out_on: NDArray[np.bool_], alive: Ints) -> Survivors:
        """Of one unit.

        Args:
            unit: gathered under a full plan.
            rows_on: bool [s] sequences that are not rejected as a whole.
            out_on: bool [o] the tokens that are not ordinary and survive.
            alive: int64 [s] surviving tokens of each sequence.
        """
        d, dp, t, at = unit.od[out_on], unit.odp[out_on], unit.ot[out_on], unit.at[out_on]
        size = unit.n.size

        def both(ordinary: Floats, others: Floats) -> float:
            return float(ordinary[rows_on].sum() + others.sum())

        live = alive > 0
        count = np.maximum(alive, 1)
        total_d = np.where(rows_on, unit.d, 0.0) + np.bincount(at, weights=d, minlength=size)
        total_t = np.where(rows_on, unit.t, 0.0) + np.bincount(at, weights=t, minlength=size)
        mean_d, mean_t = (total_d / count)[live], (total_t / count)[live]
        log_ppl, rollout_ppl, diff = -mean_t, mean_d - mean_t, -mean_d  # r = t - d
        sums = {
            "d": both(unit.d, d),
            "d2": both(unit.d2, d * d),
            "abs": both(unit.absolute, np.abs(d)),
            "mult": both(unit.mult, np.exp(np.abs(d))),
            "dp": both(unit.dp, np.abs(dp)),
            "raw_e": both(unit.e, np.expm1(d)),
            "raw_e2": both(unit.e2, np.square(np.expm1(d))),
            "extreme": float((np.abs(d) > LN2).sum()),
            "rows": float(live.sum()),
            "log_ppl": float(log_ppl.sum()),
            "rollout_log_ppl": float(rollout_ppl.sum()),
            "ppl": float(np.exp(log_ppl).sum()),
            "rollout_ppl": float(np.exp(rollout_ppl).sum()),
            "diff": float(diff.sum()),
            "abs_diff": float(np.abs(diff).sum()),
            "ratio": float(np.exp(diff).sum()),
            "chi2_seq": float(np.expm1(2.0 * total_d[live]).sum()),
            "chi2_geometric": float(np.expm1(2.0 * mean_d).sum()),
        }
        edges = np.concatenate(
            [
                np.abs(unit.low[rows_on & (unit.ordinary > 0)]),
                np.abs(unit.high[rows_on & (unit.ordinary > 0)]),
                np.abs(d),
            ]
        )
        highs = {
            "abs": float(edges.max(initial=-np.inf)),
            "dp": float(max(unit.dp_high[rows_on & live].max(initial=-np.inf), np.abs(dp).max(initial=-np.inf))),
            "diff": float(diff.max(initial=-np.inf)),
        }
        return Survivors(sums, {"diff": float(diff.min(initial=np.inf))}, highs)
