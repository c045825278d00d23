"""The largest sequence weights of a dump, folded as units come in, so that memory does not grow with the sequences."""

from __future__ import annotations

from dataclasses import replace

from rollout_is.analysis.engine import Partial
from rollout_is.analysis.pareto import TopLogWeights
from rollout_is.analysis.rows import PARETO_CAPACITY, Row, SequenceRow

KEPT_IN_ROWS = 4097  # enough for the k-hat of any group of up to 1.8 million sequences


class Tails:
    """One state for the masked population and one for the unmasked."""

    def __init__(self) -> None:
        self._states = (TopLogWeights(PARETO_CAPACITY), TopLogWeights(PARETO_CAPACITY))

    def of(self, population: int) -> TopLogWeights:
        """0: masked, 1: unmasked."""
        return self._states[population]

    def merge(self, other: Tails) -> None:
        for mine, its in zip(self._states, other._states, strict=True):
            mine.merge(its)

    def take(self, partial: Partial) -> None:
        """Fold the whole-unit tails in and leave in every row what its groups can need."""
        masked, unmasked = partial.rows["", ""]
        for state, row in ((self._states[0], masked), (self._states[1], unmasked or masked)):
            if row.sequence is not None and row.sequence.pareto is not None:
                state.merge(row.sequence.pareto)
        for pair in partial.rows.values():
            for kept in pair:
                if kept is not None and kept.sequence is not None:
                    _cut(kept, kept.sequence)


def _cut(row: Row, sequence: SequenceRow) -> None:
    whole = sequence.pareto
    if whole is None or len(whole) <= KEPT_IN_ROWS:
        return
    few = TopLogWeights(KEPT_IN_ROWS)
    few.merge(whole)
    row.sequence = replace(sequence, pareto=few)
