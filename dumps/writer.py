"""``DumpWriter``: what a trainer calls each step. Bad input is refused at once; the disk is written behind the trainer's back.

A call costs the step a check and one copy off the device. At most ``queue_size`` copies are alive: when the disk is slower
than the training, the next call waits for a slot, and the wait is counted.
"""

from __future__ import annotations

import contextlib
import json
import operator
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from rollout_is.dumps.errors import DumpError, RolloutIsError, UsageError
from rollout_is.dumps.layout import FORMAT, LAYOUTS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class WriterStats:
    """What a writer did so far.

    Attributes:
        written: shards on disk.
        bytes: their size.
        skipped: steps left out by ``every``.
        failed: shards lost to a disk error.
        stalls: calls that had to wait for the disk.
        stalled_seconds: how long they waited in all.
    """

    written: int = 0
    bytes: int = 0
    skipped: int = 0
    failed: int = 0
    stalls: int = 0
    stalled_seconds: float = 0.0


class DumpWriter:
    """Writes one shard a step for one rank: ``directory/step_00000412/rank_00003.safetensors``.

    Each shard appears whole or not at all. Use it as a context manager, or call ``close`` at the end; both wait for the disk.
    A resumed run that writes a step again replaces that shard.

    Args:
        directory: the dump's folder; made when the first shard is written.
        rank, world_size: of the process, among those that dump.
        run, trainer, train_policy: strings for the metadata (``train_policy``: old, current or proximal).
        metadata: further metadata; values are written as strings.
        layout: ``packed`` or ``rectangular`` where shapes do not tell; None follows the shapes.
        queue_size: shards that may wait for the disk, the one being written included.
        every: write only steps divisible by it.

    Raises:
        UsageError: a rank outside the world, or another setting out of range.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder, DumpWriter(folder, run="demo") as writer:
    ...     path = writer.write(step=7, train_logprobs=torch.tensor([-1.0, -2.0]), rollout_logprobs=torch.tensor([-1.1, -2.0]),
    ...                         response_mask=torch.tensor([True, True]), cu_seqlens=torch.tensor([0, 2]))
    ...     writer.flush()
    ...     path.name, path.exists(), writer.stats.written
    ('rank_00000.safetensors', True, 1)
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        run: str | None = None,
        trainer: str | None = None,
        train_policy: str | None = None,
        metadata: Mapping[str, object] | None = None,
        layout: str | None = None,
        queue_size: int = 2,
        every: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            _usage(f"rank={rank}, world_size={world_size}", "expected 0 <= rank < world_size")
        if queue_size < 1 or every < 1:
            _usage(f"queue_size={queue_size}, every={every}", "expected both to be at least 1")
        if layout not in (None, *LAYOUTS):
            _usage(f"layout={layout!r}", "expected packed, rectangular or None")
        self.directory = Path(directory)
        self.rank = rank
        self.world_size = world_size
        self.every = every
        self.layout = layout
        self.stats = WriterStats()
        named = {"run": run, "trainer": trainer, "train_policy": train_policy}
        self._metadata = _strings(
            {**{key: value for key, value in named.items() if value is not None}, **(metadata or {})}
        )
        self._slots = threading.BoundedSemaphore(queue_size)
        self._lock = threading.Condition()
        self._queue: deque[tuple[int, Path, dict[str, Tensor], dict[str, str]]] = deque()
        self._thread: threading.Thread | None = None
        self._error: DumpError | None = None
        self._steps: set[int] = set()
        self._closed = False

    def write(
        self,
        *,
        step: int,
        train_logprobs: Tensor,
        rollout_logprobs: Tensor,
        response_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_packs: Tensor | None = None,
        trainer_metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, object] | None = None,
        **columns: Tensor,
    ) -> Path | None:
        """Check one step's tensors, copy them off the device, and queue them for the disk.

        Args:
            step: the training step; each once.
            train_logprobs, rollout_logprobs: [T], [1, T] or [B, L], floating; nats.
            response_mask: the same shape, nonzero = valid; or pass ``labels`` (-100 = not valid) instead.
            cu_seqlens: int32 or int64 [S+1]; or pass ``seq_lens`` [S] instead; neither for [B, L] whose rows are sequences.
            cu_packs: int32 or int64 [P+1], token offsets of the micro-batches.
            trainer_metrics: what the trainer itself logged at this step (numbers, or tensors of one element).
            metadata: strings for this shard only.
            **columns: optional columns of the format by their names, ``**{"mask.NAME": ..., "logprobs.NAME": ...}`` included.

        Returns:
            Where the shard will stand, or None when ``every`` leaves this step out.

        Raises:
            DumpError: the tensors do not fit together (the errors of the reader), or an earlier shard could not be written.
            UsageError: an unknown column, a step given twice, or a closed writer.
        """
        from rollout_is.dumps.shape import check_and_copy

        if self._closed:
            _usage("DumpWriter.write", "expected an open writer, found a closed one")
        self._raise_error()
        step = _whole_step(step)
        if step % self.every:
            self.stats.skipped += 1
            return None
        if step in self._steps:
            _usage(
                f"step={step}",
                "expected each step once, found it a second time; gather the micro-batches into one call",
            )
        path = self.directory / f"step_{step:08d}" / f"rank_{self.rank:05d}.safetensors"
        tensors = {
            "train_logprobs": train_logprobs,
            "rollout_logprobs": rollout_logprobs,
            "response_mask": response_mask,
            "cu_seqlens": cu_seqlens,
            "cu_packs": cu_packs,
            **columns,
        }
        text = {
            **self._metadata,
            **_strings(metadata or {}),
            "format": FORMAT,
            "step": str(step),
            "rank": str(self.rank),
            "world_size": str(self.world_size),
        }
        if trainer_metrics is not None:
            text["trainer_metrics"] = json.dumps(dict(trainer_metrics), default=_plain)
        self._take_slot()
        try:
            copies, layout = check_and_copy(tensors, f"step {step}, rank {self.rank}", text, self.layout)
            text["layout"] = layout
            self._start((step, path, copies, text))
        except BaseException:
            self._slots.release()
            raise
        self._steps.add(step)
        return path

    def flush(self) -> None:
        """Wait until everything queued is on disk. Raises DumpError when a shard could not be written."""
        with self._lock:
            while self._thread is not None:
                self._lock.wait()
        self._raise_error()

    def close(self) -> None:
        """Wait for the disk and end. Raises DumpError when a shard could not be written; closing twice is fine."""
        self._closed = True
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RolloutIsError as lost:
            if error is None:
                raise
            error.add_note(f"and a shard could not be written: {lost}")

    def __del__(self) -> None:
        if getattr(self, "_error", None) is not None:  # nobody called close: say it rather than lose it
            warnings.warn(str(self._error), RuntimeWarning, stacklevel=1)

    def _take_slot(self) -> None:
        if self._slots.acquire(blocking=False):
            return
        self.stats.stalls += 1
        began = time.monotonic()
        self._slots.acquire()
        self.stats.stalled_seconds += time.monotonic() - began

    def _start(self, item: tuple[int, Path, dict[str, Tensor], dict[str, str]]) -> None:
        # The thread lives only while there is work: it is no daemon, so the interpreter waits for the last shard at exit,
        # and a forgotten close hangs nothing.
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._drain, name="rollout-is-dump", daemon=False)
                thread.start()
                self._thread = thread
            self._queue.append(item)

    def _drain(self) -> None:
        from rollout_is.dumps.serialize import save_shard

        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    self._lock.notify_all()
                    return
                step, path, tensors, metadata = self._queue.popleft()
            size, error = 0, None
            try:
                size = save_shard(path, tensors, metadata)
            except Exception as problem:  # noqa: BLE001 - whatever it is, the trainer hears of it at its next call
                error = _lost(path, problem)
            del tensors  # the copy is given up before its slot is
            with self._lock:
                if error is None:
                    self.stats.written += 1
                    self.stats.bytes += size
                else:
                    self.stats.failed += 1
                    self._steps.discard(step)  # it may be given again
                    self._error = self._error or error
            self._slots.release()

    def _raise_error(self) -> None:
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error


def _lost(path: Path, problem: Exception) -> DumpError:
    error = DumpError(
        str(path),
        f"expected to write the shard, found {type(problem).__name__}: {problem}",
        "the disk is full, or the folder may not be written to",
        "make room; whole shards written before are intact",
        code="dump-write-failed",
    )
    error.__cause__ = problem
    return error


def _strings(values: Mapping[str, object]) -> dict[str, str]:
    return {
        str(key): value if isinstance(value, str) else json.dumps(value, default=_plain)
        for key, value in values.items()
    }


def _plain(value: Any) -> Any:
    """What JSON lacks: numbers and arrays of torch and numpy as Python's, anything else as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def _whole_step(step: Any) -> int:
    """Python's int of a whole number of any library."""
    if not isinstance(step, bool):
        with contextlib.suppress(TypeError):
            if (found := operator.index(step)) >= 0:
                return found
    _usage(f"step={step!r}", "expected a whole number >= 0")


def _usage(where: str, problem: str) -> NoReturn:
    raise UsageError(f"DumpWriter: {where}", problem, code="writer-usage")
