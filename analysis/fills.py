"""Is a fully masked segment padding? What stands on the rollout side of segments without a valid token, followed over blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.observe import KNOWN_FILLS, all_nan_pieces, is_known_fill

FEW = 16  # segments up to which a loop beats a reduction over every piece


class Fills:
    """Extremes of the rollout log-probs of each segment of a unit, as far as it holds no valid token.

    Args:
        segments: how many the unit has.
    """

    def __init__(self, segments: int) -> None:
        self._low = np.full(segments, np.inf)
        self._high = np.full(segments, -np.inf)
        self._seen = np.zeros(segments, dtype=bool)
        self._nan = np.ones(segments, dtype=bool)

    def see(self, rollout: Floats, starts: Ints, sequence: Ints, empty: Any) -> None:
        """Masked-out positions of a block.

        Args:
            rollout: float64 [n].
            starts, sequence: the pieces of it.
            empty: bool [k] pieces whose segment had no valid token so far.
        """
        if not empty.any():
            return
        own = sequence[empty]
        if len(own) <= FEW:
            ends = np.append(starts[1:], len(rollout))[empty]
            for number, first, stop in zip(own.tolist(), starts[empty].tolist(), ends.tolist(), strict=True):
                self._see_one(number, rollout[first:stop])
            return
        nan = np.isnan(rollout)
        some_nan = every_nan = np.zeros(len(starts), dtype=bool)
        if nan.any():
            some_nan, every_nan = np.logical_or.reduceat(nan, starts), all_nan_pieces(rollout, starts)
        low, high = np.fmin.reduceat(rollout, starts), np.fmax.reduceat(rollout, starts)
        self._seen[own] = True
        self._low[own] = np.fmin(self._low[own], low[empty])
        self._high[own] = np.fmax(self._high[own], high[empty])
        self._nan[own] &= every_nan[empty]
        mixed = own[some_nan[empty] & ~every_nan[empty]]
        self._low[mixed], self._high[mixed] = -np.inf, np.inf

    def _see_one(self, number: int, values: Floats) -> None:
        self._seen[number] = True
        low, high = float(values.min()), float(values.max())  # NaN where there is one
        if not math.isnan(low):
            self._nan[number] = False
            self._low[number], self._high[number] = min(self._low[number], low), max(self._high[number], high)
        elif not np.isnan(values).all():
            self._nan[number] = False
            self._low[number], self._high[number] = -np.inf, np.inf

    def padlike(self, dtype: Any) -> Any:
        """bool [s]: every rollout value seen is one known fill, as the stored dtype rounds it."""
        import torch

        rounded = torch.tensor(KNOWN_FILLS, dtype=torch.float64).to(dtype).to(torch.float64).numpy()
        all_nan = self._nan & self._seen
        low, high = np.where(all_nan, np.nan, self._low), np.where(all_nan, np.nan, self._high)
        return is_known_fill(low, high, rounded) & self._seen
