"""Limits from a known-good run: how far each statistic may move before it is more than noise and margin."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout_is.analysis.catalog import lookup
from rollout_is.analysis.gate.limits import Limit, MaxChange, Origin, PerStep
from rollout_is.analysis.summary import Statistic, Summary
from rollout_is.dumps.errors import UsageError

DEFAULT_MARGIN = 0.5
# How many standard errors of the baseline a figure may move on noise alone. Two runs differ by sqrt(2) of them, so this is
# nearly 6 of the difference; less would do under normal errors, but means of squares have heavy tails and the error of a
# baseline of few groups is itself uncertain (benchmarks/false_alarms.py measures what is left).
NOISE = 8.0

# What is worth a limit: means and shares whose noise is known; no extremes (one token moves them), no effective sample size
# and no correlation (their noise is not known; chi2 and the mean differences see the same), no perplexities (they move with
# training). Each entry says whether the steps are held too.
GUARDED: tuple[tuple[str, bool], ...] = (
    ("masked.mismatch.mismatch_logprob_abs_diff", True),
    ("masked.mismatch.mismatch_k3_kl", True),
    ("masked.mismatch.mismatch_kl", True),
    ("masked.mismatch.mismatch_prob_abs_diff", False),
    ("masked.mismatch.mismatch_extreme_fraction", False),
    ("masked.mismatch.mismatch_log_ppl_abs_diff", False),
    ("masked.mismatch.mismatch_ppl_ratio", False),
    ("masked.token.rollout_is_mean", True),
    ("masked.mismatch.mismatch_chi2_token", False),
    ("masked.geometric.rollout_is_mean", False),
    ("masked.per_sequence.rollout_is_seq_mean", False),
)


def baseline_limits(summary: Summary, margin: float = DEFAULT_MARGIN, place: str = "baseline") -> tuple[Limit, ...]:
    """Limits around the figures of a known-good run.

    Args:
        summary: of the known-good run; grouped by step where steps are to be held too.
        margin: how far a figure may move, as a share of its distance from the ideal (0, or 1 for ratios): 0.5 is +-50 %.
        place: named as the origin of the limits.

    Returns:
        two-sided ``max_change`` limits. The band is the larger of the margin and eight standard errors of the baseline; a share
        that was never seen gets three in n (the rule of three).
    """
    found: list[Limit] = []
    for statistic_id, stepwise in GUARDED:
        statistic = summary.get(statistic_id)
        if statistic is None or statistic.value is None:
            continue
        origin = Origin(f"{place} (margin {100 * margin:g} %)")
        found.append(Limit(statistic_id, max_change=_change(statistic_id, [statistic], margin), origin=origin))
        steps = _step_statistics(summary, statistic_id) if stepwise else []
        if len(steps) > 1 and all(step.value is not None for step in steps):
            change = _change(statistic_id, steps, margin)
            found.append(Limit(statistic_id, max_change=change, per_step=PerStep("any"), origin=origin))
    return tuple(found)


def check_margin(margin: float) -> None:
    """Refuse a margin that no run can hold.

    Raises:
        UsageError: it is not a finite share above 0.
    """
    if not 0 < margin < math.inf:
        raise UsageError(
            f"--margin {margin}",
            f"expected a share above 0, found {margin}",
            "limits without any margin break on noise",
            "0.5 lets a figure move by half of its distance from the ideal",
            code="margin",
        )


def _change(statistic_id: str, statistics: Sequence[Statistic], margin: float) -> MaxChange:
    """One band that suits all the given statistics (the pooled one, or every step's)."""
    entry = lookup(statistic_id)
    ideal_is_one = entry is not None and entry.better in ("near 1", "higher")
    noise = max(_noise(statistic_id, statistic) for statistic in statistics)
    if not ideal_is_one:
        return MaxChange(relative=margin, absolute=_two_digits_up(noise))
    distance = max(abs((statistic.value or 0.0) - 1.0) for statistic in statistics)
    return MaxChange(absolute=_two_digits_up(max(margin * distance, noise)))


def _noise(statistic_id: str, statistic: Statistic) -> float:
    if statistic.stderr:
        return NOISE * statistic.stderr
    if "fraction" in statistic_id and statistic.value == 0.0 and statistic.n:
        return 3.0 / statistic.n
    return 0.0


def _step_statistics(summary: Summary, statistic_id: str) -> list[Statistic]:
    view, section, name = statistic_id.split(".")
    found = []
    for group in summary.groups.get("step", {}).values():
        statistic = group.views.get(view, {}).get(section, {}).get(name)
        if statistic is not None:
            found.append(statistic)
    return found


def _two_digits_up(value: float) -> float:
    """Two significant digits, rounded up: a limit is read by people, and rounding must not tighten it."""
    if value == 0.0:
        return 0.0
    exponent = math.floor(math.log10(value)) - 1
    return float(f"{math.ceil(value / 10.0**exponent - 1e-9)}e{exponent}")


def limits_toml(limits: Sequence[Limit], summary: Summary, baseline_path: str | None = None) -> str:
    """The limits as a file to check in; reading it back gives the same limits.

    Args:
        limits: from ``baseline_limits``.
        summary: the known-good run, for the figures in the comments.
        baseline_path: written as the baseline that ``check`` uses when none is named.
    """
    lines = [
        "# Limits for `rollout-is check`, written by `rollout-is baseline`. Edit freely: docs/ci.md lists every key.",
        "# Each band is two-sided: an unexplained improvement usually means a broken metric.",
    ]
    if baseline_path is not None:
        lines.append(f"baseline = {_string(baseline_path)}")
    lines += ["", "[limits]"]
    grouped: dict[str, list[Limit]] = {}
    for limit in limits:
        grouped.setdefault(limit.statistic, []).append(limit)
    for statistic_id, several in grouped.items():
        statistic = summary.get(statistic_id)
        if statistic is not None and statistic.value is not None:
            error = f" ± {statistic.stderr:.2g}" if statistic.stderr else ""
            lines.append(f"# was {statistic.value:.6g}{error}")
        tables = [_inline(limit) for limit in several]
        key = _string(statistic_id)
        if len(tables) == 1:
            lines.append(f"{key} = {tables[0]}")
        else:
            lines += [f"{key} = [", *(f"  {table}," for table in tables), "]"]
    return "\n".join(lines) + "\n"


def _inline(limit: Limit) -> str:
    parts = []
    if limit.min is not None:
        parts.append(f"min = {limit.min!r}")
    if limit.max is not None:
        parts.append(f"max = {limit.max!r}")
    if limit.max_change is not None:
        change = limit.max_change
        inner = [] if change.relative is None else [f"relative = {change.relative!r}"]
        inner += [] if change.absolute is None else [f"absolute = {change.absolute!r}"]
        inner += [] if change.direction == "both" else [f"direction = {_string(change.direction)}"]
        parts.append(f"max_change = {{ {', '.join(inner)} }}")
    if limit.per_step is not None:
        rule = limit.per_step
        parts.append(
            f"per_step = {{ share = {rule.share!r} }}" if rule.rule == "share" else f'per_step = "{rule.rule}"'
        )
    if limit.severity != "error":
        parts.append(f'severity = "{limit.severity}"')
    if limit.reason:
        parts.append(f"reason = {_string(limit.reason)}")
    return f"{{ {', '.join(parts)} }}"


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'
