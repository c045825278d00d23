"""Where the sums of pieces stand until they are folded by sequence."""

from __future__ import annotations

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.populations import FIRST_ZEROED, HIGHEST, LOWEST, ROWS

PAGE, ODD = 512, 72  # float64 of a page of memory, and of what is added to whole ones
MANY = 64  # pieces of sequences already begun up to which a loop beats a reduction over all pieces


class Columns:
    """A column of ROWS sums for each piece, in the order in which they come.

    Args:
        memory: float64 [ROWS, m] to be used, m being at least the number of all pieces; None collects block by block.
    """

    def __init__(self, memory: Floats | None = None) -> None:
        self._memory = memory
        self._parts: list[Floats] = []
        self.count = 0

    def next(self, k: int, *, zeroed: bool = True) -> Floats:
        """float64 [ROWS, k] columns to be filled; ``zeroed``: rows that not every block writes are 0."""
        first, self.count = self.count, self.count + k
        if self._memory is None:
            self._parts.append(np.zeros((ROWS, k)))
            return self._parts[-1]
        piece: Floats = self._memory[:, first : self.count]
        if zeroed:
            piece[FIRST_ZEROED:] = 0.0
        return piece

    def undo(self, k: int) -> None:
        """Forget the last k columns, all of which came together."""
        self.count -= k
        if self._memory is None:
            self._parts.pop()

    def since(self, first: int) -> Floats:
        """float64 [ROWS, count - first] the columns from ``first`` on; writing into it writes into them.

        What ``next`` gave before is no longer part of them where they were collected block by block.
        """
        if self._memory is None:
            if len(self._parts) > 1:
                self._parts = [np.concatenate(self._parts, axis=1)]
            return self._parts[0][:, first:]
        return self._memory[:, first : self.count]


class Store:
    """Memory for the columns of a unit's pieces, grown when needed and used again for the next unit."""

    def __init__(self) -> None:
        self._memory = np.empty((ROWS, 0))

    def columns(self, pieces: int) -> Columns:
        """Room for so many pieces. What was given before is overwritten."""
        if pieces > self._memory.shape[1]:
            # Rows at a power of two from each other would all fall into the same lines of the cache.
            self._memory = np.empty((ROWS, pieces // PAGE * PAGE + PAGE + ODD))
        return Columns(self._memory)


def fold(sequence: Ints, piece: Floats) -> tuple[Ints, Floats]:
    """Add the pieces of each sequence: they come in order, some over several blocks. The first of them takes the sum.

    Args:
        sequence: int64 [k] not descending.
        piece: float64 [ROWS, k].
    """
    again = np.flatnonzero(sequence[1:] == sequence[:-1]) + 1
    if not len(again):
        return sequence, piece
    keep = np.ones(len(sequence), dtype=bool)
    keep[again] = False
    cuts = np.flatnonzero(keep)
    if len(again) <= MANY:
        firsts = cuts[cuts.searchsorted(again, side="right") - 1]
        for target, source in zip(firsts.tolist(), again.tolist(), strict=True):
            low, high = piece[LOWEST, target], piece[HIGHEST, target]
            piece[:, target] += piece[:, source]
            piece[LOWEST, target] = min(low, piece[LOWEST, source])
            piece[HIGHEST, target] = max(high, piece[HIGHEST, source])
        return sequence[keep], piece.compress(keep, axis=1)  # piece[:, keep] would lie sequence by sequence
    out = np.add.reduceat(piece, cuts, axis=1)
    out[LOWEST] = np.minimum.reduceat(piece[LOWEST], cuts)
    out[HIGHEST] = np.maximum.reduceat(piece[HIGHEST], cuts)
    return sequence[cuts], out
