"""What every fingerprint is made of: a small bag of sums that can be merged, and histograms that merge as integers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_is.analysis.batch import Floats, Ints

PLACES = 3


def count() -> Any:
    """An integer that is added on merge."""
    return field(default=0, metadata={"merge": "sum"})


def total() -> Any:
    """A float that is added on merge."""
    return field(default=0.0, metadata={"merge": "sum"})


def counts(*shape: int) -> Any:
    """An int64 array that is added on merge."""
    return field(default_factory=lambda: np.zeros(shape, np.int64), metadata={"merge": "sum"})


def totals(*shape: int) -> Any:
    """A float64 array that is added on merge."""
    return field(default_factory=lambda: np.zeros(shape, np.float64), metadata={"merge": "sum"})


def largest() -> Any:
    """A float of which the largest is kept; -inf while nothing was seen."""
    return field(default=float("-inf"), metadata={"merge": "max"})


def smallest() -> Any:
    """A float of which the smallest is kept; +inf while nothing was seen."""
    return field(default=float("inf"), metadata={"merge": "min"})


def places() -> Any:
    """The first few places of evidence, in unit order."""
    return field(default_factory=list, metadata={"merge": "first"})


def table() -> Any:
    """A dict of key -> State or number: states are merged, numbers are added."""
    return field(default_factory=dict, metadata={"merge": "table"})


@dataclass
class State:
    """Sums of one fingerprint over one unit. ``merge`` adds another's; fields say how they merge.

    Units are always merged in unit order, so float sums have the same bits for any number of workers.
    """

    def merge(self, other: Self) -> None:
        """Take in what another unit saw."""
        mine, theirs = self.__dict__, other.__dict__
        for name, how in _plan(type(self)):
            if how == "sum":
                mine[name] = mine[name] + theirs[name]
            elif how == "max":
                mine[name] = max(mine[name], theirs[name])
            elif how == "min":
                mine[name] = min(mine[name], theirs[name])
            elif how == "first":
                mine[name] = (mine[name] + theirs[name])[:PLACES]
            elif theirs[name]:
                _merge_table(mine[name], theirs[name])


_PLANS: dict[type, tuple[tuple[str, str], ...]] = {}  # looked up once a class: there is a merge for every unit


def _plan(kind: type[State]) -> tuple[tuple[str, str], ...]:
    if kind not in _PLANS:
        _PLANS[kind] = tuple((f.name, f.metadata["merge"]) for f in fields(kind))
    return _PLANS[kind]


def _merge_table(mine: dict[Any, Any], theirs: dict[Any, Any]) -> None:
    for key, value in theirs.items():
        if key not in mine:
            mine[key] = copy.deepcopy(value)
        elif isinstance(value, State):
            mine[key].merge(value)
        else:
            mine[key] = mine[key] + value


S = TypeVar("S", bound=State)


def merged(kind: type[S], parts: Iterable[S]) -> S:
    """One state with the sums of all parts, taken in the given order; the parts stay as they are."""
    whole = kind()
    for part in parts:
        whole.merge(part)
    return whole


def inner(a: Floats, b: Floats) -> float:
    """Sum of products, on one thread: the number of BLAS threads must not change a bit."""
    return float(np.einsum("i,i->", a, b))


# Histogram of magnitudes: four bins an octave (19 % wide), read off the bits of float32, so that it costs a shift.
_LOW, _HIGH = -24, 12  # octaves
MAGNITUDES = (_HIGH - _LOW) * 4
_BASE = (127 + _LOW) * 4


def magnitude_bin(x: NDArray[np.floating[Any]]) -> NDArray[np.int32]:
    """Bin 0..MAGNITUDES-1 of each |x|; what is below 2**-24 (zero included) is in bin 0, infinity in the last.

    >>> magnitude_bin(np.array([0.0, 1.0, 1.3, 2.0])).tolist()
    [0, 96, 97, 100]
    """
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinity, and belongs into the last bin
        bits = np.abs(x).astype(np.float32).view(np.int32)
    index: NDArray[np.int32] = (bits >> 21) - _BASE
    return np.clip(index, 0, MAGNITUDES - 1, out=index)


def magnitudes(x: NDArray[np.floating[Any]]) -> Ints:
    """Histogram of |x|, int64 [MAGNITUDES]."""
    return tally(magnitude_bin(x))


def tally(bins: NDArray[np.int32]) -> Ints:
    """Histogram of bins, int64 [MAGNITUDES]."""
    return np.bincount(bins, minlength=MAGNITUDES).astype(np.int64)


def magnitude_value(index: int) -> float:
    """Middle of a bin; 0 for the lowest, which holds the zeros."""
    if index <= 0:
        return 0.0
    octave, quarter = divmod(index, 4)
    return float(2.0 ** (octave + _LOW) * (1 + (quarter + 0.5) / 4))


def quantile(histogram: Ints, p: float) -> float:
    """The p-quantile (inverted CDF) of a magnitude histogram, to 12 %; 0 for an empty one.

    >>> round(quantile(magnitudes(np.linspace(0, 1, 1001)), 0.5), 2)
    0.56
    """
    n = int(histogram.sum())
    if n == 0:
        return 0.0
    at = int(np.searchsorted(np.cumsum(histogram), max(1, int(np.ceil(p * n)))))
    return magnitude_value(at)


def share_of_top(histogram: Ints, top: float) -> float:
    """Share of the sum of magnitudes that the largest ``top`` (a share of the tokens) carry."""
    values: Floats = np.array([magnitude_value(i) for i in range(MAGNITUDES)])
    n = float(histogram.sum())
    weight = float((histogram * values).sum())
    if n == 0 or weight == 0:
        return 0.0
    left, carried = top * n, 0.0
    for i in range(MAGNITUDES - 1, -1, -1):
        take = min(left, float(histogram[i]))
        carried += take * float(values[i])
        left -= take
        if left <= 0:
            break
    return carried / weight
