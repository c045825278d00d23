"""One pass over the tokens for any number of policies: per-sequence sums of the ordinary tokens, and the others one by one.

Every bound of every policy leaves an interval of log-ratios in which no policy does anything to a token (it keeps its ratio). The
tokens inside are summed once, for all policies together; the few outside are kept as they are and judged by each policy. So twelve
policies cost little more than one, and nothing is approximated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rollout_is.analysis.batch import Block, Floats, Ints, SequenceTable
from rollout_is.analysis.policies.rules import Policy, Rule

SAFE = 20.0
_ADDED = ("n", "ordinary", "d", "e", "e2", "d2", "mult", "t", "absolute", "dp")  # what two pieces of a sequence add up


@dataclass(frozen=True)
class Plan:
    """What the tokens are reduced to for a set of policies.

    Attributes:
        low, high: ordinary tokens have low < d < high.
        squares, mult: whether sums of d^2 and of exp|d| are needed.
        dprob: tokens whose probability moves by this much or more are kept too; None where no policy asks.
        full: also the sums that the mismatch family of the survivors needs.
    """

    low: float
    high: float
    squares: bool
    mult: bool
    dprob: float | None
    full: bool = False

    @staticmethod
    def of(policies: Iterable[Policy], bounds: tuple[float, float] | None = None) -> Plan:
        """The plan for some policies.

        Args:
            policies: what will be judged.
            bounds: weights outside these are counted too, and the survivors' mismatch is wanted; None is neither.
        """
        low, high, dprob = -SAFE, SAFE, math.inf
        squares = mult = full = bounds is not None
        if bounds is not None:
            low = max(math.log(bounds[0]) if bounds[0] > 0 else low, -math.log(2.0))
            high = min(math.log(bounds[1]), math.log(2.0))
        for policy in policies:
            weight = policy.weight
            if weight.safety is not None and weight.level == "token":
                low, high = max(low, -weight.safety), min(high, weight.safety)
            if weight.level == "token":
                low = low if weight.lower is None else max(low, math.log(weight.lower))
                high = high if weight.upper is None else min(high, math.log(weight.upper))
            for rule in policy.rules:
                squares |= rule.statistic.endswith(".k2")
                mult |= rule.statistic == "mean.mult"
                if rule.safety is not None:
                    low, high = max(low, -rule.safety), min(high, rule.safety)
                if rule.statistic == "token.dprob":
                    dprob = min(dprob, *(abs(b) for b in (rule.lower, rule.upper) if b is not None))
                elif rule.veto or rule.scope == "token":
                    inner = _harmless(rule)
                    low, high = max(low, inner[0]), min(high, inner[1])
        return Plan(low, high, squares, mult, None if dprob == math.inf else dprob, full)


def _harmless(rule: Rule) -> tuple[float, float]:
    """Log-ratios strictly between these pass a token rule for sure."""
    low, high = rule.log_bounds()
    if rule.is_ratio:
        return low, high
    if rule.statistic == "token.k1":
        return -high, -low
    if rule.lower is not None:  # a lower bound on k2 or k3 rejects the ordinary tokens: all are looked at
        return math.inf, -math.inf
    if rule.statistic == "token.k2":
        edge = math.sqrt(2.0 * max(high, 0.0)) * (1 - 1e-9)
        return -edge, edge
    return -_k3_edge(high, -1.0), _k3_edge(high, 1.0)


def _k3_edge(bound: float, side: float) -> float:
    """A distance below which exp(d) - 1 - d stays under the bound, on one side of 0."""
    near, far = 0.0, 1.0
    while math.expm1(side * far) - side * far < bound and far < 700:
        far *= 2
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if math.expm1(side * middle) - side * middle < bound else (near, middle)
    return near * (1 - 1e-9)


@dataclass
class Gathered:
    """One unit (or one long sequence, put together again) ready to be judged. Arrays [s] run over the segments.

    Attributes:
        n: valid finite tokens; ordinary: those of them that are ordinary.
        d, e, e2: sums over the ordinary tokens of d, expm1(d), expm1(d)^2.
        d2, mult: sums of d^2 and exp|d| over the ordinary tokens, where the plan wants them (else empty).
        low, high: extremes of d over the ordinary tokens (+inf, -inf where there is none).
        min_d, max_d: extremes of d over all tokens.
        advantage: of the sequence (its first valid token); NaN where there is none.
        segments, positions, unjudged: counts for the denominators; unjudged are valid tokens without a finite d.
        at, od, odp, ot: the tokens that are not ordinary: segment, d, p_train - p_rollout and train log-prob (empty unless wanted).
        t, absolute, dp, dp_high: sums over the ordinary tokens of the train log-prob, |d| and |p_train - p_rollout|, and its largest (a
            full plan only, else zeros).
    """

    n: Ints
    ordinary: Ints
    d: Floats
    e: Floats
    e2: Floats
    d2: Floats
    mult: Floats
    low: Floats
    high: Floats
    min_d: Floats
    max_d: Floats
    advantage: Floats
    at: Ints
    od: Floats
    odp: Floats
    ot: Floats
    t: Floats
    absolute: Floats
    dp: Floats
    dp_high: Floats
    segments: int
    positions: int
    unjudged: int

    def join(self, other: Gathered) -> Gathered:
        """Two pieces of one long sequence, in order."""
        added = {k: getattr(self, k) + getattr(other, k) for k in _ADDED}
        return Gathered(
            **added,
            low=np.minimum(self.low, other.low),
            high=np.maximum(self.high, other.high),
            min_d=np.minimum(self.min_d, other.min_d),
            max_d=np.maximum(self.max_d, other.max_d),
            advantage=np.where(np.isnan(self.advantage), other.advantage, self.advantage),
            at=np.concatenate([self.at, other.at]),
            od=np.concatenate([self.od, other.od]),
            odp=np.concatenate([self.odp, other.odp]),
            ot=np.concatenate([self.ot, other.ot]),
            dp_high=np.maximum(self.dp_high, other.dp_high),
            segments=max(self.segments, other.segments),
            positions=self.positions + other.positions,
            unjudged=self.unjudged + other.unjudged,
        )


class Gatherer:
    """Collects one unit, block by block.

    Args:
        plan: what to keep.
        segments: how many segments the unit has.
    """

    def __init__(self, plan: Plan, segments: int) -> None:
        self.plan = plan
        self.ordinary = np.zeros(segments, dtype=np.int64)
        self.d, self.e, self.e2, self.d2, self.mult = (np.zeros(segments) for _ in range(5))
        self.low, self.high = np.full(segments, np.inf), np.full(segments, -np.inf)
        self.advantage = np.full(segments, np.nan)
        self.t, self.absolute, self.dp, self.dp_high = (np.zeros(segments) for _ in range(4))
        self.at: list[Ints] = []
        self.od: list[Floats] = []
        self.odp: list[Floats] = []
        self.ot: list[Floats] = []

    def see(self, block: Block) -> None:
        """Take in the valid tokens of a block."""
        starts, own = block.starts, block.sequence
        if not len(starts):
            return
        d, e = block.d.numpy(), block.e.numpy()
        plan = self.plan
        inside = (d > plan.low) & (d < plan.high)
        dp = None
        if plan.full or plan.dprob is not None:
            dp = np.exp(block.train.numpy()) - np.exp(block.rollout.numpy())
        if plan.dprob is not None and dp is not None:
            inside &= np.abs(dp) < plan.dprob
        counts = np.diff(starts, append=len(d))
        low = high = d
        out = None
        if not inside.all():
            out = np.flatnonzero(~inside)
            piece = np.searchsorted(starts, out, side="right") - 1
            self.at.append(own[piece])
            self.od.append(d[out])
            if dp is not None:
                self.odp.append(dp[out])
            counts = counts - np.bincount(piece, minlength=len(starts))
            low, high = d.copy(), d.copy()
            low[out], high[out] = np.inf, -np.inf
            d, e = d.copy(), e.copy()
            d[out] = e[out] = 0.0
        self.ordinary[own] += counts
        self.d[own] += np.add.reduceat(d, starts)
        self.e[own] += np.add.reduceat(e, starts)
        self.e2[own] += np.add.reduceat(e * e, starts)
        self.low[own] = np.minimum(self.low[own], np.minimum.reduceat(low, starts))
        self.high[own] = np.maximum(self.high[own], np.maximum.reduceat(high, starts))
        if plan.squares:
            self.d2[own] += np.add.reduceat(d * d, starts)
        if plan.mult:  # exp|d| - 1, so that the tokens set to 0 above add nothing
            self.mult[own] += np.add.reduceat(np.where(d < 0, -e / (1.0 + e), e), starts)
        if plan.full and dp is not None:
            self._see_full(block.train.numpy(), d, dp, starts, own, out)

    def _see_full(self, t: Floats, d: Floats, dp: Floats, starts: Ints, own: Ints, out: Ints | None) -> None:
        size = np.abs(dp)
        if out is not None:
            self.ot.append(t[out])
            t = t.copy()
            t[out] = size[out] = 0.0
        self.t[own] += np.add.reduceat(t, starts)
        self.absolute[own] += np.add.reduceat(np.abs(d), starts)
        self.dp[own] += np.add.reduceat(size, starts)
        self.dp_high[own] = np.maximum(self.dp_high[own], np.maximum.reduceat(size, starts))

    def see_advantages(self, own: Ints, values: Floats) -> None:
        """The advantage of each sequence in a block, from its first valid token there."""
        new = np.isnan(self.advantage[own])
        self.advantage[own[new]] = values[new]

    def finish(self, table: SequenceTable, fragment: bool) -> Gathered:
        """The unit as a whole, from what was seen and the engine's table of its sequences."""
        return Gathered(
            n=table.n,
            ordinary=self.ordinary,
            d=self.d,
            e=self.e,
            e2=self.e2,
            d2=self.d2,
            mult=self.mult + self.ordinary,
            low=self.low,
            high=self.high,
            min_d=table.min_d,
            max_d=table.max_d,
            advantage=self.advantage,
            at=np.concatenate(self.at) if self.at else np.zeros(0, dtype=np.int64),
            od=np.concatenate(self.od) if self.od else np.zeros(0),
            odp=np.concatenate(self.odp) if self.odp else np.zeros(0),
            ot=np.concatenate(self.ot) if self.ot else np.zeros(0),
            t=self.t,
            absolute=self.absolute,
            dp=self.dp,
            dp_high=self.dp_high,
            segments=1 if fragment else int(np.count_nonzero(table.length)),
            positions=int(table.length.sum()),
            unjudged=int(table.nonfinite.sum()),
        )
