"""The doctor's glance in every analysis: the cause stands first, healthy dumps stay silent, large ones are sampled."""

from __future__ import annotations

import numpy as np
import torch
from made import Shard, randomly

from rollout_is.analysis.batch import Unit, UnitId
from rollout_is.analysis.glance import LOOKED_AT, Glance
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


def test_a_large_dump_is_sampled_evenly_over_ranks() -> None:
    glance = Glance(64 * LOOKED_AT)
    taken = [s for s in range(6400) if glance.wants(Unit(UnitId(s, 0), 0, 1, 0, 1))]
    assert 60 <= len(taken) <= 145  # one in 64 of 6400
    assert {s % 8 for s in taken} == set(range(8))
    small = Glance(LOOKED_AT)
    assert all(small.wants(Unit(UnitId(s, u), 0, 1, 0, 1)) for s in range(50) for u in range(3))
