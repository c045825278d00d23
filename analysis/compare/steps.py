"""Step by step: the change at every common step, the step from which it lasts, and figures that one spike cannot carry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from rollout_is.analysis.catalog import lookup
from rollout_is.analysis.compare.result import Block, Row, Series
from rollout_is.analysis.compare.rows import ALPHA, Tests, corrected, make_row
from rollout_is.analysis.gate.lookup import step_order
from rollout_is.analysis.summary import Group, Statistic, Summary

BLOCK = 8  # steps a block, as reports of precision runs use


def common_steps(a: Summary, b: Summary) -> list[str]:
    """Steps that both summaries are grouped by, in order."""
    both = set(a.groups.get("step", {})) & set(b.groups.get("step", {}))
    return sorted(both, key=step_order)


def step_series(
    a: Summary,
    b: Summary,
    statistic_id: str,
    tests: Mapping[str, Tests] | None = None,
    block: int = BLOCK,
    alpha: float = ALPHA,
) -> Series | None:
    """Compare one statistic over the common steps.

    Args:
        a, b: summaries grouped by step.
        statistic_id: with its view.
        tests: step -> id -> test, where the sequences of both sides are at hand.
        block: steps a block of the block means.
        alpha: level of the per-step tests, corrected over the steps of this series.

    Returns:
        None when no common step holds the statistic on both sides.
    """
    rows: dict[str, Row] = {}
    for step in common_steps(a, b):
        left, right = a.groups["step"][step], b.groups["step"][step]
        figures = _at(left, statistic_id), _at(right, statistic_id)
        if figures[0] is None or figures[1] is None:
            continue
        sides = _as_summary(left), _as_summary(right)
        clusters = left.sequences, right.sequences
        rows[step] = make_row(statistic_id, figures[0], figures[1], sides, clusters, (tests or {}).get(step))
    if not rows:
        return None
    steps = dict(zip(rows, corrected(list(rows.values()), alpha), strict=True))
    starts_at, share = _onset(steps)
    real = [step for step, row in steps.items() if is_real(row)]
    values = [(row.a.value, row.b.value) for row in steps.values()]
    return Series(
        statistic_id,
        steps,
        _median([left for left, _ in values]),
        _median([right for _, right in values]),
        _blocks(steps, statistic_id, block),
        starts_at,
        share,
        tuple(real) if starts_at is None else (),
    )


def is_real(row: Row) -> bool:
    """Whether a tested row differs for real."""
    return row.verdict in ("better", "worse", "changed")


def _at(group: Group, statistic_id: str) -> Statistic | None:
    view, section, name = statistic_id.split(".")
    return group.views.get(view, {}).get(section, {}).get(name)


def _as_summary(group: Group) -> Summary:
    return Summary({}, {"sequences": group.sequences}, {}, group.views)


def _onset(steps: Mapping[str, Row]) -> tuple[str | None, float | None]:
    """The step at which a lasting difference starts, and the share of steps from there on that differ on their own.

    Least squares of a step function: no change before, one mean change after, each step weighted by its own standard error.
    It is only named when a step differs for real and at least half of the steps from there on do.
    """
    names = list(steps)
    changes = [row.change for row in steps.values()]
    if any(change is None for change in changes) or not any(is_real(row) for row in steps.values()):
        return None, None
    errors = [row.test.stderr if row.test else 0.0 for row in steps.values()]
    floor = min([error for error in errors if error > 0], default=0.0)
    if floor == 0.0:
        return None, None
    weights = [1.0 / max(error, floor) ** 2 for error in errors]
    deltas = [change or 0.0 for change in changes]
    best = min(range(len(names)), key=lambda k: (_misfit(deltas, weights, k), -k))
    after = [is_real(row) for row in list(steps.values())[best:]]
    share = sum(after) / len(after)
    return (names[best], share) if share >= 0.5 else (None, None)


def _misfit(deltas: Sequence[float], weights: Sequence[float], start: int) -> float:
    before = math.fsum(w * d * d for d, w in zip(deltas[:start], weights[:start], strict=True))
    total = math.fsum(weights[start:])
    mean = math.fsum(w * d for d, w in zip(deltas[start:], weights[start:], strict=True)) / total
    return before + math.fsum(w * (d - mean) ** 2 for d, w in zip(deltas[start:], weights[start:], strict=True))


def _median(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(median(present)) if len(present) == len(values) else None


def _blocks(steps: Mapping[str, Row], statistic_id: str, size: int) -> tuple[Block, ...]:
    """Pooled block means; only for means, whose denominators are known, and only where there is more than one block."""
    entry = lookup(statistic_id)
    is_mean = (
        entry is not None
        and entry.reduction == "pooled sum"
        and all(row.a.stderr is not None and row.b.stderr is not None for row in steps.values())
    )
    if not is_mean or len(steps) <= size:
        return ()
    names = list(steps)
    found = []
    for first in range(0, len(names), size):
        inside = names[first : first + size]
        left = _pooled([steps[step].a for step in inside])
        right = _pooled([steps[step].b for step in inside])
        if left is not None and right is not None:
            found.append(Block(inside[0], inside[-1], left, right))
    return tuple(found)


def _pooled(statistics: Sequence[Statistic]) -> float | None:
    total = sum(statistic.n for statistic in statistics)
    if total == 0 or any(statistic.value is None for statistic in statistics):
        return None
    return math.fsum((statistic.value or 0.0) * statistic.n for statistic in statistics) / total
