"""The shape of one catalog entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["near 1", "near 0", "lower", "higher"]
Unit = Literal["token", "sequence"]
Reduction = Literal["pooled sum", "min", "max", "quantile", "top-K fit"]

ALL_VIEWS = ("unmasked", "padded", "masked", "corrected")


@dataclass(frozen=True)
class Entry:
    """One statistic of METRICS.md, in words.

    Attributes:
        name: as in JSON and tables.
        section: the part of a view that holds it.
        formula: the definition as text; w = exp(t - r), d = t - r, t train and r rollout log-prob of the sampled token.
        unit: what it is taken over, and what ``n`` counts.
        reduction: how partial results of shards and ranks combine; never a mean of means.
        source: the paper or trainer that the figure or its name comes from.
        high, low: what a high and a low value mean; empty where one of them cannot be.
        action: what to do when it is off.
        better: which way is good; None where neither is.
        direction: for signed figures, what the sign means.
        views: the views that define it.
        weight: a statistic of weights: its log is carried beside the value.
        same_when_padded: padded and masked agree by construction.
    """

    name: str
    section: str
    formula: str
    unit: Unit
    reduction: Reduction
    source: str
    high: str
    low: str
    action: str
    better: Better | None = None
    direction: str = ""
    views: tuple[str, ...] = ALL_VIEWS
    weight: bool = False
    same_when_padded: bool = False

    @property
    def path(self) -> str:
        """Its id below the view: ``token.rollout_is_mean``."""
        return f"{self.section}.{self.name}"
