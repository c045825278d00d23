"""Is a fully masked segment padding? What stands on the rollout side of segments without a valid token, followed over blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_is.analysis.batch import Ints
from rollout_is.analysis.observe import KNOWN_FILLS, all_nan_pieces, is_known_fill

if TYPE_CHECKING:
    from torch import Tensor

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

    def see(self, rollout: Tensor, bounds: Ints, first: int, empty: Any) -> None:
        """A chunk.

        Args:
            rollout: [n] as stored.
            bounds: int64 [k+1] where its segments start and end in it.
            first: number of the first of them.
            empty: bool [k] which of them hold positions here and no valid token anywhere.
        """
        import torch

        own = np.flatnonzero(empty)
        exact = rollout if rollout.dtype in (torch.float32, torch.float64) else rollout.to(torch.float32)
        values = exact.numpy()
        if len(own) <= FEW:
            for number in own.tolist():
                self._see_one(first + number, values[int(bounds[number]) : int(bounds[number + 1])])
            return
        some = np.flatnonzero(bounds[1:] > bounds[:-1])
        starts, at = bounds[some], empty[some]
        nan = np.isnan(values)
        some_nan = every_nan = np.zeros(len(starts), dtype=bool)
        if nan.any():
            some_nan, every_nan = np.logical_or.reduceat(nan, starts), all_nan_pieces(values, starts)
        low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
        own = own + first
        self._seen[own] = True
        self._low[own] = np.fmin(self._low[own], low[at])
        self._high[own] = np.fmax(self._high[own], high[at])
        self._nan[own] &= every_nan[at]
        mixed = own[some_nan[at] & ~every_nan[at]]
        self._low[mixed], self._high[mixed] = -np.inf, np.inf

    def _see_one(self, number: int, values: Any) -> None:
        self._seen[number] = True
        low, high = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))  # NaN where there is one
        if not math.isnan(low):
            self._nan[number] = False
            self._low[number], self._high[number] = min(self._low[number], low), max(self._high[number], high)
        elif not np.isnan(values).all():
            self._nan[number] = False
            self._low[number], self._high[number] = -np.inf, np.inf

    def padlike(self, dtype: Any) -> Any:
        """bool [s]: every rollout value seen is one known fill, as the stored dtype rounds it."""
        if not self._seen.any():
            return np.zeros(len(self._seen), dtype=bool)
        import torch

        rounded = torch.tensor(KNOWN_FILLS, dtype=torch.float64).to(dtype).to(torch.float64).numpy()
        all_nan = self._nan & self._seen
        low, high = np.where(all_nan, np.nan, self._low), np.where(all_nan, np.nan, self._high)
        return is_known_fill(low, high, rounded) & self._seen
