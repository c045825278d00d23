"""``rollout-is inspect``: what a dump holds, from headers alone; no data is read, no torch is loaded."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from rollout_is.cli import options as o
from rollout_is.cli.output import check_output, write_result
from rollout_is.cli.render.dump import inspection_lines, inspection_tables
from rollout_is.cli.render.markup import escape, to_csv, to_markdown
from rollout_is.cli.render.numbers import count
from rollout_is.cli.render.report import labelled
from rollout_is.cli.render.terminal import Terminal, detect, for_file
from rollout_is.cli.render.text import render, wrap

UNREADABLE = 3
MOST_PROBLEMS = 10


def command(
    dump: o.Shards,
    column: o.Columns = None,
    steps: o.Steps = None,
    duplicates: o.DuplicatesOption = None,
    all_: Annotated[bool, typer.Option("--all", help="list every shard, not the first 20")] = False,
    format_: o.FormatOption = o.Format.table,
    output: o.Output = None,
    force: o.Force = False,
    color: o.ColorOption = o.Color.auto,
) -> int:
    """Shards, coverage and columns of a dump, from headers alone.

    Exit code 3 when a shard cannot be read, ranks are missing or shards are doubled.
    """
    columns = o.parse_columns(column)
    check_output(output, force)
    from rollout_is.dumps.inspection import inspect

    found = inspect(dump, columns=columns, steps=steps, duplicates=None if duplicates is None else duplicates.value)
    terminal = for_file() if output is not None else detect(sys.stdout, color.value)
    write_result(_rendered(found, format_, terminal, all_), output, force)
    return 0 if found["ok"] else UNREADABLE


def _rendered(found: dict[str, Any], format_: o.Format, terminal: Terminal, every: bool) -> str:
    if format_ is o.Format.json:
        return json.dumps(found, indent=1, allow_nan=False) + "\n"
    columns, shards = inspection_tables(found, every or format_ is not o.Format.table)
    if format_ is o.Format.csv:
        return to_csv(shards)
    if format_ is o.Format.markdown:
        head = "".join(f"- {label}: {escape(text)}\n" for label, text in inspection_lines(found))
        return f"# {escape(found['root'])}\n\n{head}\n{to_markdown(columns)}\n{to_markdown(shards)}" + _remarks(
            found, "- "
        )
    parts = [labelled(inspection_lines(found), terminal)]
    problems = _problems(found, terminal)
    parts += [problems] if problems else []
    parts += [render(table, terminal) for table in (columns, shards) if table.rows]
    notes = "".join(
        f"{terminal.plain(line)}\n"
        for note in found["notes"]
        for line in wrap(f"{note['severity']}: {note['message']}", terminal.width, "    ", first="")
    )
    return "\n".join([*parts, notes] if notes else parts)


def _problems(found: dict[str, Any], terminal: Terminal) -> str:
    """Every bad shard in four lines, ten of them; the rest is counted."""
    lines: list[str] = []
    for problem in found["problems"][:MOST_PROBLEMS]:
        lines.append(terminal.paint("error: ", "bad") + wrap(problem["where"], 10_000)[0])
        for label in ("problem", "why", "fix"):
            if problem[label]:
                text = problem[label] if label == "problem" else f"{label}: {problem[label]}"
                lines += wrap(text, terminal.width, "    ", first="  ")
    more = len(found["problems"]) - MOST_PROBLEMS
    if more > 0:
        lines.append(f"and {count(more)} more (--format json lists them all)")
    return "".join(f"{terminal.plain(line)}\n" for line in lines)


def _remarks(found: dict[str, Any], bullet: str) -> str:
    remarks = [f"error: {p['where']}: {p['problem']}" for p in found["problems"]]
    remarks += [f"{note['severity']}: {note['message']}" for note in found["notes"]]
    return ("\n" + "".join(f"{bullet}{escape(remark)}\n" for remark in remarks)) if remarks else ""
