"""Policies as tables: the sweep side by side, a policy over the steps, and what one policy took out of a dump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_is.analysis.pareto import reliable_below
from rollout_is.analysis.summary import Statistic, Summary
from rollout_is.cli.render.numbers import count, figure, percent
from rollout_is.cli.render.table import Cell, Column, Table, cell

# header, figure, drop order
_COLUMNS = (
    ("tokens", "rejected_token_fraction", 0),
    ("seqs", "rejected_sequence_fraction", 0),
    ("cut", "changed_token_fraction", 5),
    ("mean w", "mean", 0),
    ("ESS kept", "ess_kept", 0),
    ("moved", "weight_moved_fraction", 1),
    ("top share", "max_weight_share", 4),
    ("k-hat", "pareto_k", 2),
    ("KL in", "kept_k3_kl", 0),
    ("KL out", "rejected_k3_kl", 0),
)
_LONGEST_NAME = 26
_GROUPS = {"tokens": "rejected", "seqs": "rejected"}
REMARKS = (
    "* no other policy keeps more effective samples (ESS kept, as a share of all eligible tokens) while moving less weight (moved)",
    "rejected: share of the eligible tokens and sequences; cut: share of tokens whose weight was cut to a bound",
    "mean w: mean applied weight over n; moved: |applied - raw weight| as a share of the raw weight mass",
    "n: out = a rejected token leaves n; 0 = it stays in n with weight 0 (and pulls mean w down)",
    "KL in, KL out: k3 estimate of KL(rollout || train) over the tokens that keep a weight, and over the rejected ones",
    "k-hat: tail of the sequences' mean applied weights, ! = above the level where an estimate from so many can be trusted",
)


def sweep_table(policies: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row a policy, in the order given."""
    short, remarks = _short_names(policies)
    rows = [_row(short[policy["name"]], policy, policy["total"], policy.get("front", False)) for policy in policies]
    return Table(title, (Column("  policy", "left"), *_columns()), tuple(rows), (*remarks, *REMARKS))


def _short_names(policies: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Long specs are numbered and written out below the table: they would push the figures off the screen."""
    short: dict[str, str] = {}
    remarks: list[str] = []
    for policy in policies:
        name = policy["name"]
        short[name] = name
        if len(name) > _LONGEST_NAME:
            short[name] = f"spec {len(remarks) + 1}"
            remarks.append(f"{short[name]}: {name}")
    return short, tuple(remarks)


def step_tables(policies: Sequence[Mapping[str, Any]]) -> list[Table]:
    """One table a policy, one row a step."""
    out = []
    for policy in policies:
        steps = sorted(policy["steps"].items(), key=lambda item: int(item[0]))
        rows = [_row(step, policy, total, False) for step, total in steps]
        mark = " *" if policy.get("front") else ""
        out.append(Table(f"{policy['name']}{mark} by step", (Column("  step", "left"), *_columns()), tuple(rows)))
    return out


def _columns() -> tuple[Column, ...]:
    columns = [Column(header, group=_GROUPS.get(header, ""), drop=drop) for header, _, drop in _COLUMNS]
    return (Column("n", "left"), *columns)


def _row(name: str, policy: Mapping[str, Any], total: Mapping[str, Any], front: bool) -> tuple[Cell, ...]:
    where = {"none rejected": "", "leaves n": "out", "stays in n as 0": "0"}.get(policy["rejected"], "both")
    cells = [cell(f"{'*' if front else ' '} {name}", name), cell(where)]
    for header, key, _ in _COLUMNS:
        statistic = Statistic.from_dict(total["figures"][key])
        text = figure(statistic.value)
        if header == "k-hat" and statistic.value is not None and statistic.value > reliable_below(statistic.n):
            text += "!"
        cells.append(Cell(text, statistic.value))
    return tuple(cells)


def policy_tables(summary: Summary) -> list[Table]:
    """What the policy of the ``corrected`` view took out, with both denominators; nothing without a policy."""
    policy = summary.extra.get("policy")
    if not isinstance(policy, Mapping) or "total" not in policy:
        return []
    counts, figures = policy["total"]["counts"], policy["total"]["figures"]
    if not counts or not counts["tokens"]:
        return [Table(f"policy {policy['name']}: no valid tokens to judge", (), ())]
    tokens, rows = counts["tokens"], counts["sequences"]
    positions, segments = counts["positions"], counts["segments"]
    lines = [
        ("masked out (leave n)", counts["tokens_masked"], counts["sequences_masked"]),
        ("zeroed (stay in n, weight 0)", counts["tokens_zeroed"], counts["sequences_zeroed"]),
        ("weight cut to a bound", counts["tokens_changed"], counts["sequences_changed"]),
        (
            "survive",
            tokens - counts["tokens_masked"] - counts["tokens_zeroed"],
            rows - counts["sequences_masked"] - counts["sequences_zeroed"],
        ),
    ]
    body = [_shares(*line, tokens, positions, rows, segments) for line in lines]
    for rule in policy["total"]["by_rule"]:
        body.append(
            _shares(f"rule: {rule['rule']}", rule["tokens"], rule["sequences"], tokens, positions, rows, segments)
        )
    kept, lost = (Statistic.from_dict(figures[key]) for key in ("kept_k3_kl", "rejected_k3_kl"))
    remarks = [
        f"judged under mask {policy.get('mask', 'response_mask')}; {policy['words'][0]}",
        f"of {count(tokens)} eligible tokens ({count(positions)} positions), {count(rows)} sequences ({count(segments)} segments)",
        f"k3 KL(rollout || train): survivors {figure(kept.value)}, rejected {figure(lost.value)}"
        + (f" ({lost.why})" if lost.value is None else ""),
    ]
    if policy["total"]["by_rule"]:
        remarks.append("a rule's row counts what it alone rejects; a sequence counts as soon as one of its tokens is")
    columns = (
        Column("what", "left", wrap=True),
        Column("tokens", drop=1),
        Column("of eligible", group="tokens"),
        Column("of all", group="tokens"),
        Column("sequences", drop=2),
        Column("of eligible", group="sequences"),
        Column("of all", group="sequences"),
    )
    return [
        Table(f"policy {policy['name']}: what it takes out, before what is left", columns, tuple(body), tuple(remarks))
    ]


def _shares(
    what: str, tokens: int, rows: int, all_tokens: int, positions: int, all_rows: int, segments: int
) -> tuple[Cell, ...]:
    def share(part: int, whole: int) -> Cell:
        return Cell(percent(part, whole), part / whole if whole else None)

    return (
        cell(what),
        Cell(count(tokens), tokens),
        share(tokens, all_tokens),
        share(tokens, positions),
        Cell(count(rows), rows),
        share(rows, all_rows),
        share(rows, segments),
    )
