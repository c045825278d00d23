"""Group J of the public cases: stale weights, a bad rank, catastrophic sequences, mixed versions, position, tails."""

from __future__ import annotations

import numpy as np
import pytest
from doctored import Shard, examine, explained, ids, logprobs


def pair(rng: np.random.Generator, n: int, size: object = 0.01) -> tuple[np.ndarray, np.ndarray]:
    r = logprobs(rng, n) - 1
    return r + rng.normal(0, 1, n) * size, r


def test_c92_change_point_and_closer_to_the_reference() -> None:
    rng = np.random.default_rng(92)
    plain, with_ref = [], []
    for step in range(1, 7):
        size = 0.2 if step >= 4 else 0.01
        t, r = pair(rng, 2000, size)
        plain.append(Shard(t, r, [100] * 20, step=step, rank=0))
        with_ref.append(Shard(t, r, [100] * 20, step=step, rank=0, extra={"logprobs.ref": r}))
    findings = examine(*plain)
    assert ids(findings) == ["where.step"]
    assert "change point at step 4" in findings[0].message
    assert findings[0].evidence["steps"] == [4, 5, 6]
    by_step = findings[0].evidence["figures"]["mean_abs_d_by_step"]
    for shard in plain:
        assert by_step[str(shard.step)] == pytest.approx(np.abs(shard.train - shard.rollout).mean(), rel=1e-5)
    named = examine(*with_ref)
    assert named[0].id == "copies.closer_to_ref"
    assert "rollout is closer to ref (|d| 0) than to train (0.0" in named[0].message


def test_c93_stale_prefix_sits_in_the_first_tokens() -> None:
    rng = np.random.default_rng(93)
    size = np.where(np.arange(300) < 16, 0.3, 0.01)
    parts = [pair(rng, 300, size) for _ in range(40)]
    t, r = (np.concatenate(x) for x in zip(*parts, strict=True))
    findings = examine(Shard(t, r, [300] * 40))
    assert ids(findings) == ["where.position"]
    assert "the mismatch sits in the first tokens" in findings[0].message
    assert "before position 15" in findings[0].message


def test_c94_a_share_of_catastrophic_sequences_deterministic_per_prompt() -> None:
    rng = np.random.default_rng(94)
    bad = {3, 7, 12}  # three prompts of sixteen, four samples each
    shards_t, shards_r, groups = [], [], []
    for sequence in range(64):
        t, r = pair(rng, 50, 0.03)
        if sequence // 4 in bad:
            t = r + np.log(300) * rng.choice([-1, 1], 50)
        shards_t.append(t)
        shards_r.append(r)
        groups.append(sequence // 4)
    t, r = np.concatenate(shards_t), np.concatenate(shards_r)
    findings = examine(Shard(t, r, [50] * 64, extra={"group_ids": np.array(groups)}))
    assert ids(findings, "error") == ["where.sequences"]
    finding = findings[0]
    assert "12 of 64 sequences (18.8 %) are catastrophic" in finding.message
    assert "deterministic per prompt: all members of 3 groups" in finding.message
    figures = finding.evidence["figures"]
    assert figures["share_of_sequences"] == 0.1875
    listed = {row["sequence"] for row in figures["worst_sequences"]}
    assert listed == {s for s in range(64) if s // 4 in bad}
    assert finding.evidence["sequences"] == 12
    assert {p["sequence"] for p in finding.evidence["places"]} <= listed


def test_c95_one_bad_rank() -> None:
    rng = np.random.default_rng(95)
    shards = []
    for rank in range(8):
        t, r = pair(rng, 2000, (0.3 if rank == 5 else 0.01) * np.sqrt(np.pi / 2))
        shards.append(Shard(t, r, [100] * 20, rank=rank, step=1))
    findings = examine(*shards)
    assert ids(findings) == ["where.rank"]
    assert "rank 5 is 30" in findings[0].message
    assert "x the median of the others" in findings[0].message
    assert findings[0].evidence["figures"]["pooled_mean_abs_d"] == pytest.approx(0.046, rel=0.03)
    by_rank = findings[0].evidence["figures"]["mean_abs_d_by_rank"]
    assert next(iter(by_rank)) == "5"  # worst first
    assert findings[0].evidence["ranks"] == [5]
    assert all(p["rank"] == 5 for p in findings[0].evidence["places"])


@pytest.mark.parametrize("recorded", [True, False])
def test_c96_mixed_versions_inside_a_sequence(recorded: bool) -> None:
    rng = np.random.default_rng(96)
    size = np.where(np.arange(400) < 200, 0.01, 0.2)
    parts = [pair(rng, 400, size) for _ in range(20)]
    t, r = (np.concatenate(x) for x in zip(*parts, strict=True))
    version = np.tile((np.arange(400) >= 200).astype(np.int64), 20)
    findings = examine(Shard(t, r, [400] * 20, extra={"policy_version": version} if recorded else {}))
    if recorded:
        assert ids(findings) == ["where.version"]
        assert "20 sequences of 20 hold several versions" in findings[0].message
        by_version = findings[0].evidence["figures"]["mean_abs_d_by_version"]
        for v in (0, 1):
            assert by_version[str(v)] == pytest.approx(np.abs(t - r)[version == v].mean(), rel=1e-5)
        assert {p["position"] for p in findings[0].evidence["places"]} == {200}
    else:
        assert ids(findings) == ["where.position"]
        assert "steps up at about position" in findings[0].message
        at = int(findings[0].message.split("about position ")[1].split()[0])
        assert 128 <= at <= 256


def test_c98_routing_like_tails() -> None:
    rng = np.random.default_rng(98)
    size = np.where(rng.random(20000) < 0.05, 1.0, 0.01)
    t, r = pair(rng, 20000, size)
    t, r = t - 4, r - 4
    findings = examine(Shard(t, r, [200] * 100))
    assert ids(findings) == ["tails.routing"]
    figures = findings[0].evidence["figures"]
    assert figures["extreme_share"] == pytest.approx((np.abs(t - r) > np.log(2)).mean(), rel=1e-5)
    assert figures["extreme_share"] == pytest.approx(0.024, abs=0.004)
    assert figures["p99_abs_d"] == pytest.approx(np.quantile(np.abs(t - r), 0.99), rel=0.13)


def test_c98_heavy_tails_are_no_routing() -> None:
    rng = np.random.default_rng(980)
    r = logprobs(rng, 20000) - 3
    t = r + 0.01 * rng.standard_t(2, 20000)
    assert ids(examine(Shard(t, r, [200] * 100))) == []


def test_c99_growth_with_position_is_told_from_constant_mismatch() -> None:
    rng = np.random.default_rng(99)
    grown, flat = [], []
    for _ in range(40):
        grown.append(pair(rng, 500, 0.1 * np.arange(1, 501) / 250.5))
        flat.append(pair(rng, 500, 0.1))
    growing = examine(Shard(*(np.concatenate(x) for x in zip(*grown, strict=True)), [500] * 40))
    constant = examine(Shard(*(np.concatenate(x) for x in zip(*flat, strict=True)), [500] * 40))
    assert ids(growing) == ["where.position"]
    assert "grows with position" in growing[0].message
    assert "it is length, not confidence" in growing[0].message
    assert ids(constant) == []


def test_c99_growth_with_low_confidence_is_information_only() -> None:
    rng = np.random.default_rng(990)
    parts = []
    for _ in range(60):
        sure = np.arange(512) < 128
        r = np.where(sure, -rng.uniform(0.1, 0.6, 512), -rng.uniform(3, 6, 512))
        parts.append((r + rng.normal(0, 1, 512) * np.where(r > -1, 0.005, 0.15), r))
    t, r = (np.concatenate(x) for x in zip(*parts, strict=True))
    findings = examine(Shard(t, r, [512] * 60))
    assert ids(findings) == []
    (finding,) = [f for f in findings if f.id == "where.confidence"]
    assert "it follows low confidence, not position" in finding.message


def test_long_sequences_worse_than_short_ones() -> None:
    rng = np.random.default_rng(7)
    lengths = [40] * 30 + [700] * 12
    parts = [pair(rng, n, 0.2 if n > 100 else 0.01) for n in lengths]
    t, r = (np.concatenate(x) for x in zip(*parts, strict=True))
    findings = examine(Shard(t, r, lengths))
    assert "where.length" in [*ids(findings), *[x for f in findings for x in explained(f)]]


def test_a_transient_step_is_told_from_a_change_point() -> None:
    rng = np.random.default_rng(8)
    shards = []
    for step in range(1, 9):
        t, r = pair(rng, 2000, 0.2 if step == 5 else 0.01)
        shards.append(Shard(t, r, [100] * 20, step=step, rank=0))
    findings = examine(*shards)
    assert ids(findings) == ["where.step"]
    assert findings[0].severity == "warning"
    assert findings[0].evidence["steps"] == [5]
    assert "comes back" in findings[0].message


def test_shift_on_one_rank_and_a_placeholder_on_another_are_both_named() -> None:
    rng = np.random.default_rng(9)
    shards = []
    for rank in range(4):
        t, r = pair(rng, 2000)
        if rank == 1:
            t = np.concatenate([np.roll(x, 1) for x in np.split(t, 20)])
        if rank == 2:
            r[50::100] = 0.0
        shards.append(Shard(t, r, [100] * 20, rank=rank, step=1))
    findings = examine(*shards)
    assert sorted(ids(findings)) == ["alignment.lag", "placeholder.stray"]
    scopes = {f.id: f.evidence["ranks"] for f in findings}
    assert scopes == {"alignment.lag": [1], "placeholder.stray": [2]}


@pytest.mark.parametrize("first", [True, False])
def test_a_mismatch_that_is_nowhere_else_at_all(first: bool) -> None:
    """|d| exactly 0 in the other part: no number of times of it."""
    rng = np.random.default_rng(95)
    t, r = pair(rng, 40 * 1000, 0.0)
    place = np.arange(40 * 1000) % 1000
    there = place < 64 if first else place >= 936
    t = np.where(there, r - 0.3, r)
    findings = examine(Shard(t, r, [1000] * 40))
    assert ids(findings) == ["where.position"]
    message = findings[0].message
    assert (", 0 after, at equal" if first else ": 0 before, ") in message
    assert "x)" not in message and "inf" not in message


def test_versions_of_which_one_has_no_mismatch_at_all() -> None:
    rng = np.random.default_rng(96)
    t, r = pair(rng, 4000, 0.0)
    version = np.repeat(np.arange(20) % 2, 200)
    t = np.where(version == 1, r + 0.3 * rng.choice([-1, 1], 4000), r)
    findings = examine(Shard(t, r, [200] * 20, extra={"policy_version": version}))
    message = next(f.message for f in findings if f.id == "where.version")
    assert "at version 1, 0 at version 0: the trainer" in message
