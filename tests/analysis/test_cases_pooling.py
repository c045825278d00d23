"""Cases of group C: one pool, then one division. Never a mean of means."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from made import Settings, Shard, analyze, group_value, sequences, shard, stable, value, write_dump

from rollout_is import summarize

ABS = "masked.mismatch.mismatch_logprob_abs_diff"


def alternating(size: float, n: int) -> list[float]:
    return [size if i % 2 else -size for i in range(n)]


def test_c18_ranks_of_unequal_size(tmp_path: Path) -> None:
    got = analyze(write_dump(tmp_path, [sequences([1.0]), sequences([0.01] * 99)], ranks=2))
    assert value(got, ABS) == pytest.approx(0.0199)


def test_c20_token_mean_and_sequence_mean_have_their_own_names() -> None:
    got = sequences([0.1] * 10, [0.001] * 990).summarize()
    assert value(got, ABS) == pytest.approx(0.00199)
    assert value(got, "masked.mismatch.mismatch_log_ppl_abs_diff") == pytest.approx(0.0505)


def test_c21_flat_mean_and_group_means() -> None:
    one = sequences([1.0], [1.0], [1.0], [0.0], [0.0])
    one.columns["group_ids"] = torch.tensor([7, 7, 7, 7, 9])
    got = one.summarize(by=("group",))
    assert value(got, ABS) == pytest.approx(0.6)
    assert group_value(got, "group", "7", ABS) == pytest.approx(0.75)
    assert group_value(got, "group", "9", ABS) == 0.0


def test_c22_every_rank_survives_the_merge(tmp_path: Path) -> None:
    ranks = [sequences(alternating(0.01, 8)), sequences(alternating(0.5, 8))]
    got = analyze(write_dump(tmp_path, ranks, ranks=2), settings=Settings(by=("rank",)))
    assert value(got, ABS) == pytest.approx(0.255)
    assert group_value(got, "rank", "0", ABS) == pytest.approx(0.01)
    assert group_value(got, "rank", "1", ABS) == pytest.approx(0.5)
    ranks_read = got.coverage["ranks"]
    assert (ranks_read if isinstance(ranks_read, int) else len(ranks_read)) == 2


def solve_k3(k3: float) -> float:
    low, high = 0.0, 3.0
    for _ in range(200):
        mid = (low + high) / 2
        low, high = (mid, high) if math.expm1(mid) - mid < k3 else (low, mid)
    return low


def test_c23_the_last_micro_batch_does_not_overwrite(tmp_path: Path) -> None:
    values = [0.5, 0.01, 0.01, 0.01]
    shards = [sequences([solve_k3(v)] * 5, r=-1.0 - i) for i, v in enumerate(values)]
    texts = set()
    for number, order in enumerate(itertools.islice(itertools.permutations(range(4)), 0, 24, 5)):
        folder = tmp_path / str(number)
        for name, i in zip("abcd", order, strict=True):
            shards[i].write(folder / f"{name}.safetensors", step=1, rank=i, world_size=4)
        got = analyze(folder)
        assert value(got, "masked.mismatch.mismatch_k3_kl") == pytest.approx(0.1325)
        texts.add(str(got.to_dict()["views"]))
    assert len(texts) == 1


def test_c24_steps_are_not_smeared(tmp_path: Path) -> None:
    sizes = [0.01, 0.01, 0.01, 0.5]
    shards = [sequences(alternating(s, 10), r=-1.0 - i) for i, s in enumerate(sizes)]
    got = analyze(write_dump(tmp_path, shards), settings=Settings(by=("step",)))
    assert list(got.groups["step"]) == ["1", "2", "3", "4"]
    for step, size in enumerate(sizes, 1):
        assert group_value(got, "step", str(step), ABS) == pytest.approx(size)
    assert value(got, ABS) == pytest.approx(0.1325)


def test_c25_figures_do_not_grow_with_the_number_of_ranks(tmp_path: Path) -> None:
    rng = np.random.default_rng(25)
    parts = [(0.3 * rng.standard_normal(5)).tolist() for _ in range(8)]
    whole = sequences(*parts)

    def cut(a: int, b: int) -> Shard:
        span = slice(5 * a, 5 * b)
        return Shard(whole.train[span], whole.rollout[span], whole.mask[span], list(range(0, 5 * (b - a) + 1, 5)))

    results = []
    for ranks in (1, 2, 4):
        step = 8 // ranks
        shards = [cut(i, i + step) for i in range(0, 8, step)]
        results.append(analyze(write_dump(tmp_path / str(ranks), shards, ranks=ranks)))
    for got in results:
        assert got.coverage["valid_tokens"] == 40
        for name, found in results[0].statistics():
            other = got.get(name)
            assert other is not None and other.n == found.n
            if found.value is not None:
                assert other.value == pytest.approx(found.value, rel=1e-11, abs=1e-14), name


def test_c27_standard_deviation_of_the_pool(tmp_path: Path) -> None:
    got = analyze(write_dump(tmp_path, [sequences([0.0] * 6), sequences([2.0] * 6)], ranks=2))
    assert value(got, "masked.mismatch.mismatch_logprob_diff_std") == pytest.approx(1.0)


def test_c28_a_leading_axis_of_one_is_squeezed() -> None:
    one = sequences([math.log(1.0)], [math.log(1.2)])
    cu = torch.tensor(one.cu)
    flat = summarize(one.train, one.rollout, one.mask, cu)
    row = summarize(one.train[None], one.rollout[None], one.mask[None], cu)
    assert stable(row) == stable(flat)
    assert value(row, "masked.sequence.rollout_is_mean") == pytest.approx(1.1)
    assert value(row, "masked.per_sequence.rollout_is_seq_mean") == pytest.approx(1.1)


def test_c28_shapes_that_would_broadcast_are_refused() -> None:
    from rollout_is.dumps.errors import RolloutIsError

    one = sequences([0.1, 0.2, 0.3, 0.4])
    cu = torch.tensor(one.cu)
    with pytest.raises(RolloutIsError):
        summarize(one.train[:, None], one.rollout, one.mask, cu)
    with pytest.raises(RolloutIsError):
        summarize(one.train, one.rollout[:3], one.mask, cu)


def test_c30_a_mean_over_shards_is_pooled_whatever_its_name(tmp_path: Path) -> None:
    shards = [sequences([0.0] * 4, r=-1.0), sequences([math.log(3.0)] * 4, r=-2.0)]
    got = analyze(write_dump(tmp_path, shards, ranks=2))
    assert value(got, "masked.token.rollout_is_mean") == pytest.approx(2.0)
    assert value(got, "masked.token.rollout_is_min") == pytest.approx(1.0)
    assert value(got, "masked.token.rollout_is_max") == pytest.approx(3.0)


def test_a_pool_of_ranks_is_the_pool_of_their_tokens() -> None:
    """Effective sample size and extremes of a pool are no means of those of its parts."""
    one = shard(np.log([1.0] * 7 + [11.0]) - 1.0, [-1.0] * 8, [1] * 8, [0, 4, 8])
    assert value(one.summarize(), "masked.token.rollout_is_eff_sample_size") == pytest.approx(18**2 / (8 * 128))
