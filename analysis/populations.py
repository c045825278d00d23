"""What the sums of a unit hold: bounds, tables by sequence, weights kept as logarithms, and what is pooled over tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.histogram import Histogram
from rollout_is.analysis.ops import HALF_BINS, Ops

if TYPE_CHECKING:
    from rollout_is.analysis.fused.library import Block

# Columns of a piece. E, E2 and D2 are taken about the unit's shift, so that variances do not cancel.
N, D, ABS, E, E2, W, W2, T, D2, MULT, DP, K3, HIGH, LOW, EXTREME, VETO, IDENTICAL = range(17)
COLUMNS = 17
# A piece has three more until it is folded: its tokens beyond the nearest bound, and the extremes of d.
TAIL, LOWEST, HIGHEST, ROWS = 17, 18, 19, 20
FIRST_ZEROED = T  # from it on, rows that not every block writes
COLD = 1e-2  # a piece with a mean weight below this is summed without the 1 + (w - 1) detour, which would cancel


@dataclass(frozen=True)
class Bounds:
    """Log-ratio bounds that tokens are counted against; None is off."""

    log_lower: float
    log_upper: float
    veto_lower: float | None
    veto_upper: float | None

    @property
    def nearest(self) -> float:
        """The smallest |d| that can lie beyond any bound: blocks below it are not searched."""
        bounds = [self.log_lower, self.log_upper, math.log(2.0)]
        bounds += [b for b in (self.veto_lower, self.veto_upper) if b is not None]
        if self.log_lower >= 0 or self.log_upper <= 0:
            return -1.0
        veto_inside = (self.veto_lower is not None and self.veto_lower >= 0) or (
            self.veto_upper is not None and self.veto_upper <= 0
        )
        return -1.0 if veto_inside else min(abs(b) for b in bounds)


@dataclass
class Scaled:
    """Weights kept as logarithms: per entry its sequence, log scale m, sum of exp(L - m) and of exp(2(L - m))."""

    sequence: list[Ints] = field(default_factory=list)
    scale: list[Floats] = field(default_factory=list)
    first: list[Floats] = field(default_factory=list)
    second: list[Floats] = field(default_factory=list)

    def add(self, sequence: Ints, scale: Floats, first: Floats, second: Floats) -> None:
        if len(sequence):
            self.sequence.append(sequence)
            self.scale.append(scale)
            self.first.append(first)
            self.second.append(second)

    def arrays(self) -> tuple[Ints, Floats, Floats, Floats]:
        if not self.sequence:
            none = np.zeros(0)
            return np.zeros(0, dtype=np.int64), none, none, none
        return (
            np.concatenate(self.sequence),
            np.concatenate(self.scale),
            np.concatenate(self.first),
            np.concatenate(self.second),
        )


@dataclass
class Pooled:
    """What is needed of the population only as a whole: moments of p = exp(t) and q = exp(r) about shifts, and extremes."""

    shift: tuple[float, float] | None = None  # of p and of q
    p: float = 0.0
    p2: float = 0.0
    q: float = 0.0
    q2: float = 0.0
    cross: float = 0.0
    max_dp: float = -math.inf
    # Followed only while every probability is the same: they tell "constant" from a correlation.
    train: tuple[float, float] = (math.inf, -math.inf)
    rollout: tuple[float, float] = (math.inf, -math.inf)

    def add(self, ops: Ops, train: Any, rollout: Any, p: Any | None, q: Any, difference: Any) -> None:
        """A block's tokens. ``p`` is given where q + difference would cancel; ``p`` and ``q`` may be overwritten."""
        if _one_probability(self.train):
            self.train = _widen(self.train, ops.minmax(train))
        if _one_probability(self.rollout):
            self.rollout = _widen(self.rollout, ops.minmax(rollout))
        n = len(q)
        sum_q = ops.total(q)
        if self.shift is None:
            self.shift = self._pilot(ops, p, q, difference, sum_q)
        shift_p, shift_q = self.shift
        if shift_q:
            ops.subtract(q, shift_q, q)
            sum_q = ops.total(q)
        if p is not None:
            if shift_p:
                ops.subtract(p, shift_p, p)
            qq = ops.dot(q, q)
            self.p += ops.total(p)
            self.p2 += ops.dot(p, p)
            self.cross += ops.dot(p, q)
        else:
            # p about its shift is (q about its own) + difference + a, a being the gap between the shifts.
            a = shift_q - shift_p
            qq, qd, dd = ops.dot(q, q), ops.dot(q, difference), ops.dot(difference, difference)
            sum_d = ops.total(difference)
            self.p += sum_q + sum_d + n * a
            self.p2 += qq + 2.0 * qd + dd + a * (2.0 * (sum_q + sum_d) + n * a)
            self.cross += qq + qd + a * sum_q
        self.q += sum_q
        self.q2 += qq

    def pilot(self, train: Floats, rollout: Floats) -> None:
        """Set the shifts by some of the population's tokens, float64 [n] log-probs each; finite ones, if there are any."""
        finite = np.isfinite(train) & np.isfinite(rollout)
        if not finite.any():
            return
        with np.errstate(all="ignore"):
            p, q = np.exp(train[finite]), np.exp(rollout[finite])
            mean_p, mean_q = float(p.mean()), float(q.mean())
            wide = all(float((x * x).mean()) > 1.01 * mean * mean for x, mean in ((p, mean_p), (q, mean_q)))
        self.shift = (0.0, 0.0) if wide or not (math.isfinite(mean_p) and math.isfinite(mean_q)) else (mean_p, mean_q)

    def take(self, given: Block) -> None:
        """What the compiled kernel summed of a block, about this shift."""
        if _one_probability(self.train):
            self.train = _widen(self.train, (given.train_low, given.train_high))
        if _one_probability(self.rollout):
            self.rollout = _widen(self.rollout, (given.rollout_low, given.rollout_high))
        self.p += given.p
        self.p2 += given.p2
        self.q += given.q
        self.q2 += given.q2
        self.cross += given.cross
        self.max_dp = max(self.max_dp, given.largest_difference)

    @staticmethod
    def _pilot(ops: Ops, p: Any | None, q: Any, difference: Any, sum_q: float) -> tuple[float, float]:
        """Shifts at the block's means; (0, 0) where the spread is of the mean's own size and nothing would cancel."""
        n = len(q)
        mean_q = sum_q / n
        mean_p = (ops.total(p) if p is not None else sum_q + ops.total(difference)) / n
        if not (math.isfinite(mean_q) and math.isfinite(mean_p)):
            return 0.0, 0.0
        wide_q = ops.dot(q, q) / n > 1.01 * mean_q * mean_q
        wide_p = p is None or ops.dot(p, p) / n > 1.01 * mean_p * mean_p
        return (0.0, 0.0) if wide_q and wide_p else (mean_p, mean_q)


def _one_probability(extremes: tuple[float, float]) -> bool:
    low, high = extremes
    return low > high or low == high or (high < 709.0 and math.exp(low) == math.exp(high))


@dataclass
class Whole:
    """What is kept of one population beside its pieces."""

    pooled: Pooled = field(default_factory=Pooled)
    bins: Ints = field(default_factory=lambda: np.zeros(HALF_BINS, dtype=np.int64))
    zeros: int = 0
    negative_zeros: int = 0
    far: list[Floats] = field(default_factory=list)
    infinite: list[int] = field(default_factory=lambda: [0, 0])  # d = -inf, +inf: in fractions and veto only


@dataclass(frozen=True)
class Half:
    """What a unit's sums say of one population as a whole."""

    bounds: Bounds
    shift: float
    e_shift: float
    mismatch: bool
    n: int
    whole: Whole
    scaled: Scaled
    scaled_abs: Scaled
    scaled_k3: Scaled

    @property
    def pooled(self) -> Pooled:
        return self.whole.pooled

    @property
    def infinite(self) -> list[int]:
        return self.whole.infinite

    def histogram(self) -> Histogram:
        """Of the log-ratio."""
        whole = self.whole
        far = np.concatenate(whole.far) if whole.far else np.zeros(0)
        return Histogram.of_half_bins(whole.bins, whole.zeros, whole.negative_zeros, far)


@dataclass(frozen=True)
class Table:
    """Per-sequence sums.

    Attributes:
        sequence: int64 [s] ascending.
        sums: float64 [COLUMNS, s].
        low, high: float64 [s] extremes of d.
    """

    sequence: Ints
    sums: Floats
    low: Floats
    high: Floats

    @staticmethod
    def empty() -> Table:
        none = np.zeros(0)
        return Table(np.zeros(0, dtype=np.int64), np.zeros((COLUMNS, 0)), none, none)

    @staticmethod
    def zeros(size: int) -> Table:
        """A column for each of ``size`` sequences, none of which has a token yet."""
        return Table(np.arange(size), np.zeros((COLUMNS, size)), np.full(size, math.inf), np.full(size, -math.inf))

    def spread(self, size: int) -> Table:
        """The same with a column for each of ``size`` sequences; those without tokens are empty."""
        if len(self.sequence) == size:
            return self
        sums = np.zeros((COLUMNS, size))
        sums[:, self.sequence] = self.sums
        low, high = np.full(size, math.inf), np.full(size, -math.inf)
        low[self.sequence], high[self.sequence] = self.low, self.high
        return Table(np.arange(size), sums, low, high)

    def plus(self, other: Table) -> Table:
        """Both populations, both spread over the same sequences. The memory of ``other`` is used for the result."""
        np.add(self.sums, other.sums, out=other.sums)
        np.minimum(self.low, other.low, out=other.low)
        np.maximum(self.high, other.high, out=other.high)
        return other

    def copy(self) -> Table:
        """In memory of its own: sums of a unit stand where the next unit's will."""
        return Table(self.sequence.copy(), self.sums.copy(), self.low.copy(), self.high.copy())

    def take(self, keep: Any) -> Table:
        """Of some of the sequences: bool [s] or int64 [k]."""
        keep = np.flatnonzero(keep) if keep.dtype == bool else keep
        return Table(self.sequence[keep], self.sums.take(keep, axis=1), self.low[keep], self.high[keep])


def _widen(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return min(a[0], b[0]), max(a[1], b[1])
