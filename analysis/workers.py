"""Run the units of a dump in this process or in several; which process ran a unit leaves no trace in its partial."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    from concurrent.futures import Future, ProcessPoolExecutor

    from rollout_is.dumps.shard import OpenShard, ShardInfo

AHEAD = 2  # tasks that a worker has been sent: the one it does and the next
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


_runner: Runner | None = None


def _start(job: Job) -> None:
    import torch

    global _runner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work; a worker has nothing to say
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _runner = Runner(job)


def _end_with_parent() -> None:
    """Whatever ends the parent ends its workers: they would read on for nobody, and hold its output open."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(task: Task) -> Done:
    assert _runner is not None
    return _run_and_check(_runner, task)


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
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # fork shares the parent's torch instead of importing it again; never after CUDA has started, which needs spawn.
    method = "fork" if job.settings.device == "cpu" and hasattr(os, "fork") else "spawn"
    context = multiprocessing.get_context(method)
    total = sum(t.positions for t in tasks)
    done = 0

    def counted(result: Done) -> Done:
        nonlocal done
        done += result.task.positions
        if progress is not None:
            progress(done, total)
        return result

    pool = ProcessPoolExecutor(workers - 1, mp_context=context, initializer=_start, initargs=(job,))
    waiting = deque(tasks)
    # A future holds its result: nothing but this queue may hold a future. None is ever cancelled: the executor cannot end then.
    sent: deque[Future[Done]] = deque()

    def send() -> None:
        while waiting and len(sent) < AHEAD * (workers - 1):
            sent.append(pool.submit(_run, waiting.popleft()))

    try:
        with one_thread(), settled_heap():
            send()
            runner = Runner(job)
            while waiting:
                yield counted(_run_and_check(runner, waiting.pop()))
                while (ended := next((f for f in sent if f.done()), None)) is not None:
                    sent.remove(ended)
                    result = ended.result()
                    del ended
                    send()
                    yield counted(result)
                    del result
        while sent:
            yield counted(sent.popleft().result())
    except BrokenProcessPool as error:
        _kill(pool)
        raise WorkLostError(
            f"one of {workers} worker processes",
            "expected it to end its work, but it was killed",
            "most often the out-of-memory killer; the dump itself is not to blame",
            f"run again with fewer workers (--workers {max(1, workers // 2)}) or more memory",
            code="worker-killed",
        ) from error
    except BaseException:
        _kill(pool)
        raise
    pool.shutdown(wait=False)
    _ending.append(pool)


_ending: list[ProcessPoolExecutor] = []  # idle, on their way out


def wait_for_workers() -> None:
    """Until all processes of earlier runs have ended: an executor that is still ending when the interpreter does may speak up.

    They end while the caller goes on with what they gave.
    """
    while _ending:
        _ending.pop().shutdown(wait=True)


def _kill(pool: ProcessPoolExecutor) -> None:
    """End the workers at once, whatever they do."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False)


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
