"""Hold a summary against limits: every limit gives one outcome, and whatever cannot be evaluated is an error, never a pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_is.analysis.compare.settings_diff import concerns, settings_differences
from rollout_is.analysis.gate.limits import Limit, Origin
from rollout_is.analysis.gate.lookup import Missing, series, single
from rollout_is.analysis.gate.robust import reduce_steps
from rollout_is.analysis.summary import Summary

Status = Literal["pass", "fail", "error"]
# No set of limits, however small, passes a dump in which nothing was compared.
_COMPARABLE = Limit("coverage.valid_tokens", min=1.0, origin=Origin("always"), reason="nothing was compared")


@dataclass(frozen=True)
class Outcome:
    """What became of one limit.

    Attributes:
        limit: the limit.
        status: ``pass``, ``fail`` (evaluated and broken) or ``error`` (could not be evaluated).
        value: the figure that was judged: pooled, reduced over steps, or of the worst step; None when there is none.
        baseline: the same figure of the baseline, where one is given and holds it.
        message: why it failed or could not be evaluated; empty on a pass.
        steps: for a limit on single steps: those that broke it.
    """

    limit: Limit
    status: Status
    value: float | None = None
    baseline: float | None = None
    message: str = ""
    steps: tuple[str, ...] = ()

    @property
    def change(self) -> float | None:
        """Value minus baseline, where both exist."""
        return None if self.value is None or self.baseline is None else self.value - self.baseline

    @property
    def fatal(self) -> bool:
        """Whether the check must not pass: a broken limit of severity error, or any limit that was not evaluated."""
        return self.status == "error" or (self.status == "fail" and self.limit.severity == "error")

    def to_dict(self) -> dict[str, Any]:
        """The outcome as JSON data."""
        return {
            "statistic": self.limit.statistic,
            "status": self.status,
            "severity": self.limit.severity,
            "limit": self.limit.describe(),
            "origin": str(self.limit.origin),
            "value": self.value,
            "baseline": self.baseline,
            "change": self.change,
            "steps": list(self.steps),
            "message": self.message,
            "reason": self.limit.reason,
        }


@dataclass(frozen=True)
class Verdict:
    """All outcomes of one check, in the order of the limits."""

    outcomes: tuple[Outcome, ...]
    strict: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether the exit code may be 0. No limit at all is not a pass."""
        return bool(self.outcomes) and not any(self.counts(outcome) for outcome in self.outcomes)

    def counts(self, outcome: Outcome) -> bool:
        """Whether this outcome fails the check (under ``strict`` a broken warning does too)."""
        return outcome.fatal or (self.strict and outcome.status != "pass")

    def by_urgency(self) -> list[Outcome]:
        """Failures first, then errors, then warnings, then what holds; each in the order of the limits."""

        def rank(outcome: Outcome) -> int:
            if outcome.status == "pass":
                return 3
            return (0 if outcome.status == "fail" else 1) if outcome.fatal else 2

        return sorted(self.outcomes, key=rank)


def evaluate(
    summary: Summary,
    limits: Sequence[Limit],
    baseline: Summary | None = None,
    *,
    strict: bool = False,
) -> Verdict:
    """Hold a summary against limits.

    Args:
        summary: of the run under test; limits per step need it grouped by step.
        limits: see ``Limit``.
        baseline: of the known-good run, for ``max_change`` and for the change that is shown.
        strict: broken limits of severity ``warning`` fail too.

    Returns:
        one outcome a limit. Missing, null, NaN, a missing step or a baseline of another definition is an ``error`` outcome;
        where nothing was compared and no limit says so, one more.
    """
    outcomes = tuple(_evaluate(summary, limit, baseline) for limit in limits)
    nothing = summary.coverage.get("valid_tokens") is not None and summary.comparable <= 0
    if nothing and not any(outcome.fatal for outcome in outcomes):
        outcomes = (*outcomes, Outcome(_COMPARABLE, "error", 0.0, None, "no valid token is finite on both sides"))
    return Verdict(outcomes, strict)


def _evaluate(summary: Summary, limit: Limit, baseline: Summary | None) -> Outcome:
    try:
        _same_definition(summary, limit, baseline)
        if limit.per_step is None:
            return _pooled(summary, limit, baseline)
        if limit.per_step.rule in ("mean", "median", "trimmed_mean"):
            return _reduced(summary, limit, baseline)
        return _single_steps(summary, limit, baseline)
    except Missing as missing:
        return Outcome(limit, "error", missing.value, missing.baseline, str(missing))


def _same_definition(summary: Summary, limit: Limit, baseline: Summary | None) -> None:
    if limit.max_change is None:
        return
    if baseline is None:
        raise Missing("max_change needs a baseline, and none is given: add --baseline main.json")
    for difference in settings_differences(baseline, summary):
        if concerns(difference, limit.statistic):
            raise Missing(
                f"the baseline is of another definition: {difference.key} is {difference.a} there and {difference.b} here"
            )


def _pooled(summary: Summary, limit: Limit, baseline: Summary | None) -> Outcome:
    value = single(summary, limit.statistic)
    before = _from_baseline(limit, baseline, value)
    return _judge(limit, value, before)


def _judge(limit: Limit, value: float, before: float | None) -> Outcome:
    message = limit.violation(value, before)
    return Outcome(limit, "fail" if message else "pass", value, before, message or "")


def _from_baseline(limit: Limit, baseline: Summary | None, value: float) -> float | None:
    """The baseline's figure; needed by max_change, otherwise only shown."""
    if baseline is None:
        return None
    try:
        return single(baseline, limit.statistic)
    except Missing as missing:
        if limit.max_change is None:
            return None
        raise Missing(f"in the baseline: {missing}", value) from None


def _step_values(
    summary: Summary, limit: Limit, baseline: Summary | None
) -> tuple[dict[str, float], dict[str, float] | None]:
    now = series(summary, limit.statistic)
    if baseline is None:
        return now, None
    try:
        before = series(baseline, limit.statistic)
    except Missing as missing:
        if limit.max_change is None:
            return now, None
        raise Missing(f"in the baseline: {missing}") from None
    absent = [step for step in before if step not in now]
    if absent:
        raise Missing(f"missing step{'s'[: len(absent) > 1]} {_listed(absent)}, which the baseline holds")
    unknown = [step for step in now if step not in before]
    if unknown and limit.max_change is not None:
        raise Missing(f"step{'s'[: len(unknown) > 1]} {_listed(unknown)} missing from the baseline")
    return now, before


def _reduced(summary: Summary, limit: Limit, baseline: Summary | None) -> Outcome:
    assert limit.per_step is not None
    now, before = _step_values(summary, limit, baseline)
    rule = limit.per_step.rule
    value = reduce_steps(rule, list(now.values()))
    return _judge(limit, value, reduce_steps(rule, list(before.values())) if before else None)


def _single_steps(summary: Summary, limit: Limit, baseline: Summary | None) -> Outcome:
    assert limit.per_step is not None
    now, before = _step_values(summary, limit, baseline)
    steps = list(now)[-1:] if limit.per_step.rule == "last" else list(now)
    broken: list[tuple[str, str]] = []
    for step in steps:
        message = limit.violation(now[step], before.get(step) if before else None)
        if message:
            broken.append((step, message))
    # the step that is shown: the one furthest out, so that the line says the worst of it
    shown = max(broken or [(step, "") for step in steps], key=lambda item: _distance(limit, now, before, item[0]))[0]
    value, base = now[shown], before.get(shown) if before else None
    allowed = 0.0 if limit.per_step.rule != "share" else limit.per_step.share or 0.0
    if len(broken) <= allowed * len(steps):
        return Outcome(limit, "pass", value, base, "", tuple(step for step, _ in broken))
    message = f"step {shown}: {dict(broken)[shown]}"
    if len(steps) > 1:
        message += f"; {len(broken)} of {len(steps)} steps outside ({_listed([step for step, _ in broken])})"
    return Outcome(limit, "fail", value, base, message, tuple(step for step, _ in broken))


def _distance(limit: Limit, now: dict[str, float], before: dict[str, float] | None, step: str) -> float:
    value = now[step]
    outside = [0.0]
    if limit.max is not None:
        outside.append(value - limit.max)
    if limit.min is not None:
        outside.append(limit.min - value)
    if before is not None and step in before and limit.max_change is not None:
        outside.append(abs(value - before[step]) - limit.max_change.band(before[step]))
    return max(outside) if math.isfinite(value) else math.inf


def _listed(steps: Iterable[str], most: int = 6) -> str:
    steps = list(steps)
    return ", ".join(steps[:most]) + (f" and {len(steps) - most} more" if len(steps) > most else "")
