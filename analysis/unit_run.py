"""One unit while it is read: chunk by chunk from the file, each population's tokens picked out, summed block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_is.analysis import grouped, units
from rollout_is.analysis import populations as sums
from rollout_is.analysis.batch import Block, Consumer, Ints, SequenceTable, Unit, enough, wants, watches
from rollout_is.analysis.fills import Fills
from rollout_is.analysis.nonfinite import Nonfinite, pieces_left
from rollout_is.analysis.observe import Counts, Observations
from rollout_is.analysis.partial import Coverage, Partial
from rollout_is.analysis.populations import Table
from rollout_is.analysis.rejected import Rejected
from rollout_is.analysis.retokenized import cut_at_difference
from rollout_is.analysis.rows import FragmentSums, Population, Row, SequenceFacts, sequence_row, token_row
from rollout_is.analysis.select import Stored, fold32, valid_of
from rollout_is.analysis.split import Pieces, Runs
from rollout_is.analysis.sums import Extremes, Sums
from rollout_is.analysis.worst import WorstSequences, WorstTokens

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.analysis.engine import Engine
    from rollout_is.analysis.fused.call import Fused
    from rollout_is.dumps.shard import OpenShard

SHORT = 32  # mean tokens a piece below which pieces are short
PILOT = 4096  # tokens that the unit's shift is taken from
HIDDEN, VALID = 0, 1  # masked-out and valid tokens


@dataclass(frozen=True)
class _Half:
    """One population of the unit: where its tokens stand, how they are cut, and where their sums go."""

    number: int
    runs: Runs
    pieces: Pieces
    sums: Sums


@dataclass(frozen=True)
class _Chunk:
    """Positions [start, stop) of the unit as they are stored."""

    start: int
    stop: int
    train: Tensor
    rollout: Tensor


@dataclass(frozen=True)
class _Block:
    """Some tokens of one population of a chunk.

    Attributes:
        first, last: ranks in the chunk.
        starts, sequence: of its pieces.
        stored: the population's tokens of the chunk.
    """

    half: _Half
    chunk: _Chunk
    first: int
    last: int
    starts: Ints
    sequence: Ints
    stored: Stored

    def positions(self, kept: Ints | None = None, count: int | None = None) -> Ints:
        """int64 [v] positions in the chunk, of the tokens kept, or of the first so many of them."""
        picks = self.stored.picks
        if count is None:
            own = picks.positions[self.first : self.last]
            return own if kept is None else own[kept]
        if kept is None:
            return picks.some(self.first, min(self.first + count, self.last))
        kept = kept[:count]
        return picks.some(self.first, self.first + int(kept[-1]) + 1)[kept] if len(kept) else kept

    def span(self) -> tuple[int, int]:
        """Positions [start, stop) of the chunk that are this block's and no other's of its population."""
        runs, rank = self.half.runs, int(self.half.runs.before(np.array([self.chunk.start]))[0])
        start, stop = 0, self.chunk.stop - self.chunk.start
        if self.first:
            start = runs.place_of(rank + self.first) - self.chunk.start
        if self.last < self.stored.picks.count:
            stop = runs.place_of(rank + self.last) - self.chunk.start
        return start, stop


class UnitRun:
    """The state of one unit while it is read.

    Args:
        offsets: int64 [S+1] of the shard.
    """

    def __init__(self, engine: Engine, shard: OpenShard, unit: Unit, offsets: Ints) -> None:
        self.engine = engine
        self.shard = shard
        self.unit = unit
        self.edges = offsets[unit.first : unit.last + 1]
        self.segments = unit.last - unit.first
        self.observed = Observations()
        self.nonfinite = (Nonfinite(self.segments), Nonfinite(self.segments))
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
        self.shift = self._pilot(int(offsets[unit.first]))
        self.groups = grouped.Groups(self, self.shift) if engine.work2 is not None else None
        self.consumers = {i: c for i, c in enumerate(engine.consumers) if wants(c, unit)}
        self.watching: list[Consumer] = []  # those of them that still want blocks
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
        """Read it all; what it gave."""
        edges = np.clip(self.edges, self.unit.start, self.unit.stop) - self.unit.start
        runs = self._read_mask(edges)
        before = runs[VALID].before(edges)
        self.valid += np.diff(before)
        others = runs[HIDDEN].before(edges) if self.skipped.any() else edges - before
        cuts = units.cut_chunks(edges)
        hidden, valid = (self._half(number, runs[number], (others, before)[number], cuts) for number in (HIDDEN, VALID))
        for number, (start, stop) in enumerate(pairwise(cuts)):
            at = self.unit.start
            train, rollout = (self.shard.read(role, at + start, at + stop) for role in ("train", "rollout"))
            chunk = _Chunk(start, stop, train, rollout)
            self._see_fills(chunk, edges)
            self.watching = [c for c in self.consumers.values() if watches(c)]
            for half in (valid, hidden):
                self._chunk(half, chunk, number)
        return self._finish(valid.sums, hidden.sums)

    def _read_mask(self, edges: Ints) -> tuple[Runs, Runs]:
        """Where the masked-out and the valid tokens stand; and what the mask says of each segment and of the other masks."""
        unit, shard = self.unit, self.shard
        memory, n = self.engine.masks, unit.stop - unit.start
        stored = shard.read("mask", unit.start, unit.stop)
        valid, others = valid_of(stored, shard.info, unit.start, out=memory.take("valid", n))
        for value, count in others.items():
            self.observed.mask_values[value] += count
        for role in self.other_masks:
            other, _ = valid_of(shard.read(role, unit.start, unit.stop), shard.info, unit.start, role)
            self.observed.mask_differs[role] = not np.array_equal(other, valid)
            self.eligible[role] = np.diff(Runs(other).before(edges))
            self.left_out[role] = int(np.count_nonzero(other & ~valid))
        self.observed.retokenized = cut_at_difference(shard, unit, self.edges, valid)
        if self.skipped.any():
            kept = np.repeat(~self.skipped, np.diff(edges))
            runs = Runs(~valid & kept), Runs(valid & kept)
        else:
            on = Runs(valid, memory.take("scratch", n))
            runs = on.inverse(memory.take("hidden", n)), on
        return runs

    def _half(self, number: int, runs: Runs, ranks: Ints, cuts: list[int]) -> _Half:
        """``ranks``: the population's tokens before each segment, and in all."""
        engine = self.engine
        pieces = Pieces.cut(ranks, runs.before(np.array(cuts)), units.BLOCK_TOKENS)
        columns = engine.stores[number].columns(len(pieces.starts))
        moments = bool(engine.consumers)
        own = Sums(engine.bounds, self.shift, engine.mismatch, moments=moments, columns=columns)
        return _Half(number, runs, pieces, own)

    def _see_fills(self, chunk: _Chunk, edges: Ints) -> None:
        """What stands on the rollout side of the chunk's segments without a valid token."""
        first = int(edges.searchsorted(chunk.start, side="right")) - 1
        last = int(edges.searchsorted(chunk.stop, side="left"))
        empty = self.valid[first:last] == 0
        if empty.any():
            bounds = np.clip(edges[first : last + 1], chunk.start, chunk.stop) - chunk.start
            empty &= bounds[1:] > bounds[:-1]
            self.fills.see(chunk.rollout, bounds, first, empty)

    def _chunk(self, half: _Half, chunk: _Chunk, number: int) -> None:
        """The tokens of one population in one chunk, block by block."""
        cut = half.pieces
        first, last = cut.chunks[number : number + 2].tolist()
        picks = half.runs.pick(chunk.start, chunk.stop)
        stored = Stored(self.engine.picker, picks, chunk.train, chunk.rollout)
        if first == last:
            if half.number == VALID and self.watching:
                none = np.zeros(0, dtype=np.int64)
                self._consume(self.watching, _Block(half, chunk, 0, 0, none, none, stored), 0, None)
            return
        if half.number == HIDDEN and self.observed.wanted_masked:
            self.observed.see_masked(stored.values(0, self.observed.wanted_masked)[1])
        fused = self.engine.fused if self.engine.fused is not None and self.engine.fused.handles(stored) else None
        bounds = (cut.bounds[first : last + 1] - cut.bounds[first]).tolist()
        pieces = cut.first[first : last + 1].tolist()
        for (a, b), (p, q) in zip(pairwise(bounds), pairwise(pieces), strict=True):
            self._block(_Block(half, chunk, a, b, cut.starts[p:q], cut.sequence[p:q], stored), fused)

    def _block(self, block: _Block, fused: Fused | None) -> None:
        """One block: summed by the compiled kernel where it is there and can, and laid out for whoever looks at it."""
        visible = block.half.number == VALID
        watching = [c for c in self.watching if watches(c)] if visible else []
        looked_at = self.groups is not None or (visible and self.tokens is not None)
        wanted = math.inf if looked_at else enough(watching)
        v, starts, sequence = block.last - block.first, block.starts, block.sequence
        kept: Ints | None = None
        if fused is None or not self._add_compiled(fused, block, wanted):
            starts, sequence, kept = self._add(block)
            v = v if kept is None else len(kept)
        if looked_at and v:
            self._look(block, v, starts, sequence, kept)
        if watching:
            self._consume(watching, replace(block, starts=starts, sequence=sequence), v, kept)

    def _add_compiled(self, fused: Fused, block: _Block, wanted: float) -> bool:
        """Sum a block by the compiled kernel; False where it cannot, and nothing is changed.

        Args:
            wanted: how many of its first tokens are to stand in the workspace.
        """
        half, visible = block.half, block.half.number == VALID
        done = fused.add(
            half.sums, block.stored, block.first, block.last, block.starts, block.sequence,
            checksums=visible, keep=self.engine.work, kept=int(min(wanted, block.last - block.first)),
        )  # fmt: skip
        if done is None:
            return False
        said, bits = done
        if visible:
            self.checksum[block.sequence] += bits
            self.observed.see_counts(
                said.tokens,
                Counts.of(said.train_side, said.train_high),
                Counts.of(said.rollout_side, said.rollout_high),
                said.both_zero,
            )
            if self.observed.wanted:
                last = min(block.last, block.first + self.observed.wanted)
                self.observed.sample(*block.stored.values(block.first, last))
        return True

    def _add(self, block: _Block) -> tuple[Ints, Ints, Ints | None]:
        """Sum a block by numpy or torch: starts and sequences of the pieces left, and which tokens were kept (None: all)."""
        ops, work, half = self.engine.ops, self.engine.work, block.half
        v, starts, sequence, visible = block.last - block.first, block.starts, block.sequence, half.number == VALID
        train, rollout = (bits[block.first : block.last] for bits in block.stored.bits)
        if visible:
            bits = np.add.reduceat(fold32(train), starts, dtype=np.int32) * np.int32(-1640531527)
            bits += np.add.reduceat(fold32(rollout), starts, dtype=np.int32)
            self.checksum[sequence] += bits
        tops = (
            ops.load(train, block.chunk.train.dtype, work.train[:v]),
            ops.load(rollout, block.chunk.rollout.dtype, work.rollout[:v]),
        )
        ops.subtract(work.train[:v], work.rollout[:v], work.d[:v])
        extremes = self._extremes(v, starts)
        kept: Ints | None = None
        if not (math.isfinite(extremes.bottom) and math.isfinite(extremes.top)):
            kept = self._drop_nonfinite(block)
            starts, sequence = pieces_left(kept, starts, sequence)
            v = len(kept)
            if v:
                extremes = self._extremes(v, starts)
        if v:
            if visible:
                self.observed.see_valid(ops.host(work.train[:v]), ops.host(work.rollout[:v]), tops)
            half.sums.add(work, v, starts, sequence, extremes)
        return starts, sequence, kept

    def _look(self, block: _Block, v: int, starts: Ints, sequence: Ints, kept: Ints | None) -> None:
        """What the worst tokens and the groupings want of a block that stands in the workspace."""
        at = self.unit.start + block.chunk.start
        visible = block.half.number == VALID
        if self.tokens is not None and visible:
            segments, shard = sequence + self.unit.first, self.unit.id.shard
            self.tokens.see(
                self.engine.ops, self.engine.work, v, starts, segments, block.positions(kept), at, shard
            )  # fmt: skip
        if self.groups is not None:
            self.groups.see(v, starts, sequence, block.positions(kept) if visible else None, at)

    def _extremes(self, v: int, starts: Ints) -> Extremes:
        """Of each piece; of the block alone where pieces are short and nobody asks for theirs.

        A reduction to extremes costs some 20 ns a piece, which sequences of a few tokens cannot carry.
        """
        ops, d = self.engine.ops, self.engine.work.d[:v]
        if self.consumers or v >= SHORT * len(starts):
            return Extremes.of(ops, d, starts)
        return Extremes.of_block(ops, d)

    def _drop_nonfinite(self, block: _Block) -> Ints:
        """Move the finite tokens together; count and place the others. Gives what was kept, int64."""
        half, shard = block.half, self.unit.id.shard
        v = block.last - block.first
        own = self.nonfinite[half.number].drop(self.engine.ops, self.engine.work, v, block.starts, block.sequence)
        half.sums.whole.infinite[0] += own.low
        half.sums.whole.infinite[1] += own.high
        if half.number == HIDDEN:
            self.observed.nonfinite_masked += len(own.places)
        elif len(own.places):
            at = block.positions(own.places) + block.chunk.start + self.unit.start
            self.observed.place_nonfinite(shard, at, own.train, own.rollout)
            if self.tokens is not None:
                self.tokens.see_nonfinite(at, own.sequence + self.unit.first, own.train, own.rollout, shard)
        return own.kept

    def _consume(self, watching: list[Consumer], block: _Block, v: int, kept: Ints | None) -> None:
        """Show a block to consumers: of its v valid tokens as many as are enough for them stand in the workspace."""
        import torch

        work, ops, chunk = self.engine.work, self.engine.ops, block.chunk
        t, r, d, e = (torch.from_numpy(ops.host(x[:v])) for x in (work.train, work.rollout, work.d, work.e))
        start, stop = block.span()
        valid = block.half.runs.on[chunk.start + start : chunk.start + stop]
        shown = Block(
            self.unit.start + chunk.start + start, chunk.train[start:stop], chunk.rollout[start:stop], valid,
            t, r, d, e, block.starts, block.sequence, lambda count: block.positions(kept, count) - start,
        )  # fmt: skip
        most = enough(watching)
        if most < v:
            shown = shown.head(int(most))
        for consumer in watching:
            consumer.block(shown)

    def _finish(self, valid: Sums, hidden: Sums) -> Partial:
        unit, engine = self.unit, self.engine
        lengths = np.diff(self.edges) if not unit.fragment else np.array([unit.stop - unit.start])
        if self.skipped.any():
            lengths = np.where(self.skipped, 0, lengths)
        groups = self.group_ids()
        table = valid.table().spread(self.segments)
        left_out = self.nonfinite[VALID]
        facts = SequenceFacts.of([left_out], groups)
        masked = self._row(Population([valid.half()]), table, facts, self.valid > 0)
        partial = Partial(
            unit=unit,
            rows={("", ""): (masked, None)},
            coverage={("", ""): self._coverage(lengths)},
            observations=self.observed,
            checksums=self._checksums(),
            fill=(bool((self.valid > 0).any()), bool(self.padlike()[0])) if unit.fragment else None,
            worst_tokens=self.tokens,
        )
        said = self.shard.segment_column("segment_is_pad")
        if said is not None:
            self.observed.pad_valid = int(self.valid[(said[unit.first : unit.last] != 0).numpy()].sum())
        for role, eligible in self.eligible.items():
            self.observed.rejected[role] = Rejected.of(unit, eligible, self.valid, self.left_out[role])
        self.observed.identical = int(table.sums[sums.IDENTICAL].sum())
        if engine.settings.top and not unit.fragment:
            partial.worst_sequences = WorstSequences.of(engine.settings.top, unit, table, left_out.count)
        if self.consumers:
            seen = self._consumer_table(table, lengths)
            partial.consumed = {i: consumer.end(seen) for i, consumer in self.consumers.items()}
        if hidden.tokens or self.nonfinite[HIDDEN].count.any():
            facts = SequenceFacts.of(self.nonfinite, groups)
            joined = table.plus(hidden.table().spread(self.segments))
            population = Population([valid.half(), hidden.half()])
            unmasked = self._row(population, joined, facts, lengths > 0)
            partial.rows["", ""] = (masked, unmasked)
        if self.groups is not None:
            self.groups.finish(partial, lengths)
        return partial

    def group_ids(self) -> Ints | None:
        """int64 [s] of the unit's segments."""
        import torch

        column = self.shard.segment_column("group_ids")
        if column is None:
            return None
        out: Ints = column[self.unit.first : self.unit.last].to(dtype=torch.int64).numpy()
        return out

    def _row(self, population: Population, table: Table, facts: SequenceFacts, has: Any) -> Row:
        """``has``: which segments are sequences of this population."""
        unit, figures = self.unit, self.engine.figures
        if figures is not None and not unit.fragment:
            row = figures.row(population, table, facts)
            if row is not None:
                return row
        shift = population.members[0].e_shift
        own = facts if has.all() else facts.take(has)
        sequences = table if has.all() else table.take(has)
        token = token_row(population, sequences, own, clustered=not unit.fragment)
        scaled = population.scaled.arrays()
        if unit.fragment:
            key = (unit.id.shard, unit.first)
            return Row(token, None, FragmentSums(key, table.copy(), facts, scaled, population.members[0].shift))
        return Row(
            token,
            sequence_row(sequences, own, scaled, self.engine.bounds, shift, self.engine.mismatch, self.engine.tail),
        )

    def padlike(self) -> Any:
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
        pad = int(np.count_nonzero(self.padlike() & some))
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
        n, shift = t[sums.N], self.shift
        return SequenceTable(
            first=self.unit.first,
            length=lengths,
            n=n.astype(np.int64),
            valid=self.valid,
            sum_d=t[sums.D].copy(),
            sum_abs=t[sums.ABS].copy(),
            sum_d2=t[sums.D2] + 2.0 * shift * (t[sums.D] - n * shift) + n * shift * shift,
            sum_e=t[sums.E] + n * math.expm1(shift),
            sum_train=t[sums.T].copy(),
            min_d=table.low.copy(),
            max_d=table.high.copy(),
            nonfinite=self.nonfinite[VALID].count,
        )
