"""The figures without exact copies: only the units that hold one are read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_is.analysis.assemble import assemble
from rollout_is.analysis.batch import UnitId
from rollout_is.analysis.duplicates import Duplicates
from rollout_is.analysis.partial import Partial
from rollout_is.analysis.plan import Plan
from rollout_is.analysis.summary import Statistic
from rollout_is.analysis.tails import Tails
from rollout_is.analysis.workers import Job, Task, run_tasks
from rollout_is.dumps.shard import ShardInfo


def without_copies(
    found: Duplicates, plan: Plan, job: Job, partials: list[Partial], shards: Mapping[int, ShardInfo], tails: Tails
) -> dict[str, Any]:
    """The masked figures without the copies: only the units that hold one are read again."""
    places: dict[int, list[int]] = {}
    for shard, segment in found.copies:
        places.setdefault(shard, []).append(segment)
    touched = {shard: np.sort(np.array(segments)) for shard, segments in places.items()}
    again: list[Task] = []
    for task in plan.tasks:
        own = touched.get(task.shard)
        if own is not None:
            units = tuple(u for u in task.units if own.searchsorted(u.first) < own.searchsorted(u.last))
            again += [Task(task.shard, units)] if units else []
    replaced = _read_again(job, again, frozenset(found.copies))
    folded: Tails | None = None
    if (
        tails.strips
    ):  # the rows have no histograms of their own: take those of the units out of the whole, and put the new in
        old, new = Tails(strip=True), Tails(strip=True)
        for p in _read_again(job, again, frozenset()).values():
            old.take(p)
        for p in replaced.values():
            new.take(p)
        folded = tails.without(old, new)
    rest = [replaced.get(p.unit.id, p) for p in partials]
    rest = [p for p in rest if p.coverage["", ""].positions or not p.unit.fragment]
    plain = replace(job.settings, by=(), top=0)
    masked = assemble(rest, shards, plain, folded).views["masked"]
    if folded is not None:
        n = masked["sequence"]["rollout_is_mean"].n
        masked["sequence"]["pareto_k"] = Statistic(None, n, why="not kept for so large a dump")
    return {
        "sequences_left_out": len(found.copies),
        "views": {"masked": {k: {name: s.to_dict() for name, s in names.items()} for k, names in masked.items()}},
    }


def _read_again(job: Job, tasks: Sequence[Task], skip: frozenset[tuple[int, int]]) -> dict[UnitId, Partial]:
    second = Job(job.shards, job.opener, job.settings, (), skip)
    out = {}
    for done in run_tasks(second, tasks, 1):
        if done.error is not None:
            raise done.error
        out.update({p.unit.id: p for p in done.partials})
    return out
