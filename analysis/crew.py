"""Worker processes, each with pipes of its own: one that is killed in the middle of a word keeps no other from speaking.

A pool with one queue for all results, such as ``concurrent.futures``', waits for ever for the rest of what a killed worker began to
say: the pipe stays open as long as anybody else can write into it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, SpawnContext
    from multiprocessing.process import BaseProcess

ROOM = 1 << 20  # bytes of a pipe for results: as much as Linux gives to anybody
PATIENCE = 5.0  # seconds for a killed process to be gone: one that waits for a dead disk cannot be waited for


class Lost(Exception):
    """A worker ended before its work did; ``code`` is its exit code, negative for a signal, None where it is not known."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class _Failed:
    error: Exception


@dataclass
class _Worker:
    process: BaseProcess
    tasks: Connection
    results: Connection
    busy: int = 0  # tasks sent whose results have not been taken


class Crew:
    """Processes that do what they are sent, in any order.

    Args:
        context: of ``multiprocessing``; ``fork`` leaves nothing to be pickled but tasks and results.
        count: of processes.
        prepare: called in each of them with ``given``; returns what does a task.
    """

    def __init__(
        self,
        context: ForkContext | SpawnContext,
        count: int,
        prepare: Callable[[Any], Callable[[Any], Any]],
        given: Any,
    ) -> None:
        self._workers: list[_Worker] = []
        self._said: SimpleQueue[tuple[_Worker, bytes | None]] = SimpleQueue()  # None: it has ended
        self._listener = threading.Thread(target=self._listen, daemon=True)
        try:
            for _ in range(count):
                self._workers.append(_begin(context, prepare, given))
        except BaseException:
            self.kill()
            raise
        self._listener.start()  # after the last fork: a thread does not go with it

    def send(self, task: Any, ahead: int) -> bool:
        """Give the task to whoever has the least to do; False where everybody has been sent ``ahead`` tasks already."""
        worker = min(self._workers, key=lambda w: w.busy)
        if worker.busy >= ahead:
            return False
        worker.busy += 1
        try:
            worker.tasks.send(task)
        except OSError:
            pass  # it has ended: its end is among the results
        return True

    @property
    def busy(self) -> bool:
        """Whether there are results to come."""
        return any(w.busy for w in self._workers)

    def ready(self) -> bool:
        """Whether there is a result to be taken at once."""
        return not self._said.empty()

    def take(self) -> Any:
        """The next result, waited for.

        Raises:
            Lost: a worker has ended; nothing but ``kill`` makes sense then.
            Exception: what a task raised, its traceback in a note.
        """
        worker, said = self._said.get()
        worker.busy -= 1
        if said is None:
            worker.process.join(PATIENCE)
            raise Lost(worker.process.exitcode)
        # Unpickled here: a thread that did it would hold the interpreter while this one wants to work.
        result = pickle.loads(said)
        if isinstance(result, _Failed):
            raise result.error
        return result

    def dismiss(self) -> None:
        """Nothing more will be sent."""
        for worker in self._workers:
            try:
                worker.tasks.send(None)
            except OSError:
                pass  # it has ended

    def kill(self) -> None:
        """End the processes at once, whatever they do, and wait for them."""
        for worker in self._workers:
            worker.process.kill()
        self.join(PATIENCE)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the processes have ended."""
        for worker in self._workers:
            worker.process.join(timeout)
        if self._listener.is_alive():
            self._listener.join(timeout)
        if self._listener.is_alive() or any(w.process.exitcode is None for w in self._workers):
            return
        for worker in self._workers:
            for each in (worker.tasks, worker.results, worker.process):
                each.close()
        self._workers.clear()

    def _listen(self) -> None:
        """Take what the workers say while this process works: a pipe is small, and they would stand still."""
        speaking = {w.results: w for w in self._workers}
        while speaking:
            for results in wait(list(speaking)):
                assert isinstance(results, Connection)
                try:
                    said = results.recv_bytes()
                except (EOFError, OSError):
                    self._said.put((speaking.pop(results), None))
                else:
                    self._said.put((speaking[results], said))
                    del said  # it is the taker's alone


def _begin(context: ForkContext | SpawnContext, prepare: Callable[[Any], Callable[[Any], Any]], given: Any) -> _Worker:
    theirs, tasks = context.Pipe(duplex=False)
    results, answers = context.Pipe(duplex=False)
    _widen(answers)
    # Not a daemon of multiprocessing's: those may not be started from one, such as a data loader's worker.
    process = context.Process(target=_work, args=(theirs, answers, prepare, given))
    process.start()
    # This process's copies: while it held them, or a later worker did, their end could not be seen.
    theirs.close()
    answers.close()
    return _Worker(process, tasks, results)


def _widen(pipe: Connection) -> None:
    """Have room for some results in the pipe, where the system can: a worker need not wait until somebody listens."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # the system has a limit for each user
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, ROOM)


def _work(tasks: Connection, answers: Connection, prepare: Callable[[Any], Callable[[Any], Any]], given: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work; a worker has nothing to say
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run = prepare(given)
    while (task := tasks.recv()) is not None:
        try:
            answers.send(run(task))
        except Exception as error:  # noqa: BLE001 - raised again, where the task came from
            error.add_note(traceback.format_exc())
            answers.send(_Failed(error))


def _end_with_parent() -> None:
    """Whatever ends the parent ends its workers: they would read on for nobody, and hold its output open."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
