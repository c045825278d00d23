"""Weights: the mean ratio is 1 whenever r is the log-prob of the distribution that was sampled, however stale or noisy t is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rollout_is.analysis.batch import Floats, Ints, SequenceTable
from rollout_is.analysis.doctor.state import State, counts, inner, totals
from rollout_is.analysis.doctor.support import Support
from rollout_is.analysis.doctor.verdict import Draft, Scene, find_scope, sig
from rollout_is.analysis.doctor.worst import Worst

MIN_SEQUENCES = 8
OFF = 0.02
SURE = 6.0
# noise added on r after sampling moves E[w] by half its variance; this many times mean(d^2)/2 is put up with
NOISE = 2.0


@dataclass
class Weights(State):
    """Sums for E[w] with its error clustered by sequence: number, n^2, n e, e^2 over sequences, e being the sum of w - 1."""

    tokens: Ints = counts(1)
    sequences: Ints = counts(1)
    e: Floats = totals(1)
    square: Floats = totals(1)
    n_square: Floats = totals(1)
    n_e: Floats = totals(1)
    e_square: Floats = totals(1)

    def finished(self, table: SequenceTable) -> None:
        """Take in the unit's finished sequences."""
        some = table.n > 0
        n, e = table.n[some].astype(np.float64), table.sum_e[some]
        with np.errstate(over="ignore", invalid="ignore"):
            e = np.where(e < 1e150, e, np.inf)
            self.e_square[0] += inner(e, e)
            self.e[0] += float(e.sum())
            self.n_e[0] += inner(n, e)
        self.tokens[0] += int(table.n[some].sum())
        self.sequences[0] += int(some.sum())
        self.square[0] += float(table.sum_d2[some].sum())
        self.n_square[0] += inner(n, n)

    def mean(self) -> tuple[float, float]:
        """E[w] and its standard error clustered by sequence (METRICS.md, Pooling); (inf, inf) beyond float64."""
        g, n = int(self.sequences[0]), float(self.tokens[0])
        off = float(self.e[0]) / n
        if g < 2 or not math.isfinite(off) or not math.isfinite(float(self.e_square[0])):
            return math.inf, math.inf
        inner = float(self.e_square[0]) - 2 * off * float(self.n_e[0]) + off * off * float(self.n_square[0])
        return 1 + off, math.sqrt(max(inner, 0.0) * g / (g - 1)) / n


def _fires(s: Weights) -> bool:
    if int(s.sequences[0]) < MIN_SEQUENCES:
        return False
    mean, error = s.mean()
    k2 = float(s.square[0]) / float(s.tokens[0]) / 2
    off = abs(mean - 1)
    return math.isfinite(mean) and off > max(OFF, NOISE * k2) and off > SURE * error


def judge(scene: Scene) -> list[Draft]:
    """``weights.mean``."""
    found = find_scope(scene, Weights, _fires)
    if found is None:
        return []
    s, scope = found
    mean, error = s.mean()
    support = scene.pooled(Support, ranks=scope.ranks, steps=scope.steps)
    inverse, inverse_error = support.weight(2) if support.n else (math.inf, math.inf)
    swapped = math.isfinite(inverse_error) and abs(inverse - 1) < max(0.02, 3 * inverse_error)
    message = (
        f"E[w] = {sig(mean)} +- {sig(error)}, away from 1: r is not the log-prob of the distribution that was sampled{scope.words(scene)} "
        "(engine noise and stale weights leave it at 1)"
    )
    if swapped:
        message += f"; E[1/w] = {sig(inverse)}: the train side is"
    return [
        Draft(
            "weights.mean",
            "warning",
            message,
            abs(mean - 1) / max(error, 1e-12),
            "distance of E[w] from 1 in its standard errors, clustered by sequence",
            scope,
            tokens=int(s.tokens[0]),
            token_share=1.0,
            sequences=int(s.sequences[0]),
            places=Worst.of(scene, scope),
            alternatives=(
                "noise added to r after sampling (coarse storage)",
                "tokens chosen after sampling by their log-prob",
            ),
            figures={"mean_weight": mean, "stderr": error, "mean_inverse_weight": inverse},
            source="importance sampling identity: sum over tokens of pi_rollout * pi_train / pi_rollout = 1",
            next="check temperature, truncation and penalties of the sampler against what was recorded; rollout-is explain weights.mean",
        )
    ]
