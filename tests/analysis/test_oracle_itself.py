"""The oracle and its comparison are checked before they check anything else."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from agree import differences
from oracle import Expected, Packed, summarize

from rollout_is.analysis.summary import Statistic

VECTOR = Packed(
    np.array([-2, -1, -3, -0.5, -0.7, -5]),
    np.array([-1.5, -1.2, -1.0, -0.6, -2.0, 0.0]),
    np.array([1, 1, 1, 1, 1, 0], bool),
    [0, 3, 5, 6],
)
EXPECTED = summarize([VECTOR], veto_lower=0.5)


def reported(changed: dict[str, Statistic]) -> list[str]:
    def actual(name: str) -> Statistic:
        e = EXPECTED[name]
        honest = Statistic(e.value, e.n, e.stderr, e.why or (None if e.value is not None else "overflow"), e.log)
        return changed.get(name, honest)

    return differences(actual, EXPECTED)


@pytest.mark.parametrize(
    ("name", "due"),
    [
        ("masked.mismatch.mismatch_kl", 0.18),
        ("masked.mismatch.mismatch_k3_kl", 0.5275),
        ("masked.mismatch.mismatch_training_ppl", 4.6056),
        ("masked.mismatch.mismatch_chi2_token", 2.3126),
        ("masked.mismatch.mismatch_chi2_seq", 7.2273),
        ("masked.token.rollout_is_std", 1.2234),
        ("masked.token.rollout_is_eff_sample_size", 0.5482),
        ("masked.per_sequence.rollout_is_seq_mean", 1.5208),
        ("padded.mismatch.mismatch_training_ppl", 3.4037),
        ("padded.mismatch.mismatch_chi2_seq", 4.8182),
        ("padded.per_sequence.rollout_is_seq_mean", 1.0139),
        ("padded.per_sequence.rollout_is_seq_min", 0.0),
    ],
)
def test_the_oracle_gives_the_reference_vector(name: str, due: float) -> None:
    assert EXPECTED[name].value == pytest.approx(due, abs=5.0001e-5)


def test_honest_figures_agree() -> None:
    assert reported({}) == []


def test_every_kind_of_disagreement_is_seen() -> None:
    name = "masked.token.rollout_is_mean"
    e = EXPECTED[name]
    assert e.value is not None and e.stderr is not None and e.log is not None
    right = Statistic(e.value, e.n, e.stderr, None, e.log)
    for wrong, word in (
        (replace(right, value=e.value * (1 + 1e-8)), "value"),
        (replace(right, value=None, why="no reason at all"), "null"),
        (replace(right, value=math.nan), "finite"),
        (replace(right, n=6), "n 6"),
        (replace(right, stderr=None), "stderr"),
        (replace(right, stderr=e.stderr * 1.001), "stderr"),
        (replace(right, log_value=None), "log_value"),
        (replace(right, log_value=e.log + 1e-6), "log_value"),
    ):
        found = reported({name: wrong})
        assert found and word in found[0], wrong


def test_quantiles_are_held_to_one_percent() -> None:
    name = "masked.token.log_ratio_p50"
    assert EXPECTED[name].value == pytest.approx(0.1)
    assert reported({name: Statistic(0.1009, 5)}) == []
    assert reported({name: Statistic(0.1011, 5)}) != []


def test_overflow_is_expected_as_null_with_its_log() -> None:
    one = Packed(np.array([999.0, -1.0]), np.array([-1.0, -1.0]), np.ones(2, bool), [0, 2])
    e: Expected = summarize([one])["masked.token.rollout_is_mean"]
    assert e.value is None and e.needs_log and e.log == pytest.approx(1000 - math.log(2))
