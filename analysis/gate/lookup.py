"""Fetch the figure that a limit names, or say in words why there is none."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence

from rollout_is.analysis.catalog_notes import notes
from rollout_is.analysis.doctor.texts import findings
from rollout_is.analysis.summary import VIEWS, Statistic, Summary


class Missing(Exception):
    """A figure that a limit needs is not there; the text says which and why. Ends as an ``error`` outcome."""

    def __init__(self, message: str, value: float | None = None, baseline: float | None = None) -> None:
        super().__init__(message)
        self.value = value
        self.baseline = baseline


def single(summary: Summary, statistic_id: str) -> float:
    """The pooled figure of a statistic.

    Beside statistics and ``coverage.*``, ``findings.ID`` counts what the doctor found of that id or below it, ``notes.CODE`` the
    notes. An id that the doctor does not know, or a summary that it has not looked at, is no 0.

    Raises:
        Missing: the summary does not hold it, or it is null, NaN or infinite.
    """
    head, _, rest = statistic_id.partition(".")
    if head == "findings":
        return float(_findings(summary, rest))
    if head == "notes":
        _known("note", rest, [key.removeprefix("note.") for key in notes()])
        return float(sum(note.code == rest for note in summary.notes))
    statistic = summary.get(statistic_id)
    if statistic is None:
        raise Missing(_not_there(summary, statistic_id))
    return _finite(statistic, "")


def series(summary: Summary, statistic_id: str) -> dict[str, float]:
    """The figure of every step, in the order of the steps.

    Raises:
        Missing: the summary is not grouped by step, or a step lacks the figure.
    """
    groups = summary.groups.get("step")
    if not groups:
        raise Missing("no step series in the summary: analyze the dump with --by step")
    head, _, rest = statistic_id.partition(".")
    section, _, name = rest.partition(".")
    if head not in VIEWS:
        raise Missing(f"{statistic_id} is one count of the whole dump: it has no step series, leave per_step out")
    if summary.get(statistic_id) is None:
        raise Missing(_not_there(summary, statistic_id))
    values: dict[str, float] = {}
    for step in sorted(groups, key=step_order):
        statistic = groups[step].views.get(head, {}).get(section, {}).get(name)
        if statistic is None:
            raise Missing(f"step {step} holds no {statistic_id}")
        values[step] = _finite(statistic, f"step {step}: ")
    return values


def step_order(step: str) -> tuple[int, float, str]:
    """Sort key of step names: numbers by value, then other names.

    >>> sorted(["10", "9", "unknown"], key=step_order)
    ['9', '10', 'unknown']
    """
    try:
        return (0, float(step), step)
    except ValueError:
        return (1, 0.0, step)


def _findings(summary: Summary, wanted: str) -> int:
    ids = list(findings())
    _known("finding", wanted, [*ids, *(id.partition(".")[0] for id in ids)])
    looked = summary.extra.get("doctor")
    if not isinstance(looked, Mapping):
        raise Missing("the doctor has not looked at this summary: check the dump itself")
    return sum(id == wanted or id.startswith(f"{wanted}.") for id in looked.get("ids", ()))


def _known(kind: str, wanted: str, names: Sequence[str]) -> None:
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, 1, 0.5)
        raise Missing(f"no {kind} is called {wanted!r}" + (f"; did you mean {near[0]}?" if near else ""))


def _finite(statistic: Statistic, where: str) -> float:
    value = statistic.value
    if value is None:
        log = f" (its log is {statistic.log_value:.6g})" if statistic.log_value is not None else ""
        raise Missing(f"{where}no value: {statistic.why or 'no reason recorded'}{log}")
    if not math.isfinite(value):
        raise Missing(f"{where}the value is {value}, not a finite number")
    return float(value)


def _not_there(summary: Summary, statistic_id: str) -> str:
    known = [name for name, _ in summary.statistics()] + [f"coverage.{key}" for key in summary.coverage]
    near = difflib.get_close_matches(statistic_id, known, 1, 0.7)
    hint = f"; did you mean {near[0]}?" if near else ""
    head = statistic_id.partition(".")[0]
    if not near and head in VIEWS and head not in summary.views:
        hint = f"; the summary has no view {head!r}"
    return f"no such statistic in the summary{hint}"
