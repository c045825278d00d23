"""Profiles and audits as tables: logged, ours, why; and what is wrong with each number that the trainer logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_is.analysis.summary import Summary
from rollout_is.cli.render.numbers import figure
from rollout_is.cli.render.table import Cell, Column, Table, cell


def profile_tables(summary: Summary) -> list[Table]:
    """One table a profile: what it would have logged beside the exact figure, and the audit after them."""
    out = [_profile(report) for report in summary.profiles]
    audit = summary.extra.get("audit")
    if isinstance(audit, Mapping):
        out.insert(0, _audit(audit))
    return out


def _profile(report: Mapping[str, Any]) -> Table:
    """A letter stands for each reason: one line a metric."""
    windows = f"mean of {len(report['steps'])} steps; "
    why = {d["metric"]: d["why"].removeprefix(windows) for d in report["differs"]}
    letters = {text: chr(ord("a") + k % 26) * (1 + k // 26) for k, text in enumerate(dict.fromkeys(why.values()))}
    rows = []
    for name, value in report["metrics"].items():
        text = report["nonfinite"].get(name) or figure(value)
        ours = report["ours"].get(name)
        same = name in report["ours"] and name not in why
        letter = Cell(letters[why[name]] if name in why else "", why.get(name, ""))
        rows.append((cell(name), Cell(text, value), Cell("=" if same else figure(ours), ours), letter))
    chosen = ", ".join(f"{k}={_word(v)}" for k, v in report["settings"].items() if v is not None and v is not False)
    title = (
        f"what {report['name']} would have logged ({chosen})" if chosen else f"what {report['name']} would have logged"
    )
    remarks = [f"{letter}: {text}" for text, letter in letters.items()]
    if len(report["steps"]) > 1:
        remarks.append(f"logged: mean over {len(report['steps'])} steps, which alone moves extremes and unequal steps")
    remarks.append(
        "ours: the exact figure over valid tokens and sequences, everything pooled; = both agree, - nothing exact corresponds"
    )
    if not report["metrics"]:
        remarks = [f"nothing: {text}" for text in dict.fromkeys(report["errors"].values())] or [
            "nothing under these settings"
        ]
    columns = (Column("logged name", "left"), Column("logged"), Column("ours"), Column("why", "left"))
    return Table(title, columns, tuple(rows), tuple(remarks))


def _word(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _audit(audit: Mapping[str, Any]) -> Table:
    """Equal verdicts of several steps stand in one row."""
    groups: dict[tuple[str, tuple[str, ...]], list[Mapping[str, Any]]] = {}
    for entry in audit["entries"]:
        groups.setdefault((entry["metric"], tuple(entry["reproduced_by"])), []).append(entry)
    rows = []
    for entries in groups.values():
        first = entries[0]
        rows.append(
            (
                cell(_steps([e["step"] for e in entries])),
                Cell(first["logged_word"] or figure(first["logged"]), first["logged"]),
                Cell(figure(first["ours"]), first["ours"]),
                cell(first["verdict"]),
            )
        )
    remarks = (
        "ours: the exact figure over valid tokens and sequences of that step",
        "a row of several steps shows the figures of the first of them; --format json holds each",
    )
    columns = (Column("steps", "left"), Column("logged"), Column("ours"), Column("verdict", "left", wrap=True))
    count = sum(1 for e in audit["entries"] if not e["reproduced_by"])
    title = (
        f"audit of what the trainer logged, as {audit['name']}: {len(audit['entries'])} numbers, {count} not reproduced"
    )
    return Table(title, columns, tuple(rows), remarks)


def _steps(steps: Sequence[str | None]) -> str:
    known = [step for step in steps if step is not None]
    if not known:
        return "-"
    return known[0] if len(known) == 1 else f"{known[0]}..{known[-1]} ({len(known)})"
