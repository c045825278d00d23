"""What would make memory grow with the dump, folded as units come in: the largest sequence weights, and the histograms.

Both merge without rounding, so the order in which units come in leaves no trace.
"""

from __future__ import annotations

from dataclasses import replace

from rollout_is.analysis.histogram import Histogram, merge
from rollout_is.analysis.pareto import LARGEST, TopLogWeights
from rollout_is.analysis.partial import Partial
from rollout_is.analysis.rows import Row

KEPT_IN_ROWS = 4097  # enough for the k-hat of any group of up to 1.8 million sequences


class Folded:
    """What is folded of one population.

    Attributes:
        tail: the largest product weights.
        token, product, geometric: histograms of the log-ratio, where rows do not keep their own.
    """

    def __init__(self) -> None:
        self.tail = TopLogWeights(LARGEST)
        self.token = self.product = self.geometric = Histogram.empty()

    def merge(self, other: Folded) -> None:
        """Take in another."""
        self.tail.merge(other.tail)
        self._add(other.token, other.product, other.geometric)

    def _add(self, token: Histogram, product: Histogram, geometric: Histogram) -> None:
        self.token = merge([self.token, token])
        self.product = merge([self.product, product])
        self.geometric = merge([self.geometric, geometric])

    def take(self, row: Row, strip: bool) -> None:
        """A row of a whole unit."""
        if row.sequence is not None and row.sequence.pareto is not None:
            self.tail.merge(row.sequence.pareto)
        if strip and row.token is not None:
            self._add(
                row.token.weights.histogram,
                Histogram.empty() if row.sequence is None else row.sequence.product.histogram,
                Histogram.empty() if row.sequence is None else row.sequence.geometric.histogram,
            )


class Tails:
    """One state for the masked population and one for the unmasked.

    Args:
        strip: take the histograms out of the rows too. They must stay where groups are made of whole units (step, rank, shard).
    """

    def __init__(self, *, strip: bool = False) -> None:
        self._strip = strip
        self._states = (Folded(), Folded())

    def of(self, population: int) -> Folded:
        """0: masked, 1: unmasked."""
        return self._states[population]

    @property
    def strips(self) -> bool:
        return self._strip

    def without(self, part: Tails, instead: Tails) -> Tails:
        """With a part of the units (folded apart in ``part``) replaced. The largest weights cannot be taken back: they are left empty."""
        out = Tails(strip=True)
        for mine, whole, old, new in zip(out._states, self._states, part._states, instead._states, strict=True):
            for level in ("token", "product", "geometric"):
                kept = getattr(whole, level).minus(getattr(old, level))
                setattr(mine, level, merge([kept, getattr(new, level)]))
        return out

    def merge(self, other: Tails) -> None:
        for mine, its in zip(self._states, other._states, strict=True):
            mine.merge(its)

    def take(self, partial: Partial) -> None:
        """Fold a unit in and leave in every row what its groups can need."""
        masked, unmasked = partial.rows["", ""]
        for state, row in zip(self._states, (masked, unmasked or masked), strict=True):
            state.take(row, self._strip)
        if self._strip:
            for own in (masked, unmasked):
                if own is not None:
                    _strip(own)
        for pair in partial.rows.values():
            for kept in pair:
                if kept is not None:
                    _shorten(kept)


def _strip(row: Row) -> None:
    none = Histogram.empty()
    if row.token is not None:
        row.token = replace(row.token, weights=replace(row.token.weights, histogram=none))
    if row.sequence is not None:
        product, geometric = row.sequence.product, row.sequence.geometric
        row.sequence = replace(
            row.sequence,
            pareto=None,
            product=replace(product, histogram=none),
            geometric=replace(geometric, histogram=none),
        )


def _shorten(row: Row) -> None:
    if row.sequence is None or row.sequence.pareto is None or len(row.sequence.pareto) <= KEPT_IN_ROWS:
        return
    few = TopLogWeights(KEPT_IN_ROWS)
    few.merge(row.sequence.pareto)
    row.sequence = replace(row.sequence, pareto=few)
