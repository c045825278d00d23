"""Cases C52, C102 and C06: text that was tokenised again, slices of context parallelism, answers alike by themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made import Shard, analyze, codes, messages, randomly, shard, value, write_dump

from rollout_is.analysis import units
from rollout_is.dumps.errors import DumpError


def retokenized(lengths: tuple[int, ...] = (6, 6), places: tuple[int, ...] = (2, 10)) -> Shard:
    n = sum(lengths)
    r = -np.arange(1.0, n + 1) / 10
    ids = torch.arange(n)
    other = ids.clone()
    other[list(places)] += 100
    d = np.where(np.arange(n) % 2, 0.1, -0.1)
    for place in places:
        d[place:] = np.where(np.arange(n)[place:] < sum(lengths[: 1 + (place >= lengths[0])]), 5.0, d[place:])
    cu = np.cumsum([0, *lengths]).tolist()
    return shard(r + d, r, np.ones(n), cu, token_ids=ids, rollout_token_ids=other)


def test_c52_tokens_after_the_first_difference_are_flagged_not_averaged_in() -> None:
    got = retokenized().summarize()
    said = messages(got, "tokens-differ")
    assert "2 sequences" in said and "sequence 0 position 2" in said and "sequence 1 position 4" in said
    assert "6 valid tokens" in said
    assert got.coverage["valid_tokens"] == 6
    assert value(got, "masked.mismatch.mismatch_logprob_abs_diff") == pytest.approx(0.1)


def test_c52_the_same_tokens_on_both_sides_are_not_worth_a_word() -> None:
    one = retokenized(places=())
    assert "tokens-differ" not in codes(one.summarize())
    one.columns["rollout_token_ids"][3] += 1
    one.mask[3] = False  # a difference under the mask is nobody's business
    assert "tokens-differ" not in codes(one.summarize())


def test_c52_a_sequence_longer_than_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_POSITIONS", 4)
    got = retokenized(lengths=(12, 3), places=(5,)).summarize()
    assert got.coverage["valid_tokens"] == 8
    assert "1 sequence (" in messages(got, "tokens-differ") and "7 valid tokens" in messages(got, "tokens-differ")


def slices(folder: Path, ranks: range) -> Path:
    for rank in ranks:
        one = randomly(np.random.default_rng(rank), segments=4)
        one.write(folder / f"rank_{rank}.safetensors", step=1, rank=rank, cp_size=4, cp_rank=rank)
    return folder


def test_c102_a_partial_context_parallel_group_is_refused(tmp_path: Path) -> None:
    folder = slices(tmp_path, range(3))
    with pytest.raises(DumpError, match="3 of 4 slices") as met:
        analyze(folder)
    assert met.value.code == "cp-slices"
    assert "partial CP groups" in messages(analyze(folder, allow_partial=True), "cp-slices")


def test_c100_whole_groups_of_slices_are_named_for_what_they_are(tmp_path: Path) -> None:
    said = messages(analyze(slices(tmp_path, range(4))), "cp-slices")
    assert "every slice is taken for a sequence" in said and "partial" not in said


@pytest.mark.parametrize(("length", "severity"), [(1, "notice"), (3, "notice"), (4, "warning"), (20, "warning")])
def test_c06_short_answers_are_alike_by_themselves(tmp_path: Path, length: int, severity: str) -> None:
    rng = np.random.default_rng(6)
    r = -rng.exponential(1.0, length)
    other = -rng.exponential(1.0, 9)
    train, rollout = np.concatenate((r + 0.01, r + 0.01, other)), np.concatenate((r, r, other))
    one = shard(train, rollout, np.ones(2 * length + 9), [0, length, 2 * length, 2 * length + 9])
    got = analyze(write_dump(tmp_path, [one]))
    assert [n.severity for n in got.notes if n.code == "duplicate-sequences"] == [severity]
