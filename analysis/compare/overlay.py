"""A small histogram of the token log-ratio, on one fixed symmetric-log axis, so that two dumps lie over each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Block, Ints, SequenceTable, Unit
from rollout_is.dumps.shard import OpenShard, ShardInfo

# Four bins a decade from 0.0001 to 10 on either side; one bin around 0 and one beyond either end.
_SIDE = 10.0 ** (np.arange(-16, 5) / 4.0)
EDGES: tuple[float, ...] = tuple(float(edge) for edge in np.concatenate([-_SIDE[::-1], _SIDE]))


@dataclass(frozen=True)
class Overlay:
    """Two histograms over one axis.

    Attributes:
        edges: ascending; bin i lies between edges i - 1 and i, the first and the last are open.
        a, b: counts of valid tokens, ``len(edges) + 1`` each.
    """

    edges: tuple[float, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """The overlay as JSON data."""
        return {"edges": list(self.edges), "a": list(self.a), "b": list(self.b)}


class RatioHistogram:
    """Counts the log-ratios of all valid tokens into the bins of ``EDGES`` while the engine reads."""

    name = "ratio_histogram"

    def __init__(self) -> None:
        self._counts = np.zeros(len(EDGES) + 1, np.int64)
        self._edges = np.array(EDGES)

    def begin(self, unit: Unit, shard: OpenShard) -> None:
        self._counts = np.zeros(len(EDGES) + 1, np.int64)

    def block(self, block: Block) -> None:
        bins = np.searchsorted(self._edges, block.d.cpu().numpy(), side="right")
        self._counts += np.bincount(bins, minlength=len(self._counts))

    def end(self, table: SequenceTable) -> Ints:
        return self._counts

    def finish(self, partials: list[tuple[Unit, ShardInfo, Any]]) -> tuple[int, ...]:
        total = np.zeros(len(EDGES) + 1, np.int64)
        for _, _, counts in partials:
            total += counts
        return tuple(int(count) for count in total)
