"""Shapes and dtypes of what passes between the engine's parts, checked on every call while the tests run.

The signatures stand here and not in the code, so that nothing of it is a dependency of rollout-is; a call whose arrays do not
fit raises. Axes with one name must agree within a call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64, jaxtyped

from rollout_is.analysis import clusters, columns, fills, histogram, populations, split, sums, weights

Array = np.ndarray


class ShapeError(TypeError):
    """An argument that does not fit its signature."""


@dataclass(frozen=True)
class Each:
    """Every element of a sequence fits."""

    kind: Any


VECTOR = Float64[Array, "n"]
PLACES = Int64[Array, "n"]

# owner, name -> what its arguments must be.
SIGNATURES: list[tuple[Any, str, dict[str, Any]]] = [
    (weights, "row_of", {"log_weights": VECTOR}),
    (clusters, "row_of", {"n": VECTOR, "sums": Each(VECTOR)}),
    (clusters, "fold_groups", {"ids": PLACES, "n": VECTOR, "sums": Each(VECTOR)}),
    (histogram.Histogram, "of_values", {"values": VECTOR}),
    (histogram.Histogram, "of_half_bins", {"bins": Int64[Array, "4096"], "far": VECTOR}),
    (split.Runs, "__init__", {"on": Bool[Array, "n"]}),
    (split.Runs, "before", {"at": PLACES}),
    (
        split.Pieces,
        "__init__",
        {
            "bounds": Int64[Array, "b"],
            "first": Int64[Array, "b"],
            "chunks": Int64[Array, "c"],
            "starts": PLACES,
            "sequence": PLACES,
        },
    ),
    (columns, "fold", {"sequence": PLACES, "piece": Float64[Array, f"{populations.ROWS} n"]}),
    (
        fills.Fills,
        "see",
        {"empty": Bool[Array, "n"], "bounds": Int64[Array, "n+1"]},
    ),
    (sums.Sums, "add", {"starts": PLACES, "sequence": PLACES}),
    (
        populations.Table,
        "__init__",
        {"sequence": PLACES, "sums": Float64[Array, f"{populations.COLUMNS} n"], "low": VECTOR, "high": VECTOR},
    ),
    (clusters.ClusterRow, "__init__", {"centre": VECTOR, "squares": VECTOR, "cross": VECTOR}),
]


def checked(function: Callable[..., Any], kinds: dict[str, Any]) -> Callable[..., Any]:
    """The function with some arguments checked; axes of one name agree within a call."""
    signature = inspect.signature(function)
    unknown = set(kinds) - set(signature.parameters)
    assert not unknown, f"{function.__qualname__} has no parameter {unknown}"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        with jaxtyped("context"):
            for name, kind in kinds.items():
                value = given[name]
                parts = value if isinstance(kind, Each) else [value]
                own = kind.kind if isinstance(kind, Each) else kind
                for part in parts:
                    if not isinstance(part, own):
                        found = f"{getattr(part, 'dtype', type(part))} {getattr(part, 'shape', '')}"
                        raise ShapeError(f"{function.__qualname__}: {name}: expected {own}, found {found}")
        return function(*args, **kwargs)

    return call


def install() -> None:
    """Check every call of SIGNATURES from now on."""
    for owner, name, kinds in SIGNATURES:
        raw = inspect.getattr_static(owner, name)
        if isinstance(raw, staticmethod):
            setattr(owner, name, staticmethod(checked(raw.__func__, kinds)))
        else:
            setattr(owner, name, checked(raw, kinds))
