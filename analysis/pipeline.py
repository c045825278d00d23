"""From paths (or tensors) to a Summary: scan, cut into units, run them wherever, assemble, say what was noticed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_is.analysis import notebook
from rollout_is.analysis.assemble import assemble
from rollout_is.analysis.batch import Consumer
from rollout_is.analysis.duplicates import DuplicateIndex, confirm
from rollout_is.analysis.grouping import UNIT_GROUPINGS
from rollout_is.analysis.heap import give_back
from rollout_is.analysis.partial import Partial
from rollout_is.analysis.places import describe_worst
from rollout_is.analysis.plan import Paths, Plan, asked_for, plan_shards
from rollout_is.analysis.recount import without_copies
from rollout_is.analysis.reduce import Launch, Ranks
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary
from rollout_is.analysis.tails import Tails
from rollout_is.analysis.workers import Job, Progress, run_tasks, usable_cores, wait_for_workers
from rollout_is.analysis.worst import WorstSequences, WorstTokens
from rollout_is.dumps.errors import DumpError, RolloutIsError, UsageError
from rollout_is.dumps.scan import Scan, scan
from rollout_is.dumps.shard import ShardInfo

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.dumps.shard import OpenShard

SMALL = 4 << 20  # positions below which more processes cost more than they save
GIVE_BACK = 16  # units after which free memory is returned
KEPT_UNITS = 1024  # units up to which each keeps all it has: some 100 MB
MANY = 256  # tasks from which on they pay all the same: a shard costs some milliseconds however small it is


@dataclass(frozen=True)
class FileOpener:
    """Opens the shards of a scan with the roles settled. Picklable: it goes to the workers."""

    mask: str
    train: str
    rollout: str

    def __call__(self, info: ShardInfo) -> OpenShard:
        from rollout_is.dumps.reader import open_shard

        return open_shard(info, mask=self.mask, train=self.train, rollout=self.rollout)


class Outcome:
    """What the units gave, wherever they ran. What would grow with the dump is folded as it comes in.

    Args:
        errors: met already, by shard.
        strip: fold the histograms too (see ``Tails``).
    """

    def __init__(self, errors: Mapping[int, RolloutIsError] | None = None, *, strip: bool = False) -> None:
        self.partials: list[Partial] = []
        self.errors: dict[int, RolloutIsError] = dict(errors or {})
        self.index = DuplicateIndex()
        self.tails = Tails(strip=strip)

    def add(self, partial: Partial) -> None:
        """Take in one unit."""
        self.index.add(partial.unit.id.shard, partial.checksums, fragment=partial.unit.fragment)
        none = np.zeros(0, dtype=np.int64)
        partial.checksums = (none, none, none)
        self.tails.take(partial)
        self.partials.append(partial)
        if len(self.partials) % GIVE_BACK == 0:
            give_back()

    def merge(self, other: Outcome) -> None:
        """Take in what another rank did."""
        self.partials += other.partials
        self.errors.update(other.errors)
        self.index.merge(other.index)
        self.tails.merge(other.tails)


def analyze(
    paths: Paths,
    *,
    settings: Settings | None = None,
    columns: Mapping[str, str] | None = None,
    steps: str | None = None,
    allow_partial: bool = False,
    duplicates: str | None = None,
    workers: int | None = 1,
    local: bool = False,
    progress: Progress | None = None,
    consumers: Sequence[Consumer] = (),
    diagnose: bool = True,
) -> Summary:
    """IS and mismatch statistics of a dump, before and after masking: what ``rollout-is analyze`` prints.

    Under torchrun every rank must call it; each gets the same Summary.

    Args:
        paths: folder, file or glob of shards, or several of them; foreign dumps too.
        settings: bounds, mask, groupings, device; see ``Settings``.
        columns: role -> tensor name, where the known names do not settle it.
        steps: ``100:200`` (both ends in) or ``100,105``; None is all.
        allow_partial: go on without bad shards and missing ranks, and say so.
        duplicates: ``newest`` or ``all``, where two shards claim one (step, rank).
        workers: processes; None is one for each usable core. The figures do not depend on it, not by a bit.
        local: under torchrun, each node reads only the files that it sees itself.
        progress: called with (positions done, positions in all).
        consumers: extra statistics on the same pass; their results stand in ``summary.extra[consumer.name]``.
        diagnose: let the doctor have a glance for ``summary.findings``; False, or ``only="weights"``, leaves it out.

    Raises:
        DumpError: the dump cannot be read or is inconsistent.
        UsageError: wrong settings.
        WorkLostError: a worker or rank was killed.

    >>> import torch, tempfile
    >>> from rollout_is.dumps.writer import DumpWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with DumpWriter(folder) as writer:
    ...         path = writer.write(step=1, train_logprobs=torch.tensor([-1.0, -2.0, 0.0]),
    ...                      rollout_logprobs=torch.tensor([-1.5, -2.0, 0.0]),
    ...                      response_mask=torch.tensor([1, 1, 0]), cu_seqlens=torch.tensor([0, 2, 3]))
    ...     summary = analyze(folder)
    >>> summary.views["padded"]["per_sequence"]["rollout_is_seq_min"].value
    0.0
    """
    settings = settings or Settings()
    started = time.monotonic()
    launch = Launch.from_environment()
    if launch is not None and launch.world > 1:
        from rollout_is.analysis.ranks import analyze_ranked

        return analyze_ranked(
            Ranks(launch), paths, settings, columns=columns, steps=steps, allow_partial=allow_partial,
            duplicates=duplicates, local=local, progress=progress, consumers=consumers,
            diagnose=diagnose,
        )  # fmt: skip
    scanned = scan(paths, columns=columns, steps=steps, allow_partial=allow_partial, duplicates=duplicates)
    opener = FileOpener(settings.mask, settings.train, settings.rollout)
    plan = plan_shards(dict(enumerate(scanned.shards)), opener)
    plan.asked = asked_for(paths, columns, steps, allow_partial, duplicates)
    settle(plan.errors, len(plan.shards), scanned.root, allow_partial)
    job = Job(plan.shards, opener, settings, observers(settings, consumers, diagnose, scanned))
    count = worker_count(workers, plan, settings)
    try:
        outcome = run_plan(plan, job, count, progress)
        if set(outcome.errors) != set(plan.errors):
            settle(outcome.errors, len(plan.shards), scanned.root, allow_partial)
            outcome = run_plan(
                plan.without(outcome.errors), job, count, progress
            )  # sums that held a bad shard are void
        runtime = {"workers": count, "ranks": 1, "seconds": time.monotonic() - started}
        return conclude(scanned, plan, job, outcome, runtime)
    finally:
        wait_for_workers()


def summarize(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    settings: Settings | None = None,
    consumers: Sequence[Consumer] = (),
    diagnose: bool = True,
    metadata: Mapping[str, str] | None = None,
    **columns: Tensor,
) -> Summary:
    """The same statistics of tensors in memory.

    Args:
        train_logprobs, rollout_logprobs: float [T] (or [1, T], or [B, L] with a [B, L] mask and no ``cu_seqlens``).
        response_mask: bool, integer or float [T]; nonzero = valid.
        cu_seqlens: int32 or int64 [S+1].
        settings: see ``Settings``.
        consumers, diagnose: as for ``analyze``.
        metadata: as a shard's, such as ``{"layout": "rectangular"}``.
        **columns: further columns of the format, such as ``segment_is_pad``, ``group_ids``, ``cu_packs``, ``token_ids``.

    Raises:
        DumpError: shapes, dtypes or offsets do not fit together.

    >>> import torch
    >>> summary = summarize(torch.tensor([-2.0, -1.0]), torch.tensor([-1.5, -1.2]), torch.tensor([1, 1]), torch.tensor([0, 2]))
    >>> round(summary.get("masked.mismatch.mismatch_kl").value, 6)
    0.15
    """
    from rollout_is.dumps.memory import MemoryShard, describe_tensors

    settings = settings or Settings()
    tensors = {"train_logprobs": train_logprobs, "rollout_logprobs": rollout_logprobs, "response_mask": response_mask}
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = cu_seqlens
    given = {name: tensor for name, tensor in columns.items() if tensor is not None}
    tensors.update(given)
    info, notes = describe_tensors(tensors, metadata=metadata)

    def opener(info: ShardInfo) -> OpenShard:
        return MemoryShard(info, tensors, mask=settings.mask, train=settings.train, rollout=settings.rollout)

    plan = plan_shards({0: info}, opener)
    settle(plan.errors, 1, "tensors", False)
    scanned = Scan((info,), (), notes, "tensors")
    job = Job(plan.shards, opener, settings, observers(settings, consumers, diagnose, scanned))
    outcome = run_plan(plan, job, 1, None)
    settle(outcome.errors, 1, "tensors", False)
    return conclude(scanned, plan, job, outcome, {"workers": 1, "ranks": 1})


def observers(settings: Settings, consumers: Sequence[Consumer], diagnose: bool, scanned: Scan) -> tuple[Consumer, ...]:
    """The consumers of an analysis, the doctor's glance among them where it is wanted."""
    if not diagnose or settings.only == "weights":
        return tuple(consumers)
    from rollout_is.analysis.glance import with_glance

    return with_glance(tuple(consumers), sum(s.positions for s in scanned.shards))


def worker_count(workers: int | None, plan: Plan, settings: Settings) -> int:
    """How many processes to use."""
    if workers is not None and workers < 1:
        raise UsageError(
            f"--workers {workers}", f"expected at least 1 worker, found {workers}", "", "leave it out for one a core"
        )
    if settings.device not in ("cpu", "cpu:torch"):
        return 1
    if workers is not None:
        return workers
    large = sum(t.positions for t in plan.tasks) >= SMALL or len(plan.tasks) >= MANY
    return usable_cores() if large else 1


def run_plan(plan: Plan, job: Job, workers: int, progress: Progress | None) -> Outcome:
    """Run all tasks; a shard that fails loses all of its partials and is named in ``errors``."""
    check_device(job.settings.device)
    outcome = Outcome(plan.errors, strip=strips(plan, job.settings))
    for done in run_tasks(job, plan.tasks, workers, progress):
        if done.error is not None:
            outcome.errors.setdefault(done.task.shard, done.error)
        for partial in done.partials:
            outcome.add(partial)
    return outcome


def strips(plan: Plan, settings: Settings) -> bool:
    """Whether rows give up their histograms: for very many units, where no group is made of whole units."""
    return sum(len(t.units) for t in plan.tasks) > KEPT_UNITS and not any(by in UNIT_GROUPINGS for by in settings.by)


def check_device(device: str) -> None:
    """Refuse what cannot be used, with the reason."""
    if device in ("cpu", "cpu:torch"):
        return
    import torch

    kind = device.split(":")[0]
    where = f"--device {device}"
    if kind == "mps":
        raise UsageError(
            where,
            "expected cpu or cuda, found mps",
            "Apple's GPUs have no float64, which every figure here is computed in",
            "use --device cpu",
        )
    if kind != "cuda":
        raise UsageError(where, f"expected cpu, cuda or cuda:N, found {device}", "", "use --device cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            where,
            "expected a CUDA device, found none",
            "this torch build or this machine has no CUDA",
            "use --device cpu",
        )
    number = device.partition(":")[2]
    if number and (not number.isdigit() or int(number) >= torch.cuda.device_count()):
        raise UsageError(where, f"expected cuda:0 to cuda:{torch.cuda.device_count() - 1}, found {device}")


def settle(errors: Mapping[int, RolloutIsError], shards: int, root: str, allow_partial: bool) -> None:
    """Raise when shards failed and that is not allowed: one error as it is, several as a list that hides none.

    Raises:
        RolloutIsError: any failure without ``allow_partial``, or when no shard is left.
    """
    if not errors or (allow_partial and len(errors) < shards):
        return
    ordered = [errors[k] for k in sorted(errors)]
    if len(ordered) == 1:
        raise ordered[0]
    from rollout_is.dumps.scan import together

    raise together([e for e in ordered if isinstance(e, DumpError)], shards, root)


def conclude(scanned: Scan, plan: Plan, job: Job, outcome: Outcome, runtime: Mapping[str, Any]) -> Summary:
    """Everything after the units: assembling, duplicates, worst places, notes, findings."""
    settings = job.settings
    left_out = [outcome.errors[k] for k in sorted(outcome.errors)]
    shards = {k: v for k, v in plan.shards.items() if k not in outcome.errors}
    partials = sorted(outcome.partials, key=lambda p: p.unit.id)
    here = {k: v for k, v in shards.items() if job.readable is None or k in job.readable}
    found = confirm(outcome.index, here, job.opener)
    assembled = assemble(partials, shards, settings, outcome.tails)
    extra: dict[str, Any] = {}
    if found.copies:
        extra["without_duplicates"] = without_copies(found, plan, job, partials, shards, outcome.tails)
    worst: dict[str, Any] = {}
    if settings.top:
        tokens, sequences = WorstTokens(settings.top), WorstSequences(settings.top)
        for p in partials:
            if p.worst_tokens is not None:
                tokens.merge(p.worst_tokens)
            if p.worst_sequences is not None:
                sequences.merge(p.worst_sequences)
        worst = describe_worst(tokens, sequences, shards, job.opener, set(here))
    for i, consumer in enumerate(job.consumers):
        extra[consumer.name] = consumer.finish(
            [(p.unit, shards[p.unit.id.shard], p.consumed[i]) for p in partials if i in p.consumed]
        )
    return notebook.write(scanned, shards, plan, assembled, found, left_out, settings, worst, extra, runtime)
