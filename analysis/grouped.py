"""Figures by pack, length, group, position, probability or version: the same sums, one set a label.

Tokens of a block are sorted by label (stable, so in place order) and each label's run is summed like a small block.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_is.analysis.batch import Ints
from rollout_is.analysis.grouping import (
    SEQUENCE_GROUPINGS,
    UNIT_GROUPINGS,
    name_of,
    power_of_two_bin,
    probability_bin,
)
from rollout_is.analysis.partial import Coverage, Partial
from rollout_is.analysis.rows import (
    FragmentSums,
    Population,
    Row,
    SequenceFacts,
    sequence_row,
    token_row,
)
from rollout_is.analysis.select import valid_of
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.sums import Extremes, Sums
from rollout_is.dumps.errors import DumpError

if TYPE_CHECKING:
    from rollout_is.analysis.unit_run import UnitRun

SLICE = 1 << 20
NONE = -(1 << 62)  # label of what belongs to no group


def needed(settings: Settings) -> bool:
    """True when a grouping cuts through units."""
    return any(by not in UNIT_GROUPINGS for by in settings.by)


class Groups:
    """All groupings of one unit."""

    def __init__(self, run: UnitRun, shift: float) -> None:
        self.run = run
        self.shift = shift
        self.by = [by for by in run.engine.settings.by if by not in UNIT_GROUPINGS]
        self.sums: tuple[dict[tuple[str, int], Sums], ...] = ({}, {})  # of masked-out and of valid tokens
        self.seen = np.zeros(run.segments, dtype=np.int64)  # valid tokens so far: for positions in the response
        self.names: dict[tuple[str, int], str] = {}
        self.labels = {by: self._sequence_labels(by) for by in self.by if by in SEQUENCE_GROUPINGS}
        if "position" in self.by and run.unit.fragment:
            self.seen[0] = self._valid_before(int(run.edges[0]), run.unit.start)

    def _valid_before(self, start: int, stop: int) -> int:
        total = 0
        for a in range(start, stop, SLICE):
            valid, _ = valid_of(self.run.shard.read("mask", a, min(a + SLICE, stop)), self.run.shard.info, a)
            total += int(valid.sum())
        return total

    def _sequence_labels(self, by: str) -> Ints:
        """int64 [s]: the label of each segment of the unit; NONE for none."""
        run = self.run
        unit, edges, shard = run.unit, run.edges, run.shard
        if by == "pack":
            packs = shard.pack_offsets()
            number = np.zeros(run.segments, dtype=np.int64)
            if packs is not None:
                # A zero-length segment at the very end starts where the last pack stops.
                number = np.minimum(np.searchsorted(packs.numpy(), edges[:-1], side="right") - 1, len(packs) - 2)
            number = np.where(np.diff(edges) > 0, number, -1)  # an empty segment at the very end lies in no pack
            for label in np.unique(number[number >= 0]).tolist():
                self.names[by, label] = f"{shard.info.name}:{label}"
            return number
        if by == "group":
            column = shard.segment_column("group_ids")
            if column is None:
                raise _no_column(shard.info.name, "group", "group_ids")
            groups: Ints = column[unit.first : unit.last].to(dtype=_int64()).numpy()
            return groups
        # Lengths are counted in valid tokens, which only the mask knows.
        counts = np.zeros(run.segments, dtype=np.int64)
        if unit.fragment:
            counts[0] = self._valid_before(int(edges[0]), int(edges[1]))
        else:
            for a in range(unit.start, unit.stop, SLICE):
                b = min(a + SLICE, unit.stop)
                valid, _ = valid_of(shard.read("mask", a, b), shard.info, a)
                before = np.concatenate(([0], np.cumsum(valid)))
                ends = np.clip(edges, a, b) - a
                counts += before[ends[1:]] - before[ends[:-1]]
        return np.where(counts > 0, power_of_two_bin(counts), NONE)

    def see(self, v: int, starts: Ints, sequence: Ints, index: Ints | None, start: int) -> None:
        """A block of one population that stands in the engine's workspace.

        Args:
            index: int64 [v] where valid tokens stand, counted from ``start``; None for masked-out ones.
        """
        lengths = np.diff(starts, append=v)
        tokens = np.repeat(sequence, lengths)
        half = 0 if index is None else 1
        for by in self.by:
            if by in self.labels:
                self._split(by, half, np.repeat(self.labels[by][sequence], lengths), tokens)
                continue
            if index is None:
                continue  # token groupings are of valid tokens
            if by == "position":
                before = np.repeat(self.seen[sequence] - starts, lengths)
                label = power_of_two_bin(np.arange(v) + before)
            elif by == "probability":
                label = probability_bin(self.run.engine.ops.host(self.run.engine.work.rollout[:v]))
            else:
                label = self._versions(index, start)
            self._split(by, half, label, tokens)
        if index is not None:
            self.seen[sequence] += lengths

    def _versions(self, index: Ints, start: int) -> Ints:
        shard = self.run.shard
        if "policy_version" not in shard.info.columns:
            raise _no_column(shard.info.name, "version", "policy_version")
        column = shard.read("policy_version", start, start + int(index.max()) + 1).to(dtype=_int64()).numpy()
        out: Ints = column[index]
        return out

    def _split(self, by: str, half: int, label: Ints, sequence: Ints) -> None:
        """Sum the tokens in the workspace label by label; int64 [v] labels and sequences."""
        engine = self.run.engine
        ops, work, own = engine.ops, engine.work, engine.work2
        assert own is not None
        into = self.sums[half]
        order = np.argsort(label, kind="stable")
        ordered = label[order]
        cuts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        train, rollout = ops.host(work.train[: len(label)]), ops.host(work.rollout[: len(label)])
        for a, b in zip(cuts, [*cuts[1:], len(label)], strict=True):
            value = int(ordered[a])
            if value == NONE:
                continue
            pick = order[a:b]
            n = len(pick)
            ops.take_in(train[pick], own.train[:n])
            ops.take_in(rollout[pick], own.rollout[:n])
            ops.subtract(own.train[:n], own.rollout[:n], own.d[:n])
            inside = sequence[pick]
            starts = np.flatnonzero(np.concatenate(([True], inside[1:] != inside[:-1])))
            if (by, value) not in into:
                into[by, value] = self._empty()
            into[by, value].add(own, n, starts, inside[starts], Extremes.of(ops, own.d[:n], starts))

    def _empty(self) -> Sums:
        return Sums(self.run.engine.bounds, self.shift, self.run.engine.mismatch)

    def finish(self, partial: Partial, lengths: Ints) -> None:
        """Add a row and a coverage for each label met in the unit."""
        for by in self.by:
            labels = sorted({value for half in self.sums for b, value in half if b == by})
            if by in self.labels:
                labels = sorted(set(labels) | {int(x) for x in np.unique(self.labels[by][lengths > 0]) if x != NONE})
            for value in labels:
                self._finish_label(partial, by, value, lengths)

    def _finish_label(self, partial: Partial, by: str, value: int, lengths: Ints) -> None:
        run = self.run
        unit, engine = run.unit, run.engine
        hidden_sums, valid_sums = (half.get((by, value)) or self._empty() for half in self.sums)
        hidden, valid = hidden_sums.half(), valid_sums.half()
        hidden_table, table = hidden_sums.table(), valid_sums.table()
        whole = by in self.labels
        key = (by, self.names.get((by, value)) or name_of(by, value))
        groups = run.group_ids()

        def facts(halves: list[int], at: Any) -> SequenceFacts:
            return SequenceFacts.of([run.nonfinite[half] for half in halves], groups).take(at)

        def row(population: Population, at: Any, joined: Any, halves: list[int]) -> Row:
            known = facts(halves, joined.sequence)
            token = token_row(population, joined, known, clustered=not (unit.fragment and whole))
            if not whole:
                return Row(token, None)
            spread = joined.spread(run.segments)
            scaled = population.scaled.arrays()
            if unit.fragment:
                own = facts(halves, slice(None))
                return Row(token, None, FragmentSums((unit.id.shard, unit.first), spread, own, scaled, self.shift))
            own, shift = facts(halves, at), math.expm1(self.shift)
            return Row(
                token, sequence_row(spread.take(at), own, scaled, engine.bounds, shift, engine.mismatch, engine.tail)
            )

        if not whole:
            count = int(table.sums[0].sum())
            partial.rows[key] = (row(Population([valid]), None, table, [1]), None)
            partial.coverage[key] = Coverage(positions=count, valid=count)
            return
        inside = self.labels[by] == value
        for known, own_half in zip(run.nonfinite, (hidden, valid), strict=True):
            own_half.infinite[:] = [int(x[inside].sum()) for x in (known.low, known.high)]
        sequences = np.flatnonzero(inside & (run.valid > 0))
        segments = np.flatnonzero(inside & (lengths > 0))
        masked = row(Population([valid]), sequences, table, [1])
        unmasked = None
        if hidden.n or run.nonfinite[0].count[inside].any():
            both = table.spread(run.segments).plus(hidden_table.spread(run.segments))
            joined = both.take(both.sums[0] > 0)
            unmasked = row(Population([valid, hidden]), segments, joined, [0, 1])
        partial.rows[key] = (masked, unmasked)
        pad = 0 if unit.fragment else int(np.count_nonzero(run.padlike()[inside] & (lengths[inside] > 0)))
        full = 0 if unit.fragment else len(segments)
        partial.coverage[key] = Coverage(
            positions=int(lengths[inside].sum()),
            valid=int(run.valid[inside].sum()),
            segments=full,
            sequences=0 if unit.fragment else len(sequences),
            padlike=pad,
            content=0 if unit.fragment else full - len(sequences) - pad,
        )


def _no_column(shard: str, by: str, column: str) -> DumpError:
    return DumpError(
        f"{shard}: {column}",
        f"expected a column {column} for --by {by}, found none",
        "the column is optional and was not dumped",
        f"dump {column}, or leave out --by {by}",
        code="column-missing",
    )


def _int64() -> Any:
    import torch

    return torch.int64
