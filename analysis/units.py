"""Cut a shard into work units by its own content, so that no number of workers can change a sum.

A unit is a run of whole segments bounded in positions and in segments. A segment longer than a unit is cut at fixed
offsets into fragments, whose per-sequence sums are joined at the end.
"""

from __future__ import annotations

import numpy as np

from rollout_is.analysis.batch import Ints, Unit, UnitId

# Part of the result's definition: another value gives other last bits. Never tuned at run time.
UNIT_POSITIONS = 1 << 21
UNIT_SEGMENTS = 1 << 16
CHUNK_POSITIONS = 1 << 18  # read at a time
BLOCK_TOKENS = 1 << 17  # summed at a time, of one population


def cut_units(offsets: Ints, shard: int = 0) -> list[Unit]:
    """Units of one shard, in order, covering every segment once.

    Args:
        offsets: int64 [S+1], checked cu_seqlens.
        shard: number of the shard in canonical order.

    >>> [(u.first, u.last, u.start, u.stop, u.fragment) for u in cut_units(np.array([0, 4, 9]))]
    [(0, 2, 0, 9, False)]
    >>> [(u.start, u.stop) for u in cut_units(np.array([0, UNIT_POSITIONS + 5]))]
    [(0, 2097152), (2097152, 2097157)]
    """
    units: list[Unit] = []
    segments = len(offsets) - 1
    first = 0
    while first < segments:
        start = int(offsets[first])
        fits = int(np.searchsorted(offsets, start + UNIT_POSITIONS, side="right")) - 1
        last = min(fits, first + UNIT_SEGMENTS)
        if last > first:
            units.append(Unit(UnitId(shard, len(units)), start, int(offsets[last]), first, last))
            first = last
            continue
        end = int(offsets[first + 1])
        for cut in range(start, end, UNIT_POSITIONS):
            stop = min(cut + UNIT_POSITIONS, end)
            units.append(Unit(UnitId(shard, len(units)), cut, stop, first, first + 1, fragment=True))
        first += 1
    return units


def cut_chunks(edges: Ints) -> list[int]:
    """Where the chunks of a unit start, and the end: between segments where one ends near, so that few are cut in two.

    Args:
        edges: int64 [s+1] of its segments, counted from the unit's start.

    >>> cut_chunks(np.array([0, CHUNK_POSITIONS - 3, CHUNK_POSITIONS + 9]))
    [0, 262141, 262153]
    """
    at, stop = 0, int(edges[-1])
    cuts = [0]
    while at < stop:
        end = min(at + CHUNK_POSITIONS, stop)
        near = int(edges[edges.searchsorted(end, side="right") - 1])
        at = near if near > at and end - near <= CHUNK_POSITIONS // 8 else end
        cuts.append(at)
    return cuts
