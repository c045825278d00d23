"""Run the units of a dump in this process or in several; which process ran a unit leaves no trace in its partial."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rollout_is.analysis.batch import Consumer, Ints, Unit
from rollout_is.analysis.engine import Engine
from rollout_is.analysis.heap import settled_heap
from rollout_is.analysis.pareto import capacity
from rollout_is.analysis.partial import Partial
from rollout_is.analysis.settings import Settings
from rollout_is.dumps.errors import RolloutIsError, WorkLostError

if TYPE_CHECKING:
    from rollout_is.analysis.crew import Crew
    from rollout_is.dumps.shard import OpenShard, ShardInfo

AHEAD = 2  # tasks that a worker has been sent: the one it does and the next
KILLED = 9  # SIGKILL, which Windows does not name
TASK_UNITS = 1  # units handed to a process at a time: fewer leave no process waiting at the end
Opener = Callable[["ShardInfo"], "OpenShard"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Task:
    """Some consecutive units of one shard."""

    shard: int
    units: tuple[Unit, ...]

    @property
    def positions(self) -> int:
        return sum(u.stop - u.start for u in self.units)


@dataclass(frozen=True)
class Job:
    """Everything a process needs to run any task. Picklable unless the opener serves tensors in memory."""

    shards: dict[int, ShardInfo]
    opener: Opener
    settings: Settings
    consumers: tuple[Consumer, ...] = ()
    skip: frozenset[tuple[int, int]] = frozenset()
    readable: frozenset[int] | None = None  # shards that this node can open; None is all

    @property
    def segments(self) -> int:
        """As many sequences as there can be at most."""
        return sum(info.segments for info in self.shards.values())


@dataclass(frozen=True)
class Done:
    """What came of one task: its partials, or the error that its shard met."""

    task: Task
    partials: tuple[Partial, ...] = ()
    error: RolloutIsError | None = None


class Runner:
    """Runs tasks in this process, keeping the last shard open."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.engine = Engine(job.settings, job.consumers, job.skip, capacity(job.segments))
        self._number = -1
        self._shard: OpenShard | None = None
        self._offsets: Ints = np.zeros(1, dtype=np.int64)

    def run(self, task: Task) -> Done:
        """Never raises for a bad shard: its error is the result."""
        try:
            if task.shard != self._number or self._shard is None:
                self._drop(
                    forget=False
                )  # the caller has closed or checked it: another shard's error is not this task's
                self._shard = self.job.opener(self.job.shards[task.shard])
                self._shard.__enter__()
                if task.shard != self._number:  # a shard that was closed and opened again is the same, or an error
                    self._offsets = self._shard.offsets().numpy()
                self._number = task.shard
            partials = tuple(self.engine.run(self._shard, unit, self._offsets) for unit in task.units)
        except RolloutIsError as error:
            self._drop()
            return Done(task, error=error)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's; it has moved between modules
                raise
            raise _device_full(self.job.settings.device) from error
        return Done(task, partials)

    def close(self) -> None:
        """Close the open shard; raises DumpError when the file changed while it was read."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.__exit__(None, None, None)

    def check(self) -> None:
        """See to it that the open shard is still the file of the scan; raises DumpError when it is not."""
        check = getattr(self._shard, "check", self.close)
        try:
            check()
        except RolloutIsError:
            self._drop()
            raise

    def _drop(self, *, forget: bool = True) -> None:
        """Close the open shard without a look at the file; ``forget``: what was read of it too."""
        shard, self._shard = self._shard, None
        if forget:
            self._number = -1
        if shard is not None:
            shard.__exit__(RolloutIsError, None, None)


def _device_full(device: str) -> WorkLostError:
    return WorkLostError(
        f"--device {device}",
        "expected room for the buffers of one block (some 10 MB), but the device is out of memory",
        "another process holds the device's memory; the size of the dump does not matter",
        "free the device, name another one (--device cuda:1), or use --device cpu",
        code="device-memory",
    )


def run_here(job: Job, tasks: Sequence[Task], progress: Progress | None) -> Iterator[Done]:
    """All tasks in this process, one torch thread."""
    total = sum(t.positions for t in tasks)
    done = 0
    with one_thread(), settled_heap():
        runner = Runner(job)
        previous: Task | None = None
        for task in tasks:
            if previous is not None and task.shard != previous.shard:
                yield from _closed(runner, previous)
            yield runner.run(task)
            previous = task
            done += task.positions
            if progress is not None:
                progress(done, total)
        if previous is not None:
            yield from _closed(runner, previous)


def _closed(runner: Runner, task: Task) -> Iterator[Done]:
    try:
        runner.close()
    except RolloutIsError as error:
        yield Done(Task(task.shard, ()), error=error)


def _prepare(job: Job) -> Callable[[Task], Done]:
    """In a worker: what does one task of the job."""
    import torch

    torch.set_num_threads(1)
    return partial(_run_and_check, Runner(job))


def _run_and_check(runner: Runner, task: Task) -> Done:
    # A process does not know its last task, so the check for a changed file is made after each.
    done = runner.run(task)
    if done.error is None:
        try:
            runner.check()
        except RolloutIsError as error:
            return Done(task, error=error)
    return done


def run_processes(job: Job, tasks: Sequence[Task], workers: int, progress: Progress | None) -> Iterator[Done]:
    """All tasks over ``workers`` processes, this one among them, in whatever order they end.

    The others take tasks from the front, this one from the back: it has begun before they have started.

    Raises:
        WorkLostError: a worker was killed (out of memory?).
    """
    import multiprocessing

    from rollout_is.analysis.crew import Crew, Lost

    # fork shares the parent's torch instead of importing it again; never after CUDA has started, which needs spawn.
    forks = job.settings.device == "cpu" and hasattr(os, "fork")
    context = multiprocessing.get_context("fork") if forks else multiprocessing.get_context("spawn")
    total = sum(t.positions for t in tasks)
    done = 0

    def counted(result: Done) -> Done:
        nonlocal done
        done += result.task.positions
        if progress is not None:
            progress(done, total)
        return result

    waiting = deque(tasks)
    wait_for_workers()  # of an earlier run: a thread that listens to them should not be there when this process forks
    with one_thread(), settled_heap():
        crew = Crew(context, workers - 1, _prepare, job)

        def send() -> None:
            # Near the end nobody is sent a task that another could begin with sooner.
            while waiting and crew.send(waiting[0], AHEAD if len(waiting) >= workers else 1):
                waiting.popleft()

        try:
            send()
            runner = Runner(job)
            while waiting:
                yield counted(_run_and_check(runner, waiting.pop()))
                while crew.ready():
                    result = crew.take()
                    send()
                    yield counted(result)
                    del result  # nothing but its taker may hold a result
            while crew.busy:
                yield counted(crew.take())
        except Lost as lost:
            crew.kill()
            raise _worker_lost(lost.code, workers) from None
        except BaseException:
            crew.kill()
            raise
        crew.dismiss()
        _ending.append(crew)


def _worker_lost(code: int | None, workers: int) -> WorkLostError:
    where = f"one of {workers} worker processes"
    if code == -KILLED:
        return WorkLostError(
            where,
            "expected it to end its work, but it was killed",
            "most often the out-of-memory killer; the dump itself is not to blame",
            f"run again with fewer workers (--workers {max(1, workers // 2)}) or more memory",
            code="worker-killed",
        )
    how = "ended" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return WorkLostError(
        where,
        f"expected it to end its work, but it {how}",
        "",
        "run again, with --workers 1 if it happens again: what fails then fails in the open",
        code="worker-killed",
    )


_ending: list[Crew] = []  # dismissed, on their way out


def wait_for_workers() -> None:
    """Until all processes of earlier runs have ended: they end while the caller goes on with what they gave."""
    while _ending:
        _ending.pop().join()


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread while it lasts: more only spin, and the order of sums must not depend on them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_tasks(job: Job, tasks: Sequence[Task], workers: int, progress: Progress | None = None) -> Iterator[Done]:
    """Run all tasks, here or in processes."""
    if workers <= 1 or len(tasks) <= 1:
        return run_here(job, tasks, progress)
    return run_processes(job, tasks, min(workers, len(tasks)), progress)


def tasks_of(units: Sequence[Unit]) -> list[Task]:
    """Units of one shard, some at a time."""
    return [Task(units[i].id.shard, tuple(units[i : i + TASK_UNITS])) for i in range(0, len(units), TASK_UNITS)]
