"""Tables as borderless text: a number is never cut; when the width is short, columns go in their fixed order."""

from __future__ import annotations

import textwrap

from rollout_is.cli.render.table import Cell, Column, Table
from rollout_is.cli.render.terminal import Terminal

GAP = 2
GROUP_GAP, NARROW_GROUP_GAP = 3, 2
_LEAST_NAME = 16
_LEAST_WRAP = 24  # a free-text column narrower than this is worse than none


def columns_that_fit(table: Table, width: int) -> tuple[int, ...]:
    """Indices of the columns shown at this width; the highest ``drop`` goes first, ``drop`` 0 always stays."""
    chosen = list(range(len(table.columns)))
    while _least_width(table, chosen) > width:
        droppable = [i for i in chosen if table.columns[i].drop]
        if not droppable:
            break
        chosen.remove(max(droppable, key=lambda i: (table.columns[i].drop, i)))
    # one very wide column may have taken narrow ones with it: those that fit without it come back
    for i in sorted(set(range(len(table.columns))) - set(chosen), key=lambda i: (table.columns[i].drop, i)):
        wider = sorted([*chosen, i])
        if _least_width(table, wider) <= width:
            chosen = wider
    return tuple(chosen)


def fits(table: Table, width: int) -> bool:
    """Whether the whole table is shown at this width."""
    return len(columns_that_fit(table, width)) == len(table.columns) and (
        _least_width(table, list(range(len(table.columns)))) <= width
    )


def _group_gap(table: Table, chosen: list[int], width: int) -> int:
    """Groups stand a little closer where that keeps the table whole."""
    return GROUP_GAP if _least_width(table, chosen, GROUP_GAP) <= width else NARROW_GROUP_GAP


def render(table: Table, terminal: Terminal) -> str:
    """The table as lines of text, a newline at the end.

    >>> from rollout_is.cli.render.table import cell
    >>> print(render(Table("T", (Column("name", "left"), Column("x")), ((cell("a"), cell("1.00")),)), Terminal()), end="")
    T
    name     x
    a     1.00
    """
    chosen = columns_that_fit(table, terminal.width)
    columns = [table.columns[i] for i in chosen]
    rows = [[Cell(printable(row[i].text), style=row[i].style) for i in chosen] for row in table.rows]
    widths = _widths(columns, rows)
    gaps = _gaps(columns, _group_gap(table, list(chosen), terminal.width))
    # What is too wide still is taken from text, never from numbers: free text is broken, names are shortened in the middle.
    for k, column in sorted(enumerate(columns), key=lambda pair: not pair[1].wrap):
        if column.align == "left":
            room = terminal.width - sum(gaps) - sum(w for j, w in enumerate(widths) if j != k)
            widths[k] = min(widths[k], max(room, _LEAST_WRAP if column.wrap else _LEAST_NAME))
    lines = [terminal.paint(line, "bold") for line in wrap(table.title, terminal.width, "  ", first="")]
    lines = lines if table.title else []
    if any(column.group for column in columns):
        lines.append(terminal.paint(_groups(columns, widths, gaps, terminal), "dim"))
    header = [Cell(column.header, style="dim") for column in columns]
    for row in [header, *rows] if columns else []:
        lines += _row(row, columns, widths, gaps, terminal)
    remarks = list(table.remarks)
    left_out = [table.columns[i] for i in range(len(table.columns)) if i not in chosen]
    if left_out:
        names = ", ".join(f"{c.group} {c.header}".strip() for c in left_out)
        remarks.append(f"left out at this width: {names}")
    for remark in remarks:
        lines += [terminal.paint(line, "dim") for line in wrap(remark, terminal.width, indent="  ")]
    return "".join(f"{terminal.plain(line)}\n" for line in lines)


def wrap(text: str, width: int, indent: str = "", first: str | None = None) -> list[str]:
    """Text broken at blanks; a word longer than the line (a path) stays whole."""
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def printable(text: str) -> str:
    """Control characters (a file name may hold an escape sequence) as their escapes, so that a terminal obeys none.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, width: int) -> str:
    """A name cut in the middle: both ends of a path say more than its middle.

    >>> shorten("step_00000412/rank_00003.safetensors", 20)
    'step_00000…fetensors'
    """
    if text_width(text) <= width:
        return text
    keep = max(width - 1, 2)
    while text_width(text[: keep - keep // 2]) + text_width(text[-(keep // 2) :]) > width - 1 and keep > 2:
        keep -= 1
    return f"{text[: keep - keep // 2]}…{text[-(keep // 2) :]}"


def text_width(text: str) -> int:
    """Columns that a text takes on a terminal (East Asian wide characters take two)."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # loaded only for file names beyond ASCII and our own few signs

    return cell_len(text)


def _widths(columns: list[Column], rows: list[list[Cell]]) -> list[int]:
    """What each column needs; the first of a group makes room for the group's name."""
    widths = [max([text_width(c.header), *(text_width(r[k].text) for r in rows)]) for k, c in enumerate(columns)]
    for first, last in _runs(columns):
        span = sum(widths[first : last + 1]) + last - first
        widths[first] += max(0, text_width(columns[first].group) - span)
    return widths


def _least_width(table: Table, chosen: list[int], group_gap: int = NARROW_GROUP_GAP) -> int:
    columns = [table.columns[i] for i in chosen]
    rows = [[Cell(printable(row[i].text)) for i in chosen] for row in table.rows]
    widths = _widths(columns, rows)
    free = [min(w, _LEAST_WRAP) if c.wrap else w for c, w in zip(columns, widths, strict=True)]
    return sum(_gaps(columns, group_gap)) + sum(free)


def _runs(columns: list[Column]) -> list[tuple[int, int]]:
    """First and last index of each run of columns of one group."""
    runs: list[tuple[int, int]] = []
    for k, column in enumerate(columns):
        if runs and columns[runs[-1][0]].group == column.group:
            runs[-1] = (runs[-1][0], k)
        else:
            runs.append((k, k))
    return runs


def _gaps(columns: list[Column], group_gap: int) -> list[int]:
    """Blanks before each column; wider where a new group starts."""
    gaps = []
    for k, column in enumerate(columns):
        if k == 0:
            gaps.append(0)
        elif column.group and columns[k - 1].group == column.group:
            gaps.append(1)
        else:
            gaps.append(group_gap if column.group else GAP)
    return gaps


def _groups(columns: list[Column], widths: list[int], gaps: list[int], terminal: Terminal) -> str:
    out = ""
    for first, last in _runs(columns):
        span = sum(widths[first : last + 1]) + sum(gaps[first + 1 : last + 1])
        name = columns[first].group
        ruled = f" {name} ".center(span, "─") if span >= text_width(name) + 4 else name.rjust(span)
        out += " " * gaps[first] + (ruled if name else " " * span)
    return out.rstrip()


def _row(row: list[Cell], columns: list[Column], widths: list[int], gaps: list[int], terminal: Terminal) -> list[str]:
    """One row; several lines when a free-text cell is broken."""
    parts = [
        wrap(c.text, width) if column.wrap and text_width(c.text) > width else [shorten(c.text, width)]
        for c, column, width in zip(row, columns, widths, strict=True)
    ]
    lines = []
    for n in range(max(map(len, parts))):
        line = ""
        for k, (c, column) in enumerate(zip(row, columns, strict=True)):
            text = parts[k][n] if n < len(parts[k]) else ""
            pad = " " * max(0, widths[k] - text_width(text))
            painted = terminal.paint(text, c.style)
            line += " " * gaps[k] + (pad + painted if column.align == "right" else painted + pad)
        lines.append(line.rstrip())
    return lines
