"""A table for each grouping: worst first where the order means nothing, in order with a sparkline where it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

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
    ("is_std", "token", "rollout_is_std", 9),
    ("is_min", "token", "rollout_is_min", 8),
    ("is_max", "token", "rollout_is_max", 7),
    ("is_ess", "token", "rollout_is_eff_sample_size", 2),
    ("seq_min", "per_sequence", "rollout_is_seq_min", 4),
    ("seq_max", "per_sequence", "rollout_is_seq_max", 6),
)
# Shown only where a veto bound is given: one token vetoes a sequence, so the share of sequences grows with their length
_VETO = (
    ("veto_tok", "veto", "rollout_is_catastrophic_token_fraction", 0),
    ("veto_seq", "veto", "rollout_is_veto_fraction", 0),
)
ORDERED = ("step", "position", "length", "probability", "version")
MOST_ORDERED, MOST_RANKED, MOST_MARKS = 40, 20, 60
MOST_BAD = 10
STANDS_OUT = 3.0  # times the median of the others


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
    measure = _measure(groups)
    numbers = {key: _value(group, *measure[1:]) for key, group in groups.items()}
    keys = list(groups) if ordered else sorted(groups, key=lambda key: _badness(numbers[key]), reverse=True)
    most = MOST_ORDERED if ordered else MOST_RANKED
    whole = any(group.sequences for group in groups.values())  # a token grouping splits sequences: it has none to count
    columns = [Column(by, "left"), Column("valid tokens", drop=1)]
    columns += [Column("sequences", drop=10)] if whole else []
    shown: list[tuple[str, str]] = []
    missing: dict[str, list[str]] = {}
    veto_on = any(_value(group, *_VETO[0][1:3]) is not None for group in groups.values())
    for header, section, name, drop in (*_SHOWN[:1], *(_VETO if veto_on else ()), *_SHOWN[1:]):
        reason = _why_none(groups, section, name)
        if reason is None:
            columns.append(Column(header, drop=drop))
            shown.append((section, name))
        else:
            missing.setdefault(reason, []).append(header)
    rows = []
    for key in keys[:most]:
        group = groups[key]
        line = [cell(key), Cell(count(group.valid_tokens), group.valid_tokens)]
        line += [Cell(count(group.sequences), group.sequences)] if whole else []
        line += [notes.statistic(_statistic(group, section, name)) for section, name in shown]
        rows.append(tuple(line))
    remarks = [f"{', '.join(headers)}: {reason}" for reason, headers in missing.items()]
    if len(keys) > most:
        remarks.append(f"{count(len(keys) - most)} more not shown (--format csv or json has all)")
    remarks += _nonfinite(by, groups, [key for key in groups if key in keys])
    series = [numbers[key] for key in keys]
    remarks += _trend(by, measure[0], series, unicode) if ordered else _outlier(by, measure[0], keys, series)
    title = f"by {by}, masked" + ("" if ordered else f", worst {measure[0]} first")
    return Table(title, tuple(columns), tuple(rows), tuple(remarks))


def _measure(groups: Mapping[str, Group]) -> tuple[str, str, str]:
    """What groups are judged by: mean |d|, or the spread of weights where the mismatch family was left out."""
    if any(_value(group, "mismatch", "mismatch_logprob_abs_diff") is not None for group in groups.values()):
        return "abs diff", "mismatch", "mismatch_logprob_abs_diff"
    return "is_std", "token", "rollout_is_std"


def _why_none(groups: Mapping[str, Group], section: str, name: str) -> str | None:
    """The one reason for which no group has this figure; None when some group has it, or reasons differ."""
    held = [_statistic(group, section, name) for group in groups.values()]
    if any(s is not None and (s.value is not None or s.log_value is not None) for s in held):
        return None
    reasons = {"not computed" if s is None else s.why or "no reason given" for s in held}
    return reasons.pop() if len(reasons) == 1 else None


_PLURALS = {"probability": "probabilities"}


def _trend(by: str, name: str, series: Sequence[float | None], unicode: bool) -> list[str]:
    values = list(series)
    if len(values) > MOST_MARKS:  # one mark a bucket: its largest value, so that no spike is averaged away
        size = -(-len(values) // MOST_MARKS)
        buckets = [values[i : i + size] for i in range(0, len(values), size)]
        values = [max((v for v in bucket if v is not None), default=None) for bucket in buckets]
    known = [v for v in values if v is not None]
    if len(values) < 3 or not known or min(known) == max(known):
        return []
    return [
        f"{name} over {_PLURALS.get(by, f'{by}s')}: {sparkline(values, unicode)}  {figure(min(known))} to {figure(max(known))}"
    ]


def _outlier(by: str, name: str, keys: Sequence[str], series: Sequence[float | None]) -> list[str]:
    """One group an order of magnitude off the others: said in words."""
    known = [v for v in series if v is not None]
    if len(known) < 2 or known[0] <= STANDS_OUT * median(known[1:]):
        return []
    others = median(known[1:])
    times = f"{figure(known[0] / others)} times" if others > 0 else "infinitely many times"
    return [f"{by} {keys[0]} has {times} the median {name} of the others"]


def _nonfinite(by: str, groups: Mapping[str, Group], keys: Sequence[str]) -> list[str]:
    """Groups whose figures leave out valid tokens because they are not finite: marked, or they would look like the others."""
    bad = []
    for key in keys:
        mean = _statistic(groups[key], "token", "rollout_is_mean")
        if mean is not None and mean.n < groups[key].valid_tokens:
            bad.append(f"{key} ({count(groups[key].valid_tokens - mean.n)} of {count(groups[key].valid_tokens)})")
    if not bad:
        return []
    more = f" and {count(len(bad) - MOST_BAD)} more" if len(bad) > MOST_BAD else ""
    return [f"invalid, with valid tokens that are NaN or infinite and left out: {by} {', '.join(bad[:MOST_BAD])}{more}"]


def _statistic(group: Group, section: str, name: str) -> Statistic | None:
    return group.views.get("masked", {}).get(section, {}).get(name)


def _value(group: Group, section: str, name: str) -> float | None:
    statistic = _statistic(group, section, name)
    return None if statistic is None else statistic.value


def _badness(value: float | None) -> float:
    return -1.0 if value is None else value
