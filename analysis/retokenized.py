"""Where both sides' token ids are dumped: the first difference in each sequence, and what follows it.

After a difference the two sides scored different text, so what follows is flagged and left out of every figure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_is.analysis.batch import Ints, Unit
from rollout_is.dumps.notes import Note

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout_is.dumps.shard import OpenShard, ShardInfo

BOTH = ("token_ids", "rollout_token_ids")
SHOWN = 3


@dataclass
class Retokenized:
    """Sequences with a difference, the valid tokens left out for it, and the first places (shard, segment, position)."""

    sequences: int = 0
    tokens: int = 0
    places: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, other: Retokenized) -> None:
        """Take in what another unit saw."""
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.places = sorted(self.places + other.places)[:SHOWN]


def cut_at_difference(shard: OpenShard, unit: Unit, edges: Ints, valid: Any) -> Retokenized:
    """Mask out, in ``valid`` (bool [n], the unit's positions), each sequence from its first valid difference on."""
    out = Retokenized()
    if not all(role in shard.info.columns for role in BOTH):
        return out
    other = shard.read(BOTH[0], unit.start, unit.stop) != shard.read(BOTH[1], unit.start, unit.stop)
    different = np.flatnonzero(other.numpy() & valid) + unit.start
    segment = edges.searchsorted(different, side="right") - 1
    first = np.flatnonzero(np.concatenate(([True], segment[1:] != segment[:-1]))) if len(segment) else segment
    earlier = unit.fragment and _differs_before(shard, int(edges[0]), unit.start)
    if earlier:
        out.tokens = int(valid.sum())
        valid[:] = False
        return out
    for i in first:
        number, at = int(segment[i]), int(different[i])
        stop = min(int(edges[number + 1]), unit.stop)
        out.tokens += int(valid[at - unit.start : stop - unit.start].sum())
        valid[at - unit.start : stop - unit.start] = False
        out.sequences += 1
        if len(out.places) < SHOWN:
            out.places.append((unit.id.shard, unit.first + number, at - int(edges[number])))
    return out


def _differs_before(shard: OpenShard, start: int, stop: int) -> bool:
    """Whether a sequence that began in an earlier unit had its first difference there."""
    for a in range(start, stop, 1 << 20):
        b = min(a + (1 << 20), stop)
        differs = (shard.read(BOTH[0], a, b) != shard.read(BOTH[1], a, b)) & (shard.read("mask", a, b) != 0)
        if bool(differs.any()):
            return True
    return False


def retokenized_notes(found: Retokenized, shards: Mapping[int, ShardInfo]) -> list[Note]:
    """The note ``tokens-differ``, where there is a difference."""
    if not found.sequences:
        return []
    places = ", ".join(f"{shards[a].name} sequence {b} position {c}" for a, b, c in found.places)
    word = "sequence" if found.sequences == 1 else "sequences"
    return [
        Note(
            "tokens-differ",
            "error",
            BOTH[1],
            f"token ids of the two sides differ in {found.sequences:,} {word} (first difference: {places}): different text was "
            f"scored; {found.tokens:,} valid tokens from there on are left out of every figure",
        )
    ]
