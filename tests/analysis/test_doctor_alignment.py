"""Group E of the public cases: shifts, growing offsets, periodic outliers, columns that are not the same quantity."""

from __future__ import annotations

import numpy as np
import pytest
from doctored import Shard, examine, explained, ids, logprobs


def noisy(rng: np.random.Generator, r: np.ndarray, size: float = 0.01) -> np.ndarray:
    return r + rng.normal(0, size, len(r))


def test_c42_one_position_offset_is_named_with_its_lag_and_how_much_better_it_fits() -> None:
    rng = np.random.default_rng(42)
    r = logprobs(rng, 4000)
    t = noisy(rng, r)
    lengths = [400] * 10
    assert ids(examine(Shard(t, r, lengths))) == []
    shifted = np.concatenate([np.roll(part, 1) for part in np.split(t, 10)])  # train[i] belongs to rollout[i - 1]
    (finding,) = [f for f in examine(Shard(shifted, r, lengths)) if f.severity == "error"]
    assert finding.id == "alignment.lag"
    assert finding.evidence["figures"]["lag"] == -1
    assert "shift by one suspected, lag -1 fits" in finding.message
    curve = finding.evidence["figures"]["mean_abs_d_by_lag"]
    assert curve["-1"] == pytest.approx(0.0079, rel=0.1)  # mean |N(0, .01)|
    # the oracle for the others: the mean distance of unrelated draws
    expected = np.abs(r[:, None] - rng.permutation(r)[None, :500]).mean()
    assert curve["+0"] == pytest.approx(expected, rel=0.15)
    assert curve["+1"] == pytest.approx(expected, rel=0.15)
    assert finding.evidence["strength"] == pytest.approx(curve["+0"] / curve["-1"], rel=1e-3)
    assert finding.evidence["strength"] > 40
    place = finding.evidence["places"][0]
    rows = {position: (train, rollout) for position, train, rollout in place["neighbours"]}
    at = place["position"]
    assert rows[at][0] == pytest.approx(rows[at - 1][1], abs=0.05)  # the neighbour shows the shift to the eye


@pytest.mark.parametrize("lag", [-3, -2, 2, 3])
def test_c42_other_lags_up_to_three(lag: int) -> None:
    rng = np.random.default_rng(lag + 10)
    r = logprobs(rng, 600)
    t = np.concatenate([np.roll(part, -lag) for part in np.split(noisy(rng, r), 6)])
    findings = examine(Shard(t, r, [100] * 6))
    assert ids(findings, "error") == ["alignment.lag"]
    assert findings[0].evidence["figures"]["lag"] == lag


def test_c42_a_shift_of_one_rank_is_named_on_that_rank_and_explains_its_mismatch() -> None:
    rng = np.random.default_rng(1)
    shards = []
    for rank in range(4):
        r = logprobs(rng, 2000)
        t = noisy(rng, r)
        if rank == 2:
            t = np.concatenate([np.roll(part, 1) for part in np.split(t, 20)])
        shards.append(Shard(t, r, [100] * 20, rank=rank, step=1))
    findings = examine(*shards)
    assert ids(findings) == ["alignment.lag"]
    assert findings[0].evidence["ranks"] == [2]
    assert "on rank 2 (1 of 4 ranks)" in findings[0].message
    assert "where.rank" in explained(findings[0])


def test_c43_offset_that_grows_by_one_with_each_sample() -> None:
    rng = np.random.default_rng(43)
    whole = logprobs(rng, 30) - 0.05
    t = noisy(rng, whole)
    # each of the 5 samples lost the log-prob of its last token; packed, then filled up with zeros
    kept = np.concatenate([whole[6 * j : 6 * j + 5] for j in range(5)])
    r = np.concatenate([kept, np.zeros(5)])
    findings = examine(Shard(t, r, [6] * 5))
    assert ids(findings, "error") == ["alignment.growing"]
    assert "the offset grows by one with every sequence of a pack (0, 1, 2, 3, ...)" in findings[0].message
    assert "lost one value" in findings[0].message
    assert findings[0].evidence["figures"]["growth_per_sequence"] == -1


def test_lag_that_differs_between_sequences() -> None:
    rng = np.random.default_rng(5)
    r = logprobs(rng, 1200)
    t = noisy(rng, r)
    shifts = [1, 2, -1, 3, 1, -2, 2, 1, -1, 3, -3, 2]
    t = np.concatenate([np.roll(part, k) for part, k in zip(np.split(t, 12), shifts, strict=True)])
    findings = examine(Shard(t, r, [100] * 12))
    assert ids(findings, "error") == ["alignment.lag_varies"]
    by_lag = findings[0].evidence["figures"]["sequences_by_lag"]
    assert by_lag == {f"{-k:+d}": shifts.count(k) for k in sorted(set(shifts), reverse=True)}


def test_c44_outliers_at_the_end_of_every_slice() -> None:
    rng = np.random.default_rng(44)
    r = logprobs(rng, 4096) - 0.05
    t = noisy(rng, r)
    t[511::512] = r[511::512] - 8
    findings = examine(Shard(t, r, [4096]))
    assert ids(findings, "error") == ["alignment.periodic"]
    assert "outliers periodic, period 512 — shard boundary?" in findings[0].message
    figures = findings[0].evidence["figures"]
    assert (figures["period"], figures["residue"]) == (512, 511)
    assert findings[0].evidence["tokens"] == 8
    assert figures["largest_abs_d"] == pytest.approx(8, rel=0.15)
    assert "median |d| 0.00" in findings[0].message
    assert {p["position"] % 512 for p in findings[0].evidence["places"]} == {511}


def test_outliers_without_a_period_are_no_seam() -> None:
    rng = np.random.default_rng(45)
    r = logprobs(rng, 4096)
    t = noisy(rng, r)
    t[rng.choice(4096, 8, replace=False)] -= 8
    assert "alignment.periodic" not in ids(examine(Shard(t, r, [4096])))


def test_c47_with_a_second_trainer_pass_the_odd_one_out_is_named() -> None:
    rng = np.random.default_rng(47)
    truth = logprobs(rng, 2400)
    t, again = noisy(rng, truth, 0.005), noisy(rng, truth, 0.005)
    r = truth + rng.normal(0, 0.4, 2400)
    findings = examine(Shard(t, r, [20] * 120, extra={"logprobs.train_again": again}))
    (finding,) = [f for f in findings if f.id == "passes.odd_one_out"]
    assert "the rollout column is the odd one out: train and train_again agree" in finding.message
    figures = finding.evidence["figures"]
    assert figures["mean_abs_train_rollout"] == pytest.approx(np.abs(t - r).mean(), rel=1e-5)
    assert figures["mean_abs_train_pass"] == pytest.approx(np.abs(t - again).mean(), rel=1e-5)


def test_c49_same_position_scoring_is_not_the_same_quantity() -> None:
    rng = np.random.default_rng(49)
    t = logprobs(rng, 2000)
    r = -6 - rng.gamma(2, 1, 2000)
    r[::100] = np.nan  # the first position has no context; it is masked
    mask = np.ones(2000, bool)
    mask[::100] = False
    findings = examine(Shard(t, r, [100] * 20, mask=mask))
    assert ids(findings, "error") == ["alignment.unrelated"]
    assert "not the same quantity" in findings[0].message
    oracle = np.corrcoef(t[mask], r[mask])[0, 1]
    assert findings[0].evidence["figures"]["correlation_by_lag"]["+0"] == pytest.approx(oracle, abs=1e-4)


def test_c52_tokens_that_slip_inside_the_response() -> None:
    rng = np.random.default_rng(52)
    shards = []
    for _ in range(8):
        r = logprobs(rng, 600)
        t = noisy(rng, r)
        r = np.concatenate([r[:200], r[201:], [-0.3]])  # one token less after decoding and encoding again
        shards.append((t, r))
    t, r = (np.concatenate(x) for x in zip(*shards, strict=True))
    findings = examine(Shard(t, r, [600] * 8))
    assert ids(findings, "error") == ["alignment.lag_inside"]
    assert "a token was inserted or lost inside the response" in findings[0].message
    assert findings[0].evidence["sequences"] == 8


@pytest.mark.parametrize("name", ["first", "last"])
def test_first_or_last_valid_token_always_bad(name: str) -> None:
    rng = np.random.default_rng(7)
    r = logprobs(rng, 1200) - 0.01
    t = noisy(rng, r)
    t[slice(0, None, 60) if name == "first" else slice(59, None, 60)] -= rng.uniform(1, 5, 20)
    findings = examine(Shard(t, r, [60] * 20))
    assert ids(findings, "error") == [f"alignment.{name}_token"]
    assert f"the {name} valid token is bad in nearly every sequence" in findings[0].message
    wanted = 0 if name == "first" else 59
    assert {p["position"] for p in findings[0].evidence["places"]} == {wanted}


def test_a_fifth_of_bad_first_tokens_is_not_always() -> None:
    rng = np.random.default_rng(8)
    r = logprobs(rng, 3000)
    t = noisy(rng, r)
    t[0::300] -= 2.0  # 10 of 50
    assert "alignment.first_token" not in ids(examine(Shard(t, r, [60] * 50)))
