"""The outcome of a check as tables and lines: failures first, every limit once."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_is.analysis.catalog import find
from rollout_is.analysis.gate.evaluate import Outcome, Verdict
from rollout_is.analysis.gate.limits import Limit
from rollout_is.cli.render.markup import escape, to_csv, to_markdown
from rollout_is.cli.render.numbers import count, figure
from rollout_is.cli.render.table import Cell, Column, Style, Table, cell
from rollout_is.cli.render.terminal import Terminal
from rollout_is.cli.render.text import render, wrap

MOST = 5  # explained above the tables
_STYLES: dict[str, Style] = {"ok": "good", "FAIL": "bad", "ERROR": "bad", "warn": "warn"}


def word(outcome: Outcome) -> str:
    """The outcome in one word: ok, FAIL, ERROR (could not be evaluated) or warn (broken, severity warning)."""
    if outcome.status == "pass":
        return "ok"
    if outcome.status == "error":
        return "ERROR"
    return "FAIL" if outcome.fatal else "warn"


def headline(verdict: Verdict) -> str:
    """One line: how many limits hold, are broken, could not be evaluated.

    >>> headline(Verdict(()))
    'failed: no limit was checked'
    """
    if not verdict.outcomes:
        return "failed: no limit was checked"
    words = [word(outcome) for outcome in verdict.outcomes]
    total = f"{len(words)} limit{'s' if len(words) != 1 else ''}"
    if all(one == "ok" for one in words):
        return f"ok: {total} hold" if len(words) > 1 else "ok: 1 limit holds"
    counted = [
        f"{words.count(key)} {text}"
        for key, text in (("FAIL", "broken"), ("ERROR", "not evaluated"), ("warn", "broken as warnings"))
        if key in words
    ]
    return f"{'ok' if verdict.passed else 'failed'}: of {total} {', '.join(counted)}"


def to_text(verdict: Verdict, terminal: Terminal) -> str:
    """Verdict, what is wrong, then one table a view with one line a limit."""
    title = headline(verdict)
    lines = [terminal.paint(title, "good" if verdict.passed else "bad")]
    wrong = [outcome for outcome in verdict.by_urgency() if outcome.status != "pass"]
    for outcome in _told(wrong):
        lines += _explained(outcome, terminal)
    if len(wrong) > len(_told(wrong)):
        lines.append(f"   and {len(wrong) - len(_told(wrong))} more, marked below")
    parts = ["".join(f"{terminal.plain(line)}\n" for line in lines)]
    heads = dict.fromkeys(_head(outcome.limit) for outcome in verdict.outcomes)
    for head in heads:
        chosen = [outcome for outcome in verdict.outcomes if _head(outcome.limit) == head]
        parts.append(render(_table(head, chosen, short=True), terminal))
    if verdict.notes:
        wrapped = [line for note in verdict.notes for line in wrap(note, terminal.width, "  ", first="")]
        parts.append("".join(f"{terminal.plain(line)}\n" for line in wrapped))
    return "\n".join(parts)


def to_md(verdict: Verdict, title: str = "rollout-is check") -> str:
    """The same as Markdown, every column, failures first."""
    lines = [f"## {title}", "", f"**{escape(headline(verdict))}**", ""]
    for outcome in verdict.by_urgency():
        if outcome.status != "pass":
            reason = f" {escape(outcome.limit.reason)}" if outcome.limit.reason else ""
            lines.append(
                f"- **{word(outcome)}** {escape(outcome.limit.statistic)}: {escape(outcome.message)}."
                f"{reason} ({escape(str(outcome.limit.origin))})"
            )
    if lines[-1]:
        lines.append("")
    table = to_markdown(_table("", verdict.by_urgency(), short=False)) if verdict.outcomes else ""
    notes = "".join(f"\n- {escape(note)}\n" for note in verdict.notes)
    return "\n".join(lines) + table + notes


def to_csv_text(verdict: Verdict) -> str:
    """One row a limit in full precision, in the order of the limits."""
    return to_csv(_table("", verdict.outcomes, short=False))


def _told(wrong: Sequence[Outcome]) -> list[Outcome]:
    """The first five, each statistic once, by the limit that names steps where there is one; the tables hold them all."""
    chosen: dict[str, Outcome] = {}
    for outcome in wrong:
        known = chosen.setdefault(outcome.limit.statistic, outcome)
        if outcome.steps and not known.steps:
            chosen[outcome.limit.statistic] = outcome
    return list(chosen.values())[:MOST]


def _head(limit: Limit) -> str:
    return limit.statistic.partition(".")[0]


def _explained(outcome: Outcome, terminal: Terminal) -> list[str]:
    status = word(outcome)
    label = f"{status} {outcome.limit.statistic}: "
    body = wrap(f"{label}{outcome.message} ({outcome.limit.origin})", terminal.width, indent="   ", first="")
    body[0] = terminal.paint(status, _STYLES[status]) + body[0][len(status) :]
    if outcome.limit.reason:
        body += [terminal.paint(line, "dim") for line in wrap(f"why: {outcome.limit.reason}", terminal.width, "   ")]
    return body


def _table(title: str, outcomes: Sequence[Outcome], short: bool) -> Table:
    columns = (
        Column("", "left"),
        Column("statistic", "left"),
        Column("value"),
        Column("limit", "left", wrap=True),
        Column("baseline", drop=3),
        Column("change", drop=2),
        Column("from", "left", drop=1),
    )
    places = list(dict.fromkeys(str(outcome.limit.origin.place) for outcome in outcomes))
    one_place = short and len(places) == 1
    rows = []
    for outcome in outcomes:
        status = word(outcome)
        origin = outcome.limit.origin
        shown = (f"line {origin.line}" if origin.line else "") if one_place else str(origin)
        rows.append(
            (
                cell(status, style=_STYLES[status]),
                cell(_short(outcome.limit.statistic) if short else outcome.limit.statistic),
                _figure(outcome.value, outcome),
                cell(outcome.limit.describe()),
                _figure(outcome.baseline, outcome),
                cell(change_text(outcome), outcome.change if outcome.change is not None else ""),
                cell(shown),
            )
        )
    hidden = set()
    if one_place and not any(outcome.limit.origin.line for outcome in outcomes):
        hidden.add("from")
    if short and all(outcome.baseline is None for outcome in outcomes):
        hidden |= {"baseline", "change"}
    kept = [index for index, column in enumerate(columns) if column.header not in hidden]
    remarks = (f"limits: {places[0]}",) if one_place and places[0] else ()
    picked = tuple(tuple(row[index] for index in kept) for row in rows)
    return Table(title, tuple(columns[index] for index in kept), picked, remarks)


def _short(statistic: str) -> str:
    """The id without its view, and without its section where the name says enough (``explain`` takes it so)."""
    rest = statistic.partition(".")[2] or statistic
    name = rest.partition(".")[2]
    return name if name and len(find(name)) == 1 else rest


def _figure(value: float | None, outcome: Outcome) -> Cell:
    counted = _head(outcome.limit) in ("coverage", "notes", "findings")
    return Cell(count(value) if counted else figure(value), value)


def change_text(outcome: Outcome) -> str:
    """The change from the baseline: a factor when it is large, else percent, else the difference."""
    value, before = outcome.value, outcome.baseline
    if value is None or before is None:
        return ""
    if value == before:
        return "0"
    if before > 0 and value > 0 and not 0.5 < before < 2:
        factor = value / before
        return f"x{factor:.3g}" if not 0.5 < factor < 2 else f"{100 * (factor - 1):+.3g} %"
    return f"{value - before:+.3g}"
