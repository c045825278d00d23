"""Sums over the tokens of one unit, a column a piece, for one population of tokens (the valid or the masked-out ones).

A piece is the run of one sequence's tokens inside one block. Everything that a statistic needs is summed once, here; the
per-sequence and pooled figures are read from these columns afterwards. Weights that float64 sums would lose (log-ratios
above 300, pieces whose weights all but vanish) are kept apart as (log scale, scaled sums).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.histogram import Histogram
from rollout_is.analysis.ops import HALF_BINS, Ops

# Columns of a piece. E, E2 and D2 are taken about the unit's shift, so that variances do not cancel.
N, T, D, D2, ABS, E, E2, W, W2, K3, MULT, DP, HIGH, LOW, EXTREME, VETO, IDENTICAL = range(17)
COLUMNS = 17

HOT = 300.0  # |d| above this: exp(d) and its square are kept as a logarithm
COLD = 1e-2  # a piece with a mean weight below this is summed without the 1 + (w - 1) detour, which would cancel
FAINT = -7.0  # a block with d below this takes p = exp(t) itself: q + q expm1(d) would cancel
HALF_MAX = 65519.0  # beyond it a half is infinite


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
    train: tuple[float, float] = (math.inf, -math.inf)
    rollout: tuple[float, float] = (math.inf, -math.inf)


class Workspace:
    """Reused block buffers, one set a process."""

    def __init__(self, ops: Ops, block: int) -> None:
        self.ops = ops
        self.train = ops.array(block)
        self.rollout = ops.array(block)
        self.d = ops.array(block)
        self.e = ops.array(block)
        self.scratch = ops.array(block)
        self.magnitude = ops.array(block)
        self.probability = ops.array(block)


class Sums:
    """Accumulates one population of tokens of one unit.

    Args:
        bounds: what tokens are counted against.
        shift: the unit's pilot for d (0 where the mean is small beside the spread).
        mismatch: False leaves out the probability family.
    """

    def __init__(self, bounds: Bounds, shift: float, mismatch: bool) -> None:
        self.bounds = bounds
        self.shift = shift
        self.e_shift = math.expm1(shift)
        self.mismatch = mismatch
        self.pieces: list[Floats] = []
        self.lows: list[Floats] = []
        self.highs: list[Floats] = []
        self.sequence: list[Ints] = []
        self.scaled = Scaled()
        self.scaled_abs = Scaled()
        self.scaled_k3 = Scaled()
        self.pooled = Pooled()
        self.bins = np.zeros(HALF_BINS, dtype=np.int64)
        self.zeros = 0
        self.negative_zeros = 0
        self.far: list[Floats] = []
        self.infinite = [0, 0]  # valid tokens with d = -inf, +inf: they count in fractions and veto only

    def add(self, work: Workspace, v: int, starts: Ints, sequence: Ints, low: Floats, high: Floats) -> None:
        """Take in v finite tokens that stand in the workspace (train, rollout, d), cut into pieces at ``starts``.

        Leaves expm1(d) in ``work.e``. ``sequence`` is the sequence of each piece, ``low`` and ``high`` its extremes of d.
        """
        ops = work.ops
        train, d = work.train[:v], work.d[:v]
        e, scratch, magnitude = work.e[:v], work.scratch[:v], work.magnitude[:v]
        piece = np.zeros((COLUMNS, len(starts)))
        counts = np.diff(starts, append=v).astype(np.float64)
        piece[N] = counts
        piece[D] = ops.segment_sum(d, starts)
        piece[T] = ops.segment_sum(train, starts)
        biggest = max(float(high.max()), -float(low.min()))

        ops.absolute(d, magnitude)
        piece[ABS] = ops.segment_sum(magnitude, starts)
        tail = ops.above(magnitude, self.bounds.nearest) if biggest > self.bounds.nearest else None
        if tail is not None and len(tail):
            self._count_tail(piece, ops.fetch(d, tail), np.searchsorted(starts, tail, side="right") - 1)
        hot = ops.above(magnitude, HOT) if biggest > HOT else None
        hot_d = ops.fetch(d, hot) if hot is not None else np.zeros(0)

        self._bin(ops, d, hot_d, biggest)
        zeros = ops.count_zero(d)
        if zeros:
            self._count_zeros(ops, piece, d, starts, zeros)

        if self.shift:
            ops.subtract(d, self.shift, scratch)
            ops.multiply(scratch, scratch, scratch)
        else:
            ops.multiply(d, d, scratch)
        piece[D2] = ops.segment_sum(scratch, starts)

        ops.expm1(d, e)
        weights = e
        if hot is not None:
            # A hot token enters the plain sums with weight 0 and its logarithm is kept.
            weights = ops.copy(e)
            ops.put(weights, hot, np.where(hot_d > 0, -1.0, ops.fetch(e, hot)))
            self._keep_hot(hot_d, sequence[np.searchsorted(starts, hot, side="right") - 1])
        plain = weights
        if self.shift:
            ops.subtract(weights, self.e_shift, scratch)
            plain = scratch
        piece[E] = ops.segment_sum(plain, starts)
        ops.multiply(plain, plain, scratch)
        piece[E2] = ops.segment_sum(scratch, starts)
        one = 1.0 + self.e_shift
        piece[W] = counts * one + piece[E]
        piece[W2] = counts * one * one + 2.0 * one * piece[E] + piece[E2]
        self._resum_cold(ops, piece, d, starts, sequence, counts, high)

        if self.mismatch:
            # k3 = sum of e - d: the two sums carry 1e-16 of the larger, and expm1 keeps e exact, so nothing cancels.
            k3 = counts * self.e_shift + piece[E] - piece[D]
            if hot is not None:
                at = np.searchsorted(starts, hot, side="right") - 1
                up = hot_d > 0
                np.add.at(k3, at[up], 1.0 + hot_d[up])
            piece[K3] = np.maximum(k3, 0.0)
            self._mismatch(ops, work, v, piece, starts, hot, float(low.min()))
        self.pieces.append(piece)
        self.lows.append(low)
        self.highs.append(high)
        self.sequence.append(sequence)

    def _count_tail(self, piece: Floats, d: Floats, at: Ints) -> None:
        pieces = piece.shape[1]
        bounds = self.bounds
        veto = np.zeros(len(d), dtype=bool)
        if bounds.veto_lower is not None:
            veto |= d < bounds.veto_lower
        if bounds.veto_upper is not None:
            veto |= d > bounds.veto_upper
        half = math.log(2.0)
        for column, beyond in (
            (HIGH, d > bounds.log_upper),
            (LOW, d < bounds.log_lower),
            (EXTREME, np.abs(d) > half),
            (VETO, veto),
        ):
            piece[column] = np.bincount(at[beyond], minlength=pieces)

    def _bin(self, ops: Ops, d: Any, hot_d: Floats, biggest: float) -> None:
        self.bins += ops.half_histogram(d)
        if biggest > HALF_MAX:
            self.far.append(hot_d[np.abs(hot_d) > HALF_MAX])

    def _count_zeros(self, ops: Ops, piece: Floats, d: Any, starts: Ints, zeros: int) -> None:
        zero = ops.host(d) == 0
        self.zeros += zeros
        self.negative_zeros += int(np.count_nonzero(zero & np.signbit(ops.host(d))))
        piece[IDENTICAL] = np.add.reduceat(zero, starts, dtype=np.int64)

    def _keep_hot(self, d: Floats, sequence: Ints) -> None:
        up = d > 0
        one = np.ones(len(d))
        self.scaled.add(sequence[up], d[up], one[up], one[up])
        if self.mismatch:
            self.scaled_k3.add(sequence[up], d[up], one[up], one[up])
            self.scaled_abs.add(sequence, np.abs(d), one, one)

    def _resum_cold(
        self, ops: Ops, piece: Floats, d: Any, starts: Ints, sequence: Ints, counts: Floats, high: Floats
    ) -> None:
        cold = piece[W] < COLD * counts
        if not cold.any():
            return
        host = ops.host(d)
        lengths = counts[cold].astype(np.int64)
        own = host[np.repeat(cold, counts.astype(np.int64))]
        inner = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        scale = np.where(high[cold] < -HOT, high[cold], 0.0)
        # Hot tokens of a cold piece are kept elsewhere already.
        shifted = np.where(own > HOT, -np.inf, own - np.repeat(scale, lengths))
        weight = np.exp(shifted)
        first = np.add.reduceat(weight, inner)
        second = np.add.reduceat(weight * weight, inner)
        deep = scale != 0.0
        piece[W, cold] = np.where(deep, 0.0, first)
        piece[W2, cold] = np.where(deep, 0.0, second)
        self.scaled.add(sequence[cold][deep], scale[deep], first[deep], second[deep])

    def _mismatch(
        self, ops: Ops, work: Workspace, v: int, piece: Floats, starts: Ints, hot: Ints | None, lowest: float
    ) -> None:
        train, rollout, e = work.train[:v], work.rollout[:v], work.e[:v]
        scratch, magnitude = work.scratch[:v], work.magnitude[:v]
        if hot is not None:
            ops.put(magnitude, hot, -math.inf)  # exp 0: kept as logarithms instead
        ops.exp(magnitude, scratch)
        piece[MULT] = ops.segment_sum(scratch, starts)

        # p - q = q (w - 1): one exponential instead of two, and exact where p is close to q.
        q, difference = scratch, magnitude
        ops.exp(rollout, q)
        ops.multiply(q, e, difference)
        if hot is not None:
            ops.put(difference, hot, np.exp(ops.fetch(train, hot)) - np.exp(ops.fetch(rollout, hot)))
        p, pooled = work.probability[:v], self.pooled
        if hot is not None or lowest < FAINT:
            ops.exp(train, p)
        else:
            ops.add(q, difference, p)
        if pooled.shift is None:
            about = ops.total(p) / v, ops.total(q) / v
            pooled.shift = about if all(map(math.isfinite, about)) else (0.0, 0.0)
        ops.subtract(p, pooled.shift[0], p)
        ops.subtract(q, pooled.shift[1], q)
        pooled.p += ops.total(p)
        pooled.p2 += ops.dot(p, p)
        pooled.q += ops.total(q)
        pooled.q2 += ops.dot(q, q)
        pooled.cross += ops.dot(p, q)
        ops.absolute(difference, difference)
        piece[DP] = ops.segment_sum(difference, starts)
        pooled.max_dp = max(pooled.max_dp, ops.minmax(difference)[1])
        pooled.train = _widen(pooled.train, ops.minmax(train))
        pooled.rollout = _widen(pooled.rollout, ops.minmax(rollout))

    def histogram(self) -> Histogram:
        far = np.concatenate(self.far) if self.far else np.zeros(0)
        return Histogram.of_half_bins(self.bins, self.zeros, self.negative_zeros, far)

    def table(self) -> Table:
        """Fold the pieces by sequence."""
        if not self.pieces:
            none = np.zeros(0)
            return Table(np.zeros(0, dtype=np.int64), np.zeros((COLUMNS, 0)), none, none)
        sequence = np.concatenate(self.sequence)
        pieces = np.concatenate(self.pieces, axis=1)
        low, high = np.concatenate(self.lows), np.concatenate(self.highs)
        if len(sequence) > 1 and not (sequence[1:] > sequence[:-1]).all():
            cuts = np.flatnonzero(np.concatenate(([True], sequence[1:] != sequence[:-1])))
            pieces = np.add.reduceat(pieces, cuts, axis=1)
            low, high = np.minimum.reduceat(low, cuts), np.maximum.reduceat(high, cuts)
            sequence = sequence[cuts]
        return Table(sequence, pieces, low, high)


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
        """Both populations, both spread over the same sequences."""
        return Table(
            self.sequence, self.sums + other.sums, np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        )

    def take(self, keep: Any) -> Table:
        return Table(self.sequence[keep], self.sums[:, keep], self.low[keep], self.high[keep])


def _widen(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return min(a[0], b[0]), max(a[1], b[1])
