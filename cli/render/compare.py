"""A comparison as text, Markdown and CSV, in the manner of benchstat: figures with their errors, the change, ``~`` for noise."""

from __future__ import annotations

from rollout_is.analysis.catalog import find
from rollout_is.analysis.compare.result import Comparison, Pair, Row, Series
from rollout_is.analysis.compare.steps import is_real
from rollout_is.analysis.summary import VIEWS
from rollout_is.cli.render.footnotes import Footnotes
from rollout_is.cli.render.markup import escape, rows_to_csv, to_markdown
from rollout_is.cli.render.numbers import figure, sparkline
from rollout_is.cli.render.overlay import overlay_table
from rollout_is.cli.render.table import Cell, Column, Style, Table, cell
from rollout_is.cli.render.terminal import Terminal
from rollout_is.cli.render.text import render, wrap

_STYLES: dict[str, Style] = {"worse": "bad", "better": "good", "changed": "warn", "~": "dim", "same": "dim"}
MOST_STEPS = 40  # a longer series is shown by its blocks and its medians


def to_text(comparison: Comparison, terminal: Terminal) -> str:
    """Verdict, settings that differ, tables, footnotes."""
    notes = Footnotes()
    real = any(is_real(row) for pair in comparison.pairs for row in pair.rows)
    lines = wrap(comparison.verdict, terminal.width, "  ", first="")
    parts = ["".join(f"{terminal.plain(terminal.paint(line, 'bold' if real else ''))}\n" for line in lines)]
    for table in tables(comparison, notes, terminal.unicode):
        parts.append(render(table, terminal))
    foot = [line for note in notes.lines() for line in wrap(note, terminal.width, "    ", first="")]
    foot += [line for text in remarks(comparison) for line in wrap(text, terminal.width, "  ", first="")]
    parts.append("".join(f"{terminal.plain(line)}\n" for line in foot))
    return "\n".join(parts)


def to_md(comparison: Comparison) -> str:
    """The same as Markdown, every column."""
    notes = Footnotes()
    parts = [f"## rollout-is compare\n\n**{escape(comparison.verdict)}**\n"]
    parts += [to_markdown(table, 3) for table in tables(comparison, notes)]
    parts.append("".join(f"- {escape(line)}\n" for line in [*notes.lines(), *remarks(comparison)]))
    return "\n".join(parts)


def to_csv(comparison: Comparison) -> str:
    """One row a statistic, pair and step in full precision; ``step`` is empty for the pooled figure."""
    header = ["a", "b", "step", "statistic", "value_a", "stderr_a", "value_b", "stderr_b", "change"]
    header += ["test", "stderr", "df", "p", "p_corrected", "verdict", "why"]
    rows: list[list[float | int | str | None]] = []
    for pair in comparison.pairs:
        listed = [("", row) for row in (*pair.rows, *pair.quantiles)]
        listed += [(step, row) for series in pair.series for step, row in series.steps.items()]
        for step, row in listed:
            test = row.test
            figures: list[float | int | str | None] = [row.a.value, row.a.stderr, row.b.value, row.b.stderr, row.change]
            tested: list[float | int | str | None] = [None] * 5
            if test is not None:
                tested = [test.kind, test.stderr, test.df, test.p, test.p_corrected]
            rows.append([pair.a, pair.b, step, row.statistic, *figures, *tested, row.verdict, row.why])
    return rows_to_csv(header, rows)


def tables(comparison: Comparison, notes: Footnotes, unicode: bool = True) -> list[Table]:
    """All tables in print order: what differs in the settings comes first."""
    out = []
    for pair in comparison.pairs:
        if pair.differences:
            out.append(_differences(pair))
        out.append(_rows(pair, notes))
        out += [table for series in pair.series[:1] for table in _series(pair, series, unicode)]
        if pair.quantiles:
            out.append(_quantiles(pair))
        if pair.overlay is not None:
            out.append(overlay_table(pair.a, pair.b, pair.overlay, unicode))
    return out


def remarks(comparison: Comparison) -> list[str]:
    """Footer: what the signs mean, the test used, the correction."""
    rows = [row for pair in comparison.pairs for row in pair.rows]
    kinds = sorted({row.test.kind for row in rows if row.test is not None})
    out = [note for pair in comparison.pairs for note in pair.notes]
    if kinds:
        number = sum(row.test is not None for row in rows)
        matched = next((pair.matched for pair in comparison.pairs if pair.matched), None)
        words = {"Welch t": "Welch's t-test of two independent samples", "paired t": "paired t-test"}
        named = " and ".join(words[kind] for kind in kinds)
        if "paired t" in kinds and matched:
            named += f" ({matched:,} sequences held by both sides)"
        out.append(
            f"~ is no real change at {100 * comparison.alpha:g} %: {named}, standard errors clustered by sequence (by group where "
            f"dumped), p-values corrected for the {number} tested row{'s'[: number != 1]} (Holm)"
        )
    out.append(
        "± is one standard error; better and worse follow each statistic's own direction (rollout-is explain NAME)"
    )
    return list(dict.fromkeys(out))


def _differences(pair: Pair) -> Table:
    columns = (Column("setting", "left"), Column(pair.a, "left"), Column(pair.b, "left"), Column("", "left"))
    rows = tuple(
        (
            cell(d.key),
            cell(d.a),
            cell(d.b),
            cell("another quantity" if d.defining else "circumstance", style="warn" if d.defining else ""),
        )
        for d in pair.differences
    )
    remark = ("another quantity: no change below is a regression until this agrees",) if pair.defining else ()
    return Table("settings that differ", columns, rows, remark)


def _rows(pair: Pair, notes: Footnotes) -> Table:
    columns = (
        Column("statistic", "left"),
        Column("value", group=pair.a),
        Column("±", group=pair.a, drop=3),
        Column("value", group=pair.b),
        Column("±", group=pair.b, drop=3),
        Column("change"),
        Column("p", drop=2),
        Column("", "left"),
    )
    heads = {row.statistic.partition(".")[0] for row in pair.rows} & set(VIEWS)
    title = f"{pair.b} against {pair.a}" + (f", view {next(iter(heads))}" if len(heads) == 1 else "")
    shown = [row for row in pair.rows if row.a.value is not None or row.b.value is not None]
    hidden = [f"{_short(row.statistic)} ({row.why})" for row in pair.rows if row not in shown]
    remark = (f"no value on either side: {', '.join(hidden)}",) if hidden else ()
    return Table(title, columns, tuple(_row(row, notes) for row in shown), remark)


def _row(row: Row, notes: Footnotes) -> tuple[Cell, ...]:
    p = row.test.p_corrected if row.test is not None else None
    if row.verdict == "untested":
        both = row.a.value is not None and row.b.value is not None
        verdict = Cell(notes.mark(f"not tested: {row.why}") if both else "", row.verdict, "dim")
    else:
        verdict = cell(row.verdict, style=_STYLES[row.verdict])
    return (
        cell(_short(row.statistic), row.statistic),
        notes.statistic(row.a),
        _error(row.a.stderr),
        notes.statistic(row.b),
        _error(row.b.stderr),
        Cell(change_text(row), row.change),
        Cell("" if p is None else _p(p), p),
        verdict,
    )


def change_text(row: Row) -> str:
    """The change: a factor or percent where the figure has a natural zero, else the difference."""
    a, b = row.a.value, row.b.value
    if a is None or b is None or row.change is None:
        return ""
    if a == b:
        return "0"
    if a > 0 and b > 0 and not 0.5 < a < 2:
        factor = b / a
        return f"{100 * (factor - 1):+.3g} %" if 0.5 < factor < 2 else f"x{figure(factor)}"
    return ("+" if row.change > 0 else "") + figure(row.change)


def _p(p: float) -> str:
    return "<1e-12" if p < 1e-12 else figure(p) if p >= 1e-3 else f"{p:.0e}".replace("e-0", "e-")


def _error(stderr: float | None) -> Cell:
    return Cell("" if stderr is None else f"{figure(stderr)}", stderr)


def _short(statistic: str) -> str:
    head, _, tail = statistic.partition(".")
    rest = tail if head in VIEWS else statistic
    name = rest.partition(".")[2]
    return name if name and len(find(name)) == 1 else rest


def _series(pair: Pair, series: Series, unicode: bool) -> list[Table]:
    if len(series.steps) < 2:
        return []
    title = f"{_short(series.statistic)} step by step"
    columns = (
        Column("steps", "left"),
        Column("value", group=pair.a),
        Column("value", group=pair.b),
        Column("change"),
        Column("p", drop=1),
        Column("", "left"),
    )
    rows: list[tuple[Cell, ...]] = []
    if len(series.steps) <= MOST_STEPS:
        for step, row in series.steps.items():
            p = row.test.p_corrected if row.test is not None else None
            rows.append(
                (
                    cell(step),
                    Cell(figure(row.a.value), row.a.value),
                    Cell(figure(row.b.value), row.b.value),
                    Cell(change_text(row), row.change),
                    Cell("" if p is None else _p(p), p),
                    cell(
                        "not tested" if row.verdict == "untested" else row.verdict, style=_STYLES.get(row.verdict, "")
                    ),
                )
            )
    for block in series.blocks:
        rows.append(_plain(f"{block.first} to {block.last}, mean", block.a, block.b))
    if series.median_a is not None and series.median_b is not None:
        rows.append(_plain("median of steps", series.median_a, series.median_b))
    return [Table(title, columns, tuple(rows), _series_remarks(pair, series, unicode))]


def _plain(name: str, a: float, b: float) -> tuple[Cell, ...]:
    change = f"{'+' if b > a else ''}{figure(b - a)}"
    return (cell(name), Cell(figure(a), a), Cell(figure(b), b), Cell(change, b - a), cell(""), cell(""))


def _series_remarks(pair: Pair, series: Series, unicode: bool) -> tuple[str, ...]:
    lines = [sparkline([row.b.value for row in series.steps.values()], unicode)] if len(series.steps) > 3 else []
    out = [f"{pair.b}: {lines[0]}"] if lines else []
    if series.starts_at is not None:
        share = 100 * (series.share_after or 0)
        out.append(
            f"the difference starts at step {series.starts_at} ({share:.0f} % of the steps from there on differ)"
        )
    elif series.isolated:
        out.append(f"single steps differ, no lasting change: {', '.join(series.isolated[:8])}")
    out.append("p-values of this table are corrected over its steps (Holm)")
    return tuple(out)


def _quantiles(pair: Pair) -> Table:
    columns = (Column("log-ratio at", "left"), Column(pair.a), Column(pair.b), Column("shift"))
    rows = tuple(
        (
            cell(_rank(row.statistic), row.statistic),
            Cell(figure(row.a.value), row.a.value),
            Cell(figure(row.b.value), row.b.value),
            Cell(figure(row.change), row.change),
        )
        for row in pair.quantiles
    )
    return Table("quantiles of train - rollout log-prob", columns, rows, ("order statistics are not tested",))


def _rank(statistic: str) -> str:
    name = statistic.rpartition("_")[2] if "log_ratio" not in statistic else statistic.rpartition("log_ratio_p")[2]
    return name if name in ("min", "max") else f"{name.replace('_', '.')} %"
