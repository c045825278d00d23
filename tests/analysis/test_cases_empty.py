"""Cases of group B: nothing to measure, in a rank, a shard or everywhere."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from made import Settings, Shard, analyze, group_value, messages, sequences, shard, stat, value, view, write_dump
from safetensors.torch import save_file

from rollout_is.dumps.errors import DumpError


def masked_rank() -> Shard:
    return Shard(torch.full((8,), -7.0), torch.zeros(8), torch.zeros(8, dtype=torch.bool), [0, 8])


def test_c11_no_valid_token_anywhere(tmp_path: Path) -> None:
    from rollout_is.cli.app import main

    folder = write_dump(tmp_path / "dump", [masked_rank(), masked_rank()], ranks=2)
    got = analyze(folder)
    for name, found in got.statistics():
        if name.startswith("masked."):
            assert (found.value is None and found.n == 0) or found.why == "veto is off", name
            assert found.why, name
    assert stat(got, "masked.token.rollout_is_mean").why == "no valid tokens"
    out, err = io.StringIO(), io.StringIO()
    assert main(["analyze", str(folder)], out, err) == 1
    assert "no valid token" in (out.getvalue() + err.getvalue()).lower()


def test_c12_a_shard_of_zero_length(tmp_path: Path) -> None:
    real = sequences([0.1, -0.2], [0.3])
    empty = Shard(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool), [0])
    got = analyze(write_dump(tmp_path, [real, empty], ranks=2), settings=Settings(by=("shard",)))
    assert view(got, "masked") == view(real.summarize(), "masked")
    assert got.coverage["shards"] == 2
    assert sorted((g.sequences, g.valid_tokens) for g in got.groups["shard"].values()) == [(0, 0), (2, 3)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_c13_a_fully_masked_rank_does_not_enter_extremes_as_0(tmp_path: Path, place: int) -> None:
    ranks = [sequences([-0.2] * 4, r=-1.0), sequences([-0.2] * 3, [-0.2], r=-1.5)]
    ranks.insert(place, masked_rank())
    got = analyze(write_dump(tmp_path, ranks, ranks=3))
    for section in ("token.rollout_is_", "geometric.rollout_is_", "per_sequence.rollout_is_seq_"):
        assert value(got, f"masked.{section}min") == pytest.approx(math.exp(-0.2))
        assert value(got, f"masked.{section}max") == pytest.approx(math.exp(-0.2))


def test_c13_all_ranks_masked_is_null(tmp_path: Path) -> None:
    got = analyze(write_dump(tmp_path, [masked_rank() for _ in range(3)], ranks=3))
    for metric in ("min", "max", "mean", "std"):
        found = stat(got, f"masked.token.rollout_is_{metric}")
        assert (found.value, found.n, found.why) == (None, 0, "no valid tokens")


def test_c14_a_masked_device_is_not_averaged_as_0(tmp_path: Path) -> None:
    one = sequences([-1.0] * 3)
    got = analyze(write_dump(tmp_path, [one, masked_rank(), sequences([-1.0] * 3, r=-2.0), masked_rank()], ranks=4))
    assert value(got, "masked.mismatch.mismatch_kl") == pytest.approx(1.0)


def test_c15_filtered_trajectories_are_not_padding() -> None:
    one = shard(
        [-1, -2, -1, -2, -3, 0, 0, -1],
        [-1.2, -2.1, -1.3, -2, -2.5, 0, 0, -1.5],
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0, 2, 5, 7, 8],
    )
    got = one.summarize()
    assert got.coverage["fully_masked"] == 3
    assert got.coverage["fully_masked_with_content"] == 2
    assert "2" in messages(got, "fully-masked-content")
    assert "1" in messages(got, "fully-masked-pad-like")


def test_c16_a_step_filtered_away_keeps_its_before_block(tmp_path: Path) -> None:
    one = sequences([0.1] * 4, [-0.3] * 6)
    before = one.mask.clone()
    one.mask = torch.zeros(10, dtype=torch.bool)
    one.columns["mask.pre_rejection"] = before
    folder = write_dump(tmp_path, [one])
    after = analyze(folder)
    pre = analyze(folder, settings=Settings(mask="pre_rejection"))
    assert (after.coverage["valid_tokens"], pre.coverage["valid_tokens"]) == (0, 10)
    assert stat(after, "masked.token.rollout_is_mean").why == "no valid tokens"
    assert value(pre, "masked.mismatch.mismatch_logprob_abs_diff") == pytest.approx(0.22)


def test_c17_missing_rollout_log_probs_are_not_an_empty_mask(tmp_path: Path) -> None:
    tensors = sequences([0.1, 0.2]).tensors()
    del tensors["rollout_logprobs"]
    save_file(tensors, tmp_path / "a.safetensors", {"format": "rollout-is/1"})
    with pytest.raises(DumpError, match="rollout"):
        analyze(tmp_path)
    tensors["rollout_logprobs"] = torch.empty(0)
    save_file(tensors, tmp_path / "a.safetensors", {"format": "rollout-is/1"})
    with pytest.raises(DumpError, match="rollout"):
        analyze(tmp_path)


def test_one_empty_rank_is_a_null_group(tmp_path: Path) -> None:
    got = analyze(
        write_dump(tmp_path, [sequences([0.5, 0.1]), masked_rank()], ranks=2), settings=Settings(by=("rank",))
    )
    assert group_value(got, "rank", "1", "masked.token.rollout_is_mean") is None
    assert got.groups["rank"]["1"].views["masked"]["token"]["rollout_is_mean"].why == "no valid tokens"
    assert got.groups["rank"]["1"].positions == 8
