"""What the engine notices of the data on its way: whole numbers and samples, from which the notes are written."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.rejected import Rejected
from rollout_is.analysis.retokenized import Retokenized

SAMPLE = 2048  # valid tokens of each unit looked at for repeated constants and resolution
KNOWN_FILLS = (0.0, 1.0, -9999.0, -1e10, math.inf, -math.inf, math.nan)
MASKED_SAMPLE = 8192  # masked-out positions of each unit looked at for fill values
KEPT = 10  # values and places named; the rest are counted


class Counts(NamedTuple):
    """Log-probs of one side that are not below 0; ``top`` is the largest of all."""

    positive: int
    zeros: int
    disagreeing: int
    top: float

    @staticmethod
    def of(side: Any, top: float) -> Counts:
        """From what the compiled kernel says of a side."""
        return Counts(side.positive, side.zeros, side.disagreeing, top)


@dataclass
class Side:
    """One scoring pass at valid tokens."""

    positive: int = 0
    positive_max: float = -math.inf
    zeros: int = 0
    zeros_disagreeing: int = 0  # exactly 0 where the other side is far from 0
    sampled: int = 0
    repeated: Counter[float] = field(default_factory=Counter)  # value -> times seen in the samples
    magnitude: list[float] = field(default_factory=list)  # median |log-prob| of each sample

    def add(self, other: Side) -> None:
        self.positive += other.positive
        self.positive_max = max(self.positive_max, other.positive_max)
        self.zeros += other.zeros
        self.zeros_disagreeing += other.zeros_disagreeing
        self.sampled += other.sampled
        self.repeated.update(other.repeated)
        if len(self.repeated) > 4 * KEPT:  # bounded; ties by value so that the order of units does not matter much
            self.repeated = Counter(dict(sorted(self.repeated.items(), key=lambda kv: (-kv[1], kv[0]))[: 2 * KEPT]))
        self.magnitude += other.magnitude


@dataclass
class Observations:
    """Everything noticed in one unit or in the whole dump."""

    train: Side = field(default_factory=Side)
    rollout: Side = field(default_factory=Side)
    both_zero: int = 0
    identical: int = 0
    valid: int = 0
    pad_valid: int = 0  # valid tokens in segments that segment_is_pad marks
    nonfinite_valid: int = 0
    nonfinite_masked: int = 0
    nonfinite_places: list[tuple[int, int, float, float]] = field(default_factory=list)  # shard, position, t, r
    mask_values: Counter[float] = field(default_factory=Counter)
    _looked: int = 0
    retokenized: Retokenized = field(default_factory=Retokenized)
    mask_differs: dict[str, bool] = field(default_factory=dict)  # further mask -> differs from the one in use
    rejected: dict[str, Rejected] = field(default_factory=dict)  # further mask -> what the one in use leaves out of it
    masked_fill: Counter[str] = field(default_factory=Counter)  # constants seen under the mask, as text

    def add(self, other: Observations) -> None:
        self.train.add(other.train)
        self.rollout.add(other.rollout)
        for name in ("both_zero", "identical", "valid", "pad_valid", "nonfinite_valid", "nonfinite_masked"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.nonfinite_places = sorted(self.nonfinite_places + other.nonfinite_places, key=lambda p: p[:2])[:KEPT]
        self.mask_values.update(other.mask_values)
        self.retokenized.add(other.retokenized)
        for role, differs in other.mask_differs.items():
            self.mask_differs[role] = self.mask_differs.get(role, False) or differs
        for role, one in other.rejected.items():
            self.rejected.setdefault(role, Rejected()).add(one)
        self.masked_fill.update(other.masked_fill)

    def see_valid(self, train: Floats, rollout: Floats, tops: tuple[float, float]) -> None:
        """Valid finite tokens of a block, float64 [v] each; ``tops`` are the largest stored, of others too."""
        self.valid += len(train)
        zero_t = self._see_top(self.train, train, rollout, tops[0])
        zero_r = self._see_top(self.rollout, rollout, train, tops[1])
        if zero_t is not None and zero_r is not None:
            self.both_zero += int(np.count_nonzero(zero_t & zero_r))
        self.sample(train, rollout)

    def see_counts(self, tokens: int, train: Counts, rollout: Counts, both_zero: int) -> None:
        """Valid finite tokens of a block that were counted elsewhere."""
        self.valid += tokens
        self.both_zero += both_zero
        for side, (positive, zeros, disagreeing, top) in ((self.train, train), (self.rollout, rollout)):
            side.positive += positive
            side.zeros += zeros
            side.zeros_disagreeing += disagreeing
            if positive:
                side.positive_max = max(side.positive_max, top)

    @property
    def wanted(self) -> int:
        """How many valid tokens the sample still lacks."""
        return SAMPLE - self.train.sampled

    def sample(self, train: Floats, rollout: Floats) -> None:
        """Valid finite tokens for the sample, until it is full."""
        if self.wanted:
            self._sample(self.train, train)
            self._sample(self.rollout, rollout)

    def place_nonfinite(self, shard: int, positions: Ints, train: Floats, rollout: Floats) -> None:
        """Valid tokens that were left out: int64 [b] positions in the shard, float64 [b] log-probs."""
        self.nonfinite_valid += len(positions)
        self.valid += len(positions)
        columns = (x[:KEPT].tolist() for x in (positions, train, rollout))
        places = [(shard, p, t, r) for p, t, r in zip(*columns, strict=True)]
        self.nonfinite_places = sorted(self.nonfinite_places + places, key=lambda p: p[:2])[:KEPT]

    @staticmethod
    def _see_top(side: Side, own: Floats, other: Floats, top: float) -> Any:
        if top < 0:
            return None
        top = float(own.max())
        if top > 0:
            above = own > 0
            side.positive += int(np.count_nonzero(above))
            side.positive_max = max(side.positive_max, top)
        zero = own == 0
        count = int(np.count_nonzero(zero))
        if count:
            side.zeros += count
            side.zeros_disagreeing += int(np.count_nonzero(np.abs(other[zero]) > 1e-2))
        return zero

    @staticmethod
    def _sample(side: Side, own: Floats) -> None:
        own = own[: SAMPLE - side.sampled]
        side.sampled += len(own)
        values, counts = np.unique(own, return_counts=True)
        often = counts >= max(2, len(own) // 100)
        for value, count in zip(values[often].tolist(), counts[often].tolist(), strict=True):
            side.repeated[value] += count
        side.magnitude.append(float(np.median(np.abs(own))))

    @property
    def wanted_masked(self) -> int:
        """How many masked-out positions the look at them still lacks."""
        return MASKED_SAMPLE - self._looked

    def see_masked(self, rollout: Floats) -> None:
        """Rollout log-probs at masked-out positions, float64 [n], not empty; the first of each unit are looked at."""
        if not self.wanted_masked:
            return
        rollout = rollout[: self.wanted_masked]
        self._looked += len(rollout)
        first = rollout[0]
        same = np.isnan(rollout).all() if np.isnan(first) else bool((rollout == first).all())
        if same:
            self.masked_fill[format(float(first), "g")] += len(rollout)
        else:
            for value in KNOWN_FILLS:
                hits = np.isnan(rollout) if math.isnan(value) else rollout == value
                count = int(np.count_nonzero(hits))
                if count:
                    self.masked_fill[format(value, "g")] += count


def is_known_fill(low: Floats, high: Floats, rounded: Floats) -> Any:
    """bool [s]: every value between low and high is one known fill. ``rounded``: the fills in the stored dtype.

    >>> fills = np.array(KNOWN_FILLS)
    >>> is_known_fill(np.array([0.0, -5.0, np.nan]), np.array([0.0, 0.0, np.nan]), fills).tolist()
    [True, False, True]
    """
    equal = np.isin(low, rounded[~np.isnan(rounded)]) & (low == high)
    return equal | np.isnan(low)


def all_nan_pieces(values: Floats, starts: Ints) -> Any:
    """bool [k]: pieces that hold nothing but NaN."""
    nan = np.isnan(values)
    return np.logical_and.reduceat(nan, starts)
