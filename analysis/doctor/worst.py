"""Bad tokens of each unit's sample: evidence for findings that have no places of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.doctor.state import State, table
from rollout_is.analysis.doctor.verdict import Scene, Scope
from rollout_is.analysis.doctor.window import Window


class Top:
    """Three places, largest |d| first; ``+`` keeps the three worst of both."""

    def __init__(self, rows: list[tuple[float, dict[str, Any]]] | None = None) -> None:
        self.rows = rows or []

    def __add__(self, other: Top) -> Top:
        return Top(sorted(self.rows + other.rows, key=lambda x: (-x[0], x[1]["shard"], x[1]["index"]))[:3])


@dataclass
class Worst(State):
    """Three of the worst sampled tokens."""

    top: dict[str, Top] = table()

    def look(self, window: Window) -> None:
        """Take in a window: its first tokens within a factor of two of the worst."""
        if window.n == 0:
            return
        index = np.flatnonzero(window.abs_d >= 0.5 * float(window.abs_d.max()))[:3]
        rows = [(float(window.abs_d[i]), window.place(int(i))) for i in index]
        self.top["all"] = self.top.get("all", Top()) + Top(rows)

    @staticmethod
    def of(scene: Scene, scope: Scope) -> list[dict[str, Any]]:
        """Three places inside a scope."""
        top = scene.pooled(Worst, ranks=scope.ranks, steps=scope.steps).top.get("all")
        return [place for _, place in top.rows] if top is not None else []
