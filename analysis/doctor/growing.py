"""Alignment: an offset that grows by one with every sequence of a pack, as when each sample lost (or gained) one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.doctor.state import State, count, counts, places, totals
from rollout_is.analysis.doctor.verdict import Draft, Scene, find_scope, plural, sig
from rollout_is.analysis.doctor.window import Window

STEPS = (0, -1, 1)  # growth per sequence: rollout index = position + step * (sequences before it in the pack)
CAP = 3.0  # one missing value must not decide
FIT = 0.6  # undoing the growth leaves less than this of mean |d| ...
VOTES = 0.8  # ... and brings this share of the tokens nearer, of those that it moves by more than TELLING
TELLING = 0.03
MIN_TOKENS = 12
SUSPICIOUS = 0.05  # mean |d| below which nothing needs an offset to explain it


@dataclass
class Growing(State):
    """Fit of ``t[p] ~ r[p + step * j]``, j being the number of the sequence in its pack, over tokens with j >= 1.

    The one hypothesis that crosses sequence boundaries on purpose: values were packed with other lengths than tokens.

    Attributes:
        distance: sum of min(|difference|, CAP) for each of STEPS.
        votes, nearer: for each of STEPS tokens that it moves, and those that it brings nearer.
        compared: tokens compared, the same for all of STEPS; seen: tokens looked at.
        sequences: pieces compared.
    """

    distance: Floats = totals(len(STEPS))
    votes: Ints = counts(len(STEPS))
    nearer: Ints = counts(len(STEPS))
    compared: int = count()
    seen: int = count()
    sequences: int = count()
    places: list[dict[str, Any]] = places()

    def look(self, window: Window, raw: Floats, rank_in_pack: Ints) -> None:
        """Take in a window.

        Args:
            raw: float64 [n] rollout log-probs of every position from the window's base on, masked ones too.
            rank_in_pack: int64 [k] sequences before each piece in its pack.
        """
        self.seen += window.n
        if window.n == 0 or float(window.abs_d.mean()) < SUSPICIOUS:
            return
        j = np.repeat(rank_in_pack, window.size)
        at = window.where
        reachable = (j >= 1) & (at - j >= 0) & (at + j < len(raw))
        # the growth has to be told from a constant lag: only sequences far enough into the pack, when there are enough
        index = np.flatnonzero(reachable)
        if not len(index):
            return
        stored = np.minimum(window.abs_d[index], CAP)
        for s, step in enumerate(STEPS):
            with np.errstate(invalid="ignore"):
                apart = np.abs(window.t[index] - raw[at[index] + step * j[index]])
            apart = np.minimum(np.nan_to_num(apart, nan=CAP), CAP)
            self.distance[s] += float(apart.sum())
            self.votes[s] += int(np.count_nonzero(np.abs(apart - stored) > TELLING))
            self.nearer[s] += int(np.count_nonzero(apart < stored - TELLING))
        self.compared += len(index)
        self.sequences += len(np.unique(window.piece[index]))
        if len(self.places) < 3:
            self.places.append(window.place(int(index[len(index) // 2])))


def _fires(s: Growing) -> bool:
    best = 1 + int(s.distance[1:].argmin())
    return bool(
        s.sequences >= 2
        and s.votes[best] >= MIN_TOKENS
        and s.distance[best] < FIT * s.distance[0]
        and s.nearer[best] >= VOTES * s.votes[best]
    )


def judge(scene: Scene) -> list[Draft]:
    """``alignment.growing``."""
    found = find_scope(scene, Growing, _fires)
    if found is None:
        return []
    s, scope = found
    best = 1 + int(s.distance[1:].argmin())
    means = s.distance / s.compared
    ratio = float(means[0] / max(float(means[best]), 1e-12))
    what = "lost one value" if STEPS[best] < 0 else "gained one value"
    return [
        Draft(
            "alignment.growing",
            "error",
            f"the offset grows by one with every sequence of a pack (0, 1, 2, 3, ...): each sequence {what} in the rollout column "
            f"before packing; undoing it fits {sig(ratio)}x better (mean |d| {sig(float(means[0]))} -> {sig(float(means[best]))})"
            + scope.words(scene),
            ratio,
            "mean |d| as stored over mean |d| with the growing offset undone",
            scope,
            tokens=s.compared,
            token_share=s.compared / max(1, s.seen),
            sequences=s.sequences,
            places=s.places,
            alternatives=("a constant lag, if packs hold two sequences only",),
            figures={"growth_per_sequence": STEPS[best], "mean_abs_d_undone": float(means[best])},
            source="prime-rl#605, #606: samples carried length - 1 values, patched up after packing",
            next=f"compare the lengths of both columns per sample before packing ({plural(s.sequences, 'sequence')} seen); "
            "rollout-is explain alignment.growing",
        )
    ]
