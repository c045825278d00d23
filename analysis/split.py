"""Lay out a block with its valid tokens first: which positions go where, and the pieces that come of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Ints

FEW_RUNS = 256  # mask runs up to which copying runs beats picking by index


@dataclass(frozen=True)
class Layout:
    """A block of n positions, reordered: valid tokens in place order, then masked-out ones in place order.

    Attributes:
        split: how many are valid.
        runs: (first, stop) slices in the new order, where there are few; None when ``index`` is used or nothing moves.
        index: int64 [n] positions in the new order, or None.
        starts: int64 [k] first index of each piece, in the new order.
        sequence: int64 [k] the sequence of each piece.
        counts: int64 [k] its tokens.
        valid_pieces: how many of the pieces are of valid tokens.
        valid_counts: int64 [segments of the block] valid tokens of each.
    """

    split: int
    runs: list[tuple[int, int]] | None
    index: Ints | None
    starts: Ints
    sequence: Ints
    counts: Ints
    valid_pieces: int
    valid_counts: Ints

    def positions(self, n: int) -> Ints:
        """int64 [n] the block's position of each token in the new order."""
        if self.index is not None:
            return self.index
        if self.runs is None:
            return np.arange(n)
        return np.concatenate([np.arange(a, b) for a, b in self.runs])


def lay_out(valid: Any, starts: Ints, sequence: Ints, lengths: Ints) -> Layout:
    """The layout of one block.

    Args:
        valid: bool [n].
        starts, sequence, lengths: its segments' pieces in natural order; no empty ones.

    >>> layout = lay_out(np.array([0, 1, 1, 0], bool), np.array([0, 2]), np.array([5, 6]), np.array([2, 2]))
    >>> layout.split, layout.positions(4).tolist(), layout.sequence.tolist(), layout.counts.tolist()
    (2, [1, 2, 0, 3], [5, 6, 5, 6], [1, 1, 1, 1])
    """
    n = len(valid)
    split = int(np.count_nonzero(valid))
    if split == n:
        return Layout(n, None, None, starts, sequence, lengths, len(starts), lengths)
    if split == 0:
        return Layout(0, None, None, starts, sequence, lengths, 0, np.zeros_like(lengths))
    edges = _edges(valid.tobytes())
    runs = index = None
    if edges is None:
        index = np.concatenate((np.flatnonzero(valid), np.flatnonzero(~valid)))
        own = np.add.reduceat(valid, starts, dtype=np.int64)
    else:
        first = 0 if valid[0] else 1
        pairs = list(pairwise(edges))
        runs = pairs[first::2] + pairs[1 - first :: 2]
        own = _counts(np.array(edges), first, np.append(starts, n))
    counts = np.concatenate((own, lengths - own))
    numbers = np.concatenate((sequence, sequence))
    has = counts > 0
    if not has.all():
        counts, numbers = counts[has], numbers[has]
    inner = np.zeros(len(counts), dtype=np.int64)
    np.cumsum(counts[:-1], out=inner[1:])
    return Layout(split, runs, index, inner, numbers, counts, int(np.count_nonzero(own)), own)


def _edges(mask: bytes) -> list[int] | None:
    """Where runs of the mask begin, 0 and the length included; None when there are more than FEW_RUNS.

    bytes.find is memchr: with few runs it passes over a block ten times faster than comparing neighbours.
    """
    edges, at, wanted = [0], 0, b"\0" if mask[0] else b"\1"
    while (at := mask.find(wanted, at)) >= 0:
        edges.append(at)
        if len(edges) > FEW_RUNS:
            return None
        wanted = b"\0" if wanted == b"\1" else b"\1"
    edges.append(len(mask))
    return edges


def _counts(edges: Ints, first: int, bounds: Ints) -> Ints:
    """int64 [k]: valid positions between neighbouring bounds; run ``first`` and every second one after it are valid."""
    lengths = np.diff(edges)
    lengths[1 - first :: 2] = 0
    before = np.concatenate(([0], np.cumsum(lengths)))
    run = np.searchsorted(edges, bounds, side="right") - 1
    run[run == len(lengths)] -= 1
    inside = np.where(lengths[run] > 0, bounds - edges[run], 0)
    out: Ints = np.diff(before[run] + inside)
    return out
