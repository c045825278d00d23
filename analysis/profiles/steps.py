"""Profiles over a dump: each step's shards are read as the packs of its ranks, one step in memory at a time, as in the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rollout_is.analysis.profiles.registry import Profile
from rollout_is.analysis.profiles.rows import Pack, packs_of
from rollout_is.dumps.errors import DumpError, UsageError

if TYPE_CHECKING:
    from rollout_is.analysis.batch import Block, SequenceTable, Unit
    from rollout_is.dumps.shard import OpenShard, ShardInfo

Opener = Callable[["ShardInfo"], "OpenShard"]


def read_packs(shard: OpenShard, rank: int) -> list[Pack]:
    """The packs of a shard, as its rank trained on them."""
    total = shard.info.positions
    train, rollout, mask = (shard.read(role, 0, total).clone() for role in ("train", "rollout", "mask"))
    return packs_of(
        train,
        rollout,
        mask,
        shard.offsets(),
        cu_packs=shard.pack_offsets(),
        segment_is_pad=shard.segment_column("segment_is_pad"),
        rank=rank,
    )


class ProfileConsumer:
    """Runs profiles at the end of an analysis, step by step, over the shards that it read.

    Args:
        profiles: (label, profile) pairs; labels are unique.
        opener: opens a shard again, roles settled.
        logged: also take what the trainer logged (``trainer_metrics``) from the shards.
        name: where the result stands in ``Summary.extra``.

    ``finish`` gives ``{"steps": {step: {label: {"metrics", "error"}}}, "logged": {step: {name: value}}}``; values as Python floats.
    """

    def __init__(
        self, profiles: Sequence[tuple[str, Profile]], opener: Opener, logged: bool = False, name: str = "profiles"
    ) -> None:
        self.profiles, self.opener, self.logged, self.name = tuple(profiles), opener, logged, name

    def begin(self, unit: Unit, shard: OpenShard) -> None:
        """Nothing to do: profiles need whole steps."""

    def block(self, block: Block) -> None:
        """Nothing to do."""

    def end(self, table: SequenceTable) -> None:
        """Nothing to keep."""

    def finish(self, partials: list[tuple[Unit, ShardInfo, Any]]) -> dict[str, Any]:
        """Run every profile on every step.

        Raises:
            UsageError: trainer metrics were asked for and no shard has any.
        """
        infos = list({unit.id.shard: info for unit, info, _ in partials}.values())
        steps: dict[str, list[ShardInfo]] = {}
        for info in infos:
            steps.setdefault("" if info.step is None else str(info.step), []).append(info)
        out: dict[str, Any] = {"steps": {}, "logged": {}}
        for step, shards in steps.items():
            if self.logged and (found := _logged(shards)):
                out["logged"][step] = found
            packs: list[Pack] = []
            for number, info in enumerate(shards):
                with self.opener(info) as shard:
                    packs += read_packs(shard, number if info.rank is None else info.rank)
            out["steps"][step] = {}
            for label, profile in self.profiles:
                result = profile.run(packs) if packs else None
                metrics = {} if result is None else result.metrics
                out["steps"][step][label] = {"metrics": metrics, "error": None if result is None else result.error}
        if self.logged and not out["logged"]:
            raise UsageError(
                "--audit",
                f"expected trainer_metrics in the metadata of the shards, found none in {len(infos)}",
                "the audit compares what the trainer logged with what it should have been",
                'write them: DumpWriter.write(..., trainer_metrics={"name": value})',
                code="no-trainer-metrics",
            )
        return out


def _logged(shards: Sequence[ShardInfo]) -> dict[str, float]:
    """What the trainer logged at a step: the first rank that says a name counts.

    Raises:
        DumpError: ``trainer_metrics`` is not a JSON object of numbers.
    """
    out: dict[str, float] = {}
    for info in shards:
        text = info.metadata.get("trainer_metrics")
        if text is None:
            continue
        try:
            found = json.loads(text)
            values = {str(k): float(v) for k, v in found.items() if v is not None}
        except (ValueError, TypeError, AttributeError):
            raise DumpError(
                f"{info.name}: metadata trainer_metrics",
                f"expected a JSON object of numbers, found {text[:60]!r}",
                "the trainer wrote something else under this key",
                'such as {"rollout_is_mean": 0.998}',
                code="trainer-metrics",
            ) from None
        for key, value in values.items():
            out.setdefault(key, value)
    return out
