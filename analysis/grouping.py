"""Labels for the groupings: which group a token or a sequence belongs to, as whole numbers with printable names."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints

# Step, rank and shard label whole units; these label sequences; those of settings.TOKEN_GROUPINGS label tokens.
SEQUENCE_GROUPINGS = ("pack", "length", "group")
UNIT_GROUPINGS = ("step", "rank", "shard")
PROBABILITY_EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99, 1.0)


def power_of_two_bin(x: Ints) -> Ints:
    """Bin of edges 0 1 2 4 8 ...: 0 for 0, then floor(log2 x) + 1.

    >>> power_of_two_bin(np.array([0, 1, 2, 3, 4, 7, 8])).tolist()
    [0, 1, 2, 2, 3, 3, 4]
    """
    out: Ints = np.frexp(x.astype(np.float64))[1].astype(np.int64)
    return out


def power_of_two_name(label: int) -> str:
    """Half-open interval of a bin.

    >>> [power_of_two_name(k) for k in (0, 1, 3)]
    ['0', '1', '4..7']
    """
    if label <= 1:
        return str(label)
    return f"{2 ** (label - 1)}..{2**label - 1}"


def probability_bin(rollout: Floats) -> Ints:
    """Bin of exp(rollout log-prob): the last edge is in the last bin; probabilities above 1 are too.

    >>> probability_bin(np.log(np.array([1e-5, 0.05, 0.5, 1.0]))).tolist()
    [0, 3, 5, 7]
    """
    with np.errstate(over="ignore", under="ignore"):
        p = np.exp(rollout)
    at = np.searchsorted(np.array(PROBABILITY_EDGES), p * (1 + 1e-15), side="right") - 1
    out: Ints = np.clip(at, 0, len(PROBABILITY_EDGES) - 2).astype(np.int64)
    return out


def probability_name(label: int) -> str:
    return f"{PROBABILITY_EDGES[label]:g}..{PROBABILITY_EDGES[label + 1]:g}"


def name_of(by: str, label: int) -> str:
    """How a label is printed and keyed in JSON."""
    if by in ("position", "length"):
        return power_of_two_name(label)
    if by == "probability":
        return probability_name(label)
    return str(label)


def natural_order(name: str) -> Any:
    """Sort key that puts group names in their natural order."""
    head = name.split("..")[0].split("/")[-1]
    try:
        return (0, float(head), name)
    except ValueError:
        return (1, 0.0, name)
