"""A whole summary as text, Markdown, CSV or JSON: the same stored numbers in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollout_is.analysis.summary import Group, Statistic, Summary, Views
from rollout_is.cli.render.copies import copies_table
from rollout_is.cli.render.coverage import coverage_lines
from rollout_is.cli.render.footnotes import Footnotes, note_lines
from rollout_is.cli.render.groups import group_tables
from rollout_is.cli.render.markup import escape, rows_to_csv, to_markdown
from rollout_is.cli.render.policies import policy_tables
from rollout_is.cli.render.profiles import profile_tables
from rollout_is.cli.render.table import Style, Table
from rollout_is.cli.render.terminal import Terminal
from rollout_is.cli.render.text import printable, render, wrap
from rollout_is.cli.render.verdict import pad_artefact, ranked, verdict
from rollout_is.cli.render.views import LEVELS, section_table, weight_tables
from rollout_is.cli.render.worst import worst_tables

_SEVERITY_STYLE: dict[str, Style] = {"error": "bad", "warning": "warn"}


def choose(summary: Summary, views: Sequence[str], levels: Sequence[str]) -> Summary:
    """The summary with these views and levels only; the sections that have no level stay."""

    def chosen(held: Views) -> Views:
        return {
            view: {name: section for name, section in sections.items() if name not in LEVELS or name in levels}
            for view, sections in held.items()
            if view in views
        }

    groups = {
        by: {key: replace(group, views=chosen(group.views)) for key, group in of.items()}
        for by, of in summary.groups.items()
    }
    return replace(summary, views=chosen(summary.views), groups=groups)


def tables(summary: Summary, notes: Footnotes, width: int, unicode: bool = True) -> list[Table]:
    """All tables of a summary in print order."""
    views = [view for view in ("unmasked", "padded", "masked", "corrected") if view in summary.views]
    levels = [level for level in LEVELS if any(level in summary.views[view] for view in views)]
    out = weight_tables(summary, levels, views, notes, width)
    for section in ("per_sequence", "veto", "mismatch"):
        table = section_table(summary, section, views, notes)
        if table is not None:
            # what pads do to it is the reason that this tool exists: the per-sequence family comes first
            out.insert(0, table) if section == "per_sequence" else out.append(table)
    copies = copies_table(summary, notes)
    out += [copies] if copies is not None else []
    # what was taken out, and what was asked for by name, before the survivors' figures
    first = policy_tables(summary) + profile_tables(summary)
    return first + out + group_tables(summary, notes, unicode) + worst_tables(summary)


def to_text(summary: Summary, terminal: Terminal) -> str:
    """Verdict, header, the pad artefact in words, tables, footnotes."""
    footnotes = Footnotes()
    parts = [verdict(summary, terminal), labelled(coverage_lines(summary), terminal), pad_artefact(summary, terminal)]
    parts += [render(table, terminal) for table in tables(summary, footnotes, terminal.width, terminal.unicode)]
    parts.append(_notes(summary, footnotes, terminal))
    return "\n".join(part for part in parts if part)


def to_md(summary: Summary) -> str:
    """The same as Markdown, every column in it."""
    footnotes = Footnotes()
    lines = ["# rollout-is", ""]
    serious = [f for f in ranked(summary.findings) if f.severity in ("error", "warning")]
    if not serious:
        lines.append(verdict(summary, Terminal(width=10_000)).strip())
    for finding in ranked(summary.findings):
        follow = f" Next: {_code(finding.next)}" if finding.next else ""
        source = f" ({escape(finding.source)})" if finding.source else ""
        lines.append(f"- **{finding.severity}** {escape(finding.message)}{source}.{follow}")
    lines += ["", *(f"- {label}: {escape(text)}" for label, text in coverage_lines(summary)), ""]
    body = [to_markdown(table) for table in tables(summary, footnotes, 10_000)]
    notes = [*footnotes.lines(), *(f"{severity}: {text}" for severity, text in note_lines(summary.notes))]
    if notes:
        body.append("## Notes\n\n" + "".join(f"- {escape(note)}\n" for note in notes))
    return "\n".join(lines) + "\n" + "\n".join(body)


def to_csv(summary: Summary) -> str:
    """One row a statistic: ``id,value,n,stderr,log_value,why``; counts of coverage first, groups last."""
    rows: list[list[float | int | str | None]] = []
    for key, value in summary.coverage.items():
        if isinstance(value, int) and not isinstance(value, bool):
            rows.append([f"coverage.{key}", value, 1, None, None, None])
    rows += _view_rows("", summary.views)
    for by, groups in summary.groups.items():
        for key, group in groups.items():
            rows += _group_rows(f"groups.{by}.{key}.", group)
    return rows_to_csv(["id", "value", "n", "stderr", "log_value", "why"], rows)


def _group_rows(prefix: str, group: Group) -> list[list[float | int | str | None]]:
    counts: Mapping[str, int] = {
        "positions": group.positions,
        "valid_tokens": group.valid_tokens,
        "sequences": group.sequences,
    }
    rows: list[list[float | int | str | None]] = [[prefix + k, v, 1, None, None, None] for k, v in counts.items()]
    return rows + _view_rows(prefix, group.views)


def _view_rows(prefix: str, views: Views) -> list[list[float | int | str | None]]:
    def row(path: str, s: Statistic) -> list[float | int | str | None]:
        return [path, s.value, s.n, s.stderr, s.log_value, s.why]

    return [
        row(f"{prefix}{view}.{section}.{name}", statistic)
        for view, sections in views.items()
        for section, names in sections.items()
        for name, statistic in names.items()
    ]


def labelled(lines: Sequence[tuple[str, str]], terminal: Terminal) -> str:
    """(label, text) pairs as a column of labels with their texts broken beside it."""
    indent = max(len(label) for label, _ in lines) + 2
    out = []
    for label, text in lines:
        body = wrap(text, max(terminal.width - indent, 20)) if text else [""]
        out.append(terminal.paint(label.ljust(indent), "dim") + body[0])
        out += [" " * indent + line for line in body[1:]]
    return "".join(f"{terminal.plain(line)}\n" for line in out)


def _notes(summary: Summary, footnotes: Footnotes, terminal: Terminal) -> str:
    """Reasons of missing values, then the notes on the data, numbered on."""
    lines = [line for note in footnotes.lines() for line in wrap(note, terminal.width, "    ", first="")]
    for number, (severity, text) in enumerate(note_lines(summary.notes), start=len(footnotes.lines()) + 1):
        mark = f"[{number}] "
        body = wrap(f"{mark}{severity}: {text}", terminal.width, indent="    ", first="")
        if body[0].startswith(mark + severity):
            painted = terminal.paint(severity, _SEVERITY_STYLE.get(severity, "dim"))
            body[0] = mark + painted + body[0][len(mark + severity) :]
        lines += body
    return "".join(f"{terminal.plain(line)}\n" for line in lines)


def _code(text: str) -> str:
    return f"``{printable(text)}``" if "`" in text else f"`{printable(text)}`"
