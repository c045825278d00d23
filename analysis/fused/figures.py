"""One call of the compiled pass over the sequences of a unit: the rows that ``rows.py`` makes by numpy, where it can make them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_is.analysis import weights
from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.clusters import ClusterRow, GroupTable
from rollout_is.analysis.fused.library import Level, Sequences, address
from rollout_is.analysis.histogram import WIDE_BINS, Histogram
from rollout_is.analysis.pareto import TopLogWeights
from rollout_is.analysis.populations import Bounds, Table
from rollout_is.analysis.rows import (
    SEQUENCE_ERRORS,
    TOKEN_ERRORS,
    Population,
    Row,
    SequenceFacts,
    SequenceRow,
    TokenRow,
    pooled_row,
)
from rollout_is.analysis.weights import Moments, WeightRow

Clusters = ClusterRow | GroupTable
MANY = 4096  # sequences from which on they are counted into all bins that there are: fewer are sorted
MEAN, PRODUCT, GEOMETRIC, TRAIN, ROLLOUT, RATIO = range(6)


class Figures:
    """The pass over sequences with what holds for all units of an analysis.

    Args:
        function: takes a pointer to ``Sequences``; 0 means that it could.
        bounds: what weights are counted against.
        mismatch: False leaves out the probability family.
        tail: how many of the largest product weights to keep of a unit.
    """

    def __init__(self, function: Callable[[Any], int], bounds: Bounds, mismatch: bool, tail: int) -> None:
        self._function = function
        self._mismatch = mismatch
        self._tail = tail
        self._bounds = {
            "log_lower": bounds.log_lower,
            "log_upper": bounds.log_upper,
            "lower": math.exp(bounds.log_lower),
            "upper": math.exp(bounds.log_upper),
        }
        self._logs = np.zeros((2, 0))  # product and geometric
        self._bins = np.zeros((2, WIDE_BINS), dtype=np.int64)

    def row(self, population: Population, table: Table, facts: SequenceFacts) -> Row | None:
        """The rows of a unit that is no fragment; None for what is left to numpy: tokens that are not finite, weights kept as logarithms,
        weights that need a scale.

        Args:
            population: the tokens that the table was summed from.
            table: a column for each segment of the unit, empty ones too.
            facts: of the same segments.
        """
        if facts.nonfinite.any() or any(m.scaled.sequence for m in population.members):
            return None
        first, count = population.members[0], table.sums.shape[1]
        # The kernel steps over rows by a stride, and within a row from one number to the next.
        sums = table.sums if table.sums.strides[1] == table.sums.itemsize else np.ascontiguousarray(table.sums)
        low, high = np.ascontiguousarray(table.low), np.ascontiguousarray(table.high)
        if count > self._logs.shape[1]:
            self._logs = np.zeros((2, 2 * count))
        given = Sequences(
            sums=address(sums), stride=sums.strides[0] // sums.itemsize, low=address(low), high=address(high), count=count,
            mismatch=self._mismatch, shift=first.shift, e_shift=first.e_shift,
            product=address(self._logs[0]), geometric=address(self._logs[1]), **self._bounds,
        )  # fmt: skip
        if count >= MANY:
            self._bins[:] = 0
            given.product_bins, given.geometric_bins = address(self._bins[0]), address(self._bins[1])
        ids, by_group = np.zeros(0, dtype=np.int64), np.zeros(0)
        if facts.groups is not None:
            ids, number = np.unique(facts.groups, return_inverse=True)
            number = np.ascontiguousarray(number, dtype=np.int64)
            by_group = np.zeros((len(ids), 2 + len(TOKEN_ERRORS) + len(SEQUENCE_ERRORS)))
            given.group, given.by_group = address(number), address(by_group)
        if self._function(ctypes.byref(given)) or not self._plain(given):
            return None
        tokens, sequences = _cluster_rows(given) if facts.groups is None else _group_tables(ids, by_group)
        return Row(self._token(population, given, tokens), self._sequence(given, sequences))

    def _plain(self, given: Sequences) -> bool:
        """Whether the weights of all levels need no scale of their own, those aside that are gone through again."""
        if not given.measured:
            return True
        levels = (GEOMETRIC, *((TRAIN, ROLLOUT, RATIO) if self._mismatch else ()))
        highest = [given.level[level].high for level in levels]
        highest.append(math.log(given.level[MEAN].high) if given.level[MEAN].high > 0 else -math.inf)
        return all(map(_needs_no_scale, highest))

    def _product(self, given: Sequences, histogram: Histogram) -> WeightRow:
        """The only level that is often far from 1 as a whole: what stands under a mask need not be log-probs."""
        own = given.level[PRODUCT]
        if not given.measured or _needs_no_scale(own.high):
            return _weights(given.measured, own, histogram)
        bounds = self._bounds["log_lower"], self._bounds["log_upper"]
        return replace(weights.row_of(self._logs[0, : given.measured], *bounds, binned=False), histogram=histogram)

    def _token(self, population: Population, given: Sequences, clusters: Clusters) -> TokenRow:
        some = given.measured > 0
        low, high = (given.lowest, given.highest) if some else (math.inf, -math.inf)
        return pooled_row(population, list(given.totals), low, high, clusters)

    def _histograms(self, given: Sequences) -> tuple[Histogram, Histogram]:
        """Of the log product and the log geometric weights."""
        product, geometric = self._logs[:, : given.measured]
        if given.count < MANY:
            return Histogram.of_values(product), Histogram.of_values(geometric)
        by_product, by_geometric = map(_binned, (product, geometric), self._bins)
        return by_product, by_geometric

    def _sequence(self, given: Sequences, clusters: Clusters | None) -> SequenceRow:
        n = given.measured
        top = None
        if n:
            top = TopLogWeights(self._tail)
            top.update_finite(self._logs[0, :n])
        by_product, by_geometric = self._histograms(given)
        mean = given.level[MEAN]
        none = weights.EMPTY
        train, rollout, ratio = (
            (_weights(n, given.level[level]) if self._mismatch else none) for level in (TRAIN, ROLLOUT, RATIO)
        )
        sums = dict(zip(SEQUENCE_ERRORS, given.figures, strict=True))
        return SequenceRow(
            sequences=n,
            measured=n,
            dropped=0,
            vetoed=given.vetoed,
            x=_mean_weights(n, given),
            x_deviation=max(abs(given.less_low), abs(given.less_high)) if n else -math.inf,
            x_counts=(mean.above, mean.below),
            product=self._product(given, by_product),
            geometric=_weights(n, given.level[GEOMETRIC], by_geometric),
            train=train,
            rollout=rollout,
            ratio=ratio,
            train_nll=sums["train_nll"],
            rollout_nll=sums["rollout_nll"],
            diff=sums["ppl_diff"],
            abs_diff=sums["ppl_abs_diff"],
            clusters=clusters,
            pareto=top,
        )


def _binned(values: Floats, bins: Ints) -> Histogram:
    zero = values == 0.0  # bins do not tell zeros from what is near enough to 0 to fall into theirs
    return Histogram.of_wide_bins(bins, int(np.count_nonzero(zero)), int(np.count_nonzero(np.signbit(values) & zero)))


def _needs_no_scale(high: float) -> bool:
    return weights.PLAIN_BOTTOM <= high <= weights.PLAIN_TOP


def _weights(n: int, level: Level, histogram: Histogram | None = None) -> WeightRow:
    if not n:
        return weights.EMPTY
    return WeightRow(
        n=n,
        parts=((0.0, level.sum, level.square),),
        moments=(Moments(0.0, n, level.mean, max(level.m2, 0.0)),),
        low=level.low,
        high=level.high,
        above=level.above,
        below=level.below,
        histogram=Histogram.empty() if histogram is None else histogram,
    )


def _mean_weights(n: int, given: Sequences) -> WeightRow:
    """Of the mean token weights, whose extremes are no logs yet."""
    level = given.level[MEAN]
    low, high = (
        math.log1p(less) if x > 0.5 else math.log(x) if x > 0 else -math.inf
        for x, less in ((level.low, given.less_low), (level.high, given.less_high))
    )
    return replace(_weights(n, level), low=low, high=high) if n else weights.EMPTY


def _cluster_rows(given: Sequences) -> tuple[Clusters, Clusters | None]:
    """Every sequence a cluster of its own: of the token means, and of the means over sequences."""
    centre, squares, cross = (np.array(own) for own in (given.centre, given.squares, given.cross))
    n, cut = given.measured, len(TOKEN_ERRORS)
    tokens = ClusterRow(n, centre[:cut], squares[:cut], cross[:cut], given.sizes)
    return tokens, ClusterRow(n, centre[cut:], squares[cut:], cross[cut:], float(n)) if n else None


def _group_tables(ids: Ints, sums: Floats) -> tuple[Clusters, Clusters | None]:
    """The same by group: float64 [g, 2 + errors] tokens, sequences, and what is summed."""
    some = sums[:, 0] > 0
    ids, sums = ids[some], sums[some].T
    cut = 2 + len(TOKEN_ERRORS)
    tokens = GroupTable(ids, sums[0].copy(), sums[2:cut].copy())
    return tokens, GroupTable(ids, sums[1].copy(), sums[cut:].copy()) if len(ids) else None
