"""Cases C15, C16, C35, C37: what a mask from before rejection shows that the mask after it hides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made import Settings, Shard, analyze, codes, messages, shard, write_dump

from rollout_is.analysis import units
from rollout_is.analysis.summary import Summary


def severity(summary: Summary) -> str:
    return next(note.severity for note in summary.notes if note.code == "rejected-share")


def filtered() -> Shard:
    """C37: 512 sequences of 4 tokens, 80 without valid tokens, 280 of the other 432 rejected; the survivors agree."""
    rng = np.random.default_rng(37)
    d = rng.normal(0, 0.01, 2048)
    before, after = np.ones(2048, bool), np.ones(2048, bool)
    before[: 80 * 4] = after[: 360 * 4] = False
    d[80 * 4 : 360 * 4] = 1.5
    r = -1 - rng.exponential(1, 2048)
    return shard(r + d, r, after, list(range(0, 2049, 4)), **{"mask.pre_rejection": before})


def test_c37_two_denominators_and_an_alarm(tmp_path: Path) -> None:
    summary = analyze(write_dump(tmp_path, [filtered()]), settings=Settings(), workers=1)
    text = messages(summary, "rejected-share")
    assert "64.8 % (1,120) of the 1,728 tokens" in text
    assert "64.8 % (280) of its 432 sequences (54.7 % of all 512 segments)" in text
    assert severity(summary) == "warning"
    assert any(finding.id == "note.rejected-share" for finding in summary.findings)


def test_c37_the_other_way_round_nothing_was_rejected() -> None:
    assert "rejected-share" not in codes(filtered().summarize(mask="pre_rejection"))


def test_c35_tokens_alone() -> None:
    r = np.array([-1.0, -2.0, -1.5, -3.0])
    one = shard(r, r - 0.1, [1, 1, 1, 0], [0, 4], **{"mask.pre_rejection": np.ones(4, bool)})
    assert "25 % (1) of the 4 tokens" in messages(one.summarize(), "rejected-share")
    assert "sequences" not in messages(one.summarize(), "rejected-share")


def test_c16_the_whole_step_is_gone() -> None:
    r = -np.arange(1.0, 11.0)
    one = shard(r, r - 0.1, np.zeros(10, bool), [0, 5, 10], **{"mask.pre_rejection": np.ones(10, bool)})
    summary = one.summarize()
    assert "100 % (10) of the 10 tokens" in messages(summary, "rejected-share")
    assert "100 % (2) of its 2 sequences" in messages(summary, "rejected-share")


@pytest.mark.parametrize("name", ["mask.loss", "mask.attention"])
def test_a_wider_mask_of_another_kind_is_no_alarm(name: str) -> None:
    r = -np.arange(1.0, 9.0)
    one = shard(r, r - 0.1, [0, 0, 1, 1] * 2, [0, 4, 8], **{name: np.ones(8, bool)})
    assert severity(one.summarize()) == "info"


def test_a_narrower_mask_rejects_nothing() -> None:
    r = -np.arange(1.0, 9.0)
    one = shard(r, r - 0.1, np.ones(8, bool), [0, 4, 8], **{"mask.pre_loss": np.array([0, 0, 1, 1] * 2, bool)})
    assert "rejected-share" not in codes(one.summarize())


def test_cut_sequences_and_ranks_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence longer than several units, rejected whole; one kept; on two ranks."""
    monkeypatch.setattr(units, "UNIT_POSITIONS", 100)
    n = 317
    r = -1.0 - np.arange(2 * n) % 5
    after = np.ones(2 * n, bool)
    after[:n] = False
    one = shard(r - 0.01, r, after, [0, n, 2 * n], **{"mask.pre_rejection": np.ones(2 * n, bool)})
    summary = analyze(write_dump(tmp_path, [one, one], ranks=2), settings=Settings(), workers=1)
    assert f"50 % ({2 * n:,}) of the {4 * n:,} tokens" in messages(summary, "rejected-share")
    assert "50 % (2) of its 4 sequences (50 % of all 4 segments)" in messages(summary, "rejected-share")


def test_c01_padding_that_the_mask_lets_through_is_told() -> None:
    """The fault this tool began with, seen from the flags: a segment called padding is scored."""
    r = -np.arange(1.0, 13.0)
    flags = np.array([0, 0, 1])
    scored = shard(r, r - 0.1, np.ones(12, bool), [0, 4, 8, 12], segment_is_pad=flags).summarize()
    assert "33.3 % (4) of valid tokens lie in segments that segment_is_pad calls padding" in messages(
        scored, "pad-with-valid-tokens"
    )
    masked = shard(r, r - 0.1, [1] * 8 + [0] * 4, [0, 4, 8, 12], segment_is_pad=flags).summarize()
    assert "pad-with-valid-tokens" not in codes(masked)
