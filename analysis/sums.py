"""Sums over the tokens of one unit, a column a piece, for one population of tokens (the valid or the masked-out ones).

A piece is the run of one sequence's tokens inside one block. Everything that a statistic needs is summed once, here; the
per-sequence and pooled figures are read from these columns afterwards. Weights that float64 sums would lose (log-ratios
above 300, pieces whose weights all but vanish) are kept apart as (log scale, scaled sums).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.ops import HALF_BINS, Ops
from rollout_is.analysis.populations import (
    ABS,
    COLUMNS,
    D2,
    DP,
    E2,
    EXTREME,
    HIGH,
    IDENTICAL,
    K3,
    LOW,
    MULT,
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

HOT = 300.0  # |d| above this: exp(d) and its square are kept as a logarithm
COLD = 1e-2  # a piece with a mean weight below this is summed without the 1 + (w - 1) detour, which would cancel
FAINT = -7.0  # a block with d below this takes p = exp(t) itself: q + q expm1(d) would cancel
PLAIN_LARGEST = 1e-4  # largest |d| below which weights without k3 take expm1 too
PLAIN_MEAN_SQUARE = 1e-6  # mean d^2 above which exp(d) - 1 is as good as expm1(d) in every sum
HALF_MAX = 65519.0  # beyond it a half is infinite


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
    """Accumulates the tokens of one unit, valid and masked-out ones in the same passes.

    Args:
        bounds: what tokens are counted against.
        shift: the unit's pilot for d (0 where the mean is small beside the spread).
        mismatch: False leaves out the probability family.
        size: number of sequences; pieces of masked-out tokens are numbered from there on.
        moments: sum train log-probs and d^2 also without the probability family (consumers read them).
        dense: keep one column for each sequence (the unit as a whole) instead of a list of pieces (a group of it).
    """

    def __init__(
        self, bounds: Bounds, shift: float, mismatch: bool, size: int, *, dense: bool = False, moments: bool = False
    ) -> None:
        self.bounds = bounds
        self._nearest = bounds.nearest
        self.shift = shift
        self.e_shift = math.expm1(shift)
        self.mismatch = mismatch
        self.moments = mismatch or moments
        self.size = size
        self._tables = (_Columns(size, dense), _Columns(size, dense))  # masked-out, valid
        self.scaled = Scaled()
        self.scaled_abs = Scaled()
        self.scaled_k3 = Scaled()
        self.halves = (Whole(), Whole())  # masked-out, valid

    def add(
        self, work: Workspace, v: int, split: int, starts: Ints, sequence: Ints, cut: int, low: Floats, high: Floats
    ) -> None:
        """Take in v finite tokens that stand in the workspace (train, rollout, d), cut into pieces at ``starts``.

        Leaves expm1(d) in ``work.e``.

        Args:
            split: tokens before it are valid, those from it on masked out.
            sequence: int64 [k] the sequence of each piece, plus ``size`` for masked-out pieces.
            cut: how many of the pieces are of valid tokens.
            low, high: float64 [k] extremes of d of each piece.
        """
        ops = work.ops
        train, d = work.train[:v], work.d[:v]
        e, scratch, magnitude, w = work.e[:v], work.scratch[:v], work.magnitude[:v], work.probability[:v]
        piece = np.zeros((COLUMNS, len(starts)))
        counts = piece[N]
        counts[:-1] = starts[1:]
        counts[-1] = v
        counts -= starts
        piece[D] = ops.segment_sum(d, starts)
        biggest = max(float(high.max()), -float(low.min()))

        ops.absolute(d, magnitude)
        piece[ABS] = ops.segment_sum(magnitude, starts)
        tail = ops.above(magnitude, self._nearest) if biggest > self._nearest else None
        if tail is not None and len(tail):
            self._count_tail(piece, ops.fetch(d, tail), starts.searchsorted(tail, side="right") - 1)
        hot = ops.above(magnitude, HOT) if biggest > HOT else None
        hot_d = ops.fetch(d, hot) if hot is not None else np.zeros(0)
        if self._bin(ops, d, split, hot, hot_d) and ops.count_zero(d):
            self._count_zeros(ops, piece, d, split, starts)

        if self.moments:
            piece[T] = ops.segment_sum(train, starts)
            if self.shift:
                ops.subtract(d, self.shift, scratch)
                ops.multiply(scratch, scratch, scratch)
            else:
                ops.multiply(d, d, scratch)
            piece[D2] = ops.segment_sum(scratch, starts)
        exact = self._weights(ops, d, e, w, piece, split, cut, low, high)

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
        self._resum_cold(ops, piece, d, sequence)

        if self.mismatch:
            # k3 = sum of e - d: the two sums carry 1e-16 of the larger, and e is exact where d is small.
            k3 = counts * self.e_shift + piece[E] - piece[D]
            if hot is not None:
                at = np.searchsorted(starts, hot, side="right") - 1
                up = hot_d > 0
                np.add.at(k3, at[up], 1.0 + hot_d[up])
            piece[K3] = np.maximum(k3, 0.0)
            if exact:
                ops.exp(magnitude, magnitude)
            else:
                ops.with_reciprocal(w, magnitude)  # exp|d| = max(w, 1/w), w being a rounded exp(d) itself
            if hot is not None:
                ops.put(magnitude, hot, 0.0)  # kept as logarithms
            piece[MULT] = ops.segment_sum(magnitude, starts)
            self._probabilities(work, v, split, piece, starts, cut, hot, low)
        if cut:
            self._tables[1].add(split, piece[:, :cut], low[:cut], high[:cut], sequence[:cut])
        if cut < len(starts):
            self._tables[0].add(v - split, piece[:, cut:], low[cut:], high[cut:], sequence[cut:] - self.size)

    def _weights(
        self, ops: Ops, d: Any, e: Any, w: Any, piece: Floats, split: int, cut: int, low: Floats, high: Floats
    ) -> bool:
        """e = exp(d) - 1; True where it needs expm1, and ``w`` is then left alone.

        exp(d) - 1 is off by 1e-16 a token. Beside a root mean square d above 1e-3 that is lost in every sum that e enters;
        below it k3 would not keep 1e-9.
        """
        # Judged by the valid tokens alone where there are any: what stands under the mask must not change a bit.
        cut, n = cut or len(low), split or len(d)
        if self.mismatch:
            square = float(piece[D2, :cut].sum())
            if self.shift:
                total = float(piece[D, :cut].sum())
                square += self.shift * (2.0 * (total - n * self.shift) + n * self.shift)
            # Exact zeros (padding) are exact either way.
            exact = 0.0 < square < PLAIN_MEAN_SQUARE * n
        else:
            exact = max(float(high[:cut].max()), -float(low[:cut].min())) < PLAIN_LARGEST
        if exact:
            ops.expm1(d, e)
        else:
            ops.exp(d, w)
            ops.subtract(w, 1.0, e)
        return exact

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

    def _bin(self, ops: Ops, d: Any, split: int, hot: Ints | None, hot_d: Floats) -> bool:
        """Add to the histograms; True where a value is near enough to 0 to be 0."""
        valid, hidden = ops.half_histogram(d, split)
        self.halves[1].bins += valid
        self.halves[0].bins += hidden
        if hot is not None:
            far = np.abs(hot_d) > HALF_MAX
            if far.any():
                self.halves[1].far.append(hot_d[far & (hot < split)])
                self.halves[0].far.append(hot_d[far & (hot >= split)])
        middle = HALF_BINS // 2
        return bool(valid[0] or valid[middle] or hidden[0] or hidden[middle])

    def _count_zeros(self, ops: Ops, piece: Floats, d: Any, split: int, starts: Ints) -> None:
        host = ops.host(d)
        at = np.flatnonzero(host == 0)
        piece[IDENTICAL] = np.bincount(np.searchsorted(starts, at, side="right") - 1, minlength=len(starts))
        negative = np.signbit(host[at])
        for half, inside in ((1, at < split), (0, at >= split)):
            self.halves[half].zeros += int(np.count_nonzero(inside))
            self.halves[half].negative_zeros += int(np.count_nonzero(inside & negative))

    def _keep_hot(self, d: Floats, sequence: Ints) -> None:
        up = d > 0
        one = np.ones(len(d))
        self.scaled.add(sequence[up], d[up], one[up], one[up])
        if self.mismatch:
            self.scaled_k3.add(sequence[up], d[up], one[up], one[up])
            self.scaled_abs.add(sequence, np.abs(d), one, one)

    def _resum_cold(self, ops: Ops, piece: Floats, d: Any, sequence: Ints) -> None:
        counts = piece[N]
        cold = piece[W] < COLD * counts
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
        piece[W, cold] = np.where(deep, 0.0, first)
        piece[W2, cold] = np.where(deep, 0.0, second)
        self.scaled.add(sequence[cold][deep], scale[deep], first[deep], second[deep])

    def _probabilities(
        self, work: Workspace, v: int, split: int, piece: Floats, starts: Ints, cut: int, hot: Ints | None, low: Floats
    ) -> None:  # fmt: skip
        ops = work.ops
        train, rollout, e = work.train[:v], work.rollout[:v], work.e[:v]
        q, difference = work.scratch[:v], work.magnitude[:v]
        # p - q = q (w - 1): one exponential instead of two, and exact where p is close to q.
        ops.exp(rollout, q)
        ops.multiply(q, e, difference)
        if hot is not None:
            ops.put(difference, hot, np.exp(ops.fetch(train, hot)) - np.exp(ops.fetch(rollout, hot)))
        for half, a, b, own in ((1, 0, split, low[:cut]), (0, split, v, low[cut:])):
            if a < b:
                p = None
                if float(own.min()) < FAINT or (hot is not None and ((hot >= a) & (hot < b)).any()):
                    p = work.probability[a:b]
                    ops.exp(train[a:b], p)
                self.halves[half].pooled.add(ops, train[a:b], rollout[a:b], p, q[a:b], difference[a:b])
        ops.absolute(difference, difference)
        piece[DP] = ops.segment_sum(difference, starts)
        for half, a, b in ((1, 0, split), (0, split, v)):
            if a < b:
                pooled = self.halves[half].pooled
                pooled.max_dp = max(pooled.max_dp, ops.maximum(difference[a:b]))

    def half(self, valid: bool) -> Half:
        """The valid or the masked-out tokens alone."""
        inside = (0, self.size) if valid else (self.size, 2 * self.size)
        n = self._tables[int(valid)].tokens
        return Half(
            self.bounds, self.shift, self.e_shift, self.mismatch, n, self.halves[int(valid)],
            *(s.between(*inside) for s in (self.scaled, self.scaled_abs, self.scaled_k3)),
        )  # fmt: skip

    def tables(self) -> tuple[Table, Table]:
        """(valid, masked-out): the pieces folded by sequence."""
        hidden, valid = self._tables
        return valid.table(), hidden.table()


class _Columns:
    """The columns of one population, folded by sequence as they come or at the end."""

    def __init__(self, size: int, dense: bool) -> None:
        self._size = size
        self._dense = dense
        self._pieces: list[tuple[Floats, Floats, Floats, Ints]] = []
        self._table: Table | None = None
        self.tokens = 0

    def add(self, tokens: int, piece: Floats, low: Floats, high: Floats, sequence: Ints) -> None:
        """Pieces of one block, sequences ascending."""
        self.tokens += tokens
        if not self._dense:
            self._pieces.append((piece, low, high, sequence))
            return
        if self._table is None:
            self._table = Table.zeros(self._size)
        table = self._table
        first, last = int(sequence[0]), int(sequence[-1])
        at: Any = slice(first, last + 1) if last - first + 1 == len(sequence) else sequence
        table.sums[:, at] += piece
        table.low[at] = np.minimum(table.low[at], low)
        table.high[at] = np.maximum(table.high[at], high)

    def table(self) -> Table:
        if self._dense:
            return self._table or Table.zeros(self._size)
        if not self._pieces:
            return Table.empty()
        pieces, low, high, sequence = (np.concatenate([p[i] for p in self._pieces], axis=-1) for i in range(4))
        return _fold(sequence, pieces, low, high)


def _fold(sequence: Ints, pieces: Floats, low: Floats, high: Floats) -> Table:
    """Add the pieces of each sequence; they come in order, some over several blocks."""
    if len(sequence) > 1 and not (sequence[1:] > sequence[:-1]).all():
        cuts = np.flatnonzero(np.concatenate(([True], sequence[1:] != sequence[:-1])))
        pieces = np.add.reduceat(pieces, cuts, axis=1)
        low, high = np.minimum.reduceat(low, cuts), np.maximum.reduceat(high, cuts)
        sequence = sequence[cuts]
    return Table(sequence, pieces, low, high)
