"""The crew of worker processes by itself: what it is told comes back, and whatever ends a worker ends nothing else."""

from __future__ import annotations

import multiprocessing
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from rollout_is.analysis.crew import Crew, Lost

HUGE = 64 << 20  # bytes of a result that takes a while to be said
Work = Callable[[Any], Any]


def worker(given: Any) -> Work:
    """What each process does: a few kinds of task, told by name."""

    def run(task: tuple[str, Any]) -> Any:
        kind, value = task
        if kind == "raise":
            raise ValueError(value)
        if kind == "huge":
            Path(value).touch()
            return os.urandom(1024) * (HUGE // 1024)
        if kind == "lambda":
            return lambda: None  # cannot be pickled
        if kind == "exit":
            os._exit(value)
        if kind == "pid":
            time.sleep(0.1)
            return os.getpid()
        return (given, value)

    return run


def crew_of(count: int, method: str = "fork") -> Crew:
    return Crew(multiprocessing.get_context(method), count, worker, "given")


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    resource_tracker.ensure_running()  # spawn leaves one for good
    before = open_files(), threading.active_count()
    yield
    assert multiprocessing.active_children() == []
    assert (open_files(), threading.active_count()) == before


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_every_task_is_answered_by_whoever_has_the_least_to_do() -> None:
    crew = crew_of(2)
    assert [crew.send(("pid", None), 2) for _ in range(5)] == [True, True, True, True, False]
    pids = [crew.take() for _ in range(4)]
    assert not crew.busy and not crew.ready()
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2] and os.getpid() not in pids
    crew.dismiss()
    crew.join()


def test_spawned_processes_are_given_the_same() -> None:
    crew = Crew(multiprocessing.get_context("spawn"), 1, operator.itemgetter, 0)
    assert crew.send([7, 8], 1)
    assert crew.take() == 7
    crew.dismiss()
    crew.join()


def test_what_a_task_raises_is_raised_with_the_place_where_it_was() -> None:
    crew = crew_of(1)
    crew.send(("raise", "a bad task"), 2)
    crew.send(("lambda", None), 2)
    crew.send(("echo", 1), 3)
    with pytest.raises(ValueError, match="a bad task") as caught:
        crew.take()
    assert any(Path(__file__).name in note for note in caught.value.__notes__)
    with pytest.raises(Exception, match=r"[Pp]ickle"):
        crew.take()
    assert crew.take() == ("given", 1)  # the worker lives on
    crew.dismiss()
    crew.join()


@pytest.mark.parametrize(("task", "code"), [(("exit", 3), 3), (("exit", 0), 0)])
def test_the_end_of_a_worker_is_told_with_its_exit_code(task: tuple[str, int], code: int) -> None:
    crew = crew_of(2)
    crew.send(task, 1)
    with pytest.raises(Lost) as caught:
        crew.take()
    assert caught.value.code == code
    crew.kill()


def speaking(crew: Crew, tmp_path: Path) -> None:
    """Have the first worker begin to say something huge; returns when it does, most likely in the middle of it."""
    begun = tmp_path / "begun"
    crew.send(("huge", str(begun)), 1)
    while not begun.exists():
        time.sleep(0.001)


@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.06])
def test_a_worker_killed_in_the_middle_of_a_word_is_lost_not_waited_for(tmp_path: Path, after: float) -> None:
    crew = crew_of(3)
    speaking(crew, tmp_path)
    time.sleep(after)
    first = crew._workers[0].process
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    started = time.monotonic()
    try:
        said = crew.take()  # it may have been quicker
        assert len(said) == HUGE
    except Lost as lost:
        assert lost.code == -signal.SIGKILL
    assert time.monotonic() - started < 5
    crew.kill()


@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.06])
def test_to_kill_those_who_speak_takes_no_time(tmp_path: Path, after: float) -> None:
    crew = crew_of(2)
    speaking(crew, tmp_path)
    time.sleep(after)
    started = time.monotonic()
    crew.kill()
    assert time.monotonic() - started < 5
    crew.kill()  # once more does no harm


def test_a_task_for_one_who_has_ended_is_no_error_but_its_end_is() -> None:
    crew = crew_of(1)
    crew._workers[0].process.kill()
    crew._workers[0].process.join()
    assert crew.send(("echo", 1), 1)
    with pytest.raises(Lost):
        crew.take()
    crew.kill()


def test_a_crew_that_cannot_be_started_leaves_nobody() -> None:
    with pytest.raises(Exception, match=r"[Pp]ickle"):
        Crew(multiprocessing.get_context("spawn"), 2, lambda given: lambda task: task, None)
