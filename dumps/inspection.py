"""What ``rollout-is inspect`` shows: shards, coverage, columns and problems of a dump, from headers only. No torch, no data read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.files import Paths, as_list
from rollout_is.dumps.notes import Note
from rollout_is.dumps.scan import Scan, all_problems, scan
from rollout_is.dumps.shard import ShardInfo
from rollout_is.dumps.text import shown


def inspect(
    paths: Paths,
    *,
    columns: Mapping[str, str] | None = None,
    steps: str | None = None,
    duplicates: str | None = None,
) -> dict[str, Any]:
    """Describe a dump as plain data (JSON-ready). A bad shard is listed, never raised.

    Args:
        paths, columns, steps, duplicates: as for ``scan``; without ``duplicates`` all are listed, and told.

    Returns:
        ``root``; ``shards`` (one dict each: name, step, rank, world_size, format, layout, positions, segments, size, columns,
        dtypes, metadata); ``coverage`` (counts, steps, ranks, the (step, rank) pairs that are missing or doubled are in
        ``notes``); ``columns`` (role -> tensor names, dtypes, and in how many shards); ``problems``; ``notes``; ``ok``.

    Raises:
        DumpError: no such path, or nothing that looks like a shard.
        UsageError: a role, step range or ``duplicates`` that does not exist.
    """
    try:
        found = scan(paths, columns=columns, steps=steps, allow_partial=True, duplicates=duplicates or "all")
    except DumpError as problem:
        if problem.code in ("path-missing", "no-shards", "steps-empty"):
            raise
        found = _only_problems(paths, columns, steps, problem)
    blocking = {"ranks-missing"} | (set() if duplicates else {"duplicates-kept"})
    return {
        "root": found.root,
        "ok": not found.problems and not any(note.code in blocking for note in found.notes),
        "coverage": _coverage(found),
        "columns": _columns(found.shards),
        "shards": [_shard(shard) for shard in found.shards],
        "problems": [_problem(problem) for problem in found.problems],
        "notes": [_note(note) for note in found.notes],
    }


def _only_problems(paths: Paths, columns: Mapping[str, str] | None, steps: str | None, problem: DumpError) -> Scan:
    """Nothing could be read: every problem still has its line."""
    listed = all_problems(paths, columns=columns, steps=steps)
    return Scan((), tuple(listed) or (problem,), (), ", ".join(sorted(shown(path, 400) for path in as_list(paths))))


def _shard(shard: ShardInfo) -> dict[str, Any]:
    return {
        "name": shard.name,
        "step": shard.step,
        "rank": shard.rank,
        "world_size": shard.world_size,
        "format": shard.format,
        "layout": shard.layout,
        "positions": shard.positions,
        "segments": shard.segments,
        "size": shard.size,
        "columns": dict(shard.columns),
        "dtypes": dict(shard.dtypes),
        "metadata": dict(shard.metadata),
    }


def _coverage(found: Scan) -> dict[str, Any]:
    shards = found.shards
    steps = sorted({shard.step for shard in shards if shard.step is not None})
    ranks = sorted({shard.rank for shard in shards if shard.rank is not None})
    worlds = sorted({shard.world_size for shard in shards if shard.world_size is not None})
    return {
        "shards": len(shards),
        "bad_shards": len(found.problems),
        "empty_shards": sum(shard.positions == 0 for shard in shards),
        "positions": sum(shard.positions for shard in shards),
        "segments": sum(shard.segments for shard in shards),
        "size": sum(shard.size for shard in shards),
        "steps": steps,
        "ranks": ranks,
        "world_sizes": worlds,
        "without_step": sum(shard.step is None for shard in shards),
        "without_rank": sum(shard.rank is None for shard in shards),
    }


def _columns(shards: tuple[ShardInfo, ...]) -> dict[str, Any]:
    """Role -> the names and dtypes under which it stands, each with its number of shards."""
    names: dict[str, Counter[str]] = {}
    dtypes: dict[str, Counter[str]] = {}
    for shard in shards:
        for role, tensor in shard.columns.items():
            names.setdefault(role, Counter())[tensor] += 1
            dtypes.setdefault(role, Counter())[shard.dtypes[role]] += 1
    return {
        role: {"tensors": dict(names[role]), "dtypes": dict(dtypes[role]), "shards": names[role].total()}
        for role in names
    }


def _problem(problem: DumpError) -> dict[str, str]:
    return {
        "code": problem.code,
        "where": problem.where,
        "problem": problem.problem,
        "why": problem.why,
        "fix": problem.fix,
    }


def _note(note: Note) -> dict[str, str]:
    return {"code": note.code, "severity": note.severity, "metric": note.metric, "message": note.message}
