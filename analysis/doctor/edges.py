"""Alignment: the first or the last valid token of the sequences is always bad, so mask and log-probs disagree by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Ints
from rollout_is.analysis.doctor.state import MAGNITUDES, State, counts, places, quantile, tally
from rollout_is.analysis.doctor.verdict import Draft, Scene, find_scope, plural, sig
from rollout_is.analysis.doctor.window import Window

MIN_SEQUENCES = 8
BAD = 0.2  # nats; engine noise at a hard token stays below
MOST = 0.25  # this quantile of the edge tokens has to lie ...
RARE = 0.95  # ... above this quantile of the others
TIMES = 5.0  # and the median this many times above that quantile
NEAR = 3  # tokens beside the edge, which must not be as bad: else it is a stretch, not an edge


@dataclass
class Edges(State):
    """Histograms of |d| over first tokens, last tokens, their neighbours and all but the edges, of sequences of five tokens and more."""

    first: Ints = counts(MAGNITUDES)
    last: Ints = counts(MAGNITUDES)
    inner: Ints = counts(MAGNITUDES)
    near_first: Ints = counts(MAGNITUDES)
    near_last: Ints = counts(MAGNITUDES)
    first_places: list[dict[str, Any]] = places()
    last_places: list[dict[str, Any]] = places()

    def look(self, window: Window) -> None:
        """Take in a window."""
        long = window.size > NEAR + 1
        first = window.starts[window.begins & long]
        last = (window.stops - 1)[window.ends & long]
        inner = np.ones(window.n, np.bool_)
        inner[first] = inner[last] = False
        self.first += tally(window.magnitude[first])
        self.last += tally(window.magnitude[last])
        self.inner += tally(window.magnitude[inner])
        for step in range(1, NEAR + 1):
            self.near_first += tally(window.magnitude[first + step])
            self.near_last += tally(window.magnitude[last - step])
        self._keep(self.first_places, window, first)
        self._keep(self.last_places, window, last)

    def _keep(self, into: list[dict[str, Any]], window: Window, tokens: Ints) -> None:
        for i in tokens[window.abs_d[tokens] > BAD][: 3 - len(into)]:
            into.append(window.place(int(i)))


def _bad(edge: Ints, near: Ints, inner: Ints) -> bool:
    rare = quantile(inner, RARE)
    return (
        int(edge.sum()) >= MIN_SEQUENCES
        and quantile(edge, MOST) > max(BAD, rare)
        and quantile(edge, 0.5) > max(BAD, TIMES * rare, 2 * quantile(near, 0.75))
    )


def judge(scene: Scene) -> list[Draft]:
    """``alignment.first_token``, ``alignment.last_token``."""
    drafts = []
    for name in ("first", "last"):

        def fires(s: Edges, name: str = name) -> bool:
            return _bad(getattr(s, name), getattr(s, f"near_{name}"), s.inner)

        found = find_scope(scene, Edges, fires)
        if found is None:
            continue
        s, scope = found
        edge: Ints = getattr(s, name)
        n, at, inside = int(edge.sum()), quantile(edge, 0.5), quantile(s.inner, 0.5)
        cause = (
            "the mask starts one token early, or the log-prob of the first token has no context"
            if name == "first"
            else "the mask ends one token late, or the last log-prob was never written"
        )
        drafts.append(
            Draft(
                f"alignment.{name}_token",
                "error",
                f"the {name} valid token is bad in nearly every sequence (median |d| {sig(at)} against {sig(inside)} elsewhere, "
                f"{plural(n, 'sequence')}){scope.words(scene)}: {cause}",
                at / max(inside, 1e-6),
                f"median |d| of {name} tokens over that of the others",
                scope,
                tokens=n,
                token_share=n / max(1, n + int(s.inner.sum())),
                sequences=n,
                places=s.first_places if name == "first" else s.last_places,
                alternatives=("hard first tokens after a prompt (then the probability, not the place, explains it)",)
                if name == "first"
                else ("a stop token that only one side appends",),
                figures={"median_abs_d_edge": at, "median_abs_d_inner": inside},
                source="marin#1879 (first token always worst), trl completion masks",
                next=f"look at the mask around the places below; rollout-is explain alignment.{name}_token",
            )
        )
    return drafts
