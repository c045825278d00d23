"""Cases of group H: storage dtypes, disasters, sums and means, quantiles at scale, accumulation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from made import Settings, Shard, analyze, assert_agrees, codes, messages, sequences, shard, stat, value, write_dump


def test_c73_bf16_storage(tmp_path: Path) -> None:
    rng = np.random.default_rng(73)
    r32 = torch.from_numpy(-rng.exponential(0.4, 4000)).float()
    r32[:2] = torch.tensor([-5.00, -5.01])
    one = Shard(r32, r32.bfloat16(), torch.ones(4000, dtype=torch.bool), [0, 1000, 4000])
    assert one.rollout[0] == one.rollout[1] == -5.0  # the step is 0.03125 there
    got = analyze(write_dump(tmp_path, [one]))
    assert_agrees(got, [one])
    said = messages(got, "dtype-resolution")
    assert "BF16" in said.upper() and "rollout" in said
    fine = sequences(*(0.01 * rng.standard_normal((4, 50))).tolist(), dtype=torch.float32)
    assert "dtype-resolution" not in codes(fine.summarize())


def test_c74_positive_log_probs_are_counted_and_kept() -> None:
    rng = np.random.default_rng(74)
    r = -rng.exponential(1.0, 500) - 0.01
    r[:10] = np.linspace(0.0125, 0.125, 10)
    t = r + 0.001 * rng.standard_normal(500)
    t[:10] = -0.001
    got = shard(t, r, np.ones(500), [0, 250, 500]).summarize()
    said = messages(got, "positive-logprobs")
    assert "10" in said and "0.125" in said
    assert_agrees(got, [shard(t, r, np.ones(500), [0, 250, 500])])  # unclamped


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_c76_the_tool_does_not_die_on_the_disaster(tmp_path: Path, sign: float) -> None:
    d = [1000.0 * sign] * 3 if sign else [1000.0, -1000.0, 0.5]
    one = sequences(d, [0.1, -0.1])
    got = analyze(write_dump(tmp_path, [one]), settings=Settings(top=3))
    assert_agrees(got, [one])
    for name in ("kl", "logprob_abs_diff", "logprob_abs_diff_max", "k2_kl", "extreme_fraction"):
        assert stat(got, f"masked.mismatch.mismatch_{name}").value is not None
    if sign >= 0:
        chi2 = stat(got, "masked.mismatch.mismatch_chi2_token")
        assert chi2.value is None and chi2.why and chi2.log_value is not None and chi2.log_value > 1990


def test_c77_product_and_geometric_mean_side_by_side() -> None:
    got = sequences([-0.002] * 9000).summarize()
    assert value(got, "masked.sequence.rollout_is_mean") == pytest.approx(math.exp(-18), rel=1e-9)
    assert value(got, "masked.geometric.rollout_is_mean") == pytest.approx(math.exp(-0.002), rel=1e-9)
    fifty = sequences([-0.5] * 100).summarize()
    assert value(fifty, "masked.sequence.rollout_is_mean") == pytest.approx(math.exp(-50), rel=1e-9)


def test_c78_chi2_of_product_and_geometric_have_their_own_names() -> None:
    got = sequences([0.05] * 100).summarize()
    assert value(got, "masked.mismatch.mismatch_chi2_seq") == pytest.approx(math.exp(10) - 1, rel=1e-9)
    assert value(got, "masked.mismatch.mismatch_chi2_geometric") == pytest.approx(math.expm1(0.1), rel=1e-9)


def test_c80_c81_twenty_million_tokens(tmp_path: Path) -> None:
    """Quantiles where torch.quantile refuses, and sums where a float32 accumulator stops moving; one sequence of 20 M tokens."""
    n = 20_000_000
    ramp = torch.linspace(-0.5, 1.0, n, dtype=torch.float32)
    order = torch.arange(n).mul_(7_368_787).remainder_(n)  # a permutation: 7368787 is prime to n
    rollout = torch.full((n,), -2.0)
    d = (ramp - 2.0).double() + 2.0  # rounding keeps the order: these are the order statistics
    train = ramp[order].sub_(2.0)
    one = Shard(train, rollout, torch.ones(n, dtype=torch.bool), [0, n])
    path = one.write(tmp_path / "a.safetensors", step=1, rank=0)
    got = analyze(path)
    for name, p in (
        ("p0_1", 0.001),
        ("p1", 0.01),
        ("p25", 0.25),
        ("p50", 0.5),
        ("p75", 0.75),
        ("p99", 0.99),
        ("p99_9", 0.999),
    ):
        want = float(d[math.ceil(round(p * n)) - 1])
        assert value(got, f"masked.token.log_ratio_{name}") == pytest.approx(want, rel=0.01, abs=1e-6)
    total = float(d.numpy().astype(np.longdouble).sum())
    product = stat(got, "masked.sequence.rollout_is_mean")
    assert product.value is None and product.log_value == pytest.approx(total, rel=1e-12)
    assert value(got, "masked.mismatch.mismatch_kl") == pytest.approx(-total / n, rel=1e-12)


def test_c82_a_second_trainer_pass_is_the_noise_floor(tmp_path: Path) -> None:
    rng = np.random.default_rng(82)
    one = sequences(*(0.05 * rng.standard_normal((6, 40))).tolist())
    again = one.train + torch.from_numpy(0.001 * rng.standard_normal(240))
    one.columns["logprobs.train_again"] = again
    folder = write_dump(tmp_path, [one])
    name = "masked.mismatch.mismatch_logprob_abs_diff"
    floor = analyze(folder, settings=Settings(rollout="train_again"))
    assert value(floor, name) == pytest.approx(float((one.train - again).abs().mean()), rel=1e-9)
    assert value(analyze(folder), name) == pytest.approx(float((one.train - one.rollout).abs().mean()), rel=1e-9)
