"""Gather the partials of all units and turn them into views, groups and coverage, in unit order whatever order they came in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.engine import bounds_of
from rollout_is.analysis.finish import Pool
from rollout_is.analysis.grouping import natural_order
from rollout_is.analysis.observe import Observations
from rollout_is.analysis.partial import Coverage, Partial
from rollout_is.analysis.populations import Table
from rollout_is.analysis.rows import FragmentSums, Row, SequenceFacts, sequence_row, token_clusters
from rollout_is.analysis.settings import TOKEN_GROUPINGS, Settings
from rollout_is.analysis.summary import Group, Statistic
from rollout_is.analysis.tails import Tails
from rollout_is.dumps.shard import ShardInfo

WHOLE = ("", "")
Key = tuple[str, str]


@dataclass(frozen=True)
class Assembled:
    """The figures of the dump."""

    views: dict[str, dict[str, dict[str, Statistic]]]
    groups: dict[str, dict[str, Group]]
    coverage: Coverage
    observations: Observations
    contributing: int  # shards with a valid token
    clusters: int  # behind the standard errors of the masked token means: sequences, or groups where dumped


def assemble(
    partials: Sequence[Partial], shards: Mapping[int, ShardInfo], settings: Settings, tails: Tails | None = None
) -> Assembled:
    """All partials of one analysis, in any order.

    Args:
        partials: one a unit.
        shards: by shard number.
        settings: what was asked for.
        tails: what was folded of the dump as a whole on arrival; None reads it from the rows.
    """
    ordered = sorted(partials, key=lambda p: p.unit.id)
    observations = Observations()
    for p in ordered:
        observations.add(p.observations)
    views, coverage, clusters = _views(ordered, WHOLE, settings, tails=tails)
    groups: dict[str, dict[str, Group]] = {}
    for by in settings.by:
        members = _members(ordered, by, shards)
        groups[by] = {}
        for label in sorted(members, key=natural_order):
            key = WHOLE if by in ("step", "rank", "shard") else (by, label)
            own_views, own, _ = _views(members[label], key, settings, token_grouping=by in TOKEN_GROUPINGS)
            groups[by][label] = Group(own_views, own.positions, own.valid, own.sequences)
    contributing = len({p.unit.id.shard for p in ordered if p.coverage[WHOLE].valid})
    return Assembled(views, groups, coverage, observations, contributing, clusters)


def _members(partials: list[Partial], by: str, shards: Mapping[int, ShardInfo]) -> dict[str, list[Partial]]:
    out: dict[str, list[Partial]] = {}
    if by in ("step", "rank", "shard"):  # a shard without positions has no unit, and is listed all the same
        for info in shards.values():
            value = {"step": info.step, "rank": info.rank, "shard": info.name}[by]
            out["unknown" if value is None else str(value)] = []
    for p in partials:
        info = shards[p.unit.id.shard]
        if by in ("step", "rank"):
            value = info.step if by == "step" else info.rank
            names = ["unknown" if value is None else str(value)]
        elif by == "shard":
            names = [info.name]
        else:
            names = [label for b, label in p.rows if b == by]
        for name in names:
            out.setdefault(name, []).append(p)
    return out


def _views(
    partials: list[Partial], key: Key, settings: Settings, *, token_grouping: bool = False, tails: Tails | None = None
) -> tuple[dict[str, dict[str, dict[str, Statistic]]], Coverage, int]:
    coverage = Coverage()
    masked: list[Row] = []
    unmasked: list[Row] = []
    filled: dict[tuple[int, int], list[tuple[Any, Any]]] = {}
    for p in partials:
        own_masked, own_unmasked = p.rows[key]
        masked.append(own_masked)
        unmasked.append(own_unmasked or own_masked)
        coverage.add(p.coverage[key])
        if p.fill is not None:
            filled.setdefault((p.unit.id.shard, p.unit.first), []).append(p.fill)
    for flags in filled.values():
        coverage.segments += 1
        if any(valid for valid, _ in flags):
            coverage.sequences += 1
        elif all(fill for _, fill in flags):
            coverage.padlike += 1
        else:
            coverage.content += 1
    veto = settings.veto_lower is not None or settings.veto_upper is not None
    mismatch = settings.only != "weights"

    def pool(rows: list[Row], padded: int, empty: str, population: int = 0, same_tokens: Pool | None = None) -> Pool:
        why = "a token grouping splits sequences" if token_grouping else None
        joined = rows + _join_fragments(rows, settings)
        return Pool(
            joined, settings.bounds, veto=veto, mismatch=mismatch, padded=padded, empty=empty, why_no_sequences=why,
            folded=None if tails is None else tails.of(population), same_tokens=same_tokens,
        )  # fmt: skip

    valid = pool(masked, 0, "no valid tokens")
    truth, clusters = valid.views(), valid.clusters
    if token_grouping:
        return {"masked": truth}, coverage, clusters
    fully_masked = coverage.padlike + coverage.content
    padded = pool(masked, fully_masked, "no valid tokens", same_tokens=valid).views() if fully_masked else truth
    same = all(p.rows[key][1] is None for p in partials)
    whole = truth if same and not fully_masked else pool(unmasked, 0, "no positions", 1).views()
    return {"unmasked": whole, "padded": padded, "masked": truth}, coverage, clusters


def _join_fragments(rows: list[Row], settings: Settings) -> list[Row]:
    """One row for each sequence longer than a unit: its fragments' sums added exactly, then read as one sequence."""
    parts: dict[tuple[int, int], list[FragmentSums]] = {}
    for row in rows:
        if row.fragment is not None:
            parts.setdefault(row.fragment.key, []).append(row.fragment)
    out = []
    for key in sorted(parts):
        own = parts[key]
        stacked = np.stack([f.table.sums[:, 0] for f in own])
        sums = np.array([[math.fsum(stacked[:, column])] for column in range(stacked.shape[1])])
        table = Table(
            own[0].table.sequence,
            sums,
            np.array([min(float(f.table.low[0]) for f in own)]),
            np.array([max(float(f.table.high[0]) for f in own)]),
        )
        facts = SequenceFacts(
            sum((f.facts.nonfinite for f in own), np.zeros(1, dtype=np.int64)),
            sum((f.facts.infinite_low for f in own), np.zeros(1, dtype=np.int64)),
            sum((f.facts.infinite_high for f in own), np.zeros(1, dtype=np.int64)),
            own[0].facts.groups,
        )
        if sums[0, 0] == 0 and facts.nonfinite[0] == 0:
            continue
        scaled = (
            np.concatenate([f.scaled[0] for f in own]),
            np.concatenate([f.scaled[1] for f in own]),
            np.concatenate([f.scaled[2] for f in own]),
            np.concatenate([f.scaled[3] for f in own]),
        )
        shift = own[0].shift
        with np.errstate(all="ignore"):
            sequence = sequence_row(
                table, facts, scaled, bounds_of(settings), math.expm1(shift), settings.only != "weights", 1
            )  # fmt: skip
            out.append(Row(None, sequence, clusters=token_clusters(table, facts, shift)))
    return out
