"""A limit as data: which statistic, which bounds, over the run or step by step, how bad, and where it was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
Direction = Literal["both", "increase", "decrease"]
StepRule = Literal["any", "last", "mean", "median", "trimmed_mean", "share"]
STEP_RULES: tuple[StepRule, ...] = ("any", "last", "mean", "median", "trimmed_mean", "share")
DIRECTIONS: tuple[Direction, ...] = ("both", "increase", "decrease")


@dataclass(frozen=True)
class Origin:
    """Where a limit comes from, for the report and for annotations.

    >>> str(Origin("rollout-is.toml", 12)), str(Origin("built in"))
    ('rollout-is.toml:12', 'built in')
    """

    place: str
    line: int | None = None

    def __str__(self) -> str:
        return self.place if self.line is None else f"{self.place}:{self.line}"


@dataclass(frozen=True)
class MaxChange:
    """How far a statistic may move from the baseline: the larger of a relative and an absolute band.

    Attributes:
        relative: share of the baseline's absolute value, >= 0; None is off.
        absolute: in the statistic's own unit, >= 0; None is off. Beside ``relative`` it is the floor of the band.
        direction: which way counts. ``both`` by default: an unexplained improvement usually means a broken metric.

    >>> MaxChange(relative=0.5, absolute=0.001).band(0.01)
    0.005
    """

    relative: float | None = None
    absolute: float | None = None
    direction: Direction = "both"

    def band(self, baseline: float) -> float:
        """Allowed distance from this baseline value, in the statistic's unit."""
        relative = 0.0 if self.relative is None else self.relative * abs(baseline)
        return max(relative, self.absolute or 0.0)

    def broken_by(self, value: float, baseline: float) -> bool:
        """Whether ``value`` left the band around ``baseline``."""
        change = value - baseline
        outside = abs(change) > self.band(baseline)
        if self.direction == "increase":
            return outside and change > 0
        if self.direction == "decrease":
            return outside and change < 0
        return outside

    def __str__(self) -> str:
        sign = {"both": "±", "increase": "+", "decrease": "-"}[self.direction]
        parts = [] if self.relative is None else [f"{sign}{100 * self.relative:.4g} %"]
        if self.absolute is not None:
            parts.append(f"{sign}{self.absolute:.3g}")
        return f"within {' or '.join(parts)}"


@dataclass(frozen=True)
class PerStep:
    """How the series of a statistic over the steps is held against the bounds.

    Attributes:
        rule: ``any`` every step must hold; ``last`` only the last; ``mean``, ``median``, ``trimmed_mean`` of the steps;
            ``share`` at most this share of the steps may be outside.
        share: for ``share``: in [0, 1).

    >>> str(PerStep("share", 0.1))
    'at most 10 % of steps outside'
    """

    rule: StepRule
    share: float | None = None

    def __str__(self) -> str:
        if self.rule == "share":
            return f"at most {100 * (self.share or 0):.4g} % of steps outside"
        words = {"any": "every step", "last": "last step", "trimmed_mean": "trimmed mean of steps"}
        return words.get(self.rule, f"{self.rule} of steps")


@dataclass(frozen=True)
class Limit:
    """One limit on one statistic; at least one of ``min``, ``max``, ``max_change`` is given.

    Attributes:
        statistic: id, such as ``masked.mismatch.mismatch_k3_kl`` or ``coverage.nonfinite_valid_tokens``.
        min, max: inclusive bounds in the statistic's unit.
        max_change: allowed move from the baseline.
        per_step: how the step series is judged; None judges the pooled figure of the whole run.
        severity: ``error`` fails the check; ``warning`` is shown, and fails under ``--strict``.
        origin: file and line.
        reason: the author's own words, repeated when the limit is broken.
    """

    statistic: str
    min: float | None = None
    max: float | None = None
    max_change: MaxChange | None = None
    per_step: PerStep | None = None
    severity: Severity = "error"
    origin: Origin = Origin("given in code")
    reason: str = ""

    def describe(self) -> str:
        """The limit in words, as tables print it.

        >>> Limit("coverage.sequences", min=1).describe()
        '>= 1'
        >>> Limit("masked.token.rollout_is_mean", 0.9, 1.1, per_step=PerStep("last")).describe()
        '0.9 .. 1.1, last step'
        """
        parts = []
        if self.min is not None and self.max is not None:
            parts.append(f"{self.min:.4g} .. {self.max:.4g}" if self.min < self.max else f"= {self.min:.4g}")
        elif self.min is not None:
            parts.append(f">= {self.min:.4g}")
        elif self.max is not None:
            parts.append(f"<= {self.max:.4g}")
        if self.max_change is not None:
            parts.append(str(self.max_change))
        if self.per_step is not None:
            parts.append(str(self.per_step))
        return ", ".join(parts)

    def violation(self, value: float, baseline: float | None) -> str | None:
        """Why ``value`` breaks this limit, in words, or None when it holds. ``baseline`` must be given for max_change."""
        if self.min is not None and value < self.min:
            figure, bound = distinct_figures(value, self.min)
            return f"{figure} is below the minimum {bound}"
        if self.max is not None and value > self.max:
            figure, bound = distinct_figures(value, self.max)
            return f"{figure} is above the maximum {bound}"
        if self.max_change is not None and baseline is not None and self.max_change.broken_by(value, baseline):
            word = "rose" if value > baseline else "fell"
            figure, before = distinct_figures(value, baseline)
            moved, allowed = distinct_figures(abs(value - baseline), self.max_change.band(baseline))
            return f"{word} from {before} to {figure}: a change of {moved}, allowed is {allowed}"
        return None


def distinct_figures(value: float, bound: float) -> tuple[str, str]:
    """Both figures with as many digits as it takes to tell them apart (3 at least).

    >>> distinct_figures(0.10001, 0.1)
    ('0.10001', '0.1')
    """
    for digits in range(3, 18):
        left, right = f"{value:.{digits}g}", f"{bound:.{digits}g}"
        if left != right or value == bound:
            return left, right
    return repr(value), repr(bound)
