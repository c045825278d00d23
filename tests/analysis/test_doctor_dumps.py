"""Whole dumps: real ones stay silent or name their fault, any number of workers says the same, long dumps are sampled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from doctored import Shard, examine, ids, logprobs

from rollout_is.analysis import doctor

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "reference" / "real_dumps"


@pytest.mark.parametrize("name", ["tiny_lm", "packed_padding", "multi_turn"])
def test_sample_dumps_are_healthy(name: str) -> None:
    found = doctor.run(str(ROOT / "sample_dumps" / name))
    assert found.at_least("warning") == ()


def test_a_dump_without_a_valid_token_says_so_and_nothing_else() -> None:
    found = doctor.run(str(ROOT / "sample_dumps" / "all_masked"))
    assert [f.id for f in found.at_least("warning")] == ["coverage.no-valid-tokens"]


needs_real = pytest.mark.skipif(
    not REAL.is_dir(), reason="the reference dumps are not in this checkout (../shared/reference)"
)


@needs_real
@pytest.mark.parametrize("name", ["healthy", "multi_turn", "all_masked"])
def test_healthy_real_dumps_are_silent(name: str) -> None:
    found = doctor.run(str(REAL / name))
    assert [f.id for f in found.findings if not f.id.startswith("coverage.")] == []
    assert found.at_least("warning") == ()


@needs_real
def test_real_stale_weights_are_named_with_their_step() -> None:
    (finding,) = doctor.run(str(REAL / "stale")).findings
    assert finding.id == "where.step"
    assert "change point at step 3: mean |d| 0.00939 before, 0.104 from there on (11x)" in finding.message
    assert finding.evidence["steps"] == [3, 4]


@needs_real
def test_real_bad_rank_is_named_with_its_rank() -> None:
    (finding,) = doctor.run(str(REAL / "bad_rank")).findings
    assert finding.id == "where.rank"
    assert finding.evidence["ranks"] == [1]
    assert len(finding.evidence["places"]) == 3


@needs_real
def test_any_number_of_workers_gives_the_same_bits() -> None:
    one, two = (
        json.dumps([f.evidence for f in doctor.run(str(REAL / "bad_rank"), workers=n).findings]) for n in (1, 2)
    )
    assert one == two


@pytest.mark.parametrize("rank_in_dump", [0, 1])
def test_a_shift_in_a_long_dump_is_found_from_the_sample(rank_in_dump: int) -> None:
    rng = np.random.default_rng(1)
    shards = []
    for rank in range(2):
        r = logprobs(rng, 400_000)
        t = r + rng.normal(0, 0.01, 400_000)
        if rank == rank_in_dump:
            t = np.concatenate([np.roll(x, 2) for x in np.split(t, 400)])
        shards.append(Shard(t, r, [1000] * 400, rank=rank, step=1))
    findings = examine(*shards)
    assert ids(findings) == ["alignment.lag"]
    assert findings[0].evidence["ranks"] == [rank_in_dump]
    assert findings[0].evidence["figures"]["lag"] == -2


def test_zeros_outside_the_sample_are_found_too() -> None:
    rng = np.random.default_rng(2)
    r = logprobs(rng, 400_000)
    t = r + rng.normal(0, 0.01, 400_000)
    r[100_000:100_400] = 0.0  # the second block of the unit and those up to the ninth are not sampled
    t[100_000:100_400] -= 2.0
    findings = examine(Shard(t, r, [400] * 1000))
    assert ids(findings, "error") == ["placeholder.whole"]
    assert findings[0].evidence["places"][0]["index"] == 100_000


def test_a_few_shifted_sequences_outside_the_sample_are_read_again() -> None:
    rng = np.random.default_rng(5)
    r = logprobs(rng, 400_000)
    t = r + rng.normal(0, 0.01, 400_000)
    for sequence in (500, 620, 777):
        part = slice(400 * sequence, 400 * (sequence + 1))
        t[part] = np.roll(t[part], 1)
    (finding,) = [f for f in examine(Shard(t, r, [400] * 1000)) if f.severity == "error"]
    assert finding.id == "alignment.lag"
    assert finding.evidence["figures"]["lag"] == -1
    assert finding.evidence["sequences"] == 3
    assert finding.evidence["token_share"] == pytest.approx(0.003, rel=0.05)
    assert {p["sequence"] for p in finding.evidence["places"]} <= {500, 620, 777}


def test_one_sequence_longer_than_a_unit() -> None:
    rng = np.random.default_rng(3)
    n = (1 << 20) + 5000
    r = logprobs(rng, n)
    t = np.roll(r + rng.normal(0, 0.01, n), 1)
    findings = examine(Shard(t, r, [n]))
    assert ids(findings, "error") == ["alignment.lag"]


def test_two_copies_of_a_dump_in_another_order_say_the_same() -> None:
    rng = np.random.default_rng(4)
    shards = []
    for step in (1, 2, 3):
        r = logprobs(rng, 3000)
        shards.append(Shard(r + rng.normal(0, 0.2 if step > 1 else 0.01, 3000), r - 0.5, [100] * 30, step=step, rank=0))
    assert examine(*shards) == examine(*shards)
