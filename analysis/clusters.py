"""Standard errors clustered by sequence (or by group): sqrt(G/(G-1) * sum_g (S_g - mean * n_g)^2) / N.

The pooled mean is known only at the end, so each unit keeps its residual sums about its own mean; they move to any other
mean exactly. Source: the linearised variance of a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.ops import dot


@dataclass(frozen=True)
class ClusterRow:
    """Residual sums of Q quantities over the clusters of one unit.

    Attributes:
        clusters: G.
        centre: float64 [Q] the unit's own means.
        squares, cross: float64 [Q] sum of (S_g - c n_g)^2 and of (S_g - c n_g) n_g.
        sizes: sum of n_g^2.
    """

    clusters: int
    centre: Floats
    squares: Floats
    cross: Floats
    sizes: float


@dataclass(frozen=True)
class GroupTable:
    """Sums by ``group_ids`` in one unit: a group may go on in other units, ranks and steps.

    Attributes:
        ids: int64 [g].
        n: float64 [g] tokens (or sequences).
        sums: float64 [Q, g].
    """

    ids: Ints
    n: Floats
    sums: Floats


def row_of(sums: Sequence[Floats], n: Floats) -> ClusterRow:
    """Residual sums of clusters given the totals of Q quantities, float64 [g] each, and the sizes, float64 [g]."""
    total = float(n.sum())
    centre, squares, cross = np.zeros(len(sums)), np.zeros(len(sums)), np.zeros(len(sums))
    residual = np.empty(len(n))
    with np.errstate(all="ignore"):  # what overflows here has no standard error
        for q, own in enumerate(sums):  # row by row: a matrix of them would leave the cache
            summed = own.sum()
            if summed == 0.0 and not own.any():
                continue  # counts of what never happened
            centre[q] = summed / total if total else 0.0
            np.multiply(n, -centre[q], out=residual)
            residual += own
            squares[q] = dot(residual, residual)
            cross[q] = dot(residual, n)
    return ClusterRow(len(n), centre, squares, cross, dot(n, n))


def fold_groups(ids: Ints, sums: Sequence[Floats], n: Floats) -> GroupTable:
    """Totals by group of per-sequence sums."""
    unique, inverse = np.unique(ids, return_inverse=True)
    out = np.zeros((len(sums), len(unique)))
    for q in range(len(sums)):
        out[q] = np.bincount(inverse, weights=sums[q], minlength=len(unique))
    sizes: Floats = np.bincount(inverse, weights=n, minlength=len(unique)).astype(np.float64)
    return GroupTable(unique, sizes, out)


def rows_of_groups(tables: Iterable[GroupTable]) -> list[ClusterRow]:
    """Join the tables of all units (they must come in unit order: the sums of a split group depend on it)."""
    parts = list(tables)
    if not parts:
        return []
    joined = fold_groups(
        np.concatenate([p.ids for p in parts]),
        list(np.concatenate([p.sums for p in parts], axis=1)),
        np.concatenate([p.n for p in parts]),
    )
    return [row_of(list(joined.sums), joined.n)]


def standard_error(rows: Iterable[ClusterRow], quantity: int, mean: float, total: float) -> float | None:
    """The standard error of the pooled mean of one quantity; None for fewer than two clusters or where it overflows.

    Args:
        rows: of all units.
        quantity: index into Q.
        mean: the pooled mean.
        total: N, all tokens (or sequences).
    """
    rows = list(rows)
    clusters = sum(r.clusters for r in rows)
    if clusters < 2 or not math.isfinite(mean):
        return None
    terms = []
    for r in rows:
        shift = mean - float(r.centre[quantity])
        terms += [float(r.squares[quantity]), -2.0 * shift * float(r.cross[quantity]), shift * shift * r.sizes]
    if not all(map(math.isfinite, terms)):
        return None
    largest = max(map(abs, terms))  # scaled by it: the sum of what float64 just holds would overflow
    if largest == 0.0:
        return 0.0
    square = max(0.0, math.fsum(t / largest for t in terms))
    return math.sqrt(largest) * math.sqrt(square * clusters / (clusters - 1)) / total
