"""The result that every output reads: frozen, plain data, importable without torch.

``Summary`` is what JSON, tables, ``compare`` and ``check`` share. The id of a statistic is its path below ``views``
(``masked.token.rollout_is_mean``) or from the top (``coverage.nonfinite_valid_tokens``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rollout_is.dumps.notes import Note

SCHEMA = "rollout-is/summary/1"
VIEWS = ("unmasked", "padded", "masked", "corrected")
SECTIONS = ("token", "sequence", "geometric", "per_sequence", "veto", "mismatch")


@dataclass(frozen=True)
class Statistic:
    """One number with what it rests on.

    Attributes:
        value: the figure in float64; None when there is none, and then ``why`` says the reason.
        n: how many tokens or sequences it is taken over.
        stderr: standard error clustered by sequence (or group), where one is defined.
        why: the reason for a missing value (``no valid tokens``, ``one sequence``, ...).
        log_value: natural log of the value, for statistics of weights; stands where float64 cannot hold the value.

    >>> Statistic(None, 0, why="no valid tokens").to_dict()
    {'value': None, 'n': 0, 'stderr': None, 'why': 'no valid tokens'}
    """

    value: float | None
    n: int
    stderr: float | None = None
    why: str | None = None
    log_value: float | None = None
    has_log: bool = False

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"value": self.value, "n": self.n, "stderr": self.stderr}
        if self.why is not None:
            out["why"] = self.why
        if self.has_log:
            out["log_value"] = self.log_value
        return out

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Statistic:
        """Read back what ``to_dict`` gave. Raises ValueError for a figure that is no finite number."""
        return Statistic(
            _number(data["value"]),
            int(data["n"]),
            _number(data.get("stderr")),
            data.get("why"),
            _number(data.get("log_value")),
            "log_value" in data,
        )


def _number(value: Any) -> float | None:
    """A number of a saved file, which may have been edited: NaN would pass every comparison unseen."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} where a finite number is expected")
    return value


# view -> section -> name -> statistic
Views = Mapping[str, Mapping[str, Mapping[str, Statistic]]]


@dataclass(frozen=True)
class Finding:
    """One line of the verdict: what is wrong, the evidence, where the threshold comes from, what to run next."""

    id: str
    severity: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    next: str = ""


@dataclass(frozen=True)
class Group:
    """The statistics of one value of a grouping: ``groups["step"]["412"]``."""

    views: Views
    positions: int
    valid_tokens: int
    sequences: int


@dataclass(frozen=True)
class Summary:
    """Everything that one analysis found. Equal dumps give equal summaries, ``runtime`` apart."""

    source: Mapping[str, Any]
    coverage: Mapping[str, Any]
    settings: Mapping[str, Any]
    views: Views
    groups: Mapping[str, Mapping[str, Group]] = field(default_factory=dict)
    worst: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    notes: tuple[Note, ...] = ()
    profiles: tuple[Mapping[str, Any], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)

    def get(self, statistic_id: str) -> Statistic | None:
        """The statistic with this id, or None when the summary does not hold it.

        ``coverage.*`` counts are wrapped as statistics too, so that limits can name them.
        """
        head, _, rest = statistic_id.partition(".")
        if head == "coverage":
            value = self.coverage.get(rest)
            return None if isinstance(value, bool) or not isinstance(value, int | float) else Statistic(float(value), 1)
        section, _, name = rest.partition(".")
        return self.views.get(head, {}).get(section, {}).get(name)

    @property
    def comparable(self) -> int:
        """Valid tokens with finite log-probs on both sides: with none of them, nothing was compared."""
        return int(self.coverage.get("valid_tokens", 0)) - int(self.coverage.get("nonfinite_valid_tokens", 0))

    def statistics(self) -> Iterator[tuple[str, Statistic]]:
        """All (id, statistic) pairs of ``views`` in print order."""
        for view, sections in self.views.items():
            for section, names in sections.items():
                for name, statistic in names.items():
                    yield f"{view}.{section}.{name}", statistic

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract ``rollout-is/summary/1`` as plain data (see ``rollout-is schema``)."""
        out: dict[str, Any] = {
            "schema": SCHEMA,
            "source": dict(self.source),
            "coverage": dict(self.coverage),
            "settings": dict(self.settings),
            "runtime": dict(self.runtime),
            "findings": [asdict(f) for f in self.findings],
            "views": _views_to_dict(self.views),
            "groups": {
                by: {
                    key: {
                        "positions": g.positions,
                        "valid_tokens": g.valid_tokens,
                        "sequences": g.sequences,
                        "views": _views_to_dict(g.views),
                    }
                    for key, g in groups.items()
                }
                for by, groups in self.groups.items()
            },
            "worst": dict(self.worst),
            "notes": [asdict(n) for n in self.notes],
        }
        if self.profiles:
            out["profiles"] = [dict(p) for p in self.profiles]
        out.update(self.extra)
        return out

    def to_json(self) -> str:
        """The contract as JSON text: UTF-8 safe, no NaN, no infinity, a newline at the end."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Summary:
        """Read back what ``to_dict`` gave. Raises ValueError for another schema."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA!r}, found {data.get('schema')!r}")
        known = {
            "schema",
            "source",
            "coverage",
            "settings",
            "runtime",
            "findings",
            "views",
            "groups",
            "worst",
            "notes",
            "profiles",
        }
        return Summary(
            source=data["source"],
            coverage=data["coverage"],
            settings=data["settings"],
            views=_views_from_dict(data["views"]),
            groups={
                by: {
                    key: Group(_views_from_dict(g["views"]), g["positions"], g["valid_tokens"], g["sequences"])
                    for key, g in groups.items()
                }
                for by, groups in data.get("groups", {}).items()
            },
            worst=data.get("worst", {}),
            findings=tuple(Finding(**f) for f in data.get("findings", [])),
            notes=tuple(Note(**n) for n in data.get("notes", [])),
            profiles=tuple(data.get("profiles", [])),
            extra={k: v for k, v in data.items() if k not in known},
            runtime=data.get("runtime", {}),
        )


def _views_to_dict(views: Views) -> dict[str, Any]:
    return {
        view: {section: {name: s.to_dict() for name, s in names.items()} for section, names in sections.items()}
        for view, sections in views.items()
    }


def _views_from_dict(data: Mapping[str, Any]) -> Views:
    return {
        view: {
            section: {name: Statistic.from_dict(s) for name, s in names.items()} for section, names in sections.items()
        }
        for view, sections in data.items()
    }
