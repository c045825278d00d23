"""The doctor as a consumer of the one pass: every block cheaply, a fixed sample of blocks closely, one dict of states a unit."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollout_is.analysis.batch import Block, Floats, Ints, SequenceTable, Unit
from rollout_is.analysis.doctor.copies import Copies
from rollout_is.analysis.doctor.edges import Edges
from rollout_is.analysis.doctor.growing import Growing
from rollout_is.analysis.doctor.lag import Lag
from rollout_is.analysis.doctor.nonfinite import NonFinite
from rollout_is.analysis.doctor.numerics import BITS, Positive, Resolution
from rollout_is.analysis.doctor.pairs import Pairs
from rollout_is.analysis.doctor.passes import PREFIX, Passes
from rollout_is.analysis.doctor.periodic import OUTLIER, Periodic
from rollout_is.analysis.doctor.placeholder import APART, Placeholder
from rollout_is.analysis.doctor.position import Position
from rollout_is.analysis.doctor.spread import Spread
from rollout_is.analysis.doctor.state import S, State
from rollout_is.analysis.doctor.support import Support
from rollout_is.analysis.doctor.suspects import RareLag, read_again, suspicious
from rollout_is.analysis.doctor.tails import Tails
from rollout_is.analysis.doctor.unrelated import Unrelated
from rollout_is.analysis.doctor.weights import Weights
from rollout_is.analysis.doctor.window import SAMPLED, Window, place_dict, plain, select, takes_block
from rollout_is.analysis.doctor.worst import Worst

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.dumps.shard import OpenShard, ShardInfo

Parts = list[tuple[Unit, "ShardInfo", dict[str, State]]]

STATES: tuple[type[State], ...] = (
    Copies,
    Edges,
    Growing,
    Lag,
    NonFinite,
    Pairs,
    Passes,
    Periodic,
    Placeholder,
    Position,
    Positive,
    RareLag,
    Resolution,
    Spread,
    Support,
    Tails,
    Unrelated,
    Weights,
    Worst,
)


class Doctor:
    """Collects the fingerprints' sums unit by unit; ``finish`` makes findings of them."""

    name = "doctor"

    def begin(self, unit: Unit, shard: OpenShard) -> None:
        """Start a unit with empty states."""
        self.unit, self.shard, self.info = unit, shard, shard.info
        offsets = shard.offsets().numpy()
        self.offsets: Ints = offsets
        packs = shard.pack_offsets()
        self.packs: Ints = np.zeros(1, np.int64) if packs is None else packs.numpy()[:-1]
        groups = shard.segment_column("group_ids")
        self.groups: Ints | None = None
        if groups is not None and not groups.is_floating_point():
            self.groups = groups[unit.first : unit.last].numpy().astype(np.int64)
        self.extra = tuple(
            role for role in self.info.columns if role == "policy_version" or role.startswith(PREFIX)
        )  # only what the fingerprints read
        self.coarse = any(self.info.dtypes.get(side) in BITS for side in ("train", "rollout"))
        self.states: dict[str, State] = {kind.__name__: kind() for kind in STATES}
        self.seen = self.taken = 0
        self.carried = (-1, 0)  # segment and valid tokens of the sequence that runs over the last block's end

    def state(self, kind: type[S]) -> S:
        """The unit's state of one kind."""
        found = self.states[kind.__name__]
        assert isinstance(found, kind)
        return found

    def block(self, block: Block) -> None:
        """Take in a block: extremes of all tokens, everything of the tokens that are sampled."""
        sampled = takes_block(self.seen, self.taken)
        if sampled and len(block.d) > SAMPLED:
            self._take(block.head(SAMPLED), sampled=True)
            self._take(block.tail(SAMPLED), sampled=False)
        else:
            self._take(block, sampled)

    def _take(self, block: Block, sampled: bool) -> None:
        n = len(block.mask)
        t, r, d = (x.numpy() for x in (block.train, block.rollout, block.d))
        valid = int(np.count_nonzero(block.mask))
        if valid > len(t):
            self._nonfinite(block)
        self.seen += n
        if len(t):
            low, high = float(d.min()), float(d.max())
            positive = float(t.max()) > 0 or float(r.max()) > 0
            outlying = low < -OUTLIER or high > OUTLIER
            if sampled or positive or outlying:
                self._window(block, t, r, d, sampled, positive, outlying, max(-low, high) > APART)
            self._carry(block, len(t))
        self.taken += n if sampled else 0

    def _window(
        self, block: Block, t: Floats, r: Floats, d: Floats, sampled: bool, positive: bool, outlying: bool, apart: bool
    ) -> None:
        window = self._make(block, t, r, d, sampled)
        if positive:
            self.state(Positive).look(window)
        if outlying:
            at = self.packs[np.searchsorted(self.packs, window.offset, side="right") - 1]
            self.state(Periodic).outliers(window, at)
        zeros = apart and not sampled and (bool((r == 0).any()) or bool((t == 0).any()))
        if not sampled:
            if zeros:
                self.state(Placeholder).look(window, sampled=False)
            return
        fake = self.state(Placeholder).look(window, sampled=True)
        real = select(window, ~fake) if fake.any() else window
        if real.n == 0:
            return
        self.state(Growing).look(real, _floats(block.raw_rollout), self._rank_in_pack(real))
        shifted = self.state(Lag).look(real)
        self.state(Edges).look(real)
        self.state(Periodic).look(real)
        self.state(Worst).look(real)
        clean = select(real, ~shifted) if shifted.any() else real
        if self.coarse:
            self.state(Resolution).look(real)
        if any(name.startswith(PREFIX) for name in window.columns):
            self.state(Passes).look(real)
        for kind in (Unrelated, Pairs, Support, Position, Tails):
            if clean.n:
                self.state(kind).look(clean)  # type: ignore[attr-defined]

    def _make(self, block: Block, t: Floats, r: Floats, d: Floats, sampled: bool) -> Window:
        positions = block.positions
        segment = block.sequence + self.unit.first
        offset, end = self.offsets[segment], self.offsets[segment + 1]
        stop = block.start + len(block.mask)
        before = np.zeros(len(segment), np.int64)
        begins = offset >= block.start
        if not begins[0]:
            if self.carried[0] == int(segment[0]):
                before[0] = self.carried[1]
                begins[0] = before[0] == 0 and not self.unit.fragment
            elif self.unit.fragment and self.unit.start > int(offset[0]):
                before[0] = block.start - int(offset[0])
            else:  # the earlier blocks held none of its valid tokens
                begins[0] = True
        columns: dict[str, NDArray[Any]] = {}
        if sampled:
            for role in self.extra:
                column = self.shard.read(role, block.start, stop)
                columns[role] = (_floats(column) if role != "policy_version" else column.numpy())[positions]
        return Window(
            self.info,
            t,
            r,
            d,
            positions,
            block.starts,
            segment,
            offset,
            begins,
            end <= stop,
            before,
            columns,
            block.start,
        )

    def _rank_in_pack(self, window: Window) -> Ints:
        """Segments of each piece's pack that come before it."""
        first = np.searchsorted(self.offsets, self.packs[np.searchsorted(self.packs, window.offset, side="right") - 1])
        return window.segment - first

    def _carry(self, block: Block, v: int) -> None:
        """Remember how many valid tokens the sequence at the block's end has had."""
        last = int(block.sequence[-1]) + self.unit.first
        have = v - int(block.starts[-1])
        started = self.unit.start - int(self.offsets[last]) if self.unit.fragment else 0
        earlier = self.carried[1] if self.carried[0] == last else started
        self.carried = (last, earlier + have)

    def _nonfinite(self, block: Block) -> None:
        """Name the valid tokens that were left out because a side is not finite."""
        at = np.flatnonzero(block.mask)
        t, r = _floats(block.raw_train)[at], _floats(block.raw_rollout)[at]
        state = self.state(NonFinite)
        state.kinds(t, r)
        bad = np.flatnonzero(~(np.isfinite(t) & np.isfinite(r) & np.isfinite(t - r)))
        for i in bad[: 3 - len(state.places)]:
            where = block.start + int(at[i])
            segment = int(np.searchsorted(self.offsets, where, side="right")) - 1
            start, stop = int(self.offsets[segment]), int(self.offsets[segment + 1])
            near = [
                j for j in range(int(i) - 2, int(i) + 3) if 0 <= j < len(at) and start <= block.start + at[j] < stop
            ]
            rows = [[int(block.start + at[j] - start), plain(float(t[j])), plain(float(r[j]))] for j in near]
            state.places.append(place_dict(self.info, segment, where - start, where, float(t[i]), float(r[i]), rows))

    def end(self, table: SequenceTable) -> dict[str, State]:
        """The unit's states, with the finished sequences taken in."""
        self.state(Copies).finished(table)  # a fragment of a very long sequence counts as a sequence here
        self.state(Weights).finished(table)
        self.state(Spread).finished(table, self.info.name, self.groups)
        self.state(NonFinite).finished(table)
        if not self.unit.fragment:
            self._suspects(table)
        self.shard = None  # type: ignore[assignment]  # a partial must not hold a file
        return self.states

    def _suspects(self, table: SequenceTable) -> None:
        """Read the unit's worst sequences again: for their lag, and for places to show."""
        for row in suspicious(table):
            segment = table.first + int(row)
            start, stop = (int(x) for x in self.offsets[segment : segment + 2])
            window = read_again(self.shard, segment, start, stop)
            if window is not None:
                self.state(RareLag).look(window)
                self.state(Spread).look(window)

    def finish(self, partials: Parts) -> list[dict[str, Any]]:
        """Findings of the whole dump as plain data, worst first: what stands in ``summary.extra["doctor"]``."""
        from rollout_is.analysis.doctor.diagnose import diagnose

        return [asdict(finding) for finding in diagnose(partials)]


def _floats(x: Tensor) -> Floats:
    import torch

    out: Floats = x.to(torch.float64).numpy()
    return out
