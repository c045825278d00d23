"""How heavy is the tail of a set of importance weights: the generalised Pareto shape k-hat, from log-weights.

Two public names. ``TopLogWeights(capacity)`` is the mergeable state: it keeps the ``capacity`` largest log-weights, how many there
were and the smallest of all. ``pareto_k(top, n, *, smallest=None) -> Statistic`` fits; ``tail_length(n) + 1`` values of ``top``
are enough, so a capacity of ``tail_length(total sequences) + 1`` loses nothing. ``reliable_below(n)`` is the threshold to judge by.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollout_is.analysis.summary import Statistic

Floats = NDArray[np.float64]

SAME = 1e-12  # log-weights nearer than this, in shares of the larger of 1 and their size, are the same but for rounding
LARGEST = 65536  # values that a state of a whole dump keeps at most: 3 sqrt(n) of 477 million sequences
SAMPLED = 16  # of many values, one in so many tells where the largest begin
SMALLEST_TAIL = 5  # below that the fit says nothing: 21 sequences are the fewest that have a k-hat


def tail_length(n: int) -> int:
    """M, how many of the largest of ``n`` weights the tail is fitted to: min(0.2 n, 3 sqrt n), rounded up.

    >>> tail_length(100), tail_length(10_000), tail_length(10)
    (20, 300, 2)
    """
    return math.ceil(min(0.2 * n, 3.0 * math.sqrt(n)))


def capacity(n: int) -> int:
    """How many of the largest of up to ``n`` weights are to be kept for their k-hat, or for that of some of them.

    >>> capacity(10_000), capacity(10**12)
    (301, 65536)
    """
    return min(tail_length(n) + 1, LARGEST)


def reliable_below(n: int) -> float:
    """The k-hat above which an estimate from ``n`` weights cannot be trusted: min(1 - 1/log10 n, 0.7).

    Source: Vehtari, Simpson, Gelman, Yao, Gabry, "Pareto smoothed importance sampling", JMLR 2024, section 3.2.4.

    >>> round(reliable_below(100), 3), reliable_below(10**6)
    (0.5, 0.7)
    """
    return min(1.0 - 1.0 / math.log10(n), 0.7) if n > 1 else -math.inf


class TopLogWeights:
    """The largest log-weights seen, their count and the smallest of all; merging in any order gives the same state.

    Args:
        capacity: how many to keep; ``tail_length(n) + 1`` for the largest n that can come.

    >>> a, b = TopLogWeights(3), TopLogWeights(3)
    >>> a.update([0.0, 2.0, 1.0]); b.update([5.0, -1.0])
    >>> a.merge(b)
    >>> a.values.tolist(), a.n, a.smallest
    ([5.0, 2.0, 1.0], 5, -1.0)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.n = 0
        self.smallest = math.inf
        self.nonfinite = 0
        self._values: Floats = np.empty(0)  # unsorted: most states are only merged
        self._full = False

    @property
    def values(self) -> Floats:
        """The values kept, float64 [k], largest first."""
        return np.sort(self._values)[::-1]

    def __len__(self) -> int:
        return len(self._values)

    def update(self, log_weights: ArrayLike) -> None:
        """Take in log-weights: any shape, float. NaN and +inf are counted; -inf is a weight of 0 and is kept."""
        values = np.asarray(log_weights, dtype=np.float64).ravel()
        bad = np.isnan(values) | (values == np.inf)
        self.nonfinite += int(bad.sum())
        self.update_finite(values[~bad])

    def update_finite(self, values: Floats) -> None:
        """The same of log-weights, float64 [n], that are known to be neither NaN nor +inf."""
        if values.size:
            self.smallest = min(self.smallest, float(values.min()))
        self.n += values.size
        self._keep(values)

    def merge(self, other: TopLogWeights) -> None:
        """Add what ``other`` has seen."""
        self.n += other.n
        self.nonfinite += other.nonfinite
        self.smallest = min(self.smallest, other.smallest)
        self._keep(other._values)

    def result(self) -> Statistic:
        """k-hat of everything seen, or None with the reason."""
        if self.nonfinite:
            return Statistic(None, self.n, why="non-finite")
        enough = tail_length(self.n) + 1
        values = self._values
        if values.size > enough:
            values = np.partition(values, values.size - enough)[values.size - enough :]
        return pareto_k(values, self.n, smallest=self.smallest)

    def _above_sampled(self, values: Floats) -> Floats:
        """Those above a value that half more than are kept most likely are above; all of them where that was wrong."""
        sample = values[::SAMPLED]
        at = sample.size - 3 * self.capacity // (2 * SAMPLED) - 1
        above = values[values >= np.partition(sample, at)[at]] if at > 0 else values
        return above if above.size >= self.capacity else values

    def _keep(self, values: Floats) -> None:
        if self._full:  # the first of those kept is then the smallest of them
            values = values[values > self._values[0]]
        if not values.size:
            return
        if values.size > 4 * self.capacity:
            values = self._above_sampled(values)
        both = np.concatenate([self._values, values])
        if both.size > self.capacity:  # select before sorting: a unit may hold a million sequences
            both = np.partition(both, both.size - self.capacity)[both.size - self.capacity :]
            self._full = True
        self._values = both


def pareto_k(top: ArrayLike, n: int, *, smallest: float | None = None) -> Statistic:
    """Shape k-hat of the generalised Pareto fit to the upper tail of importance weights; dimensionless.

    Args:
        top: log-weights, any order; at least the ``tail_length(n) + 1`` largest (all of them when n is less).
        n: how many weights there are in all.
        smallest: the smallest log-weight of all, to tell "all ratios equal" from "too many ties".

    Returns:
        a Statistic over n: 0.5 and above means infinite variance, ``reliable_below(n)`` is where trust ends. None with ``why`` one of
        ``too few sequences``, ``all ratios equal``, ``too many ties``, ``non-finite``.

    Raises:
        ValueError: ``top`` holds fewer than the values needed.

    Source: Zhang and Stephens (2009) for the fit; the prior that pulls k towards 0.5 with the weight of ten observations from
    Vehtari et al. (JMLR 2024), appendix G. The tail is what lies strictly above the (M + 1)-th largest.

    >>> pareto_k([0.1, 0.2], 2).why
    'too few sequences'
    >>> round(pareto_k(-0.5 * np.log((np.arange(400) + 0.5) / 400), 400).value, 2)  # a Pareto tail of shape 1/2
    0.5
    """
    values = np.sort(np.asarray(top, dtype=np.float64).ravel())
    if np.isnan(values).any() or (values == np.inf).any():
        return Statistic(None, n, why="non-finite")
    tail = tail_length(n)
    if tail < SMALLEST_TAIL:
        return Statistic(None, n, why="too few sequences")
    if values.size < tail + 1:
        raise ValueError(f"pareto_k of {n} weights needs the {tail + 1} largest, found {values.size}")
    largest, lowest = values[-1], values[0] if smallest is None else smallest
    cutoff = values[-tail - 1]
    rounding = SAME * max(1.0, abs(float(largest)), abs(float(cutoff)) if cutoff > -np.inf else 0.0)
    if largest == lowest or largest - lowest <= rounding:
        return Statistic(None, n, why="all ratios equal")
    above = values[values > cutoff + rounding]
    if np.count_nonzero(np.diff(above, prepend=cutoff) > rounding) < SMALLEST_TAIL:  # distinct values in the tail
        return Statistic(None, n, why="too many ties")
    # log(exp(L) - exp(cutoff)), exact for close values and without overflow for far ones
    log_excess = above + np.log(-np.expm1(cutoff - above)) if cutoff > -np.inf else above
    return Statistic(_fit(log_excess), n)


def _fit(log_x: Floats) -> float:
    """Empirical Bayes shape of a generalised Pareto distribution from sorted log exceedances [n].

    Everything is scaled by the lower quartile, so that weights hundreds of nats apart neither overflow nor vanish.
    """
    n = log_x.size
    log_x = log_x - log_x[int(n / 4 + 0.5) - 1]
    grid = 30 + int(math.sqrt(n))
    b = (1.0 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))) / 3.0 + np.exp(-log_x[-1])
    b = b[b != 0.0]
    shape = np.array([_mean_log1p(float(value), log_x) for value in b])
    profile = n * (np.log(-b / shape) - shape - 1.0)
    weight = np.exp(profile - profile.max())
    weight /= weight.sum()
    kept = weight >= 10.0 * np.finfo(np.float64).eps
    b_hat = float(np.sum(b[kept] * weight[kept]) / weight[kept].sum())
    k_hat = _mean_log1p(b_hat, log_x)
    return float((n * k_hat + 10.0 * 0.5) / (n + 10.0))


def _mean_log1p(b: float, log_x: Floats) -> Any:
    """mean(log(1 - b x)) for x = exp(log_x); b is below 1 / max x, so the logarithm exists."""
    if b < 0.0:
        return np.logaddexp(0.0, math.log(-b) + log_x).mean()
    return np.log1p(-b * np.exp(log_x)).mean()
