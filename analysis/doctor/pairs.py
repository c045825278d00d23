"""Moments of the pair (rollout, train) over clean tokens: what the scale and the correlation of the two sides are judged by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.doctor.state import State, counts, totals
from rollout_is.analysis.doctor.window import PROBS, Window

FOLDS = 16
MOMENTS = 6  # n, sum r, sum t, sum r^2, sum t^2, sum rt
RATIO_STEP, RATIO_TOP = 0.02, 5.0
RATIOS = int(RATIO_TOP / RATIO_STEP)
DEEP = -2.0  # ratios of log-probs are taken where both sides are below this: near 0 they are noise over noise


@dataclass
class Pairs(State):
    """Sums by fold (a deterministic sixteenth of the chunks) and by probability bin.

    Attributes:
        folds: float64 [FOLDS, MOMENTS].
        next_fold: chunks seen, so that folds stay balanced.
        bins: float64 [PROBS, 3] n, sum r, sum t by probability of the rollout side.
        ratios: histogram of t / r over tokens with both below DEEP.
        positive: tokens with r > 0, with t > 0.
        fits: sums of |t - log r| and |t + r| over windows whose r are all in [0, 1] / all >= 0.
    """

    folds: Floats = totals(FOLDS, MOMENTS)
    next_fold: Ints = counts(1)
    bins: Floats = totals(PROBS, 3)
    ratios: Ints = counts(RATIOS)
    positive: Ints = counts(2)
    inside_unit: Ints = counts(2)
    as_probability: Floats = totals(2)

    def look(self, window: Window) -> None:
        """Take in clean tokens: no placeholders, no shifted chunks."""
        if window.n == 0:
            return
        t, r = window.t, window.r
        starts = window.chunk_starts
        fold = (np.arange(len(starts)) + int(self.next_fold[0])) % FOLDS
        self.next_fold[0] += len(starts)
        rows = np.stack(
            [
                (window.chunk_stops - starts).astype(np.float64),
                np.add.reduceat(r, starts),
                np.add.reduceat(t, starts),
                np.add.reduceat(r * r, starts),
                np.add.reduceat(t * t, starts),
                np.add.reduceat(r * t, starts),
            ],
            axis=1,
        )
        for f in range(FOLDS):
            self.folds[f] += rows[fold == f].sum(axis=0)
        where = window.probability
        self.bins[:, 0] += np.bincount(where, minlength=PROBS)
        self.bins[:, 1] += np.bincount(where, weights=r, minlength=PROBS)
        self.bins[:, 2] += np.bincount(where, weights=t, minlength=PROBS)
        deep = (r < DEEP) & (t < DEEP)
        ratio = t[deep] / r[deep]
        at = np.clip((ratio / RATIO_STEP).astype(np.int64), 0, RATIOS - 1)
        self.ratios += np.bincount(at, minlength=RATIOS)
        self._positive(t, r)

    def _positive(self, t: Floats, r: Floats) -> None:
        """Sides that may hold probabilities: every value in [0, 1], and log of it near the other side."""
        for side, (x, other) in enumerate(((r, t), (t, r))):
            if float(x.max()) <= 0:
                continue
            self.positive[side] += int(np.count_nonzero(x > 0))
            inside = (x > 0) & (x <= 1)
            self.inside_unit[side] += int(np.count_nonzero(inside))
            self.as_probability[side] += float(np.abs(other[inside] - np.log(x[inside])).sum())

    @property
    def n(self) -> int:
        """Tokens."""
        return int(self.folds[:, 0].sum())


@dataclass(frozen=True)
class Line:
    """Second moments of the pair and the two regressions that bracket the errors-in-variables slope.

    Noise on t alone leaves ``low`` (t on r) at the true slope, noise on r alone leaves ``high`` (1 / (r on t)); with noise on
    both the slope lies between. So a slope of 1 is refuted only when 1 lies outside the two.
    """

    n: float
    var_r: float
    var_t: float
    cov: float
    mean_r: float
    mean_t: float
    origin_fit: float
    origin_slope: float

    @property
    def correlation(self) -> float:
        """Pearson's correlation; 0 for a constant side."""
        scale = np.sqrt(max(self.var_r, 0.0) * max(self.var_t, 0.0))
        return float(self.cov / scale) if scale > 0 else 0.0

    @property
    def low(self) -> float:
        """Slope of t on r."""
        return self.cov / self.var_r if self.var_r > 0 else float("nan")

    @property
    def high(self) -> float:
        """One over the slope of r on t."""
        return self.var_t / self.cov if self.cov != 0 else float("nan")

    @property
    def total(self) -> float:
        """Slope with equal errors in both variables (Deming, ratio 1)."""
        if self.cov == 0:
            return float("nan")
        apart = self.var_t - self.var_r
        return float((apart + np.sqrt(apart * apart + 4 * self.cov * self.cov)) / (2 * self.cov))

    @property
    def intercept(self) -> float:
        """Intercept that goes with ``total``."""
        return self.mean_t - self.total * self.mean_r


def line(moments: Floats) -> Line:
    """The line of one vector of MOMENTS."""
    n, sr, st, srr, stt, srt = (float(x) for x in moments)
    n = max(n, 1.0)
    mr, mt = sr / n, st / n
    both = srr * stt
    return Line(
        n,
        srr / n - mr * mr,
        stt / n - mt * mt,
        srt / n - mr * mt,
        mr,
        mt,
        srt * srt / both if both > 0 else 0.0,
        srt / srr if srr > 0 else float("nan"),
    )


def jackknife(folds: Floats, figure: str) -> float:
    """Standard error of one attribute of the line, leaving out a fold at a time."""
    whole = folds.sum(axis=0)
    used = [f for f in folds if f[0] > 0]
    values = np.array([getattr(line(whole - f), figure) for f in used])
    k = len(values)
    if k < 2:
        return float("inf")
    return float(np.sqrt((k - 1) / k * ((values - values.mean()) ** 2).sum()))
