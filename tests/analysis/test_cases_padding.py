"""Cases of group A: padding and fully masked sequences must not leak into sequence statistics."""

from __future__ import annotations

import math
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
    messages,
    sequences,
    shard,
    stable,
    stat,
    value,
    view,
    write_dump,
)


def test_c01_a_packed_pad_tail_is_not_a_sequence() -> None:
    r = [-1.0] * 8 + [0.0] * 8
    t = [-1 + math.log(1.1)] * 4 + [-1 + math.log(0.9)] * 4 + [0.0] * 8
    got = shard(t, r, [1] * 8 + [0] * 8, [0, 4, 8, 16]).summarize()
    assert (got.coverage["sequences"], got.coverage["fully_masked"]) == (2, 1)
    seq = "per_sequence.rollout_is_seq_"
    assert value(got, f"masked.{seq}mean") == pytest.approx(1.0)
    assert value(got, f"masked.{seq}min") == pytest.approx(0.9)
    assert value(got, f"masked.{seq}max") == pytest.approx(1.1)
    assert value(got, f"masked.{seq}max_deviation") == pytest.approx(0.1)
    assert value(got, f"padded.{seq}mean") == pytest.approx(2 / 3)
    assert value(got, f"padded.{seq}min") == 0.0
    assert value(got, f"padded.{seq}max_deviation") == pytest.approx(1.0)


def test_c02_the_leak_in_other_columns() -> None:
    one = shard([-1.5, -2.2, 0, 0], [-1.0, -2.0, 0, 0], [1, 1, 0, 0], [0, 1, 2, 4])
    got = one.summarize(lower=0.7)
    for level in ("sequence", "geometric"):
        assert value(got, f"masked.{level}.rollout_is_max") == pytest.approx(math.exp(-0.2))
        assert value(got, f"padded.{level}.rollout_is_max") == pytest.approx(1.0)
        assert value(got, f"masked.{level}.rollout_is_ratio_fraction_low") == 0.5
        assert value(got, f"padded.{level}.rollout_is_ratio_fraction_low") == pytest.approx(1 / 3)


@pytest.mark.parametrize(("k", "ppl", "diff"), [(0, 7.389, 1.0), (1, 4.195, 0.5), (3, 2.597, 0.25)])
def test_c03_batch_padding_does_not_make_the_gap_smaller(k: int, ppl: float, diff: float) -> None:
    t, r = [-2.0] * 3 + [0.0] * 2 * k, [-1.0] * 3 + [0.0] * 2 * k
    one = shard(t, r, [1] * 3 + [0] * 2 * k, [0, 3, *range(5, 4 + 2 * k, 2)])
    got = one.summarize()
    assert value(got, "masked.mismatch.mismatch_training_ppl") == pytest.approx(math.exp(2))
    assert value(got, "masked.mismatch.mismatch_log_ppl_abs_diff") == pytest.approx(1.0)
    assert value(got, "padded.mismatch.mismatch_training_ppl") == pytest.approx(ppl, abs=5e-4)
    assert value(got, "padded.mismatch.mismatch_log_ppl_abs_diff") == pytest.approx(diff)
    assert got.coverage["fully_masked"] == k


def test_c05_a_dummy_sequence_is_absent_not_nan() -> None:
    nan = math.nan
    with_dummy = shard([-1, -2, -1.5, nan, nan], [-1.1, -1.9, -1.2, nan, nan], [1, 1, 1, 0, 0], [0, 3, 5]).summarize()
    alone = shard([-1, -2, -1.5], [-1.1, -1.9, -1.2], [1, 1, 1], [0, 3]).summarize()
    assert view(with_dummy, "masked") == view(alone, "masked")
    assert with_dummy.coverage["fully_masked"] == 1
    stable(with_dummy)  # JSON with allow_nan=False: no NaN in any view


def test_c06_padding_by_repeating_a_real_row_is_flagged() -> None:
    size = 0.01, 0.01, 0.5
    one = sequences(*[[s if i % 2 else -s for i in range(6)] for s in size])
    one.rollout[6:12] -= 0.125  # the second is not a copy of the first
    one.train[6:12] -= 0.125
    last = slice(12, 18)
    copied = Shard(
        torch.cat([one.train, one.train[last]]),
        torch.cat([one.rollout, one.rollout[last]]),
        torch.cat([one.mask, one.mask[last]]),
        [*one.cu, 24],
        {"token_ids": torch.tensor([*range(18), *range(12, 18)])},
    )
    got = copied.summarize()
    assert value(got, "masked.mismatch.mismatch_logprob_abs_diff") == pytest.approx(0.255)
    said = messages(got, "duplicate-sequences")
    assert "1" in said
    assert "0.173" in stable(got)  # the figure without duplicates
    assert "duplicate-sequences" not in codes(one.summarize())


def test_c06_equal_log_probs_of_other_tokens_are_no_duplicates() -> None:
    one = sequences([0.01, -0.01, 0.02], [0.01, -0.01, 0.02])
    one.rollout[3:] = one.rollout[:3]
    one.train[3:] = one.train[:3]
    one.columns["token_ids"] = torch.tensor([1, 2, 3, 1, 2, 4])
    assert "duplicate-sequences" not in codes(one.summarize())


@pytest.mark.parametrize("k", [1, 2, 4])
def test_c08_needless_pad_batches_change_only_counters(tmp_path: Path, k: int) -> None:
    real = [sequences([0.1, -0.2, 0.05], [0.3, -0.1]), sequences([0.2, 0.02], [-0.3])]
    pads = [Shard(torch.zeros(8), torch.zeros(8), torch.zeros(8, dtype=torch.bool), [0, 8]) for _ in range(k)]
    plain = analyze(write_dump(tmp_path / "a", real, ranks=2))
    padded = analyze(write_dump(tmp_path / "b", [*real, *pads], ranks=2 + k))
    assert view(plain, "masked") == view(padded, "masked")
    assert padded.coverage["fully_masked"] == plain.coverage["fully_masked"] + k


def test_c09_pad_layouts() -> None:
    t = np.array([-1.0, -1.5, -2, -0.5, -1, -0.3, -0.9, -2.2, -7, -7, -7, -7])
    r = np.array([-1.1, -1.4, -2.3, -0.4, -1.2, -0.35, -1, -2, 0, 0, 0, 0])
    mask = np.arange(12) < 8
    results = [shard(t, r, mask, cu).summarize(by=("length",)) for cu in ([0, 4, 12], [0, 4, 8, 12], [0, 4, 8])]
    first = results[0]
    for got in results[1:]:
        assert view(got, "masked") == view(first, "masked")
    for got in results:  # length in the table is valid tokens, 4, not the 8 positions of the first layout
        filled = {k: g for k, g in got.groups["length"].items() if g.sequences}
        assert [g.sequences for g in filled.values()] == [2]
        assert [g.valid_tokens for g in filled.values()] == [8]
        (key,) = filled
        assert "4" in key
    assert "4" in messages(results[2], "outside-tokens")
    assert "outside-tokens" not in codes(results[0]) | codes(results[1])


def test_c09_valid_tokens_beyond_the_last_boundary_are_an_error() -> None:
    from rollout_is.dumps.errors import DumpError

    one = shard([-1.0] * 6, [-1.1] * 6, [1, 1, 1, 1, 0, 1], [0, 4])
    with pytest.raises(DumpError) as caught:
        one.summarize()
    assert "cu_seqlens" in str(caught.value) or "boundar" in str(caught.value)


def test_fully_masked_kinds_are_told_apart_by_fill(tmp_path: Path) -> None:
    """All r equal to one known fill value is pad-like; another constant, or two values, is content."""
    fills = [0.0, 1.0, math.nan, math.inf, -math.inf, -9999.0, -1e10, -3.25]
    r = [x for fill in fills for x in (fill, fill)] + [-1.0, -2.0, -1.0]
    t = [-5.0] * len(r)
    mask = [0] * (len(r) - 1) + [1]
    cu = [*range(0, 2 * len(fills) + 1, 2), len(r) - 1, len(r)]
    one = shard(t, r, mask, cu, dtype=torch.float64)
    got = analyze(write_dump(tmp_path, [one]), settings=Settings())
    assert got.coverage["fully_masked"] == 9
    assert got.coverage["fully_masked_with_content"] == 2
    assert "2" in messages(got, "fully-masked-content")
    assert "7" in messages(got, "fully-masked-pad-like")
    assert stat(got, "masked.token.rollout_is_mean").n == 1
    assert_agrees(
        shard(t[:2] + t[-2:], [0, 0, -2, -1], [0, 0, 1, 1], [0, 2, 4]).summarize(),
        [shard(t[:2] + t[-2:], [0, 0, -2, -1], [0, 0, 1, 1], [0, 2, 4])],
    )
