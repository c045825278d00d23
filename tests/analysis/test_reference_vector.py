"""The reference vector of METRICS.md, in memory and from a file, to the digits that are printed there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made import Shard, analyze, assert_agrees, shard, stat, value

from rollout_is.analysis.summary import Summary

VECTOR = shard(
    [-2, -1, -3, -0.5, -0.7, -5],
    [-1.5, -1.2, -1.0, -0.6, -2.0, 0.0],
    [1, 1, 1, 1, 1, 0],
    [0, 3, 5, 6],
)

PRINTED = {
    "masked.mismatch.mismatch_kl": 0.18,
    "masked.mismatch.mismatch_k3_kl": 0.5275,
    "masked.mismatch.mismatch_logprob_abs_diff": 0.82,
    "masked.mismatch.mismatch_training_ppl": 4.6056,
    "masked.mismatch.mismatch_rollout_ppl": 3.5510,
    "masked.mismatch.mismatch_training_log_ppl": 1.3000,
    "masked.mismatch.mismatch_log_ppl_diff": 0.0333,
    "masked.mismatch.mismatch_log_ppl_abs_diff": 0.7333,
    "masked.mismatch.mismatch_log_ppl_diff_max": 0.7667,
    "masked.mismatch.mismatch_log_ppl_diff_min": -0.7,
    "masked.mismatch.mismatch_ppl_ratio": 1.3246,
    "masked.mismatch.mismatch_chi2_token": 2.3126,
    "masked.mismatch.mismatch_chi2_seq": 7.2273,
    "masked.token.rollout_is_mean": 1.3475,  # METRICS.md prints 1.3476; the mean of its own five weights is 1.347547
    "masked.token.rollout_is_max": 3.6693,
    "masked.token.rollout_is_min": 0.1353,
    "masked.token.rollout_is_std": 1.2234,
    "masked.token.rollout_is_eff_sample_size": 0.5482,
    "masked.per_sequence.rollout_is_seq_mean": 1.5208,
    "masked.per_sequence.rollout_is_seq_max": 2.3872,
    "masked.per_sequence.rollout_is_seq_min": 0.6544,
    "padded.mismatch.mismatch_training_ppl": 3.4037,
    "padded.mismatch.mismatch_chi2_seq": 4.8182,
    "padded.per_sequence.rollout_is_seq_mean": 1.0139,
    "padded.per_sequence.rollout_is_seq_min": 0.0,
}


@pytest.fixture(scope="module", params=["memory", "file"])
def summary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Summary:
    if request.param == "memory":
        return VECTOR.summarize()
    path: Path = tmp_path_factory.mktemp("vector") / "step_00000001" / "rank_00000.safetensors"
    return analyze(VECTOR.write(path))


@pytest.mark.parametrize("name", PRINTED)
def test_printed_figure(summary: Summary, name: str) -> None:
    assert value(summary, name) == pytest.approx(PRINTED[name], abs=0.00005001)


def test_counts(summary: Summary) -> None:
    coverage = summary.coverage
    assert (coverage["positions"], coverage["valid_tokens"]) == (6, 5)
    assert (coverage["segments"], coverage["sequences"]) == (3, 2)
    assert (coverage["fully_masked"], coverage["fully_masked_with_content"]) == (1, 0)
    assert (coverage["zero_length"], coverage["nonfinite_valid_tokens"], coverage["shards"]) == (0, 0, 1)
    assert stat(summary, "masked.token.rollout_is_mean").n == 5
    assert stat(summary, "masked.sequence.rollout_is_mean").n == 2
    assert stat(summary, "padded.sequence.rollout_is_mean").n == 3


def test_every_statistic_agrees_with_the_oracle(summary: Summary) -> None:
    assert_agrees(summary, [VECTOR])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bounds", [{}, {"lower": 0.2, "upper": 3.0, "veto_lower": 0.5, "veto_upper": 3.5}])
def test_stored_dtypes_and_bounds(dtype: torch.dtype, bounds: dict[str, float]) -> None:
    one = Shard(VECTOR.train.to(dtype), VECTOR.rollout.to(dtype), VECTOR.mask, VECTOR.cu)
    assert_agrees(one.summarize(**bounds), [one], **bounds)


def test_veto_on_the_vector() -> None:
    got = VECTOR.summarize(veto_lower=0.5, veto_upper=3.5)
    assert value(got, "masked.veto.rollout_is_catastrophic_token_fraction") == 2 / 5  # d = -2 and d = 1.3
    assert value(got, "masked.veto.rollout_is_veto_fraction") == 1.0
    assert value(got, "padded.veto.rollout_is_veto_fraction") == pytest.approx(2 / 3)
    one_sided = VECTOR.summarize(veto_lower=0.5)
    assert value(one_sided, "masked.veto.rollout_is_catastrophic_token_fraction") == 1 / 5
    assert value(one_sided, "masked.veto.rollout_is_veto_fraction") == 0.5
    off = stat(VECTOR.summarize(), "masked.veto.rollout_is_veto_fraction")
    assert off.value is None and off.why == "veto is off"
