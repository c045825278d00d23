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
    """What is wrong first; numbers that are right, and those that stand for nothing exact, share a line each."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in audit["entries"]:
        groups.setdefault((entry["metric"], _what(entry, audit["name"])), []).append(entry)
    rows: list[tuple[int, tuple[Cell, ...]]] = []
    quiet: dict[str, list[str]] = {}
    for (metric, what), entries in groups.items():
        first = entries[0]
        if what == _EXACT or (first["ours"] is None and what == audit["name"]):
            quiet.setdefault(
                _EXACT if what == _EXACT else f"as {what} computes it, nothing exact to compare with", []
            ).append(metric)
            continue
        place = 0 if not first["reproduced_by"] else (2 if what.startswith(audit["name"]) else 1)
        row = (
            Cell(_short(metric), metric),
            cell(_steps([e["step"] for e in entries])),
            Cell(first["logged_word"] or figure(first["logged"]), first["logged"]),
            Cell(figure(first["ours"]), first["ours"]),
            cell(what),
        )
        rows.append((place, row))
    remarks = [f"{what}: {', '.join(dict.fromkeys(map(_short, names)))}" for what, names in quiet.items()]
    remarks += [
        "ours: the exact figure over valid tokens and sequences of that step; a row of several steps shows the first of them",
    ]
    columns = (
        Column("logged name", "left"),
        Column("steps", "left", drop=1),
        Column("logged"),
        Column("ours"),
        Column("what the logged number is", "left", wrap=True),
    )
    count = sum(1 for e in audit["entries"] if not e["reproduced_by"])
    title = (
        f"audit of what the trainer logged, as {audit['name']}: {len(audit['entries'])} numbers, {count} not reproduced"
    )
    body = tuple(row for _, row in sorted(rows, key=lambda pair: pair[0]))
    return Table(title, columns, body, tuple(remarks))


_EXACT = "the exact value"


def _short(name: str) -> str:
    """A logged name without the prefixes that say nothing here."""
    last = name.rsplit("/", 1)[-1]
    return last if last.startswith(("rollout_", "mismatch_", "mis_")) else name


def _what(entry: Mapping[str, Any], name: str) -> str:
    """What a logged number is, in few words."""
    matches = entry["reproduced_by"]
    if not matches:
        return (
            f"reproduced by no variant{str(entry['verdict']).partition('none of them')[2].partition('; over valid')[0]}"
        )
    if any(match.startswith("the exact value") for match in matches):
        return _EXACT
    if matches[0] != name:
        return str(matches[0])
    why = str(entry["verdict"]).partition(" as it stands (")[2].partition(")")[0]
    return f"{name}: {why}" if why else name


def _steps(steps: Sequence[str | None]) -> str:
    known = [step for step in steps if step is not None]
    if not known:
        return "-"
    return known[0] if len(known) == 1 else f"{known[0]}..{known[-1]} ({len(known)})"
