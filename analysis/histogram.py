"""Symmetric-log histograms of log-ratios: integers that merge by addition, from which quantiles are read.

Two resolutions share one sparse form. Token log-ratios are binned by the bits of their half (64 bins an octave above 2**-14,
2**-20 wide below); sequence log-ratios, which reach thousands, by the top 15 bits of their float32. Exact zeros stand apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.ops import HALF_BINS

WIDE_SHIFT = 17  # float32 bits kept: sign, 8 exponent, 6 mantissa
WIDE_BINS = 1 << (32 - WIDE_SHIFT)
_EMPTY = np.zeros(0, dtype=np.int64)
# Keys of one merged axis: wide bins are moved above the half bins so that one sorted integer array holds both.
_WIDE_BASE = HALF_BINS
ZERO_KEY = -1


@dataclass(frozen=True)
class Histogram:
    """Counts by bin.

    Attributes:
        keys: int64 [b] sorted bin numbers.
        counts: int64 [b], > 0.

    >>> h = Histogram.of_values(np.array([0.0, 1.0, 1.0, -2.0]))
    >>> h.total, round(h.quantile(0.5, -2.0, 1.0), 2)
    (4, 0.0)
    """

    keys: Ints
    counts: Ints

    @staticmethod
    def empty() -> Histogram:
        return Histogram(_EMPTY, _EMPTY)

    @staticmethod
    def of_half_bins(bins: Ints, zeros: int, negative_zeros: int, far: Floats) -> Histogram:
        """From the dense half-precision bins of a block, its exact zeros, and the values beyond a half's range.

        Args:
            bins: int64 [4096]; infinities in it are the ``far`` values and are dropped here.
            zeros: exact zeros in all, ``negative_zeros`` of them with the sign bit.
            far: the finite values that a half rounds to infinity.
        """
        dense = bins.copy()
        middle = HALF_BINS // 2
        dense[0] -= zeros - negative_zeros
        dense[middle] -= negative_zeros
        # Infinity is the first bin of exponent 31 on either side.
        dense[31 * 64 : 32 * 64] = 0
        dense[middle + 31 * 64 :] = 0
        keys = np.flatnonzero(dense).astype(np.int64)
        own = Histogram(keys, dense[keys])
        parts = [own]
        if zeros:
            parts.append(Histogram(np.array([ZERO_KEY]), np.array([zeros])))
        if len(far):
            parts.append(Histogram.of_values(far))
        return merge(parts)

    @staticmethod
    def of_values(values: Floats) -> Histogram:
        """From finite float64 values, at the wide resolution."""
        if not len(values):
            return Histogram.empty()
        with np.errstate(over="ignore", under="ignore"):
            narrow = np.clip(values, -3.4e38, 3.4e38).astype(np.float32)
        bits = narrow.view(np.uint32) >> WIDE_SHIFT
        if len(values) < 4096:
            unique, counts = np.unique(bits, return_counts=True)
        else:  # counting beats sorting
            dense = np.bincount(bits, minlength=WIDE_BINS)
            unique = np.flatnonzero(dense)
            counts = dense[unique]
        own = Histogram(unique.astype(np.int64) + _WIDE_BASE, counts.astype(np.int64))
        zeros = int(np.count_nonzero(values == 0))
        negative = int(np.count_nonzero(np.signbit(values) & (values == 0))) if zeros else 0
        return own._with_zeros_apart(zeros, negative)

    @staticmethod
    def of_wide_bins(bins: Ints, zeros: int, negative_zeros: int) -> Histogram:
        """From dense counts at the wide resolution.

        Args:
            bins: int64 [WIDE_BINS] by the leading bits of the float32.
            zeros: exact zeros in all, ``negative_zeros`` of them with the sign bit.
        """
        keys = np.flatnonzero(bins)
        return Histogram(keys + _WIDE_BASE, bins[keys])._with_zeros_apart(zeros, negative_zeros)

    def _with_zeros_apart(self, zeros: int, negative: int) -> Histogram:
        """Exact zeros out of the wide bins of +0 and -0, which tiny values share."""
        if not zeros:
            return self
        counts = self.counts.copy()
        for key, count in ((_WIDE_BASE, zeros - negative), (_WIDE_BASE + WIDE_BINS // 2, negative)):
            if count:
                counts[np.searchsorted(self.keys, key)] -= count
        left = counts > 0
        keys = np.concatenate(([ZERO_KEY], self.keys[left]))
        return Histogram(keys, np.concatenate(([zeros], counts[left])))

    def minus(self, other: Histogram) -> Histogram:
        """Without the counts of a part of it."""
        at = self.keys.searchsorted(other.keys)
        counts = self.counts.copy()
        counts[at] -= other.counts
        return Histogram(self.keys[counts > 0], counts[counts > 0])

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def centres(self) -> Floats:
        """float64 [b] the value that stands for each bin: the middle of its edges."""
        low, high = self.edges()
        return (low + high) / 2

    def edges(self) -> tuple[Floats, Floats]:
        """float64 [b], [b]: the ends of each bin by magnitude, signed."""
        low = np.zeros(len(self.keys))
        high = np.zeros(len(self.keys))
        half = (self.keys >= 0) & (self.keys < _WIDE_BASE)
        if half.any():
            key = self.keys[half]
            negative = key >= HALF_BINS // 2
            magnitude = (key % (HALF_BINS // 2)).astype(np.uint16)
            sign = np.where(negative, -1.0, 1.0)
            # A half is rounded to nearest before it is cut, so a bin reaches from half a spacing below its first value to
            # half a spacing below the next bin's.
            low[half] = sign * _half_edge(magnitude)
            high[half] = sign * _half_edge(magnitude + np.uint16(1))
        wide = self.keys >= _WIDE_BASE
        if wide.any():
            bits = ((self.keys[wide] - _WIDE_BASE).astype(np.uint32)) << np.uint32(WIDE_SHIFT)
            low[wide] = bits.view(np.float32).astype(np.float64)
            with np.errstate(over="ignore"):
                top = bits + np.uint32(1 << WIDE_SHIFT)
            high[wide] = top.view(np.float32).astype(np.float64)
        return low, high

    def quantiles(self, levels: tuple[float, ...], low: float, high: float) -> list[float]:
        """Inverted-CDF quantiles: the smallest value with at least ``level`` of the mass at or below it.

        Within 1 % relative or 1e-6 absolute of the exact order statistic, clamped to [low, high].
        """
        centres = self.centres()
        order = np.argsort(centres, kind="stable")
        cumulative = np.cumsum(self.counts[order])
        total = int(cumulative[-1])
        out = []
        for level in levels:
            rank = max(1, int(np.ceil(level * total - 1e-9 * max(1.0, level * total))))
            at = int(np.searchsorted(cumulative, rank, side="left"))
            out.append(float(min(max(centres[order[at]], low), high)))
        return out

    def quantile(self, level: float, low: float, high: float) -> float:
        return self.quantiles((level,), low, high)[0]


def _half_edge(magnitude: np.ndarray) -> Floats:
    bits = (magnitude.astype(np.uint32) << 4).astype(np.uint16)
    value = bits.view(np.float16).astype(np.float64)
    value[np.isinf(value)] = 65536.0  # the end of the last finite bin
    below = np.where(bits > 0, bits - 1, 0).astype(np.uint16).view(np.float16).astype(np.float64)
    edge: Floats = np.where(bits > 0, (value + below) / 2, 0.0)
    return edge


def merge(parts: list[Histogram]) -> Histogram:
    """Integer addition, in any order."""
    parts = [p for p in parts if len(p.keys)]
    if not parts:
        return Histogram.empty()
    if len(parts) == 1:
        return parts[0]
    # Dense, one part after another: nothing as long as all parts together is ever made. ZERO_KEY stands first.
    dense = np.zeros(max(int(p.keys.max()) for p in parts) - ZERO_KEY + 1, dtype=np.int64)
    for p in parts:
        dense[p.keys - ZERO_KEY] += p.counts
    used = np.flatnonzero(dense)
    return Histogram(used + ZERO_KEY, dense[used])
