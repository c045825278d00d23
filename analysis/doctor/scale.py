"""Scale: one side is the other times something: a temperature, another base of the logarithm, probabilities, a sign."""

from __future__ import annotations

import math
from typing import Any

from rollout_is.analysis.batch import Ints
from rollout_is.analysis.doctor.pairs import RATIO_STEP, Line, Pairs, jackknife, line
from rollout_is.analysis.doctor.support import Support
from rollout_is.analysis.doctor.verdict import Draft, Scene, Scope, find_scope, sig
from rollout_is.analysis.doctor.window import PROB_NAMES

MIN_TOKENS = 200
MIN_CORRELATION = 0.6  # below it a slope says little (bf16 against fp8 is at 0.87, verl#7519)
OFF = 0.06  # slopes within 1 +- OFF happen with noise that grows at rare tokens
SURE = 6.0  # standard errors
EXACT = 0.998  # share of t explained by r * slope when it is a mere factor; a temperature changes the normaliser too
BASE_TOLERANCE = 0.004  # a temperature of 0.7 is 1 % from ln 2
BASES = {
    1 / math.log(2): "the train side is in bits (log base 2)",
    math.log(2): "the rollout side is in bits (log base 2)",
    1 / math.log(10): "the train side is in log base 10",
    math.log(10): "the rollout side is in log base 10",
}


def _moments(s: Pairs) -> Line:
    return line(s.folds.sum(axis=0))


def _off(s: Pairs) -> bool:
    """Both regressions on the same side of 1, clearly."""
    if s.n < MIN_TOKENS:
        return False
    x = _moments(s)
    if x.correlation < MIN_CORRELATION:
        return False
    if x.low > 1 + OFF:
        return x.low - 1 > SURE * jackknife(s.folds, "low")
    if x.high < 1 - OFF:
        return 1 - x.high > SURE * jackknife(s.folds, "high")
    return False


def _probabilities(side: int, s: Pairs) -> bool:
    """Nearly every value in (0, 1] and its logarithm near the other side."""
    inside = int(s.inside_unit[side])
    return s.n >= 32 and inside >= 0.95 * s.n and float(s.as_probability[side]) / inside < 0.25


def _negated(s: Pairs) -> bool:
    x = _moments(s)
    return s.n >= 32 and x.correlation < -0.8 and x.mean_r * x.mean_t < 0


def edge(ratios: Ints, slope: float) -> float:
    """The ratio of temperatures: the far edge of t / r.

    With t = log softmax(a l), r = log softmax(l): for a > 1 the normaliser makes t >= a r at every token, with equality where the
    distribution is peaked, so a is the largest t / r; for a < 1 the smallest. The 0.2 % quantile stands for it, against noise.
    """
    n = int(ratios.sum())
    if n == 0:
        return slope
    cumulative = ratios.cumsum()
    p = 0.998 if slope > 1 else 0.002
    at = int((cumulative < p * n).sum())
    value = (at + 0.5) * RATIO_STEP
    return max(value, slope) if slope > 1 else min(value, slope)


def _by_bin(s: Pairs) -> dict[str, dict[str, Any]]:
    return {
        name: {"tokens": int(row[0]), "mean_rollout": float(row[1] / row[0]), "mean_train": float(row[2] / row[0])}
        for name, row in zip(PROB_NAMES, s.bins, strict=True)
        if row[0]
    }


def judge(scene: Scene) -> list[Draft]:
    """``scale.probabilities``, ``scale.sign``, ``scale.log_base``, ``scale.divided`` or ``scale.temperature``."""
    for side, name in ((0, "rollout"), (1, "train")):
        found = find_scope(scene, Pairs, lambda s, side=side: _probabilities(side, s))  # type: ignore[misc]
        if found is not None:
            s, scope = found
            apart = float(s.as_probability[side]) / int(s.inside_unit[side])
            return [
                Draft(
                    "scale.probabilities",
                    "error",
                    f"the {name} column holds probabilities, not log-probs: every value is in (0, 1], and its logarithm is within "
                    f"{sig(apart)} nats of the other side{scope.words(scene)}",
                    1.0 / max(apart, 1e-6),
                    "one over the mean distance of the logarithm from the other side",
                    scope,
                    tokens=s.n,
                    token_share=1.0,
                    alternatives=("ratios instead of log-probs",),
                    figures={"mean_abs_distance_of_log": apart},
                    source="definition: a log-prob is never above 0",
                    next="take the logarithm before dumping; rollout-is explain scale.probabilities",
                )
            ]
    found = find_scope(scene, Pairs, _negated)
    if found is not None:
        s, scope = found
        x = _moments(s)
        side_name = "rollout" if x.mean_r > 0 else "train"
        return [
            Draft(
                "scale.sign",
                "error",
                f"the {side_name} column has the opposite sign (correlation {sig(x.correlation)}): negative log-likelihoods instead "
                f"of log-probs{scope.words(scene)}",
                -x.correlation,
                "minus the correlation of both sides",
                scope,
                tokens=s.n,
                token_share=1.0,
                figures={"correlation": x.correlation},
                source="definition: a log-prob is never above 0",
                next="negate that column; rollout-is explain scale.sign",
            )
        ]
    found = find_scope(scene, Pairs, _off)
    return [] if found is None else [_slope(scene, *found)]


def _slope(scene: Scene, s: Pairs, scope: Scope) -> Draft:
    x = _moments(s)
    above = x.low > 1
    slope = x.low if above else x.high
    error = jackknife(s.folds, "low" if above else "high")
    z = abs(slope - 1) / max(error, 1e-12)
    common: dict[str, Any] = {
        "strength": z,
        "strength_words": "distance of the slope from 1 in its standard errors",
        "scope": scope,
        "tokens": s.n,
        "token_share": 1.0,
        "figures": {
            "slope": slope,
            "slope_t_on_r": x.low,
            "slope_errors_in_both": x.total,
            "intercept": x.intercept,
            "stderr": error,
            "correlation": x.correlation,
            "by_rollout_probability": _by_bin(s),
        },
        "source": "trl#4159, #4873, open-instruct#1678 (temperature on one side); slope bracketed by both regressions",
    }
    if x.origin_fit > EXACT:
        for base, words in BASES.items():
            if abs(x.origin_slope / base - 1) < BASE_TOLERANCE:
                common["figures"]["factor"] = x.origin_slope
                return Draft(
                    "scale.log_base",
                    "error",
                    f"train = {sig(x.origin_slope)} x rollout to within noise: {words}{scope.words(scene)}",
                    alternatives=("log-probs divided by a temperature of that value",),
                    next="multiply by the natural logarithm of the base; rollout-is explain scale.log_base",
                    **common,
                )
        common["figures"]["factor"] = x.origin_slope
        factor = x.origin_slope
        return Draft(
            "scale.divided",
            "error",
            f"train = {sig(factor)} x rollout, without a change of normaliser: log-probs were divided by a temperature after the "
            f"softmax, not the logits before it (the rollout side by {sig(factor)}, or the train side by {sig(1 / factor)})"
            f"{scope.words(scene)}",
            alternatives=("a temperature on the logits of a model that is nearly always certain",),
            next="divide logits, then normalise; rollout-is explain scale.divided",
            **common,
        )
    ratio = edge(s.ratios, x.origin_slope if (x.origin_slope > 1) == above else slope)
    common["figures"]["temperature_ratio"] = ratio
    sharper, other = ("train", "rollout") if above else ("rollout", "train")
    explained = max(ratio, 1 / ratio)
    return Draft(
        "scale.temperature",
        "error",
        f"slope != 1: temperature on one side? The regression of train on rollout has slope {sig(slope)} +- {sig(error)}: {sharper} "
        f"log-probs are those of a distribution sharper than the {other} side's by a temperature ratio of about {sig(explained)} "
        f"(T = {sig(1 / explained)} against 1, or 1 against {sig(explained)}){scope.words(scene)}{_sampled(scene, scope, common)}",
        alternatives=("penalties or a policy many steps ahead on one side",),
        next="score both sides at the sampling temperature; rollout-is explain scale.temperature",
        **common,
    )


def _sampled(scene: Scene, scope: Scope, common: dict[str, Any]) -> str:
    """Which side the tokens were drawn from: its mean inverse ratio is 1."""
    support = scene.pooled(Support, ranks=scope.ranks, steps=scope.steps)
    if not support.n:
        return ""
    (w, e1), (v, e2) = support.weight(1), support.weight(2)
    common["figures"].update(mean_weight=w, mean_inverse_weight=v)
    from_rollout, from_train = abs(w - 1) < max(0.01, 3 * e1), abs(v - 1) < max(0.01, 3 * e2)
    if from_rollout == from_train:
        return f"; E[w] = {sig(w)}, E[1/w] = {sig(v)}"
    name, what = ("rollout", f"E[w] = {sig(w)}") if from_rollout else ("train", f"E[1/w] = {sig(v)}, E[w] = {sig(w)}")
    return f"; the tokens were sampled from the {name} side's distribution ({what})"
