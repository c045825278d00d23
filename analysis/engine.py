"""One unit in, one partial out: read in cache-sized blocks, split by mask, sum, and hand every block to the consumers.

Nothing here knows how many workers there are. All float sums of a unit are made inside the unit, in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_is.analysis import grouped
from rollout_is.analysis import populations as sums
from rollout_is.analysis.batch import Block, Consumer, Floats, Ints, SequenceTable, Unit, wants
from rollout_is.analysis.fills import Fills
from rollout_is.analysis.observe import Observations
from rollout_is.analysis.ops import make_ops
from rollout_is.analysis.populations import Bounds, Table
from rollout_is.analysis.rejected import Rejected
from rollout_is.analysis.retokenized import cut_at_difference
from rollout_is.analysis.rows import (
    FragmentSums,
    Population,
    Row,
    SequenceFacts,
    sequence_row,
    token_row,
)
from rollout_is.analysis.select import Picker, bits_of, fold32, valid_of
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.split import Layout, MaskRuns
from rollout_is.analysis.sums import Sums, Workspace
from rollout_is.analysis.units import BLOCK_POSITIONS
from rollout_is.analysis.worst import WorstSequences, WorstTokens

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.dumps.shard import OpenShard

SHORT = 32  # mean tokens a piece below which pieces are short
PILOT = 4096  # tokens that the unit's shift is taken from


@dataclass
class Coverage:
    """Whole numbers of one unit or group. A fragment counts no segments: they are counted when it is joined."""

    positions: int = 0
    valid: int = 0
    segments: int = 0
    sequences: int = 0
    padlike: int = 0
    content: int = 0
    zero_length: int = 0

    def add(self, other: Coverage) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Partial:
    """What one unit gives. ``rows[(by, label)]`` holds (masked, unmasked) rows; ("", "") is the unit as a whole."""

    unit: Unit
    rows: dict[tuple[str, str], tuple[Row, Row | None]]
    coverage: dict[tuple[str, str], Coverage]
    observations: Observations
    checksums: tuple[Ints, Ints, Ints]  # segment, valid tokens, order-free sum of the raw bits
    fill: tuple[Any, Any] | None = None  # fragment only: (any valid, every rollout one known fill)
    worst_tokens: WorstTokens | None = None
    worst_sequences: WorstSequences | None = None
    consumed: dict[int, Any] = field(default_factory=dict)  # by number of the consumer


def bounds_of(settings: Settings) -> Bounds:
    lower, upper = settings.bounds
    return Bounds(
        math.log(lower),
        math.log(upper),
        None if settings.veto_lower is None else math.log(settings.veto_lower),
        None if settings.veto_upper is None else math.log(settings.veto_upper),
    )


class Engine:
    """Runs units of any shard; holds the buffers of one process.

    Args:
        settings: what to compute.
        consumers: extra statistics that see every block.
        skip: segments to leave out by (shard, segment): the second pass without duplicates.
    """

    def __init__(
        self, settings: Settings, consumers: Sequence[Consumer] = (), skip: frozenset[tuple[int, int]] = frozenset()
    ) -> None:
        self.settings = settings
        self.bounds = bounds_of(settings)
        self.consumers = consumers
        self.skip = skip
        self.mismatch = settings.only != "weights"
        self.ops = make_ops(settings.device, BLOCK_POSITIONS)
        self.work = Workspace(self.ops, BLOCK_POSITIONS)
        self.picker = Picker(BLOCK_POSITIONS)
        self.work2 = Workspace(self.ops, BLOCK_POSITIONS) if grouped.needed(settings) else None

    def run(self, shard: OpenShard, unit: Unit, offsets: Ints) -> Partial:
        """Analyse one unit.

        Args:
            shard: open, with the roles train, rollout and mask settled.
            unit: which positions.
            offsets: int64 [S+1] of the shard.

        Raises:
            DumpError: a mask value is negative or NaN, or the file cannot be read.
        """
        with np.errstate(all="ignore"):
            return _UnitRun(self, shard, unit, offsets).run()


class _UnitRun:
    """The state of one unit while it is read."""

    def __init__(self, engine: Engine, shard: OpenShard, unit: Unit, offsets: Ints) -> None:
        self.engine = engine
        self.shard = shard
        self.unit = unit
        self.edges = offsets[unit.first : unit.last + 1]
        self.segments = unit.last - unit.first
        self.observed = Observations()
        self.facts_low = np.zeros((2, self.segments), dtype=np.int64)  # masked-out, valid
        self.facts_high = np.zeros((2, self.segments), dtype=np.int64)
        self.nonfinite = np.zeros((2, self.segments), dtype=np.int64)  # masked-out, valid
        self.valid = np.zeros(self.segments, dtype=np.int64)
        self.checksum = np.zeros(self.segments, dtype=np.int64)
        self.fills = Fills(self.segments)
        settings = engine.settings
        self.skipped = np.array(
            [(unit.id.shard, s) in engine.skip for s in range(unit.first, unit.last)] if engine.skip else [], dtype=bool
        )
        self.tokens = WorstTokens(settings.top) if settings.top else None
        self.other_masks = sorted(
            r for r in shard.info.columns if r.startswith("mask.") and r != f"mask.{settings.mask}"
        )
        self.eligible: dict[str, Ints] = {}  # further mask -> its tokens in each segment
        self.left_out: dict[str, int] = {}  # further mask -> its tokens that the mask in use leaves out
        shift = self._pilot(int(offsets[unit.first]))
        self.sums = Sums(
            engine.bounds, shift, engine.mismatch, self.segments, dense=True, moments=bool(engine.consumers)
        )
        self.groups = grouped.Groups.of(self, shift) if engine.work2 is not None else None
        self.consumers = {i: c for i, c in enumerate(engine.consumers) if wants(c, unit)}
        for consumer in self.consumers.values():
            consumer.begin(unit, shard)

    def _pilot(self, start: int) -> float:
        """A shift near the mean of d when the mean is large beside the spread, else 0: then variances do not cancel."""
        stop = min(start + PILOT, int(self.edges[-1]))
        if stop <= start:
            return 0.0
        import torch

        train = self.shard.read("train", start, stop).to(torch.float64).numpy()
        rollout = self.shard.read("rollout", start, stop).to(torch.float64).numpy()
        valid, _ = valid_of(self.shard.read("mask", start, stop), self.shard.info, start)
        d = train - rollout
        d = d[np.isfinite(d) & (valid if valid.any() else True)]
        if len(d) < 2:
            return 0.0
        mean, spread = float(d.mean()), float(d.std())
        if abs(mean) > 30.0 or abs(mean) < 0.5 * spread:
            return 0.0
        return float(np.float32(mean))

    def run(self) -> Partial:
        unit = self.unit
        mask = self._read_mask()
        left_out = len(self.skipped) and self.skipped.any()
        for start in range(unit.start, unit.stop, BLOCK_POSITIONS):
            stop = min(start + BLOCK_POSITIONS, unit.stop)
            if left_out:
                for a, b in self._stretches(start, stop):
                    self._block(mask, a, b)
            else:
                self._block(mask, start, stop)
        return self._finish()

    def _read_mask(self) -> MaskRuns:
        """The unit's mask, and what it says of each segment and of the dump's other masks."""
        unit, shard = self.unit, self.shard
        stored = shard.read("mask", unit.start, unit.stop)
        valid, others = valid_of(stored, shard.info, unit.start)
        for value, count in others.items():
            self.observed.mask_values[value] += count
        for role in self.other_masks:
            other, _ = valid_of(shard.read(role, unit.start, unit.stop), shard.info, unit.start, role)
            self.observed.mask_differs[role] = not np.array_equal(other, valid)
            self.eligible[role] = np.diff(
                MaskRuns(other).before(np.clip(self.edges, unit.start, unit.stop) - unit.start)
            )
            self.left_out[role] = int(np.count_nonzero(other & ~valid))
        self.observed.retokenized = cut_at_difference(shard, unit, self.edges, valid)
        runs = MaskRuns(valid)
        before = runs.before(np.clip(self.edges, unit.start, unit.stop) - unit.start)
        self.valid += before[1:] - before[:-1]
        if len(self.skipped):
            self.valid[self.skipped] = 0
        return runs

    def _stretches(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of a block that hold no segment left out by the second pass."""
        out: list[tuple[int, int]] = []
        first, last = self._inside(start, stop)
        for number in range(first, last):
            a, b = max(start, int(self.edges[number])), min(stop, int(self.edges[number + 1]))
            if a == b or self.skipped[number]:
                continue
            if out and out[-1][1] == a:
                out[-1] = (out[-1][0], b)
            else:
                out.append((a, b))
        return out

    def _inside(self, start: int, stop: int) -> tuple[int, int]:
        """The unit's segments [first, last) that reach into [start, stop)."""
        first = int(self.edges.searchsorted(start, side="right")) - 1
        return first, int(self.edges.searchsorted(stop, side="left"))

    def _block(self, mask: MaskRuns, start: int, stop: int) -> None:
        """One block: valid tokens to the front, then everything on both halves at once."""
        engine, work, shard = self.engine, self.engine.work, self.shard
        ops = engine.ops
        train, rollout = shard.read("train", start, stop), shard.read("rollout", start, stop)
        first, last = self._inside(start, stop)
        bounds = self.edges[first : last + 1] - self.unit.start
        bounds[0], bounds[-1] = start - self.unit.start, stop - self.unit.start
        layout = mask.lay_out(start - self.unit.start, stop - self.unit.start, bounds, first)
        v, split, pieces = stop - start, layout.split, layout.valid_pieces
        raw_train = engine.picker.arrange(bits_of(train), layout, "train")
        raw_rollout = engine.picker.arrange(bits_of(rollout), layout, "rollout")
        if split:
            at = layout.starts[:pieces]
            bits = np.add.reduceat(fold32(raw_train[:split]), at, dtype=np.int32) * np.int32(-1640531527)
            bits += np.add.reduceat(fold32(raw_rollout[:split]), at, dtype=np.int32)
            self.checksum[layout.sequence[:pieces]] += bits
        t, r, d = work.train[:v], work.rollout[:v], work.d[:v]
        ops.load(raw_train, train.dtype, t)
        ops.load(raw_rollout, rollout.dtype, r)
        if split < v:
            hidden, own = ops.host(r[split:]), layout.sequence[pieces:]
            self.observed.see_masked(hidden)
            self.fills.see(hidden, layout.starts[pieces:] - split, own, self.valid[own] == 0)
        ops.subtract(t, r, d)
        starts, sequence = layout.starts, layout.sequence
        if split < v:
            sequence = sequence.copy()
            sequence[pieces:] += self.segments
        low, high = self._extremes(v, split, pieces, starts)
        kept: Ints | None = None
        if not (math.isfinite(float(low.min())) and math.isfinite(float(high.max()))):
            kept = self._drop_nonfinite(v, split, starts, sequence, layout, start)
            v, split = len(kept), int(kept.searchsorted(split))
            starts, sequence = self._pieces_left(kept, starts, sequence)
            pieces = int(starts.searchsorted(split))
            if v:
                low, high = self._extremes(v, split, pieces, starts)
        if v:
            if split:
                self.observed.see_valid(ops.host(work.train[:split]), ops.host(work.rollout[:split]))
            self.sums.add(work, v, split, starts, sequence, pieces, low, high)
        if self.tokens is not None or self.groups is not None or self.consumers:

            def positions() -> Ints:
                index = layout.positions(stop - start)
                return (index if kept is None else index[kept])[:split]

            own = sequence[:pieces]
            if self.consumers:
                valid = mask.valid[start - self.unit.start : stop - self.unit.start]
                self._consume(train, rollout, valid, start, split, starts[:pieces], own, positions)
            index = positions() if self.tokens is not None or self.groups is not None else own
            if self.tokens is not None and split:
                segments = own + self.unit.first
                self.tokens.see(ops, work, split, starts[:pieces], segments, index, start, self.unit.id.shard)
            if self.groups is not None and v:
                self.groups.see(v, split, starts, sequence, pieces, index, start)

    def _extremes(self, v: int, split: int, pieces: int, starts: Ints) -> tuple[Floats, Floats]:
        """Extremes of d of each piece; of its half as a whole where pieces are short and nobody asks for theirs.

        A reduction to extremes costs some 20 ns a piece, which sequences of a few tokens cannot carry.
        """
        ops, d = self.engine.ops, self.engine.work.d
        if self.consumers or v >= SHORT * len(starts):
            return ops.segment_min(d[:v], starts), ops.segment_max(d[:v], starts)
        low, high = np.empty(len(starts)), np.empty(len(starts))
        for own, a, b in ((slice(0, pieces), 0, split), (slice(pieces, None), split, v)):
            if a < b:
                low[own], high[own] = ops.minmax(d[a:b])
        return low, high

    def _drop_nonfinite(
        self, v: int, split: int, starts: Ints, sequence: Ints, layout: Layout, start: int
    ) -> Ints:  # fmt: skip
        """Move the finite tokens together; count and place the others. Gives what was kept, int64."""
        work, ops = self.engine.work, self.engine.ops
        train, rollout, d = (ops.host(x[:v]) for x in (work.train, work.rollout, work.d))
        finite = np.isfinite(train) & np.isfinite(rollout) & np.isfinite(d)
        bad = np.flatnonzero(~finite)
        own = sequence[np.searchsorted(starts, bad, side="right") - 1]
        for half, inside in ((1, bad < split), (0, bad >= split)):
            where = own[inside] - (0 if half else self.segments)
            np.add.at(self.nonfinite[half], where, 1)
            down, up = d[bad[inside]] == -np.inf, d[bad[inside]] == np.inf
            infinite = self.sums.halves[half].infinite
            infinite[0] += int(down.sum())
            infinite[1] += int(up.sum())
            np.add.at(self.facts_low[half], where[down], 1)
            np.add.at(self.facts_high[half], where[up], 1)
            if half and inside.any():
                places = layout.positions(v)[bad[inside]] + start
                self._place_nonfinite(places, where, train[bad[inside]], rollout[bad[inside]])
            elif not half:
                self.observed.nonfinite_masked += int(inside.sum())
        keep = np.flatnonzero(finite)
        for buffer, values in ((work.train, train), (work.rollout, rollout), (work.d, d)):
            ops.take_in(values[keep], buffer[: len(keep)])
        return keep

    def _place_nonfinite(self, positions: Ints, sequence: Ints, train: Floats, rollout: Floats) -> None:
        shard = self.unit.id.shard
        self.observed.nonfinite_valid += len(positions)
        self.observed.valid += len(positions)
        few = slice(0, 10)
        places = [
            (shard, int(p), float(t), float(r))
            for p, t, r in zip(positions[few], train[few], rollout[few], strict=True)
        ]
        self.observed.nonfinite_places = sorted(self.observed.nonfinite_places + places, key=lambda p: p[:2])[:10]
        if self.tokens is not None:
            self.tokens.see_nonfinite(positions, sequence + self.unit.first, train, rollout, shard)

    @staticmethod
    def _pieces_left(kept: Ints, starts: Ints, sequence: Ints) -> tuple[Ints, Ints]:
        """The pieces of the tokens that were kept."""
        piece = np.searchsorted(starts, kept, side="right") - 1
        first = (
            np.flatnonzero(np.concatenate(([True], piece[1:] != piece[:-1]))) if len(kept) else np.zeros(0, np.int64)
        )
        return first, sequence[piece[first]]

    def _consume(
        self, train: Tensor, rollout: Tensor, valid: Any, start: int, v: int, starts: Ints, sequence: Ints,
        positions: Callable[[], Ints],
    ) -> None:  # fmt: skip
        work = self.engine.work
        if self.engine.settings.device == "cpu":
            import torch

            t, r, d, e = (torch.from_numpy(x[:v]) for x in (work.train, work.rollout, work.d, work.e))
        else:
            t, r, d, e = (x[:v].cpu() for x in (work.train, work.rollout, work.d, work.e))
        block = Block(start, train, rollout, valid, t, r, d, e, starts, sequence, positions)
        for consumer in self.consumers.values():
            consumer.block(block)

    def _finish(self) -> Partial:
        unit, engine = self.unit, self.engine
        lengths = np.diff(self.edges) if not unit.fragment else np.array([unit.stop - unit.start])
        if self.skipped.any():
            lengths = np.where(self.skipped, 0, lengths)
        groups_column = self.shard.segment_column("group_ids")
        group_ids = None
        if groups_column is not None:
            group_ids = groups_column[unit.first : unit.last].to(dtype=_int64()).numpy()
        valid_table, hidden_table = self.sums.tables()
        valid_half, hidden_half = self.sums.half(True), self.sums.half(False)
        facts = SequenceFacts(self.nonfinite[1], self.facts_low[1], self.facts_high[1], group_ids)
        masked = self._row(Population([valid_half]), valid_table, facts, self.valid > 0)
        unmasked: Row | None = None
        if hidden_half.n or self.nonfinite[0].any():
            both = SequenceFacts(
                self.nonfinite.sum(axis=0), self.facts_low.sum(axis=0), self.facts_high.sum(axis=0), group_ids
            )
            population = Population([valid_half, hidden_half])
            unmasked = self._row(population, valid_table.plus(hidden_table), both, lengths > 0)
        partial = Partial(
            unit=unit,
            rows={("", ""): (masked, unmasked)},
            coverage={("", ""): self._coverage(lengths)},
            observations=self.observed,
            checksums=self._checksums(),
            fill=(bool((self.valid > 0).any()), bool(self._padlike()[0])) if unit.fragment else None,
            worst_tokens=self.tokens,
        )
        said = self.shard.segment_column("segment_is_pad")
        if said is not None:
            self.observed.pad_valid = int(self.valid[(said[unit.first : unit.last] != 0).numpy()].sum())
        for role, eligible in self.eligible.items():
            self.observed.rejected[role] = Rejected.of(unit, eligible, self.valid, self.left_out[role])
        self.observed.identical = int(valid_table.sums[sums.IDENTICAL].sum())
        if self.groups is not None:
            self.groups.finish(partial, lengths)
        if engine.settings.top and not unit.fragment:
            partial.worst_sequences = WorstSequences.of(engine.settings.top, unit, valid_table, self.nonfinite[1])
        if self.consumers:
            seen = self._consumer_table(valid_table, lengths)
            partial.consumed = {i: consumer.end(seen) for i, consumer in self.consumers.items()}
        return partial

    def _row(self, population: Population, table: Table, facts: SequenceFacts, has: Any) -> Row:
        """``has``: which segments are sequences of this population."""
        unit = self.unit
        shift = population.members[0].e_shift
        own = facts if has.all() else _take_facts(facts, has)
        sequences = table if has.all() else table.take(has)
        token = token_row(population, sequences, own, clustered=not unit.fragment)
        scaled = population.scaled.arrays()
        if unit.fragment:
            key = (unit.id.shard, unit.first)
            return Row(token, None, FragmentSums(key, table, facts, scaled, population.members[0].shift))
        return Row(token, sequence_row(sequences, own, scaled, self.engine.bounds, shift, self.engine.mismatch))

    def _padlike(self) -> Any:
        """bool [s]: fully masked, and pad by ``segment_is_pad`` or by its rollout values."""
        pad = self.fills.padlike(self.shard.read("rollout", self.unit.start, self.unit.start).dtype)
        said = self.shard.segment_column("segment_is_pad")
        if said is not None:
            pad |= (said[self.unit.first : self.unit.last] != 0).numpy()
        return pad & (self.valid == 0)

    def _coverage(self, lengths: Ints) -> Coverage:
        positions, valid = int(lengths.sum()), int(self.valid.sum())
        if self.unit.fragment:
            return Coverage(positions=positions, valid=valid)
        some = lengths > 0
        sequences = int(np.count_nonzero(self.valid > 0))
        pad = int(np.count_nonzero(self._padlike() & some))
        segments = int(np.count_nonzero(some))
        skipped = int(np.count_nonzero(self.skipped)) if len(self.skipped) else 0
        return Coverage(
            positions, valid, segments, sequences, pad, segments - sequences - pad, self.segments - segments - skipped
        )

    def _checksums(self) -> tuple[Ints, Ints, Ints]:
        some = np.flatnonzero(self.valid > 0)
        return some + self.unit.first, self.valid[some], self.checksum[some] & 0xFFFFFFFF

    def _consumer_table(self, table: Table, lengths: Ints) -> SequenceTable:
        t = table.sums
        shift = self.sums.shift
        n = t[sums.N]
        return SequenceTable(
            first=self.unit.first,
            length=lengths,
            n=n.astype(np.int64),
            valid=self.valid,
            sum_d=t[sums.D],
            sum_abs=t[sums.ABS],
            sum_d2=t[sums.D2] + 2.0 * shift * (t[sums.D] - n * shift) + n * shift * shift,
            sum_e=t[sums.E] + n * self.sums.e_shift,
            sum_train=t[sums.T],
            min_d=table.low,
            max_d=table.high,
            nonfinite=self.nonfinite[1],
        )


def _take_facts(facts: SequenceFacts, keep: Any) -> SequenceFacts:
    groups = None if facts.groups is None else facts.groups[keep]
    return SequenceFacts(facts.nonfinite[keep], facts.infinite_low[keep], facts.infinite_high[keep], groups)


def _int64() -> Any:
    import torch

    return torch.int64
