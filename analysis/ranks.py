"""The same analysis over the ranks of a torchrun launch: units are shared by size, partials gathered, rank 0 concludes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_is.analysis.batch import Consumer
from rollout_is.analysis.fused.library import common, kernel, only
from rollout_is.analysis.plan import Plan, asked_for, plan_shards
from rollout_is.analysis.reduce import Ranks
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary
from rollout_is.analysis.workers import Job, Progress, Task
from rollout_is.dumps import coverage
from rollout_is.dumps.errors import DumpError, RolloutIsError
from rollout_is.dumps.scan import Scan, scan, together
from rollout_is.dumps.shard import ShardInfo

# A node without a shard of its own adds nothing, where others hold some.
EMPTY = ("no-shards", "path-missing")


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
    with ranks, only(_kernel(ranks)):
        scanned, mine = _scan(ranks, paths, columns, steps, allow_partial, duplicates, local)
        opener = pipeline.FileOpener(settings.mask, settings.train, settings.rollout)
        numbered = dict(enumerate(scanned.shards))
        plan = Plan(numbered)
        met: RolloutIsError | None = None
        outcome = pipeline.Outcome()
        try:
            # Every rank plans the shards that it can see; the cut is the same everywhere because it is the shard's own.
            plan = plan_shards({k: v for k, v in numbered.items() if mine is None or k in mine}, opener)
            pipeline.settle(plan.errors, len(numbered), scanned.root, allow_partial)
        except RolloutIsError as error:
            met = error
        plan.asked = asked_for(paths, columns, steps, allow_partial, duplicates)
        ranks.agree(met)
        watching = pipeline.observers(settings, consumers, diagnose, scanned)
        job = Job(numbered, opener, settings, watching, readable=None if mine is None else frozenset(mine))
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
                result = _conclude(parts, plan, numbered, scanned, job, allow_partial, launch.world, started)
            except RolloutIsError as error:
                result = error
        result = ranks.broadcast(result)
    if isinstance(result, RolloutIsError):
        raise result
    assert result is not None
    return result


def _kernel(ranks: Ranks) -> str:
    """The kernel that every rank has: the last bits must not depend on which rank reads what."""
    met: RolloutIsError | None = None
    name = "numpy"
    try:
        name = kernel()[0]
    except RolloutIsError as error:
        met = error
    ranks.agree(met)
    return common(ranks.all_gather(name))


def _conclude(
    parts: list[Any], plan: Any, numbered: dict[int, ShardInfo], scanned: Scan, job: Job,
    allow_partial: bool, world: int, started: float,
) -> Summary:  # fmt: skip
    from rollout_is.analysis import pipeline

    outcome = pipeline.Outcome()
    for own_plan, own in parts:
        if own_plan is not None:
            plan.errors.update(own_plan.errors)
            plan.outside.update(own_plan.outside)
            plan.empty.update(own_plan.empty)
            seen = {t.shard for t in plan.tasks}
            plan.tasks += [t for t in own_plan.tasks if t.shard not in seen]
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
        # A node's own shards are never all ranks, so what is missing can be told only of all nodes' together.
        own = scan(paths, columns=columns, steps=steps, allow_partial=partial or local, duplicates=duplicates)
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
    found = ranks.all_gather((ranks.launch.node, own, met))
    return _joined(found, ranks.launch.node, partial, duplicates)


def _joined(
    found: list[tuple[int, Scan | None, RolloutIsError | None]], node: int, partial: bool, duplicates: str | None
) -> tuple[Scan, set[int]]:
    """One scan over what all nodes hold, and the numbers of this node's shards. The same scan on every rank.

    Args:
        found: for each rank its node, its scan, or the error that it met.
        node: this rank's.
        partial: bad shards and missing ranks are allowed.
        duplicates: what to do with two shards for one (step, rank).

    Raises:
        RolloutIsError: no node holds a shard; or a shard is bad, a rank missing or there twice, and that is not allowed.
    """
    held: dict[tuple[int, str], ShardInfo] = {}
    problems: dict[tuple[int, str], DumpError] = {}
    for owner, own, _ in found:
        for info in own.shards if own is not None else ():
            held.setdefault((owner, info.path), info)
        for problem in own.problems if own is not None else ():
            problems.setdefault((owner, problem.where), problem)
    errors = [met for _, _, met in found if met is not None]
    if errors and not (held and all(met.code in EMPTY for met in errors)):
        raise errors[0]
    root = next(own.root for _, own, _ in found if own is not None)
    left_out = tuple(problems.values())
    if left_out and not partial:
        raise together(list(left_out), len(held) + len(left_out), root)
    kept, notes = coverage.settle_duplicates(list(held.values()), duplicates)
    kept = sorted(kept, key=lambda info: info.sort_key)
    owners = {id(info): owner for (owner, _), info in held.items()}
    notes = [*notes, *coverage.missing_ranks(kept, [], root, partial)]
    notes += [n for _, own, _ in found if own is not None for n in own.notes if n.code != "ranks-missing"]
    mine = {number for number, info in enumerate(kept) if owners[id(info)] == node}
    return Scan(tuple(kept), left_out, tuple(dict.fromkeys(notes)), root), mine


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
