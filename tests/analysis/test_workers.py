"""Several processes, this one among them: every task done once, and nothing held of what was given."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from made import analyze, randomly, write_dump

from rollout_is.analysis.pipeline import FileOpener
from rollout_is.analysis.plan import plan_shards
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.workers import Done, Job, Runner, Task, run_processes
from rollout_is.dumps.errors import DumpError, WorkLostError
from rollout_is.dumps.reader import FileShard
from rollout_is.dumps.scan import scan

HUGE = 64 << 20  # bytes of a result that takes a while to be said


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


def small_dump(tmp_path: Path, shards: int = 12) -> Path:
    ones = [randomly(np.random.default_rng(seed), segments=6, length=50) for seed in range(shards)]
    return write_dump(tmp_path, ones, ranks=shards)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_killed_worker_is_one_error_and_leaves_nobody_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """No hang, no word from a thread of the executor (warnings are errors here), no process left."""
    job, tasks = job_of(small_dump(tmp_path))
    parent, run = os.getpid(), Runner.run

    def killed(self: Runner, task: Task) -> Done:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)  # the others get their turn
        return run(self, task)

    monkeypatch.setattr(Runner, "run", killed)
    started = time.monotonic()
    with pytest.raises(WorkLostError, match="killed"):
        list(run_processes(job, tasks, workers, None))
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("changed", [0, 5, 11])
def test_a_shard_that_changes_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, changed: int
) -> None:
    path = small_dump(tmp_path)
    name = scan(path).shards[changed].name
    being_read: set[int] = set()  # planning finds it as it was
    read, unchanged = FileShard.read, FileShard._check_unchanged

    def reads(self: FileShard, role: str, start: int, stop: int) -> torch.Tensor:
        if role == "train":
            being_read.add(id(self))
        return read(self, role, start, stop)

    def checks(self: FileShard) -> None:
        if self.info.name == name and id(self) in being_read:
            self._changed("found another time of change")
        unchanged(self)

    monkeypatch.setattr(FileShard, "read", reads)
    monkeypatch.setattr(FileShard, "_check_unchanged", checks)
    got = analyze(path, workers=workers, allow_partial=True)
    assert got.coverage["shards_left_out"] == 1
    assert got.coverage["shards"] == 11
    with pytest.raises(DumpError) as caught:
        analyze(path, workers=workers)
    assert str(caught.value).count(name) == 1


def test_nobody_is_left_when_the_summary_is_there(tmp_path: Path) -> None:
    """Not even one that is on its way out: the caller may fork, count its children or end."""
    path = small_dump(tmp_path)
    before = threading.active_count()
    for _ in range(3):
        analyze(path, workers=3)
        assert multiprocessing.active_children() == []
        assert threading.active_count() == before


@pytest.fixture
def loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers are found in the middle of saying something large; the file is there once they begin."""
    parent, begun = os.getpid(), tmp_path / "begun"

    def run(self: Runner, task: Task) -> Done:
        if os.getpid() != parent:
            begun.touch()
            return Done(task, (bytes(HUGE),))  # type: ignore[arg-type]
        while not begun.exists():
            time.sleep(0.001)
        time.sleep(0.02)
        return Done(task)

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(Runner, "check", lambda self: None)
    return begun


@pytest.mark.usefixtures("loud")
def test_an_interrupt_while_workers_speak_ends_the_run(tmp_path: Path) -> None:
    job, tasks = job_of(small_dump(tmp_path / "dump"))
    results = run_processes(job, tasks, 3, None)
    next(results)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt())
    assert time.monotonic() - started < 5
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("loud")
def test_a_worker_killed_while_it_speaks_ends_the_run(tmp_path: Path) -> None:
    job, tasks = job_of(small_dump(tmp_path / "dump"))
    started = time.monotonic()
    with pytest.raises(WorkLostError, match="killed"):
        for _ in run_processes(job, tasks, 3, None):
            for child in multiprocessing.active_children()[:1]:
                child.kill()
    assert time.monotonic() - started < 5
    assert multiprocessing.active_children() == []


CHILDREN = """
import os, sys, time
from rollout_is.analysis import workers
parent = os.getpid()
def run(self, task):
    if os.getpid() != parent:
        os.write(1, f"{os.getpid()}\\n".encode())  # in one piece: two of them speak
    time.sleep(60)
workers.Runner.run = run
from rollout_is.analysis.pipeline import analyze
analyze(sys.argv[1], workers=3)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_workers_do_not_outlive_their_parent(tmp_path: Path, how: signal.Signals) -> None:
    """They would go on reading, and hold the pipe of whoever waits for the output."""
    command = [sys.executable, "-c", CHILDREN, str(small_dump(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(how)
        parent.wait(10)
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [pid for pid in children if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []


def alive(pid: int) -> bool:
    """Running; one that nobody has waited for yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
