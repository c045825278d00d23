"""From the parts of all units to findings, causes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout_is.analysis.doctor import (
    causes,
    copies,
    edges,
    growing,
    lag,
    nonfinite,
    numerics,
    passes,
    periodic,
    placeholder,
    position,
    scale,
    support,
    suspects,
    tails,
    unrelated,
    weights,
    where,
)
from rollout_is.analysis.doctor.consumer import Parts
from rollout_is.analysis.doctor.verdict import Draft, Scene
from rollout_is.analysis.doctor.worst import Worst
from rollout_is.analysis.summary import Finding

JUDGES: tuple[Callable[[Scene], list[Draft]], ...] = (
    copies.judge,
    passes.judge,
    placeholder.judge,
    nonfinite.judge,
    growing.judge,
    lag.judge,
    suspects.judge,
    unrelated.judge,
    edges.judge,
    periodic.judge,
    scale.judge,
    support.judge,
    where.ranks,
    where.steps,
    where.sequences,
    where.lengths,
    position.judge,
    tails.judge,
    weights.judge,
    numerics.judge_positive,
    numerics.judge_resolution,
    numerics.judge_metadata,
)


def diagnose(parts: Parts) -> tuple[Finding, ...]:
    """Findings, worst first, consequences attached to their causes.

    Args:
        parts: what ``Doctor.finish`` gave, in unit order.
    """
    scene = Scene(parts)
    drafts: list[Draft] = []
    for judge in JUDGES:
        drafts += judge(scene)
    listed = causes.attach(scene, drafts)
    for (
        draft
    ) in listed:  # a fault of all tokens alike has no place of its own: the worst tokens of its scope stand for it
        draft.places = draft.places or Worst.of(scene, draft.scope)
    return tuple(draft.finish(scene) for draft in listed)


def worst(findings: Sequence[Finding], severity: str = "warning") -> list[Finding]:
    """Findings of a severity and above, as a gate asks for them."""
    from rollout_is.analysis.doctor.verdict import SEVERITIES

    return [f for f in findings if SEVERITIES.index(f.severity) >= SEVERITIES.index(severity)]
