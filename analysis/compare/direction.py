"""Better or worse, from the statistic's own direction; and why some statistics are never tested."""

from __future__ import annotations

from rollout_is.analysis.catalog import lookup
from rollout_is.analysis.compare.result import Verdict
from rollout_is.analysis.summary import Statistic, Summary

# Beyond this shape the weights have no variance, and a standard error of their mean means nothing.
HEAVY_TAIL = 0.5


def direction(statistic_id: str, a: float, b: float) -> Verdict:
    """Which way a real change from ``a`` to ``b`` goes.

    >>> direction("masked.mismatch.mismatch_kl", -0.2, 0.1)
    'better'
    >>> direction("masked.token.rollout_is_mean", 1.0, 0.9)
    'worse'
    """
    entry = lookup(statistic_id)
    better = entry.better if entry else None
    if better is None:
        return "changed"
    ideal = {"near 0": 0.0, "near 1": 1.0}.get(better)
    gain = a - b if better == "lower" else b - a
    if ideal is not None:
        gain = abs(a - ideal) - abs(b - ideal)
    if gain == 0:
        return "changed"
    return "better" if gain > 0 else "worse"


def why_untested(statistic_id: str, a: Statistic, b: Statistic, sides: tuple[Summary, Summary]) -> str | None:
    """The reason why a change of this statistic cannot be tested, or None when it can.

    Args:
        statistic_id: with its view.
        a, b: the two figures.
        sides: the summaries that they come from (the tail of the weights stands there).
    """
    for statistic in (a, b):
        if statistic.value is None:
            return statistic.why or "no value"
    entry = lookup(statistic_id)
    reduction = entry.reduction if entry else "pooled sum"
    name = statistic_id.rpartition(".")[2]
    if reduction in ("min", "max"):
        return "an extreme has no standard error"
    if reduction == "quantile":
        return "an order statistic: see the shift of quantiles"
    if reduction == "top-K fit":
        return "a fit to the tail"
    if "eff_sample_size" in name or "max_weight_share" in name:
        return "a ratio of weight sums has no standard error"
    if ".sequence." in f".{statistic_id}" or name == "mismatch_chi2_seq":
        tail = _heavy_tail(statistic_id, sides)
        if tail or name == "mismatch_chi2_seq":
            return tail or "chi-squared of products: a few sequences carry it"
    for statistic in (a, b):
        if statistic.stderr is None:
            return "no standard error: fewer than two clusters, or none is defined"
    return None


def _heavy_tail(statistic_id: str, sides: tuple[Summary, Summary]) -> str | None:
    """Products of ratios: their mean is only tested where the tail of the weights is known to have a variance."""
    view = statistic_id.partition(".")[0]
    for summary in sides:
        shape = summary.get(f"{view}.sequence.pareto_k")
        if shape is None or shape.value is None:
            reason = shape.why if shape is not None else "not in the summary"
            return f"products of ratios, and the tail is unknown (pareto_k: {reason})"
        if shape.value >= HEAVY_TAIL:
            return f"products of ratios with pareto_k {shape.value:.2g}: their variance may be infinite"
    return None
