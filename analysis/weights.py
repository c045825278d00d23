"""A set of weights as mergeable rows: scaled sums, centred moments, extremes and counts, right at any log-ratio.

Sums of exp(L) and exp(2L) are kept scaled by a log scale (0 where plain float64 does, the largest L otherwise). Rows of units
are never added to each other: they are kept side by side and combined once, by ``math.fsum``, so their order is irrelevant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rollout_is.analysis.batch import Floats
from rollout_is.analysis.histogram import Histogram, merge
from rollout_is.analysis.ops import dot

PLAIN_TOP, PLAIN_BOTTOM = 300.0, -3.0  # largest L between these: no scaling, and expm1 keeps what is near 1 exact


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of u = exp(L - scale); the mean is that of u - 1 when scale is 0."""

    scale: float
    n: int
    mean: float
    m2: float


@dataclass(frozen=True)
class WeightRow:
    """The weights of one unit (or one group of one unit).

    Attributes:
        n: how many.
        parts: (log scale, sum exp(L - scale), sum exp(2(L - scale))) each.
        moments: for the standard deviation and chi-squared.
        low, high: extremes of L (+inf, -inf when empty).
        above, below: counts beyond the upper and lower bound.
        histogram: of L.
    """

    n: int = 0
    parts: tuple[tuple[float, float, float], ...] = ()
    moments: tuple[Moments, ...] = ()
    low: float = math.inf
    high: float = -math.inf
    above: int = 0
    below: int = 0
    histogram: Histogram = Histogram.empty()  # noqa: RUF009  frozen and empty


EMPTY = WeightRow()


def row_of(
    log_weights: Floats, log_lower: float, log_upper: float, *, binned: bool = True, exponentials: Floats | None = None
) -> WeightRow:
    """The row of a vector of finite log-weights, float64 [n]; ``exponentials`` are their np.exp where it is known already.

    >>> row_of(np.array([0.0, -7504.0]), -0.7, 0.7).below
    1
    """
    n = len(log_weights)
    if n == 0:
        return EMPTY
    high = float(log_weights.max())
    scale = high if not PLAIN_BOTTOM <= high <= PLAIN_TOP else 0.0
    if scale:
        u = np.exp(log_weights - scale)
        mean = float(u.sum()) / n
        centred = u - mean
    else:
        u = np.exp(log_weights) if exponentials is None else exponentials
        # u - 1 is off by 1e-16, which beside a spread above 1e-3 is lost; near 1 it takes expm1.
        e = u - 1.0 if dot(log_weights, log_weights) > 1e-6 * n else np.expm1(log_weights)
        mean = float(e.sum()) / n
        centred = e - mean
    # Second-order correction of the two-pass variance: the rounding of the mean does not enter.
    m2 = dot(centred, centred) - float(centred.sum()) ** 2 / n
    return WeightRow(
        n=n,
        parts=((scale, float(u.sum()), dot(u, u)),),
        moments=(Moments(scale, n, mean, max(m2, 0.0)),),
        low=float(log_weights.min()),
        high=high,
        above=int(np.count_nonzero(log_weights > log_upper)),
        below=int(np.count_nonzero(log_weights < log_lower)),
        histogram=Histogram.of_values(log_weights) if binned else Histogram.empty(),
    )


def join(rows: Iterable[WeightRow]) -> WeightRow:
    """The rows side by side: nothing is rounded here."""
    rows = [r for r in rows if r.n]
    if not rows:
        return EMPTY
    return WeightRow(
        n=sum(r.n for r in rows),
        parts=tuple(p for r in rows for p in r.parts),
        moments=tuple(m for r in rows for m in r.moments),
        low=min(r.low for r in rows),
        high=max(r.high for r in rows),
        above=sum(r.above for r in rows),
        below=sum(r.below for r in rows),
        histogram=merge([r.histogram for r in rows]),
    )


def ones(n: int, lower: float, upper: float) -> WeightRow:
    """n weights of exactly 1 (L = 0): how the padded view counts fully masked segments."""
    return row_of(np.zeros(n), lower, upper) if n else EMPTY


def log_sums(row: WeightRow) -> tuple[float, float]:
    """(log of the sum of weights, log of the sum of their squares); -inf for none.

    >>> s1, s2 = log_sums(row_of(np.array([-2000.0, -2000.0]), -1, 1))
    >>> round(s1, 6), round(s2, 6)
    (-1999.306853, -3999.306853)
    """
    return _log_sum([(k, a) for k, a, _ in row.parts]), _log_sum([(2 * k, b) for k, _, b in row.parts])


def _log_sum(parts: list[tuple[float, float]]) -> float:
    parts = [(k, s) for k, s in parts if s > 0]
    if not parts:
        return -math.inf
    top = max(k for k, _ in parts)
    return top + math.log(math.fsum(s * math.exp(k - top) for k, s in parts))


def mean(row: WeightRow) -> tuple[float, float]:
    """(mean weight, its log). Near 1 it is taken as 1 + mean(w - 1), which keeps the last digits."""
    total, _ = log_sums(row)
    log = total - math.log(row.n)
    if all(k == 0 for k, _, _ in row.parts):
        value = math.fsum(s for _, s, _ in row.parts) / row.n
        return value, math.log(value) if value > 0 else -math.inf
    return safe_exp(log), log


def effective_sample_size(row: WeightRow) -> float:
    """(sum w)^2 / (n sum w^2), in (0, 1]; rounding above 1 is cut."""
    first, second = log_sums(row)
    return min(1.0, math.exp(2 * first - second - math.log(row.n)))


def largest_share(row: WeightRow) -> float:
    """Largest w over the sum of w."""
    return min(1.0, math.exp(row.high - log_sums(row)[0]))


def variance(row: WeightRow, *, sample: bool = False) -> tuple[float, float]:
    """(scale, variance of exp(L - scale)): multiply by exp(2 scale). Population, or with ddof 1."""
    if row.low == row.high and row.n == sum(m.n for m in row.moments):
        return 0.0, 0.0
    scale, total = pooled_moments(row.moments)
    return scale, max(0.0, total.m2) / (total.n - (1 if sample else 0))


def pooled_moments(rows: tuple[Moments, ...]) -> tuple[float, Moments]:
    """All moments as one, at the largest scale; the mean is of u - 1 when that scale is 0 for all."""
    scale = max(m.scale for m in rows)
    plain = all(m.scale == 0.0 for m in rows)
    if plain:
        means = [m.mean for m in rows]
        seconds = [m.m2 for m in rows]
    else:
        factors = [math.exp(m.scale - scale) for m in rows]
        means = [(m.mean + (1.0 if m.scale == 0.0 else 0.0)) * f for m, f in zip(rows, factors, strict=True)]
        seconds = [m.m2 * f * f for m, f in zip(rows, factors, strict=True)]
    n = sum(m.n for m in rows)
    centre = math.fsum(m.n * x for m, x in zip(rows, means, strict=True)) / n
    m2 = math.fsum([*seconds, *(m.n * (x - centre) ** 2 for m, x in zip(rows, means, strict=True))])
    return scale, Moments(0.0 if plain else scale, n, centre, m2)


def chi_squared(row: WeightRow) -> tuple[float, float]:
    """(mean(w^2) - 1, its log or NaN where it is not positive), as mean(e^2) + 2 mean(e) with e = w - 1 where w is near 1."""
    if all(m.scale == 0.0 for m in row.moments) and all(k == 0 for k, _, _ in row.parts):
        _, total = pooled_moments(row.moments)
        value = total.m2 / total.n + total.mean * total.mean + 2.0 * total.mean
        if abs(value) < 1e4:
            return value, math.log(value) if value > 0 else math.nan
    log_second = log_sums(row)[1] - math.log(row.n)
    if log_second > 700.0:
        return safe_exp(log_second), log_second  # the 1 is far below the last digit
    value = math.expm1(log_second)
    return value, math.log(value) if value > 0 else math.nan


def safe_exp(x: float) -> float:
    """exp, with inf instead of an error."""
    return math.inf if x > 709.78 else math.exp(x)
