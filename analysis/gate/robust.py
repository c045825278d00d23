"""One figure for a series of steps: mean, median, trimmed mean. None of them sees what the others see; docs/ci.md says which to use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from rollout_is.analysis.gate.limits import StepRule

TRIM = 0.1  # share cut off at each end


def reduce_steps(rule: StepRule, values: Sequence[float]) -> float:
    """Reduce the values of the steps to one.

    Args:
        rule: ``mean``, ``median`` or ``trimmed_mean`` (a tenth cut at each end, at least one value once there are three).
        values: one a step, at least one.

    >>> spike = [1.0] * 19 + [50.0]
    >>> [reduce_steps(rule, spike) for rule in ("mean", "median", "trimmed_mean")]
    [3.45, 1.0, 1.0]
    """
    if rule == "mean":
        return math.fsum(values) / len(values)
    if rule == "median":
        return float(median(values))
    if rule == "trimmed_mean":
        ordered = sorted(values)
        cut = max(1, int(TRIM * len(ordered))) if len(ordered) >= 3 else 0
        kept = ordered[cut : len(ordered) - cut]
        return math.fsum(kept) / len(kept)
    raise ValueError(f"expected mean, median or trimmed_mean, found {rule!r}")
