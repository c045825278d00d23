"""A table for each grouping: worst first where the order means nothing, in order with a sparkline where it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_is.analysis.summary import Group, Statistic, Summary
from rollout_is.cli.render.footnotes import Footnotes
from rollout_is.cli.render.numbers import count, figure, sparkline
from rollout_is.cli.render.table import Cell, Column, Table, cell

# What a row shows of the masked view: (header, section, name, drop order)
_SHOWN = (
    ("abs diff", "mismatch", "mismatch_logprob_abs_diff", 0),
    ("kl", "mismatch", "mismatch_kl", 5),
    ("k3_kl", "mismatch", "mismatch_k3_kl", 3),
    ("is_mean", "token", "rollout_is_mean", 0),
    ("is_min", "token", "rollout_is_min", 8),
    ("is_max", "token", "rollout_is_max", 7),
    ("is_ess", "token", "rollout_is_eff_sample_size", 2),
    ("seq_min", "per_sequence", "rollout_is_seq_min", 4),
    ("seq_max", "per_sequence", "rollout_is_seq_max", 6),
)
ORDERED = ("step", "position", "length", "probability", "version")
MOST_ORDERED, MOST_RANKED = 40, 20
_KEY = "mismatch_logprob_abs_diff"


def group_tables(summary: Summary, notes: Footnotes, unicode: bool = True) -> list[Table]:
    """One table a grouping, of the masked view.

    Args:
        summary: its ``groups`` are shown.
        notes: takes the reasons of missing values.
        unicode: whether the sparkline may use block characters.
    """
    return [_table(by, groups, notes, unicode) for by, groups in summary.groups.items() if groups]


def _table(by: str, groups: Mapping[str, Group], notes: Footnotes, unicode: bool) -> Table:
    ordered = by in ORDERED
    keys = list(groups) if ordered else sorted(groups, key=lambda k: _badness(groups[k]), reverse=True)
    most = MOST_ORDERED if ordered else MOST_RANKED
    shown = keys[:most]
    columns = [
        Column(by, "left"),
        Column("valid tokens", drop=1),
        Column("sequences", drop=9),
        *(Column(header, drop=drop) for header, _, _, drop in _SHOWN),
    ]
    rows = []
    for key in shown:
        group = groups[key]
        line = [
            cell(key),
            Cell(count(group.valid_tokens), group.valid_tokens),
            Cell(count(group.sequences), group.sequences),
        ]
        line += [notes.statistic(_statistic(group, section, name)) for _, section, name, _ in _SHOWN]
        rows.append(tuple(line))
    title = f"by {by}, masked" + ("" if ordered else ", worst first")
    return Table(title, tuple(columns), tuple(rows), tuple(_remarks(by, keys, groups, most, unicode)))


def _remarks(by: str, keys: Sequence[str], groups: Mapping[str, Group], most: int, unicode: bool) -> list[str]:
    remarks = []
    if len(keys) > most:
        remarks.append(f"{count(len(keys) - most)} more not shown (--format csv or json has all)")
    if by in ORDERED and len(keys) > 2:
        values = [_number(groups[key]) for key in keys]
        if len(values) > 60:  # one mark a bucket: its worst value, so that no spike is averaged away
            size = -(-len(values) // 60)
            buckets = [values[i : i + size] for i in range(0, len(values), size)]
            values = [max((v for v in b if v is not None), default=None) for b in buckets]
        known = [v for v in values if v is not None]
        if known and min(known) < max(known):
            remarks.append(
                f"abs diff over {by}s: {sparkline(values, unicode)}  {figure(min(known))} to {figure(max(known))}"
            )
    return remarks


def _statistic(group: Group, section: str, name: str) -> Statistic | None:
    return group.views.get("masked", {}).get(section, {}).get(name)


def _number(group: Group) -> float | None:
    statistic = _statistic(group, "mismatch", _KEY)
    return None if statistic is None else statistic.value


def _badness(group: Group) -> tuple[float, float]:
    """Large mean |d| first; without the mismatch family the spread of the weights; nothing valid last."""
    spread = _statistic(group, "token", "rollout_is_std")
    value = _number(group)
    return (-1.0 if value is None else value, -1.0 if spread is None or spread.value is None else spread.value)
