"""Summaries by hand for the tests of compare and check: plain numbers, no dump, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_is.analysis.summary import Group, Statistic, Summary

ABS_DIFF = "masked.mismatch.mismatch_logprob_abs_diff"
K3 = "masked.mismatch.mismatch_k3_kl"
TOKEN_MEAN = "masked.token.rollout_is_mean"


def views(figures: Mapping[str, Statistic]) -> dict[str, dict[str, dict[str, Statistic]]]:
    out: dict[str, dict[str, dict[str, Statistic]]] = {}
    for statistic_id, statistic in figures.items():
        view, section, name = statistic_id.split(".")
        out.setdefault(view, {}).setdefault(section, {})[name] = statistic
    return out


def summary(
    figures: Mapping[str, Statistic],
    steps: Mapping[str, Mapping[str, Statistic]] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
    **coverage: int,
) -> Summary:
    """A summary that holds these figures; ``steps`` gives the step groups."""
    covered = {"positions": 16384, "valid_tokens": 10000, "sequences": 64, "nonfinite_valid_tokens": 0} | coverage
    groups = {}
    if steps:
        groups["step"] = {name: Group(views(of), 4096, 2500, 16) for name, of in steps.items()}
    given = {"mask": "response_mask", "train": "train", "rollout": "rollout", "lower": 0.5, "upper": 2.0}
    return Summary(dict(source or {}), covered, given | dict(settings or {}), views(figures), groups)


def series(values: Mapping[str, float], statistic_id: str = ABS_DIFF, stderr: float | None = 1e-4) -> Summary:
    """A summary with one statistic: its pooled figure (plain mean) and its steps, as many tokens each."""
    pooled = sum(values.values()) / len(values)
    return summary(
        {statistic_id: Statistic(pooled, 10000, stderr)},
        {step: {statistic_id: Statistic(value, 2500, stderr)} for step, value in values.items()},
    )
