"""Random packed dumps against the oracle, to 1e-9 relative, from files and in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made import Settings, Shard, analyze, assert_agrees, randomly, sequences, shard, stat, value, write_dump
from oracle import coverage
from safetensors.torch import save_file

pytestmark = pytest.mark.usefixtures("each_kernel")

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize("train_dtype", [F32, F64, BF16, F16])
@pytest.mark.parametrize("rollout_dtype", [F32, F64, BF16, F16])
def test_every_pair_of_stored_dtypes(tmp_path: Path, train_dtype: torch.dtype, rollout_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    shards = [randomly(rng, dtype=train_dtype, rollout_dtype=rollout_dtype, tail=5) for _ in range(3)]
    bounds = {"lower": 0.7, "upper": 1.6, "veto_lower": 0.5, "veto_upper": 2.0}
    got = analyze(write_dump(tmp_path, shards, ranks=3), settings=Settings(**bounds))
    assert_agrees(got, shards, **bounds)


@pytest.mark.parametrize("seed", range(6))
def test_coverage_and_statistics_of_many_small_shards(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards = [randomly(rng, segments=int(rng.integers(1, 30)), length=int(rng.integers(1, 30))) for _ in range(6)]
    shards[4] = Shard(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool), [0])
    got = analyze(write_dump(tmp_path, shards, ranks=2))
    assert_agrees(got, shards)
    want = coverage([s.packed() for s in shards])
    assert {k: got.coverage[k] for k in want} == want


@pytest.mark.parametrize(
    "mask_dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, F16, F32, F64]
)
def test_every_mask_dtype(tmp_path: Path, mask_dtype: torch.dtype) -> None:
    one = randomly(np.random.default_rng(3))
    one.mask = one.mask.to(mask_dtype)
    assert_agrees(analyze(write_dump(tmp_path, [one])), [one])
    assert_agrees(one.summarize(), [one])


def test_packs_change_nothing(tmp_path: Path) -> None:
    one = randomly(np.random.default_rng(4), segments=20)
    plain = one.summarize()
    one.columns["cu_packs"] = torch.tensor([0, one.cu[7], one.cu[12], one.cu[-1]], dtype=torch.int32)
    packed = analyze(write_dump(tmp_path, [one]))
    assert_agrees(packed, [one])
    assert plain.views == packed.views


def test_group_ids_cluster_the_standard_errors(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    shards = [randomly(rng, segments=24) for _ in range(3)]
    for i, one in enumerate(shards):
        one.columns["group_ids"] = torch.arange(24) // 4 + (i % 2) * 3  # groups span shards
    got = analyze(write_dump(tmp_path, shards, ranks=3))
    assert_agrees(got, shards)
    one = shards[0]
    assert_agrees(one.summarize(), [one])


def test_standard_error_is_null_for_one_cluster() -> None:
    got = stat(sequences([0.1, -0.2, 0.3]).summarize(), "masked.mismatch.mismatch_kl")
    assert got.value is not None and got.stderr is None


def test_segment_is_pad_declares_pad_like() -> None:
    one = shard([-1, -1, -2, -3], [-1, -2, -1, -2], [1, 1, 0, 0], [0, 2, 4], segment_is_pad=[False, True])
    assert one.summarize().coverage["fully_masked_with_content"] == 0
    del one.columns["segment_is_pad"]
    assert one.summarize().coverage["fully_masked_with_content"] == 1


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    ("offset", "noise"), [(0.0, 1e-5), (0.1, 1e-5), (0.0, 1e-4), (-0.1, 1e-4), (0.0, 3.0), (2.0, 1e-3)]
)
def test_small_noise_and_constant_offsets_keep_nine_digits(dtype: torch.dtype, offset: float, noise: float) -> None:
    rng = np.random.default_rng(6)
    one = randomly(rng, segments=60, length=80, offset=offset, noise=noise, dtype=dtype, pads=False)
    if dtype == F32:  # keep log-probs near 0, where float32 resolves 1e-5
        one.rollout = (one.rollout / 8).to(F32)
        one.train = (one.rollout.double() + offset + noise * torch.from_numpy(rng.standard_normal(len(one.mask)))).to(
            F32
        )
    assert_agrees(one.summarize(), [one])


def test_constant_weight_three() -> None:
    d = float(np.log(3.0))
    one = sequences([d] * 50, [d] * 70, r=-1.5)
    got = one.summarize(upper=4.0)
    assert_agrees(got, [one], upper=4.0)
    assert value(got, "masked.token.rollout_is_mean") == pytest.approx(3.0, rel=1e-12)
    assert value(got, "masked.token.rollout_is_eff_sample_size") == pytest.approx(1.0, rel=1e-12)
    assert value(got, "masked.token.rollout_is_eff_sample_size") <= 1.0
    assert value(got, "masked.token.rollout_is_std") <= 1e-14


def test_log_ratios_of_a_thousand(tmp_path: Path) -> None:
    one = sequences([1000.0, -0.5, 0.1], [-1000.0, 0.2], [0.3, 0.1, -0.2])
    got = analyze(write_dump(tmp_path, [one]))
    assert_agrees(got, [one])
    top = stat(got, "masked.token.rollout_is_max")
    assert top.value is None and top.why and top.log_value == pytest.approx(1000.0)
    bottom = stat(got, "masked.token.rollout_is_min")
    assert bottom.value is None and bottom.why and bottom.log_value == pytest.approx(-1000.0)
    assert value(got, "masked.token.rollout_is_eff_sample_size") == pytest.approx(1 / 8)


def test_an_underflowing_sequence_keeps_its_log() -> None:
    """A sum of -7504 over masked positions: seen in the unmasked view of real dumps."""
    n = 1024
    one = shard(
        [-7.3, *[-1.0] * 6, *[-7.328125] * n], [-7.2, *[-1.1] * 6, *[0.0] * n], [1] * 7 + [0] * n, [0, 7, 7 + n]
    )
    got = one.summarize()
    assert_agrees(got, [one])
    low = stat(got, "unmasked.sequence.rollout_is_min")
    assert low.value is None and low.log_value == pytest.approx(-7504.0) and low.why


def test_exp_of_minus_fifty_is_not_clamped() -> None:
    got = sequences([-5.0] * 10, [0.1, -0.1]).summarize()
    assert value(got, "masked.sequence.rollout_is_min") == pytest.approx(1.9287498479639178e-22, rel=1e-9)


@pytest.mark.parametrize("mean", [-100.0, 100.0, 340.0, -340.0])
def test_sequences_far_from_one(mean: float) -> None:
    rng = np.random.default_rng(7)
    one = sequences(*[(mean / 20 + 0.1 * rng.standard_normal(20)).tolist() for _ in range(40)])
    assert_agrees(one.summarize(), [one])


def test_sequences_that_span_blocks(tmp_path: Path) -> None:
    """Blocks hold some 100 000 positions: lengths that straddle them, in one shard and its neighbour."""
    rng = np.random.default_rng(8)
    lengths = [3, 65_536, 1, 280_000, 65_535, 0, 70_001, 131_072, 17, 5]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    n = int(cu[-1])
    r = -rng.exponential(1.0, n).astype(np.float32)
    t = (r + 0.002 * rng.standard_normal(n)).astype(np.float32)
    mask = rng.random(n) < 0.7
    mask[cu[3] : cu[3] + 100_000] = False  # a hole as wide as most of a block
    mask[cu[4] : cu[5]] = False  # fully masked, a block less one position
    big = Shard(torch.from_numpy(t), torch.from_numpy(r), torch.from_numpy(mask), cu.tolist())
    small = randomly(rng, noise=0.01)
    got = analyze(write_dump(tmp_path, [big, small], ranks=2), settings=Settings(veto_lower=0.995, veto_upper=1.005))
    assert_agrees(got, [big, small], veto_lower=0.995, veto_upper=1.005)


def test_masks_with_a_hole_every_few_tokens() -> None:
    rng = np.random.default_rng(9)
    n = 60_000
    r = -rng.exponential(1.0, n)
    mask = rng.random(n) < 0.5
    cu = np.arange(0, n + 1, 8).tolist()
    one = shard(r + 0.05 * rng.standard_normal(n), r, mask, cu, dtype=F32)
    assert_agrees(one.summarize(), [one])


def test_nonfinite_values_at_valid_tokens() -> None:
    """NaN and infinities leave token statistics and the product level; d = +-inf counts in veto and fractions."""
    nan, inf = float("nan"), float("inf")
    t = [-1.0, nan, -1.2, -1.0, -2.0, -inf, -1.0, -0.5, -0.4, -1.5, -2.5]
    r = [-1.1, -1.0, -1.0, -1.5, -1.0, -1.0, -inf, -0.6, -0.7, -1.0, -1.5]
    one = shard(t, r, [1] * 11, [0, 3, 5, 7, 9, 11])
    bounds = {"veto_lower": 0.1, "veto_upper": 10.0}
    got = one.summarize(**bounds)
    assert got.coverage["nonfinite_valid_tokens"] == 3
    assert got.coverage["valid_tokens"] == 11
    assert got.coverage["sequences"] == 5
    assert stat(got, "masked.token.rollout_is_mean").n == 8
    assert stat(got, "masked.sequence.rollout_is_mean").n == 3  # two of five left the product level
    assert value(got, "masked.veto.rollout_is_veto_fraction") == pytest.approx(1 / 5)
    assert value(got, "masked.veto.rollout_is_catastrophic_token_fraction") == pytest.approx(2 / 10)
    assert_agrees(got, [one], **bounds)


def test_a_rectangle_equals_its_rows_packed(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    rows, width = 6, 30
    r = -rng.exponential(1.0, (rows, width))
    t = r + 0.2 * rng.standard_normal((rows, width))
    mask = rng.random((rows, width)) < 0.6
    mask[2] = False
    tensors = {
        "train_logprobs": torch.from_numpy(t).float(),
        "rollout_logprobs": torch.from_numpy(r).float(),
        "response_mask": torch.from_numpy(mask),
    }
    save_file(tensors, tmp_path / "a.safetensors", {"format": "rollout-is/1", "step": "1", "rank": "0"})
    packed = Shard(*(x.reshape(-1) for x in tensors.values()), list(range(0, rows * width + 1, width)))
    got = analyze(tmp_path)
    assert_agrees(got, [packed])
    assert got.views == packed.summarize().views


def test_labels_of_minus_100_serve_as_the_mask(tmp_path: Path) -> None:
    one = randomly(np.random.default_rng(13))
    tensors = one.tensors()
    del tensors["response_mask"]
    tensors["labels"] = torch.where(one.mask, torch.arange(len(one.mask)) % 1000, -100)
    save_file(tensors, tmp_path / "a.safetensors", {"format": "rollout-is/1", "step": "1", "rank": "0"})
    got = analyze(tmp_path)
    assert_agrees(got, [one])


def test_only_weights_gives_the_same_weights_and_no_mismatch() -> None:
    one = randomly(np.random.default_rng(14))
    full, part = one.summarize(), one.summarize(only="weights")
    for name in ("masked", "padded", "unmasked"):
        for section in ("token", "sequence", "geometric", "per_sequence", "veto"):
            a, b = full.views[name][section], part.views[name][section]
            assert {k: (s.value, s.n, s.log_value) for k, s in a.items()} == {
                k: (s.value, s.n, s.log_value) for k, s in b.items()
            }, (name, section)
        assert all(s.value is None for s in part.views[name].get("mismatch", {}).values())


@pytest.mark.parametrize("fill", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("bounds", [{"veto_lower": 0.5}, {"veto_upper": 2.0}, {"veto_lower": 0.5, "veto_upper": 2.0}])
def test_infinite_ratios_count_by_the_bounds_that_are_given(fill: float, bounds: dict[str, float]) -> None:
    one = randomly(np.random.default_rng(15), dtype=F64)
    one.rollout[~one.mask] = fill  # in the unmasked view these are tokens too
    one.rollout[3], one.train[5] = float("-inf"), float("-inf")
    assert_agrees(one.summarize(**bounds), [one], **bounds)


def test_no_standard_error_of_weights_that_are_kept_as_logarithms() -> None:
    """exp(305) fits float64, its square does not: rather no error than a wrong one."""
    got = sequences([305.0, 0.1], [305.0, -0.2], [305.0, 0.3]).summarize()
    found = stat(got, "masked.token.rollout_is_mean")
    assert found.value == pytest.approx(np.exp(305.0) / 2, rel=1e-9)
    assert found.stderr is None or found.stderr < 1e-9 * found.value


def test_all_sequences_with_a_nan_have_no_product() -> None:
    one = sequences([0.1, 0.2], [0.3, 0.4])
    one.train[1], one.train[2] = float("nan"), float("inf")
    got = one.summarize()
    found = stat(got, "masked.sequence.rollout_is_mean")
    assert found.value is None and found.n == 0 and "non-finite" in (found.why or "")
    assert value(got, "masked.geometric.rollout_is_mean") == pytest.approx((np.exp(0.1) + np.exp(0.4)) / 2)
    assert_agrees(got, [one])


@pytest.mark.parametrize("d", [40.0, 75.0, 250.0])
def test_products_whose_squares_overflow_have_no_standard_error(d: float) -> None:
    one = sequences([d] * 10, [d, *[0.1] * 9], [-d] * 3, [0.2, -0.1])
    got = one.summarize()
    assert_agrees(got, [one])
    found = stat(got, "masked.sequence.rollout_is_mean")
    assert found.stderr is None or np.isfinite(found.stderr)


DEVICES = ["cpu:torch"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("noise", [0.3, 1e-5, 120.0])
def test_the_operations_of_other_devices_agree_with_the_oracle(tmp_path: Path, device: str, noise: float) -> None:
    rng = np.random.default_rng(17)
    shards = [randomly(rng, segments=30, noise=noise, dtype=F64, tail=3) for _ in range(2)]
    shards[1].rollout[~shards[1].mask] = float("-inf")
    folder = write_dump(tmp_path, shards, ranks=2)
    bounds = {"veto_lower": 0.5, "veto_upper": 2.0}
    got, plain = (analyze(folder, settings=Settings(device=d, **bounds)) for d in (device, "cpu"))
    assert_agrees(got, shards, **bounds)
    assert got.coverage == plain.coverage
    for name, found in plain.statistics():
        other = got.get(name)
        assert other is not None and (other.n, other.why) == (found.n, found.why), name
        if "fraction" in name:
            assert other.value == found.value, name


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("valid", [True, False])
def test_one_bad_token_does_not_take_the_digits_of_the_correlation(bad: float, valid: bool) -> None:
    """Probabilities within 1e-7 of 1: their correlation cancels unless taken about the mean, which no NaN may hide."""
    rng = np.random.default_rng(0)
    n, scale = 20000, 1e-7
    r = -scale * (1 + rng.random(n))
    t = r + 0.3 * scale * rng.normal(size=n)
    mask = np.ones(n, dtype=bool)
    r[3], mask[3] = bad, valid
    got = Shard(torch.from_numpy(t), torch.from_numpy(r), torch.from_numpy(mask), [0, 5000, n]).summarize()
    kept = np.isfinite(r)
    p, q = (np.exp(x[kept].astype(np.longdouble)) for x in (t, r))
    p, q = p - p.mean(), q - q.mean()
    want = float((p * q).sum() / np.sqrt((p * p).sum() * (q * q).sum()))
    assert value(got, "unmasked.mismatch.mismatch_prob_pearson") == pytest.approx(want, rel=1e-6)


def test_a_lazily_negated_tensor_is_its_values() -> None:
    one = randomly(np.random.default_rng(8))
    plain = one.summarize()
    one.train, one.rollout = torch._neg_view(-one.train), torch._neg_view(-one.rollout)
    assert one.train.is_neg()
    assert one.summarize().views == plain.views
