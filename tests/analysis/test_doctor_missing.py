"""Groups G, H and L of the public cases: placeholders, missing values, copies, positive log-probs, wrong masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from doctored import Shard, examine, explained, ids, logprobs


def pair(seed: int, n: int = 2000, size: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    r = logprobs(rng, n)
    return r + rng.normal(0, size, n), r


def test_c60_zeros_at_masked_tool_tokens_are_no_finding() -> None:
    t, r = pair(60, 150)
    mask = np.r_[np.ones(50, bool), np.zeros(50, bool), np.ones(50, bool)]
    t[~mask], r[~mask] = -5.0, 0.0
    assert ids(examine(Shard(t, r, [150], mask=mask))) == []


def test_c60_tool_spans_left_in_the_mask_are_named_as_spans() -> None:
    t, r = pair(60, 3000)
    for start in range(40, 3000, 100):
        t[start : start + 12] = -5.0
        r[start : start + 12] = 0.0
    (finding,) = [f for f in examine(Shard(t, r, [100] * 30)) if f.severity == "error"]
    assert finding.id == "placeholder.span"
    assert "r is exactly 0 at 12 % of valid tokens" in finding.message
    assert "tool or observation spans left in the mask?" in finding.message
    assert finding.evidence["tokens"] == 360
    assert finding.evidence["sequences"] == 30
    assert finding.evidence["places"][0]["rollout"] == 0.0
    assert finding.evidence["places"][0]["train"] == -5.0


@pytest.mark.parametrize("fill", [0.0, 1.0, -np.inf, np.nan, -9999.0, -1e10])
def test_c62_c65_any_fill_under_the_mask_changes_nothing(fill: float) -> None:
    t, r = pair(62)
    mask = np.arange(2000) % 100 < 70
    r[~mask] = fill
    assert examine(Shard(t, r, [100] * 20, mask=mask)) == ()


def test_c66_one_nan_at_a_valid_token_is_an_error_with_its_place() -> None:
    t, r = pair(66, 1000)
    r[537] = np.nan
    findings = examine(Shard(t, r, [100] * 10))
    assert ids(findings) == ["missing.nonfinite"]
    finding = findings[0]
    assert finding.severity == "error"
    assert "1 valid token without a finite log-prob (1 NaN in rollout) in 1 sequence" in finding.message
    (place,) = finding.evidence["places"]
    assert (place["sequence"], place["position"], place["rollout"]) == (5, 37, "nan")
    assert [row[0] for row in place["neighbours"]] == [35, 36, 37, 38, 39]


def test_c68_nan_in_one_step_only_names_that_step() -> None:
    shards = []
    for step in range(1, 51):
        t, r = pair(step, 200)
        if step == 17:
            r[50:130] = np.nan
        shards.append(Shard(t, r, [20] * 10, step=step, rank=0))
    findings = examine(*shards)
    assert ids(findings) == ["missing.nonfinite"]
    assert findings[0].evidence["steps"] == [17]
    assert "at step 17 (1 of 50 steps)" in findings[0].message
    assert findings[0].evidence["sequences"] == 5


def test_c69a_every_rollout_logprob_zero_is_an_alarm() -> None:
    t, _ = pair(69)
    findings = examine(Shard(t, np.zeros(2000), [100] * 20))
    assert ids(findings) == ["placeholder.all"]
    assert "every valid rollout log-prob is exactly 0 while the train side varies" in findings[0].message


def test_c69b_honest_zeros_of_certain_tokens_are_none() -> None:
    rng = np.random.default_rng(690)
    r = np.where(rng.random(2000) < 0.4, 0.0, logprobs(rng, 2000))
    t = np.where(r == 0, -rng.uniform(0, 1e-7, 2000), r + rng.normal(0, 0.01, 2000))
    assert examine(Shard(t, r, [100] * 20)) == ()


def test_c70_both_sides_zero_is_not_health() -> None:
    findings = examine(Shard(np.zeros(500), np.zeros(500), [100] * 5))
    assert ids(findings) == ["copies.zero"]
    assert findings[0].severity == "error"
    assert "all log-probs zero on both sides (500 valid tokens)" in findings[0].message


def test_c71_identical_sides_are_a_notice() -> None:
    t, _ = pair(71)
    findings = examine(Shard(t, t, [100] * 20))
    assert ids(findings) == ["copies.identical"]
    assert findings[0].severity == "notice"
    assert "100 % of valid tokens bit-identical (2000 tokens): was the trainer pass skipped" in findings[0].message


def test_copies_on_one_rank_only() -> None:
    shards = []
    for rank in range(4):
        t, r = pair(rank)
        shards.append(Shard(r if rank == 3 else t, r, [100] * 20, rank=rank, step=1))
    findings = examine(*shards)
    assert ids(findings) == ["copies.some_ranks"]
    assert findings[0].evidence["ranks"] == [3]


def test_copies_of_some_sequences_only() -> None:
    t, r = pair(5)
    t[:600] = r[:600]
    findings = examine(Shard(t, r, [100] * 20))
    assert ids(findings) == ["copies.some_sequences"]
    assert "6 sequences of 20 (30 %) are bit-identical" in findings[0].message


def test_train_equal_to_another_scoring_pass() -> None:
    t, r = pair(6)
    findings = examine(Shard(t, r, [100] * 20, extra={"logprobs.prefill": t}))
    assert ids(findings) == ["copies.train_pass"]
    assert "train log-probs equal logprobs.prefill bit for bit" in findings[0].message


@pytest.mark.parametrize("value", [-1.0, -100.0, -9999.0])
def test_a_constant_here_and_there(value: float) -> None:
    t, r = pair(9)
    r[np.random.default_rng(9).random(2000) < 0.1] = value
    findings = examine(Shard(t, r, [100] * 20))
    assert ids(findings) == ["placeholder.stray"]
    assert f"r is the constant {value:g}" in findings[0].message
    assert findings[0].evidence["figures"]["tokens_with_value"] == int((r == value).sum())


def test_from_a_position_on() -> None:
    t, r = pair(10)
    for start in range(0, 2000, 200):
        r[start + 60 : start + 100] = 0.0
    findings = examine(Shard(t, r, [100] * 20))
    assert ids(findings) == ["placeholder.tail"]
    assert "from a position on, to the end of the sequence" in findings[0].message
    assert findings[0].evidence["sequences"] == 10


def test_last_token_never_scored() -> None:
    t, r = pair(11)
    r[99::100] = 0.0
    t[99::100] -= 2.0
    findings = examine(Shard(t, r, [100] * 20))
    assert ids(findings) == ["placeholder.last"]
    assert "at the last valid token of sequences: was it never scored?" in findings[0].message


def test_a_side_of_the_trainer_is_named_as_such() -> None:
    t, r = pair(12)
    t[::20] = 0.0
    r[::20] -= 2
    findings = examine(Shard(t, r, [100] * 20))
    assert ids(findings) == ["placeholder.stray"]
    assert findings[0].message.startswith("t is exactly 0")


def test_c73_bf16_storage_fires_nothing_but_states_its_resolution() -> None:
    rng = np.random.default_rng(73)
    r = -rng.gamma(4, 1.25, 4000)
    t = r + rng.normal(0, 1e-4, 4000)
    findings = examine(Shard(t, r, [100] * 40, rollout_dtype=torch.bfloat16))
    assert ids(findings) == []
    (finding,) = findings
    assert (finding.id, finding.severity) == ("numerics.resolution", "info")
    figures = finding.evidence["figures"]
    assert figures["resolution"] == 0.03125  # 8 bits of significand near 4.6
    assert figures["median_abs_logprob"] == pytest.approx(np.median(-r), rel=0.13)
    assert "differences below it are not meaningful" in finding.message


def test_c74_positive_logprobs_are_counted_and_kept() -> None:
    t, r = pair(74, 5000)
    at = np.random.default_rng(74).choice(5000, 100, replace=False)
    r[at] = np.linspace(0.001, 0.125, 100)
    t[at] = 0.0
    findings = examine(Shard(t, r, [100] * 50))
    assert ids(findings) == ["numerics.positive"]
    assert (
        "100 valid tokens (2 %) with a positive rollout log-prob, up to 0.125; kept as they are" in findings[0].message
    )
    tiny = np.where(np.isin(np.arange(5000), at), 5e-7, r)
    assert ids(examine(Shard(t, tiny, [100] * 50))) == []


def test_c76_differences_of_a_thousand_end_in_a_report() -> None:
    t, r = pair(76)
    t[5], r[6] = -1000.0, -1000.0
    findings = examine(Shard(t, r, [100] * 20))
    assert all(f.evidence["strength"] is None or np.isfinite(f.evidence["strength"]) for f in findings)


def test_c106_mask_that_covers_the_prompt() -> None:
    t, r = pair(106)
    for start in range(0, 2000, 100):
        r[start : start + 43] = 0.0
        t[start : start + 43] -= 1.0
    findings = examine(Shard(t, r, [100] * 20))
    assert ids(findings) == ["placeholder.start"]
    assert (
        "r is exactly 0 at 43 % of valid tokens, in one block at the start of each sequence → prompt included?"
        in findings[0].message
    )
    assert set(explained(findings[0])) <= {"where.position", "where.sequences", "weights.mean", "tails.routing"}


def test_nothing_valid_finds_nothing_and_fails_nowhere() -> None:
    t, r = pair(1, 100)
    assert examine(Shard(t, r, [100], mask=np.zeros(100, bool))) == ()
    assert examine(Shard(np.zeros(0), np.zeros(0), [])) == ()
