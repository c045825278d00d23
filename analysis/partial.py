"""What one unit gives: rows of sums, whole numbers, and what was noticed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout_is.analysis.batch import Ints, Unit
from rollout_is.analysis.observe import Observations
from rollout_is.analysis.rows import Row
from rollout_is.analysis.worst import WorstSequences, WorstTokens


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
