"""What a comparison found, as frozen data: every output (table, JSON, CSV, Markdown) reads these figures and no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rollout_is.analysis.compare.settings_diff import Difference
from rollout_is.analysis.summary import Statistic

if TYPE_CHECKING:
    from rollout_is.analysis.compare.overlay import Overlay

SCHEMA = "rollout-is/compare/1"
Verdict = Literal["better", "worse", "changed", "~", "same", "untested"]


@dataclass(frozen=True)
class Test:
    """A two-sided test of one change.

    Attributes:
        kind: ``Welch t`` (two independent samples) or ``paired t`` (sequences that both sides hold share a cluster).
        stderr: standard error of the change, clustered by sequence, in the statistic's unit.
        df: degrees of freedom.
        p: raw p-value.
        p_corrected: after Holm's correction over all tested rows of the comparison.
    """

    kind: Literal["Welch t", "paired t"]
    stderr: float
    df: float
    p: float
    p_corrected: float | None = None

    __test__ = False  # the name is not an invitation to pytest


@dataclass(frozen=True)
class Row:
    """One statistic on two sides.

    Attributes:
        statistic: id, or the path below the view when two views are compared.
        a, b: the figures with what they rest on.
        change: b - a; None when either is null.
        test: None where no test is valid, and then ``why`` says the reason.
        verdict: ``~`` tested and no real change; ``better``/``worse`` by the statistic's own direction; ``changed`` where neither
            way is better; ``same`` bit-equal; ``untested``.
    """

    statistic: str
    a: Statistic
    b: Statistic
    change: float | None
    test: Test | None
    why: str
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON data."""
        out: dict[str, Any] = {
            "statistic": self.statistic,
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
            "change": self.change,
            "verdict": self.verdict,
            "test": None,
        }
        if self.test is not None:
            out["test"] = {
                "kind": self.test.kind,
                "stderr": self.test.stderr,
                "df": self.test.df,
                "p": self.test.p,
                "p_corrected": self.test.p_corrected,
            }
        else:
            out["why"] = self.why
        return out


@dataclass(frozen=True)
class Block:
    """Pooled means over a run of steps: ``steps`` from first to last, each step weighted by what it counts."""

    first: str
    last: str
    a: float
    b: float


@dataclass(frozen=True)
class Series:
    """One statistic, step by step.

    Attributes:
        statistic: its id.
        steps: step -> row; p-values are corrected over the steps of this series.
        median_a, median_b: over the common steps: one spike moves them little.
        blocks: means over blocks of steps.
        starts_at: the step from which the sides differ for good; None when they do not.
        share_after: share of the steps from there on that differ on their own.
        isolated: steps that differ while no lasting difference starts.
    """

    statistic: str
    steps: Mapping[str, Row]
    median_a: float | None
    median_b: float | None
    blocks: tuple[Block, ...]
    starts_at: str | None
    share_after: float | None
    isolated: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The series as JSON data."""
        return {
            "statistic": self.statistic,
            "starts_at": self.starts_at,
            "share_after": self.share_after,
            "isolated": list(self.isolated),
            "median": {"a": self.median_a, "b": self.median_b},
            "blocks": [{"first": b.first, "last": b.last, "a": b.a, "b": b.b} for b in self.blocks],
            "steps": {step: row.to_dict() for step, row in self.steps.items()},
        }


@dataclass(frozen=True)
class Pair:
    """Side B against side A.

    Attributes:
        a, b: labels.
        differences: settings that differ, those that define the quantity first.
        rows, series, quantiles: the figures; ``quantiles`` are rows of the log-ratio's order statistics.
        notes: footnotes.
        overlay: histograms of the log-ratio, where tokens were at hand.
        matched, clusters: sequences held by both sides, and clusters of the paired test; None when it was not paired.
    """

    a: str
    b: str
    differences: tuple[Difference, ...]
    rows: tuple[Row, ...]
    series: tuple[Series, ...] = ()
    quantiles: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    matched: int | None = None
    clusters: int | None = None
    overlay: Overlay | None = None

    @property
    def defining(self) -> tuple[Difference, ...]:
        """Differences that make the two sides different quantities: no change is a regression then."""
        return tuple(difference for difference in self.differences if difference.defining)

    def to_dict(self) -> dict[str, Any]:
        """The pair as JSON data."""
        return {
            "a": self.a,
            "b": self.b,
            "differences": [{"key": d.key, "a": d.a, "b": d.b, "defining": d.defining} for d in self.differences],
            "matched_sequences": self.matched,
            "clusters": self.clusters,
            "rows": [row.to_dict() for row in self.rows],
            "quantiles": [row.to_dict() for row in self.quantiles],
            "series": [series.to_dict() for series in self.series],
            "histogram": None if self.overlay is None else self.overlay.to_dict(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Comparison:
    """One or more sides against the first.

    Attributes:
        kind: ``runs``, ``views``, ``masks`` or ``logprobs``.
        pairs: each other side against the first.
        verdict: one line.
        extra: what only some kinds have (the odd one out of three scoring passes).
    """

    kind: Literal["runs", "views", "masks", "logprobs"]
    pairs: tuple[Pair, ...]
    verdict: str
    alpha: float = 0.05
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON data, schema ``rollout-is/compare/1``."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "verdict": self.verdict,
            "alpha": self.alpha,
            "pairs": [pair.to_dict() for pair in self.pairs],
            **self.extra,
        }
