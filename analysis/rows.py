"""What one unit contributes to the figures of one population: token sums and per-sequence figures, ready to be combined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout_is.analysis import clusters, weights
from rollout_is.analysis import populations as sums
from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.clusters import ClusterRow, GroupTable
from rollout_is.analysis.histogram import merge
from rollout_is.analysis.nonfinite import Nonfinite
from rollout_is.analysis.pareto import TopLogWeights
from rollout_is.analysis.populations import Bounds, Half, Pooled, Scaled, Table
from rollout_is.analysis.weights import Moments, WeightRow

# Quantities that carry a clustered standard error, in the order of the cluster rows.
TOKEN_ERRORS = (
    "d", "d2", "k3", "abs", "dp", "mult", "w", "w2", "high", "low", "extreme", "veto", "identical",
)  # fmt: skip
SEQUENCE_ERRORS = (
    "x", "product", "geometric", "train_nll", "rollout_nll", "train_ppl", "rollout_ppl", "ppl_diff", "ppl_abs_diff", "ppl_ratio",
)  # fmt: skip


@dataclass(frozen=True)
class TokenRow:
    """Pooled sums over the finite tokens of one unit.

    ``sums`` holds plain sums by name (d, d2, abs, k3, mult, dp); ``counts`` whole numbers (high, low, extreme, veto, identical).
    """

    n: int
    infinite: tuple[int, int]
    infinite_vetoed: int  # of them, beyond a veto bound that is given
    weights: WeightRow
    moments: tuple[int, float, float]
    sums: dict[str, float]
    counts: dict[str, int]
    scaled_k3: tuple[tuple[float, float], ...]
    scaled_mult: tuple[tuple[float, float], ...]
    pooled: tuple[tuple[int, Pooled], ...]
    clusters: ClusterRow | GroupTable | None = None


@dataclass(frozen=True)
class SequenceRow:
    """Per-sequence figures of one unit's finished sequences."""

    sequences: int  # with at least one valid token
    measured: int  # with at least one valid finite token
    dropped: int  # left out of the product level: a valid token is not finite
    vetoed: int
    x: WeightRow
    x_deviation: float
    x_counts: tuple[int, int]
    product: WeightRow
    geometric: WeightRow
    train: WeightRow  # of -mean t: the perplexities are its weights
    rollout: WeightRow
    ratio: WeightRow  # of D = mean r - mean t
    train_nll: float
    rollout_nll: float
    diff: float
    abs_diff: float
    clusters: ClusterRow | GroupTable | None = None
    pareto: TopLogWeights | None = None


@dataclass
class Row:
    """One unit's contribution to one population.

    Where the unit is a fragment ``sequence`` waits for the others; the joined fragments are a row without ``token``.
    """

    token: TokenRow | None
    sequence: SequenceRow | None
    fragment: FragmentSums | None = None
    clusters: ClusterRow | GroupTable | None = None


@dataclass(frozen=True)
class SequenceFacts:
    """What else is known of the sequences of a table, aligned with its columns.

    Attributes:
        nonfinite: int64 [s] valid tokens left out of the sums.
        infinite_low, infinite_high: int64 [s] of them, d = -inf and +inf.
        groups: int64 [s] group ids, or None.
    """

    nonfinite: Ints
    infinite_low: Ints
    infinite_high: Ints
    groups: Ints | None

    @staticmethod
    def of(halves: Sequence[Nonfinite], groups: Ints | None) -> SequenceFacts:
        """Of one population or of two together."""
        count, low, high = halves[0].count, halves[0].low, halves[0].high
        for other in halves[1:]:
            count, low, high = count + other.count, low + other.low, high + other.high
        return SequenceFacts(count, low, high, groups)

    def take(self, keep: Any) -> SequenceFacts:
        """Of some of the sequences: bool [s] or int64 [k]."""
        groups = None if self.groups is None else self.groups[keep]
        return SequenceFacts(self.nonfinite[keep], self.infinite_low[keep], self.infinite_high[keep], groups)


@dataclass(frozen=True)
class FragmentSums:
    """The sums of a part of a sequence that is longer than a unit, to be joined in order."""

    key: tuple[int, int]  # shard, segment
    table: Table  # one column
    facts: SequenceFacts
    scaled: tuple[Ints, Floats, Floats, Floats]
    shift: float  # the same for all fragments of a segment


@dataclass
class Population:
    """One or two token populations (valid; masked-out) of a unit, joined."""

    members: list[Half] = field(default_factory=list)

    @property
    def scaled(self) -> Scaled:
        out = Scaled()
        for m in self.members:
            for arrays in zip(m.scaled.sequence, m.scaled.scale, m.scaled.first, m.scaled.second, strict=True):
                out.add(*arrays)
        return out


def token_row(population: Population, table: Table, facts: SequenceFacts, *, clustered: bool) -> TokenRow:
    """Pool a unit's table over its tokens. ``table`` joins the members' tables."""
    low = float(table.low.min()) if table.low.size else math.inf
    high = float(table.high.max()) if table.high.size else -math.inf
    shift = population.members[0].shift if population.members else 0.0
    own = token_clusters(table, facts, shift) if clustered else None
    return pooled_row(population, table.sums.sum(axis=1).tolist(), low, high, own)


def pooled_row(
    population: Population, totals: Sequence[float], low: float, high: float, own: ClusterRow | GroupTable | None
) -> TokenRow:
    """From the sums of a table's rows and the extremes of d (+inf, -inf where there is no token)."""
    members = population.members
    total = {name: totals[column] for name, column in _SUMMED.items()}
    n = int(totals[sums.N])
    shift, e_shift = (members[0].shift, members[0].e_shift) if members else (0.0, 0.0)
    _, scale, first, second = population.scaled.arrays()
    parts = [(0.0, total["w"], total["w2"])] if total["w"] > 0 else []
    parts += list(zip(scale.tolist(), first.tolist(), second.tolist(), strict=True))
    if len(parts) > 1:
        parts = [_one_part(parts)]
    if n and not len(scale) and high > -10.0:
        about = total["e"] / n
        moment = Moments(0.0, n, e_shift + about, max(0.0, total["e2"] - total["e"] * about))
    elif n:
        k, s1, s2 = parts[0] if parts else (0.0, 0.0, 0.0)
        moment = Moments(k, n, s1 / n - (1.0 if k == 0.0 else 0.0), max(0.0, s2 - s1 * s1 / n))
    else:
        moment = Moments(0.0, 0, 0.0, 0.0)
    weight_row = WeightRow(
        n=n,
        parts=tuple(parts),
        moments=(moment,) if n else (),
        low=low,
        high=high,
        above=int(total["high"]),
        below=int(total["low"]),
        histogram=merge([m.histogram() for m in members]),
    )
    mean_d = total["d"] / n if n else 0.0
    centred = total["d"] - n * shift
    # Sum of d^2 from the sum about the shift: every term but the cross one is positive.
    d2 = total["d2"] + 2.0 * shift * centred + n * shift * shift
    m2 = max(0.0, total["d2"] - centred * centred / n) if n else 0.0
    infinite = (sum(m.infinite[0] for m in members), sum(m.infinite[1] for m in members))
    return TokenRow(
        n=n,
        infinite=infinite,
        infinite_vetoed=sum(
            count
            for m in members
            for bound, count in zip((m.bounds.veto_lower, m.bounds.veto_upper), m.infinite, strict=True)
            if bound is not None
        ),
        weights=weight_row,
        moments=(n, mean_d, m2),
        sums={
            "d": total["d"],
            "d2": d2,
            "abs": total["abs"],
            "k3": total["k3"],
            "mult": total["mult"],
            "dp": total["dp"],
        },
        counts={k: int(total[k]) for k in ("high", "low", "extreme", "veto", "identical")},
        scaled_k3=_scaled_parts([m.scaled_k3 for m in members]),
        scaled_mult=_scaled_parts([m.scaled_abs for m in members]),
        pooled=tuple((m.n, m.pooled) for m in members if m.n and m.mismatch),
        clusters=own,
    )


_SUMMED = {
    "t": sums.T, "d": sums.D, "d2": sums.D2, "abs": sums.ABS, "e": sums.E, "e2": sums.E2, "w": sums.W, "w2": sums.W2,
    "k3": sums.K3, "mult": sums.MULT, "dp": sums.DP, "high": sums.HIGH, "low": sums.LOW, "extreme": sums.EXTREME,
    "veto": sums.VETO, "identical": sums.IDENTICAL,
}  # fmt: skip


def _one_part(parts: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    top = max(k for k, _, _ in parts)
    first = math.fsum(a * math.exp(k - top) for k, a, _ in parts)
    second = math.fsum(b * math.exp(2 * (k - top)) for k, _, b in parts)
    return top, first, second


def _scaled_parts(states: list[Scaled]) -> tuple[tuple[float, float], ...]:
    parts = []
    for state in states:
        _, scale, first, second = state.arrays()
        if len(scale):
            k, s1, _ = _one_part(list(zip(scale.tolist(), first.tolist(), second.tolist(), strict=True)))
            parts.append((k, s1))
    return tuple(parts)


def token_clusters(table: Table, facts: SequenceFacts, shift: float) -> ClusterRow | GroupTable:
    """Residual sums of the token means over the sequences of a table (or over their groups)."""
    has = table.sums[sums.N] > 0
    t = table.sums if has.all() else table.sums.compress(has, axis=1)
    n = t[sums.N]
    d2 = t[sums.D2] + 2.0 * shift * (t[sums.D] - n * shift) + n * shift * shift
    return _cluster([t[sums.D], d2, *(t[c] for c in _ERROR_COLUMNS)], n, facts, has)


_ERROR_COLUMNS = (
    sums.K3, sums.ABS, sums.DP, sums.MULT, sums.W, sums.W2, sums.HIGH, sums.LOW, sums.EXTREME, sums.VETO, sums.IDENTICAL,
)  # fmt: skip


def _cluster(matrix: Sequence[Floats], n: Floats, facts: SequenceFacts, keep: Any) -> ClusterRow | GroupTable:
    if facts.groups is None:
        return clusters.row_of(matrix, n)
    return clusters.fold_groups(facts.groups[keep], matrix, n)


def sequence_row(
    table: Table,
    facts: SequenceFacts,
    scaled: tuple[Ints, Floats, Floats, Floats],
    bounds: Bounds,
    e_shift: float,
    mismatch: bool,
    tail: int,
) -> SequenceRow:
    """The per-sequence figures of finished sequences.

    Args:
        table: its columns are the sequences with at least one valid token (``sequence`` ascending).
        facts: aligned with the table.
        scaled: weights kept as logarithms, by sequence number.
        tail: how many of the largest product weights to keep.
    """
    n = table.sums[sums.N]
    veto = table.sums[sums.VETO] > 0
    if bounds.veto_lower is not None:
        veto |= facts.infinite_low > 0
    if bounds.veto_upper is not None:
        veto |= facts.infinite_high > 0
    has = n > 0
    measured = table if has.all() else table.take(has)
    n = n[has]
    d, t = measured.sums[sums.D], measured.sums[sums.T]
    log_lower, log_upper = bounds.log_lower, bounds.log_upper

    log_x, x_minus_1, x = _mean_weights(measured, scaled, n, e_shift)
    geometric = d / n
    finite = facts.nonfinite[has] == 0
    product = d if finite.all() else d[finite]
    lower, upper = math.exp(log_lower), math.exp(log_upper)
    top = None
    if len(product):
        top = TopLogWeights(tail)
        top.update(product)
    nll, rollout_nll = -t / n, (d - t) / n
    drift = -geometric  # mean r - mean t
    with np.errstate(over="ignore"):  # once, for the sums and for the standard errors
        product_w, geometric_w = np.exp(d), np.exp(geometric)
        ppl, rollout_ppl, ratio = (np.exp(y) if mismatch else y for y in (nll, rollout_nll, drift))
    # A sequence without a product weight makes that one error undefined; the others stand.
    matrix = (
        x, product_w if finite.all() else np.where(finite, product_w, np.nan), geometric_w, nll, rollout_nll, ppl, rollout_ppl,
        drift, np.abs(drift), ratio,
    )  # fmt: skip
    product_w = product_w if finite.all() else product_w[finite]

    def row(log_weights: Floats, own: Floats, *, binned: bool = False) -> WeightRow:
        return weights.row_of(log_weights, log_lower, log_upper, binned=binned, exponentials=own)

    none = weights.EMPTY
    return SequenceRow(
        sequences=len(table.sequence),
        measured=len(n),
        dropped=int(np.count_nonzero(~finite)),
        vetoed=int(np.count_nonzero(veto)),
        x=weights.row_of(log_x, log_lower, log_upper, binned=False),
        x_deviation=float(np.abs(x_minus_1).max()) if len(n) else -math.inf,
        x_counts=(int(np.count_nonzero(x > upper)), int(np.count_nonzero(x < lower))),
        product=row(product, product_w, binned=True),
        geometric=row(geometric, geometric_w, binned=True),
        train=row(nll, ppl) if mismatch else none,
        rollout=row(rollout_nll, rollout_ppl) if mismatch else none,
        ratio=row(drift, ratio) if mismatch else none,
        train_nll=float(nll.sum()),
        rollout_nll=float(rollout_nll.sum()),
        diff=float(drift.sum()),
        abs_diff=float(np.abs(drift).sum()),
        clusters=_cluster(matrix, np.ones(len(n)), facts, has) if len(n) else None,
        pareto=top,
    )


def _mean_weights(
    table: Table, scaled: tuple[Ints, Floats, Floats, Floats], n: Floats, e_shift: float
) -> tuple[Floats, Floats, Floats]:
    """Per sequence: log of x = mean token weight, x - 1 and x (inf where x leaves float64)."""
    total = table.sums[sums.W]
    # Near 1 the sum of w - 1 has the digits that 1 + (w - 1) lost; far below 1 it is the other way round.
    near = total > 0.5 * n
    x_minus_1 = np.where(near, e_shift + table.sums[sums.E] / n, total / n - 1.0)
    x = np.where(near, 1.0 + x_minus_1, total / n)
    log_x = np.full(len(n), -np.inf)
    log_x[near] = np.log1p(x_minus_1[near])
    far = ~near & (total > 0)
    log_x[far] = np.log(total[far] / n[far])
    sequence, scale, first, _ = scaled
    if len(sequence):
        at = np.searchsorted(table.sequence, sequence)
        known = at < len(table.sequence)
        known &= table.sequence[np.minimum(at, len(table.sequence) - 1)] == sequence
        for column, k, s in zip(at[known], scale[known], first[known], strict=True):
            log_x[column] = np.logaddexp(log_x[column], k + math.log(s) - math.log(n[column]))
            x[column] = weights.safe_exp(float(log_x[column]))
            x_minus_1[column] = x[column] - 1.0
    return log_x, x_minus_1, x
