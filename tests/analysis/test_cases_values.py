"""Cases of group G: placeholders, NaN, infinities, missing values; and the notes that speak of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from made import (
    Settings,
    Shard,
    analyze,
    assert_agrees,
    codes,
    group_value,
    messages,
    randomly,
    sequences,
    shard,
    stable,
    stat,
    value,
    view,
    write_dump,
)
from safetensors.torch import save_file

from rollout_is.dumps.errors import DumpError

ABS = "mismatch.mismatch_logprob_abs_diff"


def test_c60_zeros_at_tool_tokens() -> None:
    rng = np.random.default_rng(60)
    d = 0.01 * rng.standard_normal(100)
    r = np.concatenate([-rng.exponential(1, 60), np.zeros(50), -rng.exponential(1, 40)])
    t = r.copy()
    t[:60] += d[:60]
    t[60:110] = -5.0
    t[110:] += d[60:]
    mask = np.ones(150, bool)
    mask[60:110] = False
    got = shard(t, r, mask, [0, 150]).summarize(top=5)
    assert value(got, f"masked.{ABS}") == pytest.approx(np.abs(t - r)[mask].mean(), rel=1e-12)
    assert value(got, f"masked.{ABS}") < 0.0095
    assert value(got, f"unmasked.{ABS}") == pytest.approx(np.abs(t - r).mean(), rel=1e-12)
    assert value(got, f"unmasked.{ABS}") > 1.6
    assert got.worst["tokens"]
    assert "-5.0" not in json.dumps(got.to_dict()["worst"])  # no masked token among the worst


FILLS = [0.0, 1.0, -math.inf, math.nan, -9999.0, -1e10]


def filled(fill: float) -> Shard:
    one = sequences([0.1, -0.2, 0.05, 0.3], [-0.1, 0.2, 0.0])
    one.mask[2], one.mask[4] = False, False
    one.rollout[~one.mask] = fill
    return one


@pytest.mark.parametrize("fill", FILLS[1:])
def test_c62_the_masked_fill_changes_no_report(fill: float) -> None:
    want, got = filled(0.0).summarize(), filled(fill).summarize()
    assert view(want, "masked") == view(got, "masked")
    assert view(want, "padded") == view(got, "padded")


def test_c62_fill_values_under_the_mask_are_told() -> None:
    assert "-9999" in messages(filled(-9999.0).summarize(), "mask-fill-values")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_c65_nonfinite_under_the_mask_is_information_only(bad: float) -> None:
    got = filled(bad).summarize()
    assert got.coverage["nonfinite_valid_tokens"] == 0
    assert "2" in messages(got, "nonfinite-masked")
    assert "nonfinite-valid" not in codes(got)
    (note,) = [n for n in got.notes if n.code == "nonfinite-masked"]
    assert note.severity == "info"
    stable(got)


def test_c66_nan_at_a_valid_token(tmp_path: Path) -> None:
    rng = np.random.default_rng(66)
    d = 0.1 * rng.standard_normal(1000)
    one = sequences(d[:400].tolist(), d[400:].tolist())
    one.rollout[612] = math.nan
    got = analyze(write_dump(tmp_path, [one]), settings=Settings(top=3))
    assert got.coverage["nonfinite_valid_tokens"] == 1
    keep = np.arange(1000) != 612
    assert value(got, f"masked.{ABS}") == pytest.approx(np.abs(d[keep]).mean(), rel=1e-9)
    assert stat(got, f"masked.{ABS}").n == 999
    assert stat(got, "masked.sequence.rollout_is_mean").n == 1
    assert stat(got, "masked.geometric.rollout_is_mean").n == 2
    assert stat(got, "masked.per_sequence.rollout_is_seq_mean").n == 2
    assert value(got, "masked.mismatch.mismatch_log_ppl_diff_max") < math.inf
    said = messages(got, "nonfinite-valid")
    assert re.search(r"\b1\b", said)
    assert re.search(r"\b(212|612)\b", said)  # where: in the sequence or in the shard
    assert_agrees(got, [one])
    stable(got)
    first = got.worst["tokens"][0]
    assert 612 in first.values() or 212 in first.values()  # the token is listed first


def test_c68_one_step_with_nan_leaves_the_others_untouched(tmp_path: Path) -> None:
    rng = np.random.default_rng(68)
    shards = [sequences(*(0.05 * rng.standard_normal((3, 6))).tolist(), r=-1.0 - i / 8) for i in range(10)]
    clean = analyze(write_dump(tmp_path / "clean", shards), settings=Settings(by=("step",)))
    shards[4].train[4:14] = math.nan
    got = analyze(write_dump(tmp_path / "bad", shards), settings=Settings(by=("step",)))
    for step in range(1, 11):
        a, b = (s.groups["step"][str(step)].views["masked"] for s in (clean, got))
        if step == 5:
            assert b["mismatch"]["mismatch_kl"].n == 8
        else:
            assert a == b
    assert got.coverage["nonfinite_valid_tokens"] == 10
    assert group_value(got, "step", "5", f"masked.{ABS}") is not None
    assert math.isfinite(value(got, f"masked.{ABS}"))


def test_c69_all_zero_rollout_is_an_alarm() -> None:
    rng = np.random.default_rng(69)
    t = -rng.exponential(1.0, 200)
    got = shard(t, np.zeros(200), np.ones(200), [0, 100, 200]).summarize()
    said = messages(got, "all-zero-side")
    assert "rollout" in said
    assert {n.severity for n in got.notes if n.code == "all-zero-side"} <= {"warning", "error"}


def test_c69_many_legitimate_near_zeros_are_none() -> None:
    rng = np.random.default_rng(70)
    r = np.where(rng.random(500) < 0.4, -1e-7 * rng.random(500), -rng.exponential(1.0, 500))
    got = shard(r + 1e-3 * rng.standard_normal(500) * (r < -1e-6), r, np.ones(500), [0, 250, 500]).summarize()
    assert not codes(got) & {"all-zero-side", "both-zero", "constant-value"}


def test_c70_both_sides_zero_look_perfect() -> None:
    got = shard(np.zeros(50), np.zeros(50), np.ones(50), [0, 20, 50]).summarize()
    assert "zero" in messages(got, "both-zero").lower() or "0" in messages(got, "both-zero")
    assert {n.severity for n in got.notes if n.code == "both-zero"} <= {"warning", "error"}


def test_c71_bit_identical_sides_are_a_notice() -> None:
    one = randomly(np.random.default_rng(71))
    got = Shard(one.rollout.clone(), one.rollout, one.mask, one.cu).summarize()
    assert "identical" in messages(got, "identical-sides")
    assert {n.severity for n in got.notes if n.code == "identical-sides"} == {"notice"}
    assert value(got, "masked.token.rollout_is_eff_sample_size") == 1.0
    assert value(got, "masked.mismatch.mismatch_kl") == 0.0
    assert "identical-sides" not in codes(one.summarize())


def test_c72_half_of_the_shards_lack_rollout_log_probs(tmp_path: Path) -> None:
    shards = [sequences([0.1, -0.2], r=-1.0 - i) for i in range(4)]
    folder = write_dump(tmp_path, shards, ranks=4)
    for rank in (1, 3):
        tensors = shards[rank].tensors()
        del tensors["rollout_logprobs"]
        meta = {"format": "rollout-is/1", "step": "1", "rank": str(rank), "world_size": "4"}
        save_file(tensors, folder / "step_00000001" / f"rank_{rank:05d}.safetensors", meta)
    with pytest.raises(DumpError, match="rollout"):
        analyze(folder)
    got = analyze(folder, allow_partial=True)
    assert got.coverage["shards"] == 2
    assert got.coverage["valid_tokens"] == 4
    assert "rank_00001" in stable(got) and "rank_00003" in stable(got)  # what was left out, by name


def test_constant_value_at_valid_tokens() -> None:
    rng = np.random.default_rng(73)
    r = -rng.exponential(1.0, 300)
    t = r + 0.01 * rng.standard_normal(300)
    r[40:160] = -9999.0
    t = np.maximum(t, -20)
    got = shard(t, r, np.ones(300), [0, 100, 300]).summarize()
    assert "-9999" in messages(got, "constant-value")


def test_exact_zeros_at_part_of_the_valid_tokens() -> None:
    """Zeros on one side at valid tokens: prompts or tool spans taken for responses."""
    rng = np.random.default_rng(74)
    r = -rng.exponential(1.0, 300)
    t = r + 0.01 * rng.standard_normal(300)
    r[:120] = 0.0
    got = shard(t, r, np.ones(300), [0, 150, 300]).summarize()
    said = messages(got, "constant-value")
    off = int(np.count_nonzero(np.abs(t[:120]) > 1e-2))
    assert f"at {off / 3:.3g} % ({off}) of valid tokens" in said and "(120 are 0 in all)" in said


def test_columns_that_some_shards_lack_are_said(tmp_path: Path) -> None:
    with_groups = randomly(np.random.default_rng(76), segments=4)
    with_groups.columns = {"group_ids": torch.tensor([0, 0, 1, 1]), "mask.before": torch.ones_like(with_groups.mask)}
    without = randomly(np.random.default_rng(77), segments=4)
    got = analyze(write_dump(tmp_path, [with_groups, without]))
    said = messages(got, "column-in-some-shards")
    assert "group_ids is in 1 of 2 shards" in said and "mask.before is in 1 of 2 shards" in said
    without.columns = with_groups.columns | {"mask.before": torch.ones_like(without.mask)}
    assert "column-in-some-shards" not in codes(analyze(write_dump(tmp_path / "both", [with_groups, without])))


def test_masks_identical_is_said(tmp_path: Path) -> None:
    one = randomly(np.random.default_rng(75))
    assert "masks-identical" not in codes(analyze(write_dump(tmp_path / "some", [one])))
    one.mask = torch.ones_like(one.mask)
    got = analyze(write_dump(tmp_path / "all", [one]))
    assert "identical" in messages(got, "masks-identical")
    assert value(got, f"masked.{ABS}") == value(got, f"unmasked.{ABS}")


def test_a_clean_dump_has_no_alarms(tmp_path: Path) -> None:
    rng = np.random.default_rng(76)
    shards = [randomly(rng, noise=0.01, pads=False, holes=False) for _ in range(4)]
    for one in shards:
        one.train, one.rollout = one.train - 0.1, one.rollout - 0.1  # noise keeps every log-prob below 0
    got = analyze(write_dump(tmp_path, shards, ranks=2))
    assert not [n for n in got.notes if n.severity in ("warning", "error")]
