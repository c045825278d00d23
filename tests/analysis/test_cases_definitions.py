"""Cases of group I: definitions that confuse, each with its sign, its denominator and its name."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from made import analyze, sequences, shard, stable, stat, value
from safetensors.torch import save_file

from rollout_is.dumps.errors import RolloutIsError


def test_c83_direction_of_the_direct_estimate() -> None:
    got = sequences([-0.3, 0.1]).summarize()
    assert value(got, "masked.mismatch.mismatch_kl") == pytest.approx(0.10)
    k3 = (math.expm1(-0.3) + 0.3 + math.expm1(0.1) - 0.1) / 2
    assert value(got, "masked.mismatch.mismatch_k3_kl") == pytest.approx(k3, rel=1e-12)
    assert k3 == pytest.approx(0.023, abs=5e-4)


def test_c84_signed_differences_cancel() -> None:
    got = sequences([1.0, -1.0]).summarize()
    assert value(got, "masked.mismatch.mismatch_kl") == pytest.approx(0.0, abs=1e-15)
    assert value(got, "masked.mismatch.mismatch_logprob_abs_diff") == pytest.approx(1.0)
    assert value(got, "masked.mismatch.mismatch_k3_kl") == pytest.approx(math.cosh(1) - 1, rel=1e-12)


def test_c85_identical_inputs_differ_by_zero() -> None:
    got = shard([-1.0] * 4, [-1.0] * 4, [1] * 4, [0, 4]).summarize()
    assert value(got, "masked.mismatch.mismatch_prob_abs_diff") == 0.0
    assert value(got, "masked.mismatch.mismatch_logprob_abs_diff") == 0.0
    assert value(got, "masked.token.rollout_is_mean") == 1.0
    pearson = stat(got, "masked.mismatch.mismatch_prob_pearson")
    assert pearson.value is None and "constant" in (pearson.why or "")


@pytest.mark.parametrize("constant", ["train", "rollout"])
def test_c85_correlation_with_one_constant_side_is_undefined(constant: str) -> None:
    varied, same = [-1.0, -0.3, -2.0, -0.7], [-1.3] * 4
    pair = (same, varied) if constant == "train" else (varied, same)
    pearson = stat(shard(*pair, [1] * 4, [0, 4]).summarize(), "masked.mismatch.mismatch_prob_pearson")
    assert pearson.value is None and "constant" in (pearson.why or "")


def test_c86_a_negative_sample_estimate_comes_with_its_error() -> None:
    got = sequences([0.2], [0.1], [-0.05]).summarize()
    kl = stat(got, "masked.mismatch.mismatch_kl")
    assert kl.value == pytest.approx(-0.25 / 3)
    d = np.array([-0.2, -0.1, 0.05])
    assert kl.stderr == pytest.approx(math.sqrt(3 / 2 * ((d - d.mean()) ** 2).sum()) / 3, rel=1e-9)
    assert value(got, "masked.mismatch.mismatch_k3_kl") == pytest.approx(0.0093, abs=5e-5)


def test_c88_the_compared_columns_are_named_and_ambiguity_is_refused(tmp_path: Path) -> None:
    one = sequences([0.1, -0.2, 0.3])
    tensors = one.tensors()
    r, t = tensors.pop("rollout_logprobs"), tensors.pop("train_logprobs")
    tensors |= {"log_probs": t + 0.5, "old_log_probs": t, "rollout_log_probs": r, "ref_log_probs": t - 1}
    save_file(tensors, tmp_path / "a.safetensors", {"format": "rollout-is/1"})
    got = None
    try:
        got = analyze(tmp_path)
    except RolloutIsError as error:
        assert "log_probs" in str(error) and "old_log_probs" in str(error)
    if got is not None:  # the one known name of the behaviour policy decides; it must be told
        assert "old_log_probs" in stable(got)
    chosen = analyze(tmp_path, columns={"train": "old_log_probs"})
    assert value(chosen, "masked.mismatch.mismatch_logprob_abs_diff") == pytest.approx(0.2)
    assert "old_log_probs" in stable(chosen) and "rollout_log_probs" in stable(chosen)


def test_c88_two_names_of_one_role_are_an_error(tmp_path: Path) -> None:
    one = sequences([0.1, -0.2, 0.3])
    tensors = one.tensors()
    tensors |= {"old_log_probs": tensors["train_logprobs"].clone()}
    save_file(tensors, tmp_path / "a.safetensors", {"format": "rollout-is/1"})
    with pytest.raises(RolloutIsError) as caught:
        analyze(tmp_path)
    assert "train_logprobs" in str(caught.value) and "old_log_probs" in str(caught.value)


def test_c89_effective_sample_size_of_raw_pooled_weights() -> None:
    one = sequences([0.0] * 4, [0.0] * 3 + [math.log(11.0)])
    got = one.summarize()
    assert value(got, "masked.token.rollout_is_eff_sample_size") == pytest.approx(18**2 / (8 * 128), rel=1e-12)
    constant = sequences([math.log(3.0)] * 8).summarize()
    assert value(constant, "masked.token.rollout_is_eff_sample_size") == pytest.approx(1.0, rel=1e-14)
    assert value(constant, "masked.token.rollout_is_mean") == pytest.approx(3.0, rel=1e-14)


def test_c91_mean_perplexity_and_perplexity_of_the_mean() -> None:
    got = shard([-1.0] * 4 + [-3.0] * 4, [-1.0] * 4 + [-3.0] * 4, [1] * 8, [0, 4, 8]).summarize()
    assert value(got, "masked.mismatch.mismatch_training_ppl") == pytest.approx((math.e + math.exp(3)) / 2)
    assert value(got, "masked.mismatch.mismatch_training_log_ppl") == pytest.approx(2.0)
    assert not [name for name, _ in got.statistics() if "entropy" in name]


@pytest.mark.parametrize(("w", "high", "low"), [(2.0, 0, 0), (0.5, 0, 0), (2.0000001, 1, 0), (0.4999999, 0, 1)])
def test_bounds_are_strict(w: float, high: int, low: int) -> None:
    d = math.log(w)
    one = shard([d] * 3, [0.0] * 3, [1] * 3, [0, 3])
    got = one.summarize(lower=0.5, upper=2.0)
    assert value(got, "masked.token.rollout_is_ratio_fraction_high") == high
    assert value(got, "masked.token.rollout_is_ratio_fraction_low") == low


def test_infinite_ratio_counts_in_veto_and_fractions() -> None:
    one = shard([-1.0, -math.inf, -1.0, -1.2], [-1.1, -1.0, -math.inf, -1.1], [1] * 4, [0, 2, 4])
    got = one.summarize(veto_lower=1e-4, veto_upper=1e4)
    assert value(got, "masked.veto.rollout_is_veto_fraction") == 1.0
    assert value(got, "masked.veto.rollout_is_catastrophic_token_fraction") > 0.0
    assert value(got, "masked.token.rollout_is_ratio_fraction_high") > 0.0
    assert value(got, "masked.token.rollout_is_ratio_fraction_low") > 0.0
    assert torch.isfinite(torch.tensor(value(got, "masked.token.rollout_is_mean")))
