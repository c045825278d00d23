"""Support: the rollout side is normalised over a part of the vocabulary, or belongs to another token than the sampled one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.doctor.state import (
    MAGNITUDES,
    State,
    counts,
    inner,
    largest,
    quantile,
    smallest,
    totals,
)
from rollout_is.analysis.doctor.verdict import Draft, Scene, find_scope, percent, sig
from rollout_is.analysis.doctor.window import Window

FOLDS = 16
MIN_TOKENS = 200
ONE_SIDED = 0.2  # the mass of |d| on the wrong side; two-sided engine noise has a half
OFFSET = 0.015  # nats of mean d below which engine noise could hide it
BOUNDED = math.log(4)  # truncation cannot move d beyond -log S; S below a quarter is no sampler's setting
SURE = 8.0
FAR = 0.3  # nats; a top candidate that was not the sampled token differs by at least this


@dataclass
class Support(State):
    """One-sidedness of d over clean tokens.

    Attributes:
        folds: float64 [FOLDS, 3] n, sum of e = w - 1, sum of 1/w - 1, by fold of chunks.
        below, above: histograms of |d| where d < 0, d >= 0.
        mass: float64 [2] sum of |d| where d < 0, where d > 0.
        square: sum of d^2.
    """

    folds: Floats = totals(FOLDS, 3)
    chunks: Ints = counts(1)
    below: Ints = counts(MAGNITUDES)
    above: Ints = counts(MAGNITUDES)
    mass: Floats = totals(2)
    square: Floats = totals(1)
    lowest_rollout: float = smallest()
    lowest_train: float = smallest()
    largest_d: float = largest()
    smallest_d: float = smallest()
    beyond: Ints = counts(2)

    def look(self, window: Window) -> None:
        """Take in clean tokens."""
        if window.n == 0:
            return
        d, starts = window.d, window.chunk_starts
        capped = np.clip(d, -30.0, 30.0)  # a stray outlier must not overflow; it is far beyond any support effect
        e = np.exp(capped) - 1.0  # sums of 1e-16 do not matter here, and this is several times faster than expm1
        rows = np.stack(
            [
                (window.chunk_stops - starts).astype(np.float64),
                np.add.reduceat(e, starts),
                np.add.reduceat(-e / (1.0 + e), starts),
            ],
            axis=1,
        )
        fold = (np.arange(len(starts)) + int(self.chunks[0])) % FOLDS
        self.chunks[0] += len(starts)
        for f in range(FOLDS):
            self.folds[f] += rows[fold == f].sum(axis=0)
        both = np.bincount(window.magnitude + MAGNITUDES * (d >= 0), minlength=2 * MAGNITUDES)
        self.below += both[:MAGNITUDES]
        self.above += both[MAGNITUDES:]
        low = float(np.minimum(d, 0.0).sum())
        self.mass += np.array([-low, float(d.sum()) - low])
        self.square[0] += inner(d, d)
        self.lowest_rollout = min(self.lowest_rollout, float(window.r.min()))
        self.lowest_train = min(self.lowest_train, float(window.t.min()))
        self.largest_d = max(self.largest_d, float(d.max()))
        self.smallest_d = min(self.smallest_d, float(d.min()))
        self.beyond += np.array([np.count_nonzero(d < -FAR), np.count_nonzero(d > FAR)])

    @property
    def n(self) -> int:
        """Tokens."""
        return int(self.folds[:, 0].sum())

    def weight(self, which: int) -> tuple[float, float]:
        """Mean of w (1) or of 1/w (2), with its standard error over folds (jackknife)."""
        whole = self.folds.sum(axis=0)
        used = [f for f in self.folds if f[0] > 0]
        left = np.array([(whole[which] - f[which]) / max(whole[0] - f[0], 1.0) for f in used])
        k = len(left)
        error = float(np.sqrt((k - 1) / k * ((left - left.mean()) ** 2).sum())) if k > 1 else float("inf")
        return 1.0 + float(whole[which] / max(whole[0], 1.0)), error


def _one_sided(s: Support, side: int) -> bool:
    """Nearly all of |d| on one side (0: d < 0, 1: d > 0), and the mean weight of that side clearly below 1."""
    weight = float(s.mass.sum())
    if s.n < MIN_TOKENS or weight / s.n < OFFSET or float(s.mass[1 - side]) > ONE_SIDED * weight:
        return False
    mean, error = s.weight(1 + side)
    return 1 - mean > max(OFFSET / 2, SURE * error)


def _truncated(s: Support, side: int) -> bool:
    return _one_sided(s, side) and quantile((s.below, s.above)[side], 0.999) < BOUNDED


def _top(s: Support, side: int) -> bool:
    """One-sided with a long tail: a fair share of tokens far off, a fair share right, none on the other side."""
    far = int(s.beyond[side]) / max(s.n, 1)
    return (
        _one_sided(s, side)
        and not _truncated(s, side)
        and 0.02 < far < 0.95
        and int(s.beyond[1 - side]) < 0.01 * int(s.beyond[side])
    )


def judge(scene: Scene) -> list[Draft]:
    """``support.truncated`` and ``support.top_candidate``, of either side."""
    for side, (name, other) in enumerate((("rollout", "trainer"), ("train", "engine"))):
        found = find_scope(scene, Support, lambda s, side=side: _truncated(s, side))  # type: ignore[misc]
        if found is not None:
            s, scope = found
            return [_truncated_draft(scene, s, scope, side, name, other)]
        found = find_scope(scene, Support, lambda s, side=side: _top(s, side))  # type: ignore[misc]
        if found is not None:
            s, scope = found
            return [_top_draft(scene, s, scope, side, name)]
    return []


def _common(s: Support, side: int) -> dict[str, Any]:
    mean, error = s.weight(1 + side)
    wrong = float(s.mass[1 - side]) / float(s.mass.sum())
    return {
        "strength": (1 - mean) / max(error, 1e-12),
        "strength_words": "distance of the mean ratio from 1 in its standard errors",
        "tokens": s.n,
        "token_share": 1.0,
        "figures": {
            "mean_weight": s.weight(1)[0],
            "mean_inverse_weight": s.weight(2)[0],
            "mean_d": float(s.mass[1] - s.mass[0]) / s.n,
            "std_d": math.sqrt(max(float(s.square[0]) / s.n - (float(s.mass[1] - s.mass[0]) / s.n) ** 2, 0.0)),
            "share_of_mass_on_the_other_side": wrong,
            "largest_weight": math.exp(min(s.largest_d, 700.0)),
            "S": mean,
        },
    }


def _truncated_draft(scene: Scene, s: Support, scope: Any, side: int, name: str, other: str) -> Draft:
    common = _common(s, side)
    figures = common["figures"]
    sign = "negative" if side == 0 else "positive"
    ratio = (
        f"mean ratio {sig(figures['mean_weight'])}, largest {sig(figures['largest_weight'])}"
        if side == 0
        else f"mean inverse ratio {sig(figures['mean_inverse_weight'])}"
    )
    return Draft(
        "support.truncated",
        "error",
        f"constant {sign} offset: truncated sampling (S = {sig(figures['S'])})? {name} log-probs are normalised over the kept set "
        f"(top-p, top-k, min-p), the {other}'s over the full vocabulary: {ratio}, d {sig(figures['mean_d'])} +- "
        f"{sig(figures['std_d'])}{scope.words(scene)}",
        scope=scope,
        alternatives=(
            "logits masked by a grammar or a list of banned words on one side",
            "vocabulary padding kept on one side",
        ),
        source="trl#6789, #7269, verl#6240, vllm#42259: mean ratio .896 at top-p .8",
        next="ask the engine for log-probs before truncation, or apply the same kept set in the trainer; "
        "rollout-is explain support.truncated",
        **common,
    )


def _top_draft(scene: Scene, s: Support, scope: Any, side: int, name: str) -> Draft:
    common = _common(s, side)
    far = int(s.beyond[side]) / s.n
    never = "r is never below t" if side == 0 else "t is never below r"
    return Draft(
        "support.top_candidate",
        "error",
        f"{never}: the {name} column holds the log-prob of the most likely candidate, not of the sampled token (equal at "
        f"{percent(1 - far)} of tokens, above it at the other {percent(far)}; lowest {name} {sig((s.lowest_rollout, s.lowest_train)[side])} "
        f"against {sig((s.lowest_train, s.lowest_rollout)[side])}){scope.words(scene)}",
        scope=scope,
        alternatives=("the maximum over the returned candidates was taken", "greedy decoding on one side only"),
        source="engines list the top candidates first; the sampled token is appended when it is not among them",
        next="pick the entry of the sampled token id; rollout-is explain support.top_candidate",
        **common,
    )
