"""The worst sequences and tokens: where they are, and what both sides said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_is.analysis.summary import Summary
from rollout_is.cli.render.numbers import NULL, figure
from rollout_is.cli.render.table import Cell, Column, Table

# The order in which columns leave a narrow terminal, first to go last in this list; the first four always stay.
_STAYS = ("shard", "sequence", "position", "log_ratio", "mean_abs_log_ratio")
_LEAVES = (
    "train_logprob",
    "rollout_logprob",
    "token_id",
    "valid_tokens",
    "nonfinite_tokens",
    "geometric_log_ratio",
    "sequence_id",
    "length",
    "rank",
    "step",
    "index",
)
_HEADERS = {
    "train_logprob": "train",
    "rollout_logprob": "rollout",
    "log_ratio": "d",
    "mean_abs_log_ratio": "mean |d|",
    "geometric_log_ratio": "mean d",
    "valid_tokens": "valid",
    "nonfinite_tokens": "non-finite",
}
_SEQUENCE_HEADERS = _HEADERS | {"log_ratio": "sum d"}
_NOT_FINITE = "not finite"


def worst_tables(summary: Summary) -> list[Table]:
    """One table a kind (``sequences``, ``tokens``), a column for each key that any record holds."""
    tables = []
    for kind, by, headers in (
        ("sequences", "mean |d| of a sequence", _SEQUENCE_HEADERS),
        ("tokens", "|d|", _HEADERS),
    ):
        records = summary.worst.get(kind)
        if isinstance(records, Sequence) and records and all(isinstance(r, Mapping) for r in records):
            tables.append(_table(f"worst {kind}, masked, by {by}", records, headers))
            tables += _neighbours(records)
    return tables


def _table(title: str, records: Sequence[Mapping[str, Any]], headers: Mapping[str, str]) -> Table:
    keys = list(dict.fromkeys(key for record in records for key in record))
    # a column that says nothing leaves; a place or a difference of 0 says something, a count of nothing does not
    blank = {"nonfinite_tokens": (None, 0)}
    keys = [key for key in keys if any(record.get(key) not in blank.get(key, (None,)) for record in records)]
    keys = [key for key in keys if key != "neighbours"]
    columns = tuple(
        Column(
            headers.get(key, key),
            "left" if any(isinstance(r.get(key), str) for r in records) else "right",
            drop=0 if key in _STAYS else _LEAVES.index(key) + 1 if key in _LEAVES else len(_LEAVES) + 1,
        )
        for key in keys
    )
    return Table(title, columns, tuple(tuple(_cell(key, record.get(key)) for key in keys) for record in records))


def _cell(key: str, value: Any) -> Cell:
    if value is None:
        # the engine stores what JSON cannot: a NaN or an infinity is null there
        return Cell(_NOT_FINITE if key.endswith(("logprob", "log_ratio")) else NULL, None, "dim")
    if isinstance(value, float):
        return Cell(figure(value), value)
    return Cell(str(value), value)


def _neighbours(records: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The tokens around each of the worst, by their distance: both log-probs, and the token id where it was dumped."""
    around = [{n["position"] - r["position"]: n for n in r.get("neighbours") or ()} for r in records]
    distances = sorted({distance for one in around for distance in one})
    if not distances:
        return []
    columns = [Column("sequence"), Column("position")]
    columns += [Column(f"{distance:+d}", drop=abs(distance) - 1) for distance in distances]
    rows = []
    for record, one in zip(records, around, strict=True):
        place = [Cell(str(record[key]), record[key]) for key in ("sequence", "position")]
        rows.append((*place, *(_neighbour(one.get(distance)) for distance in distances)))
    with_ids = any(n.get("token_id") is not None for one in around for n in one.values())
    title = "their neighbours: " + ("token id, " if with_ids else "") + "train / rollout"
    return [Table(title, tuple(columns), tuple(rows))]


def _neighbour(value: Mapping[str, Any] | None) -> Cell:
    if value is None:
        return Cell("", None)  # the sequence begins or ends here
    sides = [_cell(key, value.get(key)).text for key in ("train_logprob", "rollout_logprob")]
    token = value.get("token_id")
    text = " / ".join(sides)
    return Cell(text if token is None else f"{token}, {text}", text)
