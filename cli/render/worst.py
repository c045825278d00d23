"""The worst sequences and tokens: where they are, and what both sides said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_is.analysis.summary import Summary
from rollout_is.cli.render.numbers import NULL, figure
from rollout_is.cli.render.table import Cell, Column, Table

# What stays on the narrowest terminal; the rest goes from the right.
_STAYS = ("shard", "sequence", "position", "log_ratio")


def worst_tables(summary: Summary) -> list[Table]:
    """One table a kind (``sequences``, ``tokens``), a column for each key that any record holds."""
    tables = []
    for kind, records in summary.worst.items():
        if isinstance(records, Sequence) and records and all(isinstance(r, Mapping) for r in records):
            by = "mean |d| of a sequence" if kind == "sequences" else "|d|"
            tables.append(_table(f"worst {kind}, masked, by {by}", records))
    return tables


def _table(title: str, records: Sequence[Mapping[str, Any]]) -> Table:
    keys = list(dict.fromkeys(key for record in records for key in record))
    keys = [key for key in keys if any(record.get(key) is not None for record in records)]
    columns = tuple(
        Column(
            key,
            "left" if any(isinstance(r.get(key), str) for r in records) else "right",
            drop=0 if key in _STAYS else number,
        )
        for number, key in enumerate(keys, start=1)
    )
    return Table(title, columns, tuple(tuple(_cell(record.get(key)) for key in keys) for record in records))


def _cell(value: Any) -> Cell:
    if value is None:
        return Cell(NULL, None, "dim")
    if isinstance(value, float):
        return Cell(figure(value), value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        text = " ".join(figure(v) if isinstance(v, float) else NULL if v is None else str(v) for v in value)
        return Cell(text, text)
    return Cell(str(value), value)
