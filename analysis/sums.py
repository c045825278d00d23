"""Sums over one population of tokens of one unit (the valid or the masked-out ones), a column a piece.

A piece is the run of one sequence's tokens inside one block. Everything that a statistic needs is summed once, here; what
follows from the sums alone is worked out for all pieces of the unit together, at the end. Weights that float64 sums would
lose (log-ratios above 300, pieces whose weights all but vanish) are kept apart as (log scale, scaled sums).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.columns import Columns, fold
from rollout_is.analysis.ops import HALF_BINS, Ops
from rollout_is.analysis.populations import (
    ABS,
    COLD,
    COLUMNS,
    D2,
    DP,
    E2,
    EXTREME,
    HIGH,
    HIGHEST,
    IDENTICAL,
    K3,
    LOW,
    LOWEST,
    MULT,
    TAIL,
    VETO,
    W2,
    Bounds,
    D,
    E,
    Half,
    N,
    Scaled,
    T,
    Table,
    W,
    Whole,
)

if TYPE_CHECKING:
    from rollout_is.analysis.fused.library import Block

HOT = 300.0  # |d| above this: exp(d) and its square are kept as a logarithm
LOG_COLD = math.log(COLD)
FAINT = -7.0  # a block with d below this takes p = exp(t) itself: q + q expm1(d) would cancel
PLAIN_LARGEST = 1e-4  # largest |d| below which weights without k3 take expm1 too
PLAIN_MEAN_SQUARE = 1e-6  # mean d^2 above which exp(d) - 1 is as good as expm1(d) in every sum
HALF_MAX = 65519.0  # beyond it a half is infinite
PENDING = 1 << 14  # tokens beyond a bound that wait to be counted together: as many as the cache holds


class Workspace:
    """Reused block buffers, one set a process."""

    def __init__(self, ops: Ops, block: int) -> None:
        self.ops = ops
        self.train = ops.array(block)
        self.rollout = ops.array(block)
        self.d = ops.array(block)
        self.e = ops.array(block)
        self.first = ops.array(block)
        self.second = ops.array(block)
        self.probability = ops.array(block)


class Extremes(NamedTuple):
    """Smallest and largest d: float64 [k] of each piece (or bounds that hold for all of them), and of the block."""

    low: Floats | float
    high: Floats | float
    bottom: float
    top: float

    @staticmethod
    def of(ops: Ops, d: Any, starts: Ints) -> Extremes:
        """Of each piece."""
        low, high = ops.segment_min(d, starts), ops.segment_max(d, starts)
        return Extremes(low, high, float(low.min()), float(high.max()))

    @staticmethod
    def of_block(ops: Ops, d: Any) -> Extremes:
        """Of the block alone."""
        bottom, top = ops.minmax(d)
        return Extremes(bottom, top, bottom, top)


class Sums:
    """Accumulates one population of the tokens of one unit.

    Args:
        bounds: what tokens are counted against.
        shift: the unit's pilot for d (0 where the mean is small beside the spread).
        mismatch: False leaves out the probability family.
        moments: sum train log-probs and d^2 also without the probability family (consumers read them).
        columns: where the columns of the pieces go; by default they are collected block by block.
    """

    def __init__(
        self, bounds: Bounds, shift: float, mismatch: bool, *, moments: bool = False, columns: Columns | None = None
    ) -> None:
        self.bounds = bounds
        self._nearest = bounds.nearest
        self.shift = shift
        self.e_shift = math.expm1(shift)
        self.mismatch = mismatch
        self.moments = mismatch or moments
        self.whole = Whole()
        self.tokens = 0
        self._columns = columns or Columns()
        self._sequence: list[Ints] = []
        self._scaled = Scaled()
        self._scaled_abs = Scaled()
        self._scaled_k3 = Scaled()
        self._tail: list[Floats] = []  # d beyond the nearest bound, piece after piece
        self._pending = 0
        self._counted = 0  # pieces whose tail has been counted

    def add(self, work: Workspace, v: int, starts: Ints, sequence: Ints, extremes: Extremes) -> None:
        """Take in v finite tokens that stand in the workspace (train, rollout, d), cut into pieces at ``starts``.

        Leaves expm1(d) in ``work.e``.

        Args:
            sequence: int64 [k] the sequence of each piece.
            extremes: of d.
        """
        ops = work.ops
        train, d, e, first, second = (x[:v] for x in (work.train, work.d, work.e, work.first, work.second))
        if self._pending > PENDING:  # before this block has columns of its own: counting may move those that there are
            self._count_tail()
        piece = self._columns.next(len(starts))
        self._sequence.append(sequence)
        self.tokens += v
        counts = piece[N]
        counts[:-1] = starts[1:]
        counts[-1] = v
        counts -= starts
        piece[LOWEST], piece[HIGHEST], bottom, top = extremes
        ops.segment_sum(d, starts, piece[D])
        biggest = max(top, -bottom)

        magnitude = first
        ops.absolute(d, magnitude)
        ops.segment_sum(magnitude, starts, piece[ABS])
        if biggest > self._nearest:
            self._keep_tail(ops, d, ops.above(magnitude, self._nearest), starts, piece)
        hot = ops.above(magnitude, HOT) if biggest > HOT else None
        hot_d = ops.fetch(d, hot) if hot is not None else np.zeros(0)
        if self._bin(ops, d, hot_d):
            self._count_zeros(ops, d, starts, piece)

        if self.moments:
            ops.segment_sum(train, starts, piece[T])
            if self.shift:
                ops.subtract(d, self.shift, second)
                ops.multiply(second, second, second)
            else:
                ops.multiply(d, d, second)
            ops.segment_sum(second, starts, piece[D2])
        exact = self._needs_expm1(piece, v, biggest)
        w, scratch = second, first
        if exact:
            ops.expm1(d, e)
            scratch = second  # |d| is needed once more
        else:
            ops.exp(d, w)
            ops.subtract(w, 1.0, e)
            if self.mismatch:
                ops.with_reciprocal(w, magnitude)  # exp|d| = max(w, 1/w), w being a rounded exp(d) itself
                if hot is not None:
                    ops.put(magnitude, hot, 0.0)  # kept as logarithms
                ops.segment_sum(magnitude, starts, piece[MULT])
        self._weights(ops, e, scratch, starts, sequence, piece, hot, hot_d)
        self._complete(piece)
        if bottom < LOG_COLD:
            self._resum_cold(ops, piece, d, sequence)
        if self.mismatch:
            if exact:
                ops.exp(magnitude, magnitude)
                ops.segment_sum(magnitude, starts, piece[MULT])
            self._probabilities(work, v, starts, piece, bottom, hot)

    def open(self, k: int) -> Floats:
        """float64 [ROWS, k] columns for the pieces of a block that is summed elsewhere: to be closed, or forgotten."""
        return self._columns.next(k, zeroed=False)

    def forget(self, k: int) -> None:
        """The block could not be summed there."""
        self._columns.undo(k)

    def close(self, given: Block, sequence: Ints) -> None:
        """The block was summed: every row of its columns is filled, and it says ``given`` of its tokens as a whole."""
        self._sequence.append(sequence)
        self.tokens += given.tokens
        self.whole.zeros += given.zeros
        self.whole.negative_zeros += given.negative_zeros
        if self.mismatch:
            self.whole.pooled.take(given)

    def _needs_expm1(self, piece: Floats, n: int, biggest: float) -> bool:
        """Whether exp(d) - 1 would be too coarse: it is off by 1e-16 a token.

        Beside a root mean square d above 1e-3 that is lost in every sum that it enters; below it k3 would not keep 1e-9.
        """
        if not self.mismatch:
            return biggest < PLAIN_LARGEST
        square = float(piece[D2].sum())
        if self.shift:
            square += self.shift * (2.0 * (float(piece[D].sum()) - n * self.shift) + n * self.shift)
        return 0.0 < square < PLAIN_MEAN_SQUARE * n  # exact zeros (padding) are exact either way

    def _weights(
        self, ops: Ops, e: Any, scratch: Any, starts: Ints, sequence: Ints, piece: Floats, hot: Ints | None, hot_d: Floats
    ) -> None:  # fmt: skip
        """Sums of w - 1 and of its square, about the shift. A hot token counts as weight 0 and its logarithm is kept."""
        weights = e
        if hot is not None:
            weights = ops.copy(e)
            ops.put(weights, hot, np.where(hot_d > 0, -1.0, ops.fetch(e, hot)))
            at = starts.searchsorted(hot, side="right") - 1
            self._keep_hot(hot_d, sequence[at])
            if self.mismatch:
                up = hot_d > 0
                np.add.at(piece[K3], at[up], 1.0 + hot_d[up])
        if self.shift:
            ops.subtract(weights, self.e_shift, scratch)
            weights = scratch
        ops.segment_sum(weights, starts, piece[E])
        ops.multiply(weights, weights, scratch)
        ops.segment_sum(scratch, starts, piece[E2])

    def _keep_tail(self, ops: Ops, d: Any, tail: Ints, starts: Ints, piece: Floats) -> None:
        if not len(tail):
            return
        piece[TAIL] = count_by_piece(tail, starts)
        self._tail.append(ops.fetch(d, tail))
        self._pending += len(tail)

    def _count_tail(self) -> None:
        """Count what waits against the bounds, piece by piece, by running counts."""
        if not self._pending:
            return
        piece = self._columns.since(self._counted)
        self._counted = self._columns.count
        d = np.concatenate(self._tail)
        self._tail, self._pending = [], 0
        ends = np.zeros(piece.shape[1] + 1, dtype=np.int64)
        np.cumsum(piece[TAIL].astype(np.int64), out=ends[1:])
        running = np.zeros(len(d) + 1, dtype=np.int64)

        def count(beyond: Any) -> Ints:
            np.cumsum(beyond, out=running[1:])
            return np.diff(running[ends])

        bounds, half = self.bounds, math.log(2.0)
        # Added, not set: pieces that were summed elsewhere have no tail and hold their counts already.
        high = count(d > bounds.log_upper)
        piece[HIGH] += high
        # With bounds that mirror each other nothing else lies beyond the nearest.
        mirrored = bounds.log_upper == -bounds.log_lower == self._nearest
        piece[LOW] += piece[TAIL] - high if mirrored else count(d < bounds.log_lower)
        piece[EXTREME] += piece[TAIL] if half == self._nearest else count(np.abs(d) > half)
        veto = np.zeros(len(d), dtype=bool)
        if bounds.veto_lower is not None:
            veto |= d < bounds.veto_lower
        if bounds.veto_upper is not None:
            veto |= d > bounds.veto_upper
        if veto.any():
            piece[VETO] += count(veto)

    def _bin(self, ops: Ops, d: Any, hot_d: Floats) -> bool:
        """Add to the histogram; True where a value is near enough to 0 to be 0."""
        bins = ops.half_histogram(d)
        self.whole.bins += bins
        far = np.abs(hot_d) > HALF_MAX
        if far.any():
            self.whole.far.append(hot_d[far])
        return bool(bins[0] or bins[HALF_BINS // 2])

    def _count_zeros(self, ops: Ops, d: Any, starts: Ints, piece: Floats) -> None:
        at = ops.zeros(d)
        if not len(at):
            return
        piece[IDENTICAL] = count_by_piece(at, starts)
        self.whole.zeros += len(at)
        self.whole.negative_zeros += int(np.count_nonzero(np.signbit(ops.fetch(d, at))))

    def _keep_hot(self, d: Floats, sequence: Ints) -> None:
        up = d > 0
        one = np.ones(len(d))
        self._scaled.add(sequence[up], d[up], one[up], one[up])
        if self.mismatch:
            self._scaled_k3.add(sequence[up], d[up], one[up], one[up])
            self._scaled_abs.add(sequence, np.abs(d), one, one)

    def _complete(self, piece: Floats) -> None:
        """What follows from sums of w - 1, which keep the digits of weights near 1: the sums of w, of w^2 and of k3."""
        counts, e, one = piece[N], piece[E], 1.0 + self.e_shift
        np.multiply(counts, one, out=piece[W])
        piece[W] += e
        np.multiply(counts, one * one, out=piece[W2])
        piece[W2] += 2.0 * one * e
        piece[W2] += piece[E2]
        if self.mismatch:
            # k3 = sum of e - d: the two sums carry 1e-16 of the larger, and e is exact where d is small.
            k3 = piece[K3]
            k3 += e
            k3 -= piece[D]
            if self.e_shift:
                k3 += counts * self.e_shift
            np.maximum(k3, 0.0, out=k3)

    def _resum_cold(self, ops: Ops, piece: Floats, d: Any, sequence: Ints) -> None:
        counts = piece[N]
        cold = (1.0 + self.e_shift) * counts + piece[E] < COLD * counts
        if not cold.any():
            return
        host = ops.host(d)
        lengths = counts[cold].astype(np.int64)
        own = host[np.repeat(cold, counts.astype(np.int64))]
        inner = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        high = np.maximum.reduceat(own, inner)
        scale = np.where(high < -HOT, high, 0.0)
        # Hot tokens of a cold piece are kept elsewhere already.
        shifted = np.where(own > HOT, -np.inf, own - np.repeat(scale, lengths))
        weight = np.exp(shifted)
        first = np.add.reduceat(weight, inner)
        second = np.add.reduceat(weight * weight, inner)
        deep = scale != 0.0
        piece[W, cold], piece[W2, cold] = np.where(deep, 0.0, first), np.where(deep, 0.0, second)
        self._scaled.add(sequence[cold][deep], scale[deep], first[deep], second[deep])

    def _probabilities(
        self, work: Workspace, v: int, starts: Ints, piece: Floats, bottom: float, hot: Ints | None
    ) -> None:
        ops = work.ops
        train, rollout, e, q, difference = (
            x[:v] for x in (work.train, work.rollout, work.e, work.first, work.second)
        )  # fmt: skip
        # p - q = q (w - 1): one exponential instead of two, and exact where p is close to q.
        ops.exp(rollout, q)
        ops.multiply(q, e, difference)
        p = None
        if hot is not None:
            ops.put(difference, hot, np.exp(ops.fetch(train, hot)) - np.exp(ops.fetch(rollout, hot)))
        if bottom < FAINT or hot is not None:
            p = work.probability[:v]
            ops.exp(train, p)
        pooled = self.whole.pooled
        pooled.add(ops, train, rollout, p, q, difference)
        ops.absolute(difference, difference)
        ops.segment_sum(difference, starts, piece[DP])
        pooled.max_dp = max(pooled.max_dp, ops.maximum(difference))

    def half(self) -> Half:
        """The population as a whole."""
        return Half(
            self.bounds, self.shift, self.e_shift, self.mismatch, self.tokens, self.whole,
            self._scaled, self._scaled_abs, self._scaled_k3,
        )  # fmt: skip

    def table(self) -> Table:
        """The pieces folded by sequence, ascending; only sequences that have a token. To be called once, at the end."""
        if not self._sequence:
            return Table.empty()
        self._count_tail()
        piece = self._columns.since(0)
        sequence = self._sequence[0] if len(self._sequence) == 1 else np.concatenate(self._sequence)
        sequence, piece = fold(sequence, piece)
        return Table(sequence, piece[:COLUMNS], piece[LOWEST], piece[HIGHEST])


def count_by_piece(at: Ints, starts: Ints) -> Ints:
    """int64 [k]: how many of the ascending places fall into each piece.

    >>> count_by_piece(np.array([0, 3, 4]), np.array([0, 2, 5])).tolist()
    [1, 2, 0]
    """
    if len(starts) < len(at):
        return np.diff(at.searchsorted(starts), append=len(at))
    return np.bincount(starts.searchsorted(at, side="right") - 1, minlength=len(starts))
