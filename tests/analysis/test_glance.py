"""The doctor's glance in every analysis: the cause stands first, healthy dumps stay silent, large ones are sampled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made import Shard, analyze, randomly, write_dump

from rollout_is.analysis import glance, units
from rollout_is.analysis.batch import Unit, UnitId
from rollout_is.analysis.glance import SMALL, UNIT, UNITS, Glance
from rollout_is.analysis.pipeline import summarize
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary


def shifted() -> Shard:
    """Forty sequences of 100 tokens, the trainer's log-probs one place late."""
    rng = np.random.default_rng(42)
    rollout = -rng.gamma(1.0, 1.0, 4000)
    train = rollout + 0.01 * rng.standard_normal(4000)
    late = np.concatenate([np.roll(part, 1) for part in np.split(train, 40)])
    cu = list(range(0, 4001, 100))
    return Shard(torch.from_numpy(late), torch.from_numpy(rollout), torch.ones(4000, dtype=torch.bool), cu)


def run(one: Shard, **options: object) -> Summary:
    cu = torch.tensor(one.cu)
    return summarize(one.train, one.rollout, one.mask, cu, **options)  # type: ignore[arg-type]


def test_a_shift_is_named_before_the_figures_that_it_ruins() -> None:
    found = run(shifted()).findings
    assert found[0].id.startswith("alignment.") and "shift" in found[0].message
    assert len({f.id for f in found}) == len(found)


def test_without_the_glance_only_the_figures_speak() -> None:
    assert not any(f.id.startswith("alignment.") for f in run(shifted(), diagnose=False).findings)
    assert not any(f.id.startswith("alignment.") for f in run(shifted(), settings=Settings(only="weights")).findings)


def test_the_glance_leaves_nothing_else_in_the_summary() -> None:
    one = randomly(np.random.default_rng(3), noise=0.01)
    with_it, without = run(one), run(one, diagnose=False)
    assert dict(with_it.extra) == dict(without.extra)
    assert with_it.views == without.views and with_it.notes == without.notes


def test_very_large_dumps_are_sampled_evenly_over_ranks() -> None:
    glance = Glance(64 * UNITS * UNIT)
    taken = [s for s in range(6400) if glance.wants(Unit(UnitId(s, 0), 0, 1, 0, 1))]
    assert 60 <= len(taken) <= 145 and taken[0] == 0  # one in 64 of 6400, the first always
    assert {s % 8 for s in taken} == set(range(8))
    small = Glance(SMALL)
    assert all(small.wants(Unit(UnitId(s, u), 0, 1, 0, 1)) for s in range(50) for u in range(3))


def test_of_a_large_dump_each_unit_has_a_block_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bad rank is named from the sums of its sequences, a shift from the first blocks."""
    monkeypatch.setattr(units, "CHUNK_POSITIONS", 512)
    monkeypatch.setattr(units, "BLOCK_TOKENS", 512)
    monkeypatch.setattr(glance, "SMALL", 100)
    assert run(shifted()).findings[0].id == "alignment.lag"
    rng = np.random.default_rng(4)
    ranks = [randomly(rng, segments=60, length=60, noise=0.01, pads=False, holes=False) for _ in range(4)]
    ranks[2].train = ranks[2].rollout + 0.3 * torch.from_numpy(rng.standard_normal(len(ranks[2].train)))
    found = analyze(write_dump(tmp_path, ranks, ranks=4), workers=1).findings
    assert any(f.id == "where.rank" and "rank 2" in f.message for f in found)


def test_a_nan_in_a_block_that_is_not_looked_at_is_still_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "CHUNK_POSITIONS", 512)
    monkeypatch.setattr(units, "BLOCK_TOKENS", 512)
    monkeypatch.setattr(glance, "SMALL", 100)
    one = randomly(np.random.default_rng(6), segments=40, length=60, noise=0.01, pads=False, holes=False)
    one.train[-3] = float("nan")
    found = run(one)
    assert found.coverage["nonfinite_valid_tokens"] == 1
    assert any("finite" in f.message for f in found.findings)
