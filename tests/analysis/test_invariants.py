"""The invariants of METRICS.md, each a property over random dumps, numbered as there."""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made import Settings, Shard, analyze, randomly, sequences, stable, stat, value, view, write_dump
from oracle import QUANTILES, Expected
from oracle import summarize as oracle_summary

from rollout_is.analysis.summary import Summary

seeds = st.integers(0, 2**32 - 1)
quick = settings(derandomize=True, deadline=None, max_examples=20, database=None)
BOUNDS = {"lower": 0.8, "upper": 1.3, "veto_lower": 0.5, "veto_upper": 2.0}


def dump(seed: int, **more: object) -> Shard:
    rng = np.random.default_rng(seed)
    options = {"segments": int(rng.integers(1, 14)), "length": int(rng.integers(2, 25)), "noise": 0.2} | more
    return randomly(rng, **options)  # type: ignore[arg-type]


def analysed(*shards: Shard) -> Summary:
    with tempfile.TemporaryDirectory() as folder:
        return analyze(write_dump(Path(folder), shards, ranks=len(shards)), settings=Settings(**BOUNDS))


def near(a: float, b: float, floor: float) -> bool:
    return abs(a - b) <= 2e-12 * abs(a) + 2 * floor


def assert_same(a: Summary, b: Summary, name: str, want: dict[str, Expected]) -> None:
    """Equal beyond 1e-12 of the mean absolute summand; counts, nulls and reasons exactly."""
    wrong = []
    for key, due in want.items():
        if not key.startswith(f"{name}."):
            continue
        x, y = stat(a, key), stat(b, key)
        if (x.n, x.why, x.value is None) != (y.n, y.why, y.value is None):
            wrong.append(f"{key}: {x} and {y}")
        elif x.value is not None and y.value is not None and not near(x.value, y.value, due.floor):
            wrong.append(f"{key}: {x.value!r} and {y.value!r}")
    assert not wrong, "\n".join(wrong)


def expected(*shards: Shard) -> dict[str, Expected]:
    return oracle_summary([s.packed() for s in shards], **BOUNDS)


def join(a: Shard, b: Shard) -> Shard:
    """Two shards as one."""
    assert a.cu[-1] == len(a.train)
    return Shard(
        torch.cat([a.train, b.train]),
        torch.cat([a.rollout, b.rollout]),
        torch.cat([a.mask, b.mask]),
        [*a.cu, *[a.cu[-1] + x for x in b.cu[1:]]],
    )


def pick(one: Shard, order: list[int]) -> Shard:
    """The segments of a shard in another order."""
    spans = [(one.cu[i], one.cu[i + 1]) for i in order]

    def take(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:0], *[x[a:b] for a, b in spans]])

    cu = np.cumsum([0, *[b - a for a, b in spans]]).tolist()
    return Shard(take(one.train), take(one.rollout), take(one.mask), cu)


def fully_masked(rng: np.random.Generator, content: bool) -> Shard:
    n = int(rng.integers(1, 30))
    r = -rng.exponential(1.0, n) if content else np.zeros(n)
    t = torch.full((n,), -7.0)
    return Shard(t, torch.from_numpy(r).float(), torch.zeros(n, dtype=torch.bool), [0, n])


@quick
@given(seeds, st.booleans(), st.integers(1, 3))
def test_1_fully_masked_segments_change_only_their_counters(seed: int, content: bool, k: int) -> None:
    one, rng = dump(seed), np.random.default_rng(seed + 1)
    pads = [fully_masked(rng, content) for _ in range(k)]
    longer = one
    for pad in pads:
        longer = join(longer, pad)
    plain, with_segments, with_shards = analysed(one), analysed(longer), analysed(one, *pads)
    assert_same(plain, with_segments, "masked", expected(one))
    assert view(plain, "masked") == view(with_shards, "masked")
    for got in (with_segments, with_shards):
        assert got.coverage["fully_masked"] == plain.coverage["fully_masked"] + k
        assert got.coverage["fully_masked_with_content"] == plain.coverage["fully_masked_with_content"] + k * content
        assert got.coverage["sequences"] == plain.coverage["sequences"]
        assert got.coverage["valid_tokens"] == plain.coverage["valid_tokens"]


@quick
@given(seeds)
def test_2_splitting_merging_and_reordering_change_nothing(seed: int) -> None:
    one, rng = dump(seed), np.random.default_rng(seed + 2)
    s = len(one.cu) - 1
    order = rng.permutation(s).tolist()
    cut = int(rng.integers(0, s + 1))
    whole = analysed(one)
    split = analysed(pick(one, order[:cut]), pick(one, order[cut:]))
    repacked = analysed(pick(one, order))
    want = expected(one)
    for other in (split, repacked):
        for name in ("masked", "padded", "unmasked"):
            assert_same(whole, other, name, want)
        counts = ("positions", "valid_tokens", "segments", "sequences", "fully_masked", "zero_length")
        assert [whole.coverage[c] for c in counts] == [other.coverage[c] for c in counts]


@quick
@given(seeds, st.sampled_from(["nan", "inf", "-inf", "1e10", "-1e10", "0", "1", "bits"]), st.booleans())
def test_3_bytes_at_masked_positions_change_nothing(seed: int, kind: str, both: bool) -> None:
    one = dump(seed, tail=3)
    hidden = ~one.mask
    n = int(hidden.sum())
    if kind == "bits":
        bits = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
        garbage = torch.from_numpy(bits.view(np.float32).copy())
    else:
        garbage = torch.full((n,), float(kind))
    train, rollout = one.train.clone(), one.rollout.clone()
    rollout[hidden] = garbage
    if both:
        train[hidden] = garbage.flip(0)
    a, b = analysed(one), analysed(Shard(train, rollout, one.mask, one.cu))
    assert view(a, "masked") == view(b, "masked")
    assert view(a, "padded") == view(b, "padded")
    assert b.coverage["nonfinite_valid_tokens"] == 0
    stable(b)  # JSON holds no NaN and no infinity, in the unmasked view neither


@quick
@given(seeds)
def test_4_mask_dtype_changes_nothing(seed: int) -> None:
    one = dump(seed)
    want = analysed(one)
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float16):
        got = analysed(Shard(one.train, one.rollout, one.mask.to(dtype), one.cu))
        assert got.views == want.views


@quick
@given(seeds, st.integers(1, 40))
def test_5_the_layout_of_the_pad_tail_changes_nothing_masked(seed: int, tail: int) -> None:
    one = dump(seed)
    pad = Shard(torch.full((tail,), -7.0), torch.zeros(tail), torch.zeros(tail, dtype=torch.bool), [0, tail])
    own = join(one, pad)
    inside = Shard(own.train, own.rollout, own.mask, [*one.cu[:-1], one.cu[-1] + tail])
    beyond = Shard(own.train, own.rollout, own.mask, one.cu)
    plain, want = analysed(one), expected(one)
    for layout in (own, inside, beyond):
        assert_same(plain, analysed(layout), "masked", want)


@quick
@given(seeds, st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_6_equal_sides_give_ratio_one(seed: int, dtype: torch.dtype) -> None:
    one = dump(seed, dtype=dtype)
    got = analysed(Shard(one.rollout.clone(), one.rollout, one.mask, one.cu))
    for name in ("masked", "padded", "unmasked"):
        for level in ("token", "sequence", "geometric"):
            for metric, due in (("mean", 1.0), ("std", 0.0), ("min", 1.0), ("max", 1.0), ("eff_sample_size", 1.0)):
                assert value(got, f"{name}.{level}.rollout_is_{metric}") == due
            for quantile in QUANTILES:
                assert value(got, f"{name}.{level}.{quantile}") == 0.0
        for metric in [
            "kl",
            "k2_kl",
            "k3_kl",
            "logprob_abs_diff",
            "logprob_diff_std",
            "logprob_abs_diff_max",
            "prob_abs_diff",
            "prob_abs_diff_max",
            "chi2_token",
            "chi2_seq",
            "chi2_geometric",
            "log_ppl_diff",
            "log_ppl_abs_diff",
            "log_ppl_diff_max",
            "log_ppl_diff_min",
            "extreme_fraction",
        ]:
            assert value(got, f"{name}.mismatch.mismatch_{metric}") == 0.0, metric
        for metric in ("mult_prob_error", "ppl_ratio", "identical_fraction"):
            assert value(got, f"{name}.mismatch.mismatch_{metric}") == 1.0, metric
    assert value(got, "masked.per_sequence.rollout_is_seq_min") == 1.0
    assert value(got, "masked.per_sequence.rollout_is_seq_max_deviation") == 0.0


@quick
@given(seeds)
def test_7_swapping_the_sides_negates_and_inverts(seed: int) -> None:
    one = dump(seed, dtype=torch.float64)
    a = analysed(one)
    b = analysed(Shard(one.rollout, one.train, one.mask, one.cu))
    for name in ("masked", "padded", "unmasked"):
        for metric in ("kl", "log_ppl_diff"):
            x, y = (value(s, f"{name}.mismatch.mismatch_{metric}") for s in (a, b))
            assert x == pytest.approx(-y, rel=1e-12, abs=1e-15)
        x, y = (value(s, f"{name}.mismatch.mismatch_log_ppl_diff_{m}") for s, m in ((a, "max"), (b, "min")))
        assert x == pytest.approx(-y, rel=1e-12, abs=1e-15)
        for level in ("token", "sequence", "geometric"):
            for high, low in ((a, b), (b, a)):
                top, bottom = stat(high, f"{name}.{level}.rollout_is_max"), stat(low, f"{name}.{level}.rollout_is_min")
                assert top.log_value is not None and bottom.log_value is not None
                assert top.log_value == pytest.approx(-bottom.log_value, rel=1e-12, abs=1e-14)
        for metric in ("k2_kl", "logprob_abs_diff", "mult_prob_error", "prob_abs_diff", "extreme_fraction"):
            assert value(a, f"{name}.mismatch.mismatch_{metric}") == pytest.approx(
                value(b, f"{name}.mismatch.mismatch_{metric}"), rel=1e-12
            )


@quick
@given(seeds, st.sampled_from([1e-6, 1e-3, 0.3, 5.0, 60.0]))
def test_8_figures_stay_in_their_ranges(seed: int, noise: float) -> None:
    one = dump(seed, noise=noise, dtype=torch.float64)
    got = analysed(one)
    for name in ("masked", "padded", "unmasked"):
        k3 = stat(got, f"{name}.mismatch.mismatch_k3_kl")
        assert k3.value is None or k3.value >= 0
        for level in ("token", "sequence", "geometric"):
            assert 0 < value(got, f"{name}.{level}.rollout_is_eff_sample_size") <= 1
            assert 0 < value(got, f"{name}.{level}.rollout_is_max_weight_share") <= 1
            low = stat(got, f"{name}.{level}.rollout_is_min").log_value
            high = stat(got, f"{name}.{level}.rollout_is_max").log_value
            assert low is not None and high is not None
            order = [value(got, f"{name}.{level}.{q}") for q in QUANTILES]
            # 'min <= every quantile <= max', and quantiles never decrease.
            assert order == sorted(order)
            assert low - 1e-12 * abs(low) <= order[0] and order[-1] <= high + 1e-12 * abs(high)


@quick
@given(seeds)
def test_8_quantiles_hold_their_stated_error(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-7, 3, 400)
    d = rng.standard_normal(400) * scale
    d[rng.random(400) < 0.1] = 0.0
    one = sequences(*np.split(d, [3, 50, 51, 200]))
    got = analysed(one)
    for level in ("token", "sequence", "geometric"):
        for name in QUANTILES:
            want = expected(one)[f"masked.{level}.{name}"].value
            assert want is not None
            assert abs(value(got, f"masked.{level}.{name}") - want) <= max(0.01 * abs(want), 1e-6) * (1 + 1e-9)


def nothing_valid() -> Shard:
    n = 12
    return Shard(torch.full((n,), -1.0), torch.full((n,), -1.1), torch.zeros(n, dtype=torch.bool), [0, 5, n])


def no_positions() -> Shard:
    return Shard(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool), [0])


def nothing_finite() -> Shard:
    n = 6
    return Shard(torch.full((n,), math.nan), torch.full((n,), -1.0), torch.ones(n, dtype=torch.bool), [0, n])


@pytest.mark.parametrize("make", [nothing_valid, no_positions, nothing_finite])
def test_9_nothing_comparable_never_exits_0(make: Callable[[], Shard], tmp_path: Path) -> None:
    from rollout_is.cli.app import main

    folder = write_dump(tmp_path / "dump", [make()])
    for more in ([], ["--format", "json"]):
        out, err = io.StringIO(), io.StringIO()
        assert main(["analyze", str(folder), *more], out, err) == 1, err.getvalue()
    got = analyze(folder)
    stable(got)
    for name, found in got.statistics():
        if name.startswith("masked."):
            assert found.value is None and found.why, name


def test_10_command_and_python_give_the_same_stored_numbers(tmp_path: Path) -> None:
    import json

    from rollout_is.cli.app import main

    one = dump(10)
    folder = write_dump(tmp_path / "dump", [one, dump(11)], ranks=2)
    out, err = io.StringIO(), io.StringIO()
    assert main(["analyze", str(folder), "--format", "json"], out, err) == 0, err.getvalue()
    printed = json.loads(out.getvalue())
    stored = analyze(folder).to_dict()
    assert printed["views"] == json.loads(json.dumps(stored["views"]))
    assert printed["coverage"] == json.loads(json.dumps(stored["coverage"]))
