"""Tables as Markdown and CSV: every column, whatever the width; CSV in full precision."""

from __future__ import annotations

import csv
import io

from rollout_is.cli.render.table import Table


def to_markdown(table: Table, level: int = 2) -> str:
    """A GitHub table under a heading.

    >>> from rollout_is.cli.render.table import Column, cell
    >>> print(to_markdown(Table("T", (Column("name", "left"), Column("x")), ((cell("a|b"), cell("1")),))))
    ## T
    <BLANKLINE>
    | name | x |
    |:---|---:|
    | a\\|b | 1 |
    <BLANKLINE>
    """
    heads = [f"{c.group} {c.header}".strip() for c in table.columns]
    lines = [f"{'#' * level} {table.title}", ""] if table.title else []
    if heads:
        lines.append("| " + " | ".join(map(escape, heads)) + " |")
        lines.append("|" + "|".join(":---" if c.align == "left" else "---:" for c in table.columns) + "|")
    lines += ["| " + " | ".join(escape(c.text) for c in row) + " |" for row in table.rows]
    if table.remarks:
        lines += ["", *(f"- {escape(remark)}" for remark in table.remarks)]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text that means itself inside a Markdown table."""
    for sign in ("\\", "|", "`", "*", "<", "[", "]"):
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())


def to_csv(table: Table) -> str:
    """The table with a header line (RFC 4180, newline LF)."""
    return rows_to_csv(
        [f"{c.group}.{c.header}".strip(".") for c in table.columns], [[c.value for c in row] for row in table.rows]
    )


def rows_to_csv(header: list[str], rows: list[list[float | int | str | None]]) -> str:
    """Rows as CSV; None is empty, floats in the shortest form that reads back to the same bits.

    >>> rows_to_csv(["id", "value"], [["a", 0.1], ["b", None]])
    'id,value\\na,0.1\\nb,\\n'
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if value is None else value for value in row] for row in rows])
    return out.getvalue()
