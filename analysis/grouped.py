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
from rollout_is.analysis.sums import Sums
from rollout_is.dumps.errors import DumpError

if TYPE_CHECKING:
    from rollout_is.analysis.engine import Partial

SLICE = 1 << 20
NONE = -(1 << 62)  # label of what belongs to no group


def needed(settings: Settings) -> bool:
    """True when a grouping cuts through units."""
    return any(by not in UNIT_GROUPINGS for by in settings.by)


class Groups:
    """All groupings of one unit."""

    def __init__(self, run: Any, shift: float) -> None:
        self.run = run
        self.shift = shift
        self.by = [by for by in run.engine.settings.by if by not in UNIT_GROUPINGS]
        self.sums: dict[tuple[str, int], Sums] = {}
        self.seen = np.zeros(run.segments, dtype=np.int64)  # valid tokens so far: for positions in the response
        self.names: dict[tuple[str, int], str] = {}
        self.labels = {by: self._sequence_labels(by) for by in self.by if by in SEQUENCE_GROUPINGS}
        if "position" in self.by and run.unit.fragment:
            self.seen[0] = self._valid_before(int(run.edges[0]), run.unit.start)

    @staticmethod
    def of(run: Any, shift: float) -> Groups:
        return Groups(run, shift)

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

    def see(
        self, v: int, split: int, starts: Ints, sequence: Ints, pieces: int, index: Ints, start: int
    ) -> None:  # fmt: skip
        """A block standing in the engine's workspace: valid tokens first, ``index`` their positions in the block."""
        lengths = np.diff(starts, append=v)
        number = np.where(sequence >= self.run.segments, sequence - self.run.segments, sequence)
        tokens = np.repeat(sequence, lengths)
        valid = number[:pieces]
        for by in self.by:
            if by in self.labels:
                self._split(by, 0, v, split, np.repeat(self.labels[by][number], lengths), tokens)
                continue
            if not split:
                continue  # token groupings are of valid tokens
            if by == "position":
                before = np.repeat(self.seen[valid] - starts[:pieces], lengths[:pieces])
                label = power_of_two_bin(np.arange(split) + before)
            elif by == "probability":
                label = probability_bin(self.run.engine.ops.host(self.run.engine.work.rollout[:split]))
            else:
                label = self._versions(index, start)
            self._split(by, 0, split, split, label, tokens[:split])
        self.seen[valid] += lengths[:pieces]

    def _versions(self, index: Ints, start: int) -> Ints:
        shard = self.run.shard
        if "policy_version" not in shard.info.columns:
            raise _no_column(shard.info.name, "version", "policy_version")
        column = shard.read("policy_version", start, start + int(index.max()) + 1).to(dtype=_int64()).numpy()
        out: Ints = column[index]
        return out

    def _split(self, by: str, first: int, stop: int, split: int, label: Ints, sequence: Ints) -> None:
        """Sum tokens [first, stop) of the workspace label by label."""

        engine = self.run.engine
        ops, work, own = engine.ops, engine.work, engine.work2
        order = np.argsort(label, kind="stable")
        ordered = label[order]
        cuts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        train, rollout = ops.host(work.train[first:stop]), ops.host(work.rollout[first:stop])
        for a, b in zip(cuts, [*cuts[1:], len(label)], strict=True):
            value = int(ordered[a])
            if value == NONE:
                continue
            pick = order[a:b]  # ascending: valid tokens stay in front
            n = len(pick)
            ops.take_in(train[pick], own.train[:n])
            ops.take_in(rollout[pick], own.rollout[:n])
            ops.subtract(own.train[:n], own.rollout[:n], own.d[:n])
            inside = sequence[pick]
            starts = np.flatnonzero(np.concatenate(([True], inside[1:] != inside[:-1])))
            if (by, value) not in self.sums:
                self.sums[by, value] = self._empty()
            low, high = ops.segment_min(own.d[:n], starts), ops.segment_max(own.d[:n], starts)
            inner = int(np.searchsorted(pick, split))
            cut = int(starts.searchsorted(inner))
            self.sums[by, value].add(own, n, inner, starts, inside[starts], cut, low, high)

    def _empty(self) -> Sums:
        return Sums(self.run.engine.bounds, self.shift, self.run.engine.mismatch, self.run.segments)

    def finish(self, partial: Partial, lengths: Ints) -> None:
        """Add a row and a coverage for each label met in the unit."""
        for by in self.by:
            labels = sorted({value for b, value in self.sums if b == by})
            if by in self.labels:
                labels = sorted(set(labels) | {int(x) for x in np.unique(self.labels[by][lengths > 0]) if x != NONE})
            for value in labels:
                self._finish_label(partial, by, value, lengths)

    def _finish_label(self, partial: Partial, by: str, value: int, lengths: Ints) -> None:
        from rollout_is.analysis.engine import Coverage

        run = self.run
        unit, engine = run.unit, run.engine
        own_sums = self.sums.get((by, value)) or self._empty()
        valid, hidden = own_sums.half(True), own_sums.half(False)
        table, hidden_table = own_sums.tables()
        whole = by in self.labels
        key = (by, self.names.get((by, value)) or name_of(by, value))
        column = run.shard.segment_column("group_ids")
        groups = None if column is None else column[unit.first : unit.last].to(dtype=_int64()).numpy()

        def facts(halves: list[int], at: Any) -> SequenceFacts:
            nonfinite, low, high = (x[halves].sum(axis=0)[at] for x in (run.nonfinite, run.facts_low, run.facts_high))
            return SequenceFacts(nonfinite, low, high, None if groups is None else groups[at])

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
            return Row(token, sequence_row(spread.take(at), own, scaled, engine.bounds, shift, engine.mismatch))

        if not whole:
            count = int(table.sums[0].sum())
            partial.rows[key] = (row(Population([valid]), None, table, [1]), None)
            partial.coverage[key] = Coverage(positions=count, valid=count)
            return
        inside = self.labels[by] == value
        for half, own_half in enumerate((hidden, valid)):
            own_half.infinite[:] = [int(x[half][inside].sum()) for x in (run.facts_low, run.facts_high)]
        sequences = np.flatnonzero(inside & (run.valid > 0))
        segments = np.flatnonzero(inside & (lengths > 0))
        masked = row(Population([valid]), sequences, table, [1])
        unmasked = None
        if hidden.n or run.nonfinite[0][inside].any():
            both = table.spread(run.segments).plus(hidden_table.spread(run.segments))
            joined = both.take(both.sums[0] > 0)
            unmasked = row(Population([valid, hidden]), segments, joined, [0, 1])
        partial.rows[key] = (masked, unmasked)
        pad = 0 if unit.fragment else int(np.count_nonzero(run._padlike()[inside] & (lengths[inside] > 0)))
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
