"""The same analysis over the ranks of a torchrun launch: units are shared by size, partials gathered, rank 0 concludes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_is.analysis.batch import Consumer
from rollout_is.analysis.reduce import Ranks
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary
from rollout_is.analysis.workers import Job, Progress, Task
from rollout_is.dumps.errors import DumpError, RolloutIsError
from rollout_is.dumps.scan import Scan, scan
from rollout_is.dumps.shard import ShardInfo


def analyze_ranked(
    ranks: Ranks, paths: Any, settings: Settings, *, columns: Mapping[str, str] | None, steps: str | None,
    allow_partial: bool, duplicates: str | None, local: bool, progress: Progress | None, consumers: Sequence[Consumer],
    diagnose: bool,
) -> Summary:  # fmt: skip
    """Every rank calls it with the same arguments and gets the same Summary.

    Raises:
        RolloutIsError: the first error of any rank, on all of them.
    """
    from rollout_is.analysis import pipeline

    started = time.monotonic()
    launch = ranks.launch
    if settings.device == "cuda":
        settings = replace(settings, device=f"cuda:{launch.local_rank}")
    with ranks:
        scanned, mine = _scan(ranks, paths, columns, steps, allow_partial or local, duplicates, local)
        opener = pipeline.FileOpener(settings.mask, settings.train, settings.rollout)
        numbered = dict(enumerate(scanned.shards))
        plan = pipeline.Plan(numbered)
        met: RolloutIsError | None = None
        outcome = pipeline.Outcome()
        try:
            # Every rank plans the shards that it can see; the cut is the same everywhere because it is the shard's own.
            plan = pipeline.plan_shards({k: v for k, v in numbered.items() if mine is None or k in mine}, opener)
            pipeline.settle(plan.errors, len(numbered), scanned.root, allow_partial)
        except RolloutIsError as error:
            met = error
        ranks.agree(met)
        job = Job(numbered, opener, settings, pipeline.observers(settings, consumers, diagnose, scanned))
        own = _share(plan.tasks, ranks, local)
        try:
            shown = progress if launch.rank == 0 else None
            outcome = pipeline.run_plan(replace(plan, tasks=own), job, 1, shown)
            pipeline.settle(outcome.errors, len(numbered), scanned.root, allow_partial)
        except RolloutIsError as error:
            met = error
        ranks.agree(met)
        failed: dict[int, RolloutIsError] = {}
        for errors in ranks.all_gather(outcome.errors):
            failed.update(errors)
        if set(failed) - set(plan.errors):
            outcome = pipeline.run_plan(replace(plan, tasks=own).without(failed), job, 1, shown)
        parts = ranks.gather((plan if local else None, outcome))
        result: Summary | RolloutIsError | None = None
        if parts is not None:
            try:
                result = _conclude(parts, plan, numbered, scanned, job, local, allow_partial, launch.world, started)
            except RolloutIsError as error:
                result = error
        result = ranks.broadcast(result)
    if isinstance(result, RolloutIsError):
        raise result
    assert result is not None
    return result


def _conclude(
    parts: list[Any], plan: Any, numbered: dict[int, ShardInfo], scanned: Scan, job: Job, local: bool,
    allow_partial: bool, world: int, started: float,
) -> Summary:  # fmt: skip
    from rollout_is.analysis import pipeline

    outcome = pipeline.Outcome()
    for own_plan, own in parts:
        if local and own_plan is not None:
            plan.errors.update(own_plan.errors)
            seen = {t.shard for t in plan.tasks}
            plan.tasks += [t for t in own_plan.tasks if t.shard not in seen]
            if own_plan is not plan:
                plan.outside = max(plan.outside, own_plan.outside)
        outcome.merge(own)
    plan.shards = numbered
    pipeline.settle(outcome.errors, len(numbered), scanned.root, allow_partial)
    runtime = {"workers": 1, "ranks": world, "seconds": time.monotonic() - started}
    return pipeline.conclude(scanned, plan, job, outcome, runtime)


def _scan(
    ranks: Ranks, paths: Any, columns: Mapping[str, str] | None, steps: str | None, partial: bool,
    duplicates: str | None, local: bool,
) -> tuple[Scan, set[int] | None]:  # fmt: skip
    """The scan that all ranks agree on, and the numbers of the shards that this rank can read (None: all)."""
    met: RolloutIsError | None = None
    own: Scan | None = None
    try:
        own = scan(paths, columns=columns, steps=steps, allow_partial=partial, duplicates=duplicates)
    except RolloutIsError as error:
        met = error
    if not local:
        ranks.agree(met)
        assert own is not None
        prints = ranks.all_gather(_fingerprint(own))
        for rank, other in enumerate(prints):
            if other != prints[0]:
                raise DumpError(
                    f"rank {rank}: {own.root}",
                    f"expected the {prints[0][0]} shards that rank 0 finds, found {other[0]}"
                    + ("" if other[0] != prints[0][0] else " that differ in name or size"),
                    "the ranks do not see the same files",
                    "put the dump on a file system that all nodes share, or pass --own-shards where each node holds its own shards",
                    code="ranks-differ",
                )
        return own, None
    # Each node holds its own shards: one numbering over all of them.
    found = ranks.all_gather((ranks.launch.node, own, met))
    shards: dict[tuple[int, str], ShardInfo] = {}
    for node, other, _ in found:
        for info in other.shards if other is not None else ():
            shards.setdefault((node, info.path), info)
    if not shards:
        ranks.agree(met)
    ordered = sorted(shards.items(), key=lambda item: (item[1].sort_key, item[0]))
    mine = {i for i, (key, _) in enumerate(ordered) if key[0] == ranks.launch.node}
    notes = sorted({n for _, other, _ in found if other is not None for n in other.notes if n.code != "ranks-missing"})
    problems = tuple(p for _, other, _ in found if other is not None for p in other.problems)
    root = next(other.root for _, other, _ in found if other is not None)
    return Scan(tuple(info for _, info in ordered), problems, tuple(notes), root), mine


def _fingerprint(scanned: Scan) -> tuple[int, str]:
    text = "\n".join(f"{s.name} {s.size} {s.positions} {s.segments}" for s in scanned.shards)
    return len(scanned.shards), hashlib.sha256(text.encode()).hexdigest()


def _share(tasks: list[Task], ranks: Ranks, local: bool) -> list[Task]:
    """This rank's tasks: a contiguous run of about its share of the positions (of its node's, when ``local``)."""
    everyone = ranks.all_gather(ranks.launch.node)
    peers = [r for r, node in enumerate(everyone) if not local or node == ranks.launch.node]
    place, count = peers.index(ranks.launch.rank), len(peers)
    total = sum(t.positions for t in tasks)
    out, before = [], 0
    for task in tasks:
        middle = before + task.positions / 2
        before += task.positions
        if (total and min(count - 1, int(middle * count / total)) == place) or (not total and place == 0):
            out.append(task)
    return out
