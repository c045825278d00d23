"""Summaries built by hand, so that rendering is tested apart from the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollout_is.analysis.catalog import catalog
from rollout_is.analysis.summary import Group, Statistic, Summary
from rollout_is.dumps.notes import Note

# The reference vector of METRICS.md, where it states the figure.
MASKED = {
    "token.rollout_is_mean": 1.3476,
    "token.rollout_is_std": 1.2234,
    "token.rollout_is_min": 0.1353,
    "token.rollout_is_max": 3.6693,
    "token.rollout_is_eff_sample_size": 0.5482,
    "per_sequence.rollout_is_seq_mean": 1.5208,
    "per_sequence.rollout_is_seq_min": 0.6544,
    "per_sequence.rollout_is_seq_max": 2.3872,
    "mismatch.mismatch_kl": 0.18,
    "mismatch.mismatch_k3_kl": 0.5275,
    "mismatch.mismatch_logprob_abs_diff": 0.82,
    "mismatch.mismatch_training_ppl": 4.6056,
}
PADDED = MASKED | {"per_sequence.rollout_is_seq_min": 0.0, "per_sequence.rollout_is_seq_mean": 1.0139}


def views(figures: dict[str, float], why: str = "not computed here") -> dict[str, dict[str, Statistic]]:
    out: dict[str, dict[str, Statistic]] = {}
    for entry in catalog().values():
        value = figures.get(entry.path)
        n = 5 if entry.unit == "token" else 2
        log = math.log(value) if entry.weight and value else None
        out.setdefault(entry.section, {})[entry.name] = Statistic(
            value, n, None, None if value is not None else why, log, entry.weight
        )
    return out


@pytest.fixture
def make_summary() -> Callable[..., Summary]:
    def make(**changes: Any) -> Summary:
        coverage = {
            "positions": 6,
            "valid_tokens": 5,
            "segments": 3,
            "sequences": 2,
            "fully_masked": 1,
            "fully_masked_with_content": 0,
            "zero_length": 0,
            "shards": 1,
            "steps": 1,
            "ranks": 1,
            "nonfinite_valid_tokens": 0,
        }
        summary = Summary(
            source={
                "path": "my dump",
                "formats": ["rollout-is/1"],
                "columns": {"train": ["train_logprobs"]},
                "steps": [1],
                "ranks": [0],
            },
            coverage=coverage | changes.pop("coverage", {}),
            settings={"mask": "response_mask", "lower": 0.5, "upper": 2.0},
            views={"unmasked": views(MASKED), "padded": views(PADDED), "masked": views(MASKED)},
            groups={"rank": {"0": Group({"masked": views(MASKED)}, 6, 5, 2)}},
            worst={
                "tokens": [{"shard": "a.safetensors", "sequence": 0, "position": 2, "train": -3.0, "log_ratio": -2.0}]
            },
            notes=(Note("mask-values", "notice", "response_mask", "mask has values {0, 1, 2}, treated as on/off"),),
            runtime={"workers": 1},
        )
        return replace(summary, **changes)

    return make
