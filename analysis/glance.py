"""The doctor's glance that every analysis takes: all of a small dump; of a large one the first block of each unit.

``doctor`` itself looks at all of it; here the cost must stay small beside that of the figures. What rests on sums of sequences
(which rank, which step, the mean weight) is judged on all tokens either way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout_is.analysis.batch import Block, Consumer, Unit, UnitId
from rollout_is.analysis.doctor.consumer import Doctor
from rollout_is.analysis.findings import RANK, findings
from rollout_is.analysis.summary import Finding, Summary

if TYPE_CHECKING:
    from rollout_is.dumps.shard import OpenShard

SMALL = 1 << 21  # positions up to which a dump is looked at whole
UNITS = 1024  # about how many units of a larger one are looked at
UNIT = 1 << 21  # positions of a unit, about
TOKENS = 1 << 18  # about how many valid tokens of a larger dump are looked at,
FEWEST, MOST = 1 << 13, 1 << 15  # and so many of a unit
FIRST = UnitId(0, 0)

# What the figures alone would say too, by the fingerprint that says it better.
_SAID_BETTER = {
    "missing.nonfinite": ("coverage.nonfinite", "note.nonfinite-valid"),
    "weights.mean": ("weights.mean",),
    "copies.zero": ("note.both-zero",),
    "copies.identical": ("note.identical-sides",),
    "numerics.positive": ("note.positive-logprobs",),
    "numerics.resolution": ("note.dtype-resolution",),
    "alignment.unrelated": ("mismatch.uncorrelated",),
    "placeholder.": ("note.constant-value", "note.all-zero-side", "note.both-zero"),
}


class Glance(Doctor):
    """The doctor on a bounded part of a dump.

    Args:
        positions: of the whole dump.
    """

    name = "glance"

    def __init__(self, positions: int) -> None:
        self.whole = positions <= SMALL
        self.stride = max(1, round(positions / UNIT / UNITS))
        self.tokens = min(MOST, max(FEWEST, TOKENS * UNIT // max(positions, 1)))
        self._blocks = 0

    def begin(self, unit: Unit, shard: OpenShard) -> None:
        """As the doctor does, with no block seen."""
        super().begin(unit, shard)
        self._blocks = 0

    def block(self, block: Block) -> None:
        """The first tokens of the first block of the unit that holds a valid one; every block of a small dump."""
        if self.whole:
            super().block(block)
        elif not self._blocks:
            super().block(block.head(self.tokens))
            self._blocks += len(block.starts)

    @property
    def enough(self) -> float:
        """How many tokens of a block it looks at."""
        return math.inf if self.whole else self.tokens

    @property
    def satisfied(self) -> bool:
        """Whether it has seen what it wants of the unit."""
        return not self.whole and self._blocks > 0

    def wants(self, unit: Unit) -> bool:
        """A choice by the unit's place alone, spread so that no step or rank is passed over by rule; the first is always in."""
        if unit.id == FIRST:
            return True
        mixed = (unit.id.shard * 0x9E3779B1 + unit.id.unit * 0x85EBCA6B + 0xC2B2AE35) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        mixed = (mixed ^ (mixed >> 15)) & 0xFFFFFFFF
        # Units of many short sequences are small: of those a share does, beside the first of each shard.
        small = not self.whole and unit.id.unit > 0 and unit.stop - unit.start < UNIT // 2
        return mixed % (self.stride * (4 if small else 1)) == 0


def with_glance(consumers: tuple[Consumer, ...], positions: int) -> tuple[Consumer, ...]:
    """The consumers and a glance, unless the doctor is among them already."""
    return consumers if any(isinstance(c, Doctor) for c in consumers) else (*consumers, Glance(positions))


def verdict(summary: Summary, seen: Sequence[Mapping[str, Any]], dump: str) -> tuple[Finding, ...]:
    """What the figures and the glance say together, worst first; a cause stands before the figures that follow from it.

    Args:
        summary: without findings.
        seen: the doctor's findings as plain data.
        dump: how a shell calls the dump, for the next command.
    """
    causes = [Finding(**f) for f in seen]
    causes = [Finding(**{**vars(f), "next": f.next.replace("DUMP", dump)}) for f in causes]
    said = {f.id for f in causes} | {x["id"] for f in causes for x in f.evidence.get("explains", ())}
    dropped = {own for prefix, ids in _SAID_BETTER.items() if any(s.startswith(prefix) for s in said) for own in ids}
    rest = [f for f in findings(summary) if f.id not in dropped]
    return tuple(sorted([*causes, *rest], key=lambda f: RANK.get(f.severity, 9)))
