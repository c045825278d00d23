"""A dump as its headers describe it: the lines and tables of ``inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_is.cli.render.coverage import spans
from rollout_is.cli.render.numbers import NULL, count
from rollout_is.cli.render.table import Cell, Column, Table, cell

MOST_SHARDS = 20
_UNITS = ("B", "kB", "MB", "GB", "TB")


def inspection_lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The header: (label, text) pairs."""
    c = found["coverage"]
    empty = f", {count(c['empty_shards'])} of them empty" if c["empty_shards"] else ""
    bad = f"; {count(c['bad_shards'])} cannot be read" if c["bad_shards"] else ""
    ranks = spans(c["ranks"])
    if c["world_sizes"]:
        ranks += f" (world size {spans(c['world_sizes'])})"
    if c["without_rank"]:
        ranks += f"; unknown in {count(c['without_rank'])} shards"
    steps = spans(c["steps"]) + (f"; unknown in {count(c['without_step'])} shards" if c["without_step"] else "")
    formats = sorted({str(shard["format"]) for shard in found["shards"]})
    return [
        ("dump", str(found["root"])),
        ("verdict", "ok: every header is sound" if found["ok"] else "cannot be analysed as it is, see below"),
        ("format", ", ".join(formats) or NULL),
        ("shards", f"{count(c['shards'])}, {size(c['size'])}{empty}{bad}"),
        ("steps", steps),
        ("ranks", ranks),
        ("positions", f"{count(c['positions'])} in {count(c['segments'])} segments (masks are not read here)"),
    ]


def inspection_tables(found: Mapping[str, Any], every: bool = False) -> tuple[Table, Table]:
    """The columns that play a role, and the shards."""
    return _columns(found), _shards(found, every)


def size(n: int) -> str:
    """Bytes in the unit that leaves three digits.

    >>> size(0), size(1999), size(5_430_000_000)
    ('0 B', '2.00 kB', '5.43 GB')
    """
    value, unit = float(n), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{n} B"
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {_UNITS[unit]}"


def _columns(found: Mapping[str, Any]) -> Table:
    shards = len(found["shards"])
    rows = []
    for role, held in found["columns"].items():
        in_all = held["shards"] == shards
        rows.append(
            (
                cell(role),
                cell(_counted(held["tensors"])),
                cell(_counted(held["dtypes"])),
                Cell("all" if in_all else f"{count(held['shards'])} of {count(shards)}", held["shards"]),
            )
        )
    heads = (Column("role", "left"), Column("tensor", "left"), Column("dtype", "left"), Column("shards", drop=1))
    return Table("columns", heads, tuple(rows))


def _counted(names: Mapping[str, int]) -> str:
    """One name alone, several with their number of shards."""
    if len(names) == 1:
        return next(iter(names))
    return ", ".join(f"{name} ({n})" for name, n in names.items())


def _shards(found: Mapping[str, Any], every: bool) -> Table:
    shards = found["shards"]
    shown = shards if every else shards[:MOST_SHARDS]
    rows = tuple(
        (
            cell(shard["name"]),
            _number(shard["step"]),
            _number(shard["rank"]),
            Cell(count(shard["positions"]), shard["positions"]),
            Cell(count(shard["segments"]), shard["segments"]),
            cell(shard["layout"]),
            Cell(size(shard["size"]), shard["size"]),
        )
        for shard in shown
    )
    heads = (
        Column("shard", "left"),
        Column("step"),
        Column("rank"),
        Column("positions"),
        Column("segments", drop=1),
        Column("layout", "left", drop=3),
        Column("size", drop=2),
    )
    more = len(shards) - len(shown)
    remarks = (f"{count(more)} more shards (--all lists them)",) if more else ()
    return Table("shards", heads, rows, remarks)


def _number(value: int | None) -> Cell:
    return Cell(NULL, None, "dim") if value is None else Cell(str(value), value)
