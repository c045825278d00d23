"""Statistics as tables: rows are statistics, columns are views side by side, at three levels or in one section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollout_is.analysis.catalog import catalog, names
from rollout_is.analysis.catalog_entry import Entry
from rollout_is.analysis.summary import Summary
from rollout_is.cli.render.footnotes import Footnotes
from rollout_is.cli.render.numbers import SAME, figure
from rollout_is.cli.render.table import Cell, Column, Table, cell
from rollout_is.cli.render.text import fits

LEVELS = ("token", "sequence", "geometric")
_TITLES = {
    "token": "token level: w = exp(d), d = train - rollout log-prob of a valid token",
    "sequence": "sequence level: w = exp(sum of d), the product of a sequence's ratios",
    "geometric": "geometric level: w = exp(mean of d), the geometric mean of a sequence's ratios",
    "per_sequence": "per sequence: mean token ratio of each sequence, then over sequences",
    "veto": "veto",
    "mismatch": "mismatch of train and rollout",
}
# The views that stay longest when the terminal is narrow come last to go.
_DROP = {"unmasked": 3, "padded": 2, "corrected": 1, "masked": 0}


def weight_tables(
    summary: Summary, levels: Sequence[str], views: Sequence[str], notes: Footnotes, width: int
) -> list[Table]:
    """Importance weights, then log-ratio quantiles; the levels side by side where the width allows, else one below the other.

    Args:
        summary: what is shown.
        levels, views: which of them, in print order.
        notes: takes the reasons of missing values.
        width: columns of the terminal.
    """
    tables = []
    for quantiles in (False, True):
        chosen = [n for level in levels for n in names(level) if n.startswith("log_ratio_") == quantiles]
        rows = list(dict.fromkeys(chosen))
        what = "log-ratio quantiles" if quantiles else "importance weights"
        if quantiles:  # quantiles are of the raw log-ratio: a policy has none of its own
            views = [view for view in views if view != "corrected"]
        for short in (False, True):
            joined = _levels_joined(summary, levels, views, rows, notes, f"{what}, before and after masking", short)
            if fits(joined, width):
                tables.append(joined)
                break
        else:
            for level in levels:
                mine = [n for n in rows if (level, n) in catalog()]
                table = _one_section(summary, level, views, mine, notes, f"{what}, {_TITLES[level]}")
                # the signs mean the same at each level: said once
                tables.append(table if level == levels[-1] else replace(table, remarks=()))
    return [table for table in tables if table.rows]


def section_table(summary: Summary, section: str, views: Sequence[str], notes: Footnotes) -> Table | None:
    """One section (``per_sequence``, ``veto``, ``mismatch``); None when the summary does not hold it."""
    held = [s for view in views for s in summary.views.get(view, {}).get(section, {}).values()]
    if not held:
        return None
    reasons = {s.why for s in held}
    if len(reasons) == 1 and all(s.value is None and s.log_value is None for s in held):
        return Table(f"{_TITLES[section]}: no figures, {reasons.pop()}", (), ())
    return _one_section(summary, section, views, names(section), notes, _TITLES[section])


def _levels_joined(
    summary: Summary,
    levels: Sequence[str],
    views: Sequence[str],
    rows: Sequence[str],
    notes: Footnotes,
    title: str,
    short: bool,
) -> Table:
    columns = [Column("statistic", "left")]
    columns += [Column(view, group=level, drop=_DROP.get(view, 1)) for level in levels for view in views]
    body = []
    for name in rows:
        line = [cell(name.removeprefix("rollout_is_") if short else name)]
        for level in levels:
            entry = catalog().get((level, name))
            line += [_value(summary, view, entry, views, notes) for view in views]
        body.append(tuple(line))
    cut = short and any(name.startswith("rollout_is_") for name in rows)
    remarks = _directions(levels[0], [n for n in rows if (levels[0], n) in catalog()]) if levels else []
    if "rollout_is_mean" in rows:
        errors = [(level, _stderr(summary, level, "rollout_is_mean")) for level in levels]
        said = [f"{level} {figure(error)}" for level, error in errors if error is not None]
        if said:
            remarks.append(f"standard error of the masked mean, clustered by {_clusters(summary)}: {', '.join(said)}")
    return Table(title + (" (rollout_is_...)" if cut else ""), tuple(columns), tuple(body), tuple(remarks))


def _one_section(
    summary: Summary, section: str, views: Sequence[str], rows: Sequence[str], notes: Footnotes, title: str
) -> Table:
    held = {name for view in views for name in summary.views.get(view, {}).get(section, {})}
    rows = [name for name in rows if name in held]
    errors = {name: _stderr(summary, section, name) for name in rows}
    columns = [Column("statistic", "left"), *(Column(view, drop=_DROP.get(view, 1)) for view in views)]
    with_errors = any(error is not None for error in errors.values())
    if with_errors:
        columns.append(Column("± masked", drop=4))
    body = []
    for name in rows:
        entry = catalog()[section, name]
        line = [cell(name), *(_value(summary, view, entry, views, notes) for view in views)]
        if with_errors:
            line.append(Cell("" if errors[name] is None else figure(errors[name]), errors[name], "dim"))
        body.append(tuple(line))
    remarks = _directions(section, rows)
    kl = summary.views.get("masked", {}).get(section, {}).get("mismatch_kl")
    if kl is not None and kl.value is not None and kl.value < 0 and "mismatch_kl" in rows:
        remarks.append("kl below 0: a sample estimate may be negative; k3_kl, of the same divergence, cannot")
    return Table(title, tuple(columns), tuple(body), tuple(remarks))


def _value(summary: Summary, view: str, entry: Entry | None, views: Sequence[str], notes: Footnotes) -> Cell:
    if entry is None:
        return cell("", None)
    statistic = summary.views.get(view, {}).get(entry.section, {}).get(entry.name)
    if view == "padded" and entry.same_when_padded and "masked" in views and statistic is not None:
        return Cell(SAME, statistic.value, "dim")
    if statistic is None and view == "corrected":
        return cell("", None)
    return notes.statistic(statistic)


def _stderr(summary: Summary, section: str, name: str) -> float | None:
    statistic = summary.views.get("masked", {}).get(section, {}).get(name)
    return None if statistic is None else statistic.stderr


def _clusters(summary: Summary) -> str:
    columns = summary.source.get("columns")
    return "group" if isinstance(columns, Mapping) and "group_ids" in columns else "sequence"


def _directions(section: str, rows: Sequence[str]) -> list[str]:
    """What the sign of the signed figures says, one line a wording. Quantiles say it once for all."""
    by_words: dict[str, list[str]] = {}
    for name in rows:
        words = catalog()[section, name].direction
        if words:
            by_words.setdefault(words, []).append(name.removeprefix("mismatch_").removeprefix("rollout_is_"))
    return [
        f"{'log_ratio_*' if names_[0].startswith('log_ratio') else ', '.join(names_)}: {words}"
        for words, names_ in by_words.items()
    ]
