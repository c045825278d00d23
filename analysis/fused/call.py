"""One call of the compiled kernel: a block's addresses filled in, its answer read."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollout_is.analysis.batch import Ints
from rollout_is.analysis.fused.library import TYPES, Block, address
from rollout_is.analysis.populations import COLD, Bounds
from rollout_is.analysis.select import Stored

if TYPE_CHECKING:
    from rollout_is.analysis.sums import Sums, Workspace

FIRST = 4096  # tokens that the shifts of the probabilities are taken from


class Fused:
    """The kernel with what holds for all blocks of an analysis.

    Args:
        function: takes a pointer to a ``Block``; 0 means that it was summed.
        bounds: what tokens are counted against.
    """

    def __init__(self, function: Callable[[Any], int], bounds: Bounds) -> None:
        self._function = function
        self._block = Block(
            log_lower=bounds.log_lower,
            log_upper=bounds.log_upper,
            extreme=math.log(2.0),
            veto_lower=-math.inf if bounds.veto_lower is None else bounds.veto_lower,
            veto_upper=math.inf if bounds.veto_upper is None else bounds.veto_upper,
            nearest=bounds.nearest,
            cold=COLD,
        )
        self._pointer = ctypes.pointer(self._block)
        self._everything = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self._checksum = np.zeros(0, dtype=np.uint32)

    def handles(self, stored: Stored) -> bool:
        """Whether the columns are of types that it reads."""
        columns = (stored.train, stored.rollout)
        return all(str(c.dtype) in TYPES and c.is_contiguous() for c in columns)

    def add(
        self,
        into: Sums,
        stored: Stored,
        first: int,
        last: int,
        starts: Ints,
        sequence: Ints,
        *,
        checksums: bool,
        keep: Workspace | None = None,
        kept: int = 0,
    ) -> tuple[Block, NDArray[np.uint32]] | None:
        """Sum tokens [first, last) of those stored into a population; None where they hold what it does not handle.

        Args:
            starts, sequence: int64 [k] of the pieces.
            checksums: whether to sum the bits of each piece too.
            keep: where the log-probs, d and expm1(d) of the first ``kept`` tokens are to be left, for whoever looks at them.

        Returns:
            what it says of them, until the next call, and uint32 [k] the sums of bits (anything where none were asked for).
        """
        block, k = self._block, len(starts)
        piece = into.open(k)
        if into.mismatch and into.whole.pooled.shift is None:
            into.whole.pooled.pilot(*stored.values(first, min(last, first + FIRST)))
        self._point_to(stored)
        block.skip, block.tokens = first, last - first
        block.starts, block.pieces = address(starts), k
        block.mismatch, block.moments = into.mismatch, into.moments
        block.shift, block.e_shift = into.shift, into.e_shift
        block.shift_p, block.shift_q = into.whole.pooled.shift or (0.0, 0.0)
        block.columns, block.stride = address(piece), piece.strides[0] // piece.itemsize
        if k > len(self._checksum):
            self._checksum = np.zeros(2 * k, dtype=np.uint32)
        block.checksum = address(self._checksum) if checksums else None
        block.bins = address(into.whole.bins)
        block.keep = 0
        if keep is not None and kept:
            block.keep = kept
            room = (keep.train, keep.rollout, keep.d, keep.e)
            block.keep_train, block.keep_rollout, block.keep_d, block.keep_e = map(address, room)
        if self._function(self._pointer):
            into.forget(k)
            return None
        into.close(block, sequence)
        return block, self._checksum[:k]

    def _point_to(self, stored: Stored) -> None:
        """The columns and the runs of positions."""
        block, picks = self._block, stored.picks
        if picks.index is None:
            block.train, block.rollout = stored.train.data_ptr(), stored.rollout.data_ptr()
            begins, ends = picks.starts, picks.stops
        else:  # many short runs: picked out beforehand they are one
            block.train, block.rollout = (address(bits) for bits in stored.bits)
            begins, ends = self._everything
            ends[0] = picks.count
        block.run_start, block.run_stop, block.runs = address(begins), address(ends), len(begins)
        block.train_type, block.rollout_type = TYPES[str(stored.train.dtype)], TYPES[str(stored.rollout.dtype)]
