"""Tails: a few tokens carry the total, or a routing-like share of tokens is far off while the rest looks like a dense model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.doctor.state import (
    MAGNITUDES,
    State,
    counts,
    magnitude_bin,
    quantile,
    share_of_top,
    tally,
    totals,
)
from rollout_is.analysis.doctor.verdict import Draft, Scene, Scope, percent, sig
from rollout_is.analysis.doctor.window import PROB_NAMES, PROBS, Window
from rollout_is.analysis.doctor.worst import Worst

MIN_TOKENS = 1000
EXTREME = math.log(2)
ROUTING_SHARE = 0.005  # of tokens beyond a factor of two
# p99 over p75 of |d|: 4 for a normal, 7 for Student-t with 3 degrees, 26 for Cauchy, 100 for replay misses
ROUTING_GAP = 30.0
QUIET = 0.05  # median |d|: the bulk looks like a dense model
FEW = 0.002  # share of tokens ...
CARRY = 0.5  # ... that carries half of the total
FAR = 1.0  # nats
DECADE = 13  # bins of a factor of ten


@dataclass
class Tails(State):
    """Histogram of |d| over clean tokens; extreme tokens by probability bin."""

    histogram: Ints = counts(MAGNITUDES)
    by_probability: Floats = totals(PROBS, 3)

    def look(self, window: Window) -> None:
        """Take in clean tokens."""
        if window.n == 0:
            return
        self.histogram += tally(window.magnitude)
        p = window.probability
        self.by_probability[:, 0] += np.bincount(p, minlength=PROBS)
        self.by_probability[:, 1] += np.bincount(p, weights=window.abs_d, minlength=PROBS)
        self.by_probability[:, 2] += np.bincount(p[window.abs_d > EXTREME], minlength=PROBS)

    @property
    def n(self) -> int:
        """Tokens."""
        return int(self.histogram.sum())


def judge(scene: Scene) -> list[Draft]:
    """``tails.routing`` and ``tails.few_tokens``."""
    s = scene.pooled(Tails)
    if s.n < MIN_TOKENS:
        return []
    median, p75, p99 = (quantile(s.histogram, p) for p in (0.5, 0.75, 0.99))
    extreme = float(s.by_probability[:, 2].sum()) / s.n
    figures = {
        "median_abs_d": median,
        "p75_abs_d": p75,
        "p99_abs_d": p99,
        "extreme_share": extreme,
        "share_of_total_in_worst_1_percent": share_of_top(s.histogram, 0.01),
        "share_of_total_in_worst_0_1_percent": share_of_top(s.histogram, 0.001),
        "mean_abs_d_by_rollout_probability": {
            name: float(row[1] / row[0]) for name, row in zip(PROB_NAMES, s.by_probability, strict=True) if row[0]
        },
    }
    if extreme >= ROUTING_SHARE and median <= QUIET and p99 >= ROUTING_GAP * max(p75, 1e-6) and p99 > EXTREME / 2:
        return [
            Draft(
                "tails.routing",
                "notice",
                f"most tokens look like a dense model (median |d| {sig(median)}), but {percent(extreme)} are off by more than a factor "
                f"of two (p99 |d| {sig(p99)}): expert routing that differs between engine and trainer?",
                p99 / max(p75, 1e-6),
                "99th over 75th percentile of |d|",
                tokens=s.n,
                token_share=extreme,
                places=Worst.of(scene, Scope()),
                alternatives=("a dense model with a few broken tokens: see their positions",),
                figures=figures,
                source="Megatron-LM#4168, AReaL#1207, prime-rl#2808 (KL .0015 -> .0005 with routing replay)",
                next="record and replay routing, then compare p99; rollout-is explain tails.routing",
            )
        ]
    few = share_of_top(s.histogram, FEW)
    if few >= CARRY and _gap(s.histogram):
        far = int(s.histogram[int(magnitude_bin(np.array([FAR]))[0]) :].sum())
        return [
            Draft(
                "tails.few_tokens",
                "notice",
                f"{percent(FEW)} of the tokens carry {percent(few)} of the total |d|; {far} of {s.n} stand apart from all others by a "
                f"factor of ten and more (median {sig(median)})",
                few / FEW,
                "their share of the total over their share of the tokens",
                tokens=far,
                token_share=far / s.n,
                places=Worst.of(scene, Scope()),
                alternatives=("real ties of a quantised engine",),
                figures=figures,
                source="verl#7519: single spikes carry the mean; medians next to means",
                next="rollout-is analyze DUMP --top 20; rollout-is explain tails.few_tokens",
            )
        ]
    return []


def _gap(histogram: Ints) -> bool:
    """Whether an empty decade separates the bulk from tokens beyond FAR."""
    filled = np.flatnonzero(histogram)
    if len(filled) < 2:
        return False
    empty = np.diff(filled)
    far = int(magnitude_bin(np.array([FAR]))[0])
    wide = [int(filled[i + 1]) for i in np.flatnonzero(empty > DECADE) if filled[i] > 0]
    return any(at >= far for at in wide)
