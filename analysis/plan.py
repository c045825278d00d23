"""What is to be read: the shards cut into units, what lies outside them, and the shards that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollout_is.analysis.batch import Unit, UnitId
from rollout_is.analysis.select import valid_of
from rollout_is.analysis.units import cut_units
from rollout_is.analysis.workers import Task, tasks_of
from rollout_is.dumps.errors import DumpError, RolloutIsError
from rollout_is.dumps.shard import ShardInfo

if TYPE_CHECKING:
    from rollout_is.dumps.shard import OpenShard

SLICE = 1 << 20
Paths = str | Path | Sequence[str | Path]


@dataclass
class Plan:
    """The units of a dump, by shard number, and the shards that could not be planned."""

    shards: dict[int, ShardInfo]
    tasks: list[Task] = field(default_factory=list)
    outside: dict[int, int] = field(default_factory=dict)  # shard -> positions outside every segment
    empty: dict[int, str] = field(default_factory=dict)  # shards without positions, by name
    errors: dict[int, RolloutIsError] = field(default_factory=dict)
    asked: dict[str, list[str]] = field(default_factory=dict)  # paths and options, as a command line would take them

    def without(self, errors: Mapping[int, RolloutIsError]) -> Plan:
        """The plan less the shards that failed."""
        return replace(self, tasks=[t for t in self.tasks if t.shard not in errors], errors=dict(errors))

    def drop(self, error: RolloutIsError, number: int) -> None:
        self.errors.setdefault(number, error)


def asked_for(
    paths: Paths, columns: Mapping[str, str] | None, steps: str | None, allow_partial: bool, duplicates: str | None
) -> dict[str, list[str]]:
    """Which data was asked for, in words that a next command can repeat."""
    options = [word for role, name in sorted((columns or {}).items()) for word in ("--column", f"{role}={name}")]
    options += ["--steps", steps] if steps else []
    options += ["--allow-partial"] if allow_partial else []
    options += ["--duplicates", duplicates] if duplicates else []
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    return {"paths": sorted(str(path) for path in listed), "options": options}


def plan_shards(shards: dict[int, ShardInfo], opener: Callable[[ShardInfo], OpenShard]) -> Plan:
    """Cut every shard into units; checks its offsets, and that nothing valid lies outside its segments."""
    plan = Plan(shards)
    for number, info in shards.items():
        try:
            with opener(info) as shard:
                offsets = shard.offsets().numpy()
                plan.outside[number] = _check_outside(shard, int(offsets[-1]))
                if settings_need_packs(shard):
                    shard.pack_offsets()
                units = cut_units(offsets, number)
        except RolloutIsError as error:
            plan.drop(error, number)
            continue
        if info.positions == 0:
            plan.empty[number] = info.name
        if not units and len(offsets) > 1:
            units = [Unit(UnitId(number, 0), 0, 0, 0, len(offsets) - 1)]
        plan.tasks += tasks_of(units)
    return plan


def settings_need_packs(shard: OpenShard) -> bool:
    """Pack offsets are checked wherever they are dumped, also when nobody groups by them."""
    return "packs" in shard.info.columns or "pack_lengths" in shard.info.columns


def _check_outside(shard: OpenShard, end: int) -> int:
    """Positions past the last boundary are pad and must be masked."""
    total = shard.info.positions
    for start in range(end, total, SLICE):
        valid, _ = valid_of(shard.read("mask", start, min(start + SLICE, total)), shard.info, start)
        if valid.any():
            at = start + int(np.flatnonzero(valid)[0])
            raise DumpError(
                f"{shard.info.name}: {shard.info.columns.get('mask', 'mask')}[{at}]",
                f"expected every position past the last boundary ({end:,}) to be masked, found a valid one at {at:,}",
                "cu_seqlens ends before the data does: a sequence is missing from it",
                "give cu_seqlens its last boundary, or mask the padding",
                code="valid-outside",
            )
    return total - end
