"""Missing values: NaN and infinities at valid tokens, by side, sequence and step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Ints, SequenceTable
from rollout_is.analysis.doctor.state import State, counts, places
from rollout_is.analysis.doctor.verdict import Draft, Scene, Scope, percent, plural

KINDS = ("NaN", "+inf", "-inf")


@dataclass
class NonFinite(State):
    """Valid tokens whose t, r or d is not finite.

    Attributes:
        tokens, valid: such tokens; all valid tokens.
        by_kind: int64 [2, 3] of the train and the rollout side, by KINDS.
        sequences, whole: sequences with one; sequences with nothing else.
    """

    tokens: Ints = counts(1)
    valid: Ints = counts(1)
    by_kind: Ints = counts(2, len(KINDS))
    sequences: Ints = counts(1)
    whole: Ints = counts(1)
    sequences_seen: Ints = counts(1)
    places: list[dict[str, Any]] = places()

    def finished(self, table: SequenceTable) -> None:
        """Take in the unit's finished sequences."""
        bad = table.nonfinite > 0
        self.tokens[0] += int(table.nonfinite.sum())
        self.valid[0] += int(table.valid.sum())
        self.sequences[0] += int(bad.sum())
        self.sequences_seen[0] += int((table.valid > 0).sum())
        self.whole[0] += int((bad & (table.n == 0)).sum())

    def kinds(self, train: Any, rollout: Any) -> None:
        """Count what the values at valid tokens are; float64 arrays."""
        for side, x in enumerate((train, rollout)):
            self.by_kind[side] += np.array(
                [np.count_nonzero(np.isnan(x)), np.count_nonzero(x == np.inf), np.count_nonzero(x == -np.inf)]
            )


def judge(scene: Scene) -> list[Draft]:
    """``missing.nonfinite``."""
    s = scene.pooled(NonFinite)
    n = int(s.tokens[0])
    if n == 0:
        return []
    ranks = tuple(r for r in scene.ranks if int(scene.pooled(NonFinite, ranks=[r]).tokens[0]))
    steps = tuple(x for x in scene.steps if int(scene.pooled(NonFinite, steps=[x]).tokens[0]))
    scope = Scope(
        ranks if len(ranks) < len(scene.ranks) else (),
        steps if len(steps) < len(scene.steps) else (),
    )
    found = [
        f"{int(s.by_kind[side, k])} {kind} in {name}"
        for side, name in enumerate(("train", "rollout"))
        for k, kind in enumerate(KINDS)
        if s.by_kind[side, k]
    ]
    whole = int(s.whole[0])
    message = (
        f"{plural(n, 'valid token')} without a finite log-prob ({', '.join(found) or 't - r overflows'}) in "
        f"{plural(int(s.sequences[0]), 'sequence')}{scope.words(scene)}"
    )
    if whole:
        message += f"; {plural(whole, 'sequence')} {'has' if whole == 1 else 'have'} no finite token at all"
        message += " (a temperature of 0, or scoring that failed for the whole row?)"
    share = n / max(1, int(s.valid[0]))
    return [
        Draft(
            "missing.nonfinite",
            "error",
            message,
            float(n),
            "valid tokens without a finite value (none is put up with)",
            scope,
            tokens=n,
            token_share=share,
            sequences=int(s.sequences[0]),
            places=s.places,
            alternatives=("a weight update that raced a forward pass, if a few steps alone have them",),
            figures={
                "share": percent(share),
                "whole_sequences": whole,
                "by_kind": {
                    f"{name}_{kind}": int(s.by_kind[side, k])
                    for side, name in enumerate(("train", "rollout"))
                    for k, kind in enumerate(KINDS)
                    if s.by_kind[side, k]
                },
            },
            source="trl#5001, #6166, #6868; NeMo#2180: one NaN means that the whole row of logits was garbage",
            next="look at the sequences below before any figure; rollout-is explain missing.nonfinite",
        )
    ]
