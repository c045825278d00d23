"""Profiles beside the exact figures: what the trainer would have logged, ours, and a word on the difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_is.analysis.profiles.differs import close, find, statistic
from rollout_is.analysis.profiles.registry import Profile
from rollout_is.analysis.summary import Summary
from rollout_is.dumps.notes import Note

KEY = "profiles"  # where the consumer puts its result in Summary.extra


def number(value: float | None) -> tuple[float | None, str | None]:
    """A logged value for JSON: (number, None), or (None, its word) for inf and NaN."""
    if value is None:
        return None, None
    return (value, None) if math.isfinite(value) else (None, "nan" if math.isnan(value) else f"{value}")


def with_profiles(summary: Summary, profiles: Sequence[tuple[str, Profile]]) -> Summary:
    """The summary with ``profiles``, from an analysis that ran with ``ProfileConsumer``.

    Args:
        summary: its ``extra["profiles"]`` holds the consumer's result.
        profiles: the (label, profile) pairs to report; the consumer may have run more (variants of an audit).

    A dump of several steps shows the mean over its steps, as a logger's window would; ``steps`` holds each.
    """
    steps: Mapping[str, Any] = summary.extra[KEY]["steps"]
    reports = tuple(_report(summary, label, profile, steps) for label, profile in profiles)
    notes = list(summary.notes)
    for report in reports:
        for step, text in report["errors"].items():
            where = f" at step {step}" if step else ""
            notes.append(
                Note("profile-error", "warning", report["name"], f"{report['name']} would have failed{where}: {text}")
            )
    extra = {k: v for k, v in summary.extra.items() if k != KEY}
    return replace(summary, profiles=(*summary.profiles, *reports), extra=extra, notes=tuple(dict.fromkeys(notes)))


def _report(summary: Summary, label: str, profile: Profile, steps: Mapping[str, Any]) -> dict[str, Any]:
    runs = {step: done[label] for step, done in steps.items()}
    names = list(dict.fromkeys(name for run in runs.values() for name in run["metrics"]))
    metrics: dict[str, float | None] = {}
    nonfinite: dict[str, str] = {}
    ours: dict[str, float | None] = {}
    differs: list[dict[str, Any]] = []
    for name in names:
        values = [run["metrics"][name] for run in runs.values() if name in run["metrics"]]
        value, word = number(sum(values) / len(values))
        metrics[name] = value
        if word:
            nonfinite[name] = word
        known = find(profile.name, profile.settings, name)
        exact = None if known is None else statistic(summary.views, "masked", known[0])
        if known is None or exact is None:
            continue
        ours[name] = exact.value
        if exact.value is None or value is None or not close(value, exact.value, name):
            why = known[1] if len(values) == 1 else f"mean of {len(values)} steps; {known[1]}"
            if word:
                why = f"logged as {word}; {why}"
            differs.append({"metric": name, "ours": exact.value, "statistic": f"masked.{known[0]}", "why": why})
    return {
        "name": profile.name,
        "settings": profile.settings,
        "metrics": metrics,
        "differs": differs,
        "ours": ours,
        "nonfinite": nonfinite,
        "errors": {step: run["error"] for step, run in runs.items() if run["error"]},
        "steps": {
            step: {name: number(value)[0] for name, value in run["metrics"].items()}
            for step, run in runs.items()
            if step
        },
    }
