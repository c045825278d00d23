"""Several processes, this one among them: every task done once, and nothing held of what was given."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from made import randomly, write_dump

from rollout_is.analysis.pipeline import FileOpener
from rollout_is.analysis.plan import plan_shards
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.workers import Done, Job, Task, run_processes
from rollout_is.dumps.scan import scan


def job_of(path: Path) -> tuple[Job, list[Task]]:
    opener = FileOpener("response_mask", "train", "rollout")
    plan = plan_shards(dict(enumerate(scan(path).shards)), opener)
    return Job(plan.shards, opener, Settings()), plan.tasks


@pytest.mark.parametrize("workers", [2, 4])
def test_results_are_let_go_of_as_they_are_taken(tmp_path: Path, workers: int) -> None:
    """A future holds its result; held to the end, the results of a large dump would not fit."""
    shards = [randomly(np.random.default_rng(seed), segments=6, length=50) for seed in range(24)]
    job, tasks = job_of(write_dump(tmp_path, shards, ranks=24))
    alive: list[weakref.ref[Done]] = []
    seen: list[Task] = []
    most = 0
    for done in run_processes(job, tasks, workers, None):
        seen.append(done.task)
        alive.append(weakref.ref(done))
        del done
        gc.collect()
        most = max(most, sum(one() is not None for one in alive))
    assert sorted(t.shard for t in seen) == list(range(24)) and len(set(seen)) == len(tasks)
    assert most <= 3


def test_progress_counts_every_position_once(tmp_path: Path) -> None:
    shards = [randomly(np.random.default_rng(seed), segments=6, length=50) for seed in range(9)]
    job, tasks = job_of(write_dump(tmp_path, shards, ranks=9))
    said: list[tuple[int, int]] = []
    assert len(list(run_processes(job, tasks, 3, lambda done, total: said.append((done, total))))) == len(tasks)
    assert [done for done, _ in said] == sorted({done for done, _ in said})
    assert said[-1][0] == said[-1][1] == sum(t.positions for t in tasks)
