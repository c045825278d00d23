"""Which (step, rank) pairs a dump holds: duplicates, missing ranks, gaps between steps. No torch."""

from __future__ import annotations

import itertools
import posixpath
from collections import Counter
from collections.abc import Sequence

from rollout_is.dumps.errors import DumpError, UsageError
from rollout_is.dumps.layout import FORMAT
from rollout_is.dumps.notes import Note
from rollout_is.dumps.place import Place
from rollout_is.dumps.shard import ShardInfo
from rollout_is.dumps.text import listing

SHOWN = 10
_LINE = "\n    "  # lists in an error stand below one another, in a note on one line


def check_duplicates_choice(choice: str | None) -> None:
    """Raises UsageError unless the choice is None, ``newest`` or ``all``."""
    if choice not in (None, "newest", "all"):
        raise UsageError(
            f"--duplicates {choice}", f"expected newest or all, found {choice!r}", code="duplicates-choice"
        )


def settle_duplicates(shards: list[ShardInfo], choice: str | None) -> tuple[list[ShardInfo], list[Note]]:
    """Two shards for one (step, rank): refused, the newest kept, or all kept.

    Where the rank is unknown, two files of one name for one step are duplicates too; other files may be parts of it.

    Returns:
        The shards that stay, and a note on what was done.

    Raises:
        DumpError: there are duplicates and no choice was made.
    """
    groups: dict[tuple[int, int | str], list[ShardInfo]] = {}
    for shard in shards:
        if shard.step is not None and shard.format == FORMAT:  # a foreign dump may write many files a step
            key = shard.rank if shard.rank is not None else posixpath.basename(shard.name)
            groups.setdefault((shard.step, key), []).append(shard)
    doubled = {key: group for key, group in groups.items() if len(group) > 1}
    if not doubled:
        return shards, []
    lines = [
        f"step {step}, {f'rank {rank}' if isinstance(rank, int) else 'rank unknown'}: {listing([s.name for s in group], 4)}"
        for (step, rank), group in sorted(doubled.items(), key=lambda item: (item[0][0], str(item[0][1]).zfill(20)))
    ]
    shown = _some(lines, "; ")
    if choice is None:
        raise DumpError(
            f"{len(doubled)} (step, rank) pair{'s' * (len(doubled) > 1)}",
            f"expected one shard for each step and rank, found several:{_some(lines, _LINE, _LINE)}",
            "a resumed run wrote into the folder of the first attempt",
            "--duplicates newest keeps the last written, --duplicates all keeps every one",
            code="duplicate-shards",
        )
    if choice == "all":
        return shards, [
            Note("duplicates-kept", "warning", "", f"several shards for one step and rank, all kept: {shown}")
        ]
    stale = set()
    for group in doubled.values():
        newest = max(group, key=lambda shard: (shard.mtime_ns, shard.name))
        stale |= {shard.path for shard in group if shard is not newest}
    kept = [shard for shard in shards if shard.path not in stale]
    message = f"several shards for one step and rank, {len(stale)} older left out: {shown}"
    return kept, [Note("duplicates-left-out", "warning", "", message)]


def missing_ranks(shards: Sequence[ShardInfo], bad: Sequence[Place], root: str, allow_partial: bool) -> list[Note]:
    """Ranks that a step lacks: of its world size where that is known, else of the ranks seen anywhere.

    Shards that are bad (and told so) do not count as missing.

    Raises:
        DumpError: a rank is missing and ``allow_partial`` is off.
    """
    present: dict[int | None, set[int]] = {}
    worlds: dict[int | None, int] = {}
    for shard in shards:
        if shard.rank is not None:
            present.setdefault(shard.step, set()).add(shard.rank)
            if shard.world_size is not None:
                worlds[shard.step] = max(worlds.get(shard.step, 0), shard.world_size)
    everywhere = set().union(*present.values()) if present else set()
    told = {(place.step, place.rank) for place in bad}
    lines = []
    counted = 0
    for step, ranks in sorted(present.items(), key=lambda item: (item[0] is None, item[0] or 0)):
        world = worlds.get(step)
        size = world if world is not None else len(everywhere)
        if len(ranks) == size:
            continue
        # a world size is a claim of the file: count what it implies, list only what is shown
        expected = range(world) if world is not None else sorted(everywhere)
        absent: list[str] = []
        for rank in expected:
            if len(absent) > SHOWN:
                break
            if rank not in ranks and (step, rank) not in told:
                absent.append(str(rank))
        if absent:
            counted += 1
            where = f"step {step}" if step is not None else "step unknown"
            lines.append(
                f"{where}: {len(ranks)} of {size} ranks, missing {listing(absent[:SHOWN])}"
                + (" ..." if len(absent) > SHOWN else "")
            )
    if not lines:
        return []
    if allow_partial:
        return [Note("ranks-missing", "warning", "", f"ranks are missing: {_some(lines, '; ')}")]
    raise DumpError(
        root,
        f"expected a shard of every rank at every step, found{_some(lines, _LINE, _LINE)}",
        "a rank died, its file was not copied, or the run is still writing",
        "wait or copy the rest, or pass --allow-partial to report on what is there",
        code="ranks-missing",
    )


def context_parallel(shards: Sequence[ShardInfo], allow_partial: bool, root: str) -> list[Note]:
    """What is to be said of shards that hold context-parallel slices (metadata ``cp_size`` above 1, ``cp_rank``).

    Slices are never put together here: only the trainer knows their layout.

    Raises:
        DumpError: a slice of a group is missing and ``allow_partial`` is off.
    """
    groups: dict[tuple[int | None, str], tuple[int, set[str]]] = {}
    for shard in shards:
        size = shard.metadata.get("cp_size", "")
        if not size.isdigit() or int(size) < 2:
            continue
        key = (shard.step, shard.metadata.get("dp_rank", ""))
        seen = groups.setdefault(key, (int(size), set()))[1]
        seen.add(shard.metadata.get("cp_rank", str(shard.rank)))
    if not groups:
        return []
    lines = [
        f"step {step}{f', dp_rank {dp}' if dp else ''}: {len(seen)} of {size} slices"
        for (step, dp), (size, seen) in sorted(groups.items(), key=lambda item: (item[0][0] or 0, item[0][1]))
        if len(seen) < size
    ]
    if lines and not allow_partial:
        raise DumpError(
            root,
            f"expected every slice of a context-parallel group, found{_some(lines, _LINE, _LINE)}",
            "a rank's file was not copied, or the run is still writing",
            "copy the rest, or pass --allow-partial to report on what is there",
            code="cp-slices",
        )
    message = "shards hold context-parallel slices: tokens are counted once, but every slice is taken for a sequence of its own"
    if lines:
        message += f"; partial CP groups: {_some(lines, '; ')}"
    return [Note("cp-slices", "warning", "", f"{message}; gather the slices before the dump")]


def missing_steps(shards: Sequence[ShardInfo]) -> list[Note]:
    """Gaps in the steps, against the interval at which the dump was usually written."""
    steps = sorted({shard.step for shard in shards if shard.step is not None})
    gaps = [(low, high) for low, high in itertools.pairwise(steps)]
    if not gaps:
        return []
    counts = Counter(high - low for low, high in gaps)
    usual = min(counts, key=lambda width: (-counts[width], width))
    wide = [(low, high) for low, high in gaps if high - low > usual]
    if not wide:
        return []
    shown = listing([f"{low} to {high}" for low, high in wide], SHOWN)
    every = f"a dump every {usual} steps" if usual > 1 else "a dump every step"
    message = (
        f"{len(wide)} gap{'s' * (len(wide) > 1)} in steps {steps[0]} to {steps[-1]} ({every}): nothing between {shown}"
    )
    return [Note("steps-missing", "notice", "", message)]


def _some(lines: list[str], between: str, before: str = "") -> str:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return before + between.join(lines[:SHOWN] + more)
