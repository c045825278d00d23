"""``rollout-is sweep``: what each correction would do to a dump, side by side, in one pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_is.analysis.policies.presets import parse_policy
from rollout_is.analysis.policies.rules import LEVELS
from rollout_is.analysis.policies.sweep import ACTIONS, DEFAULT, SCHEMA, check_levels, grid, order, parse_bounds
from rollout_is.cli import options as o
from rollout_is.cli.output import check_output, write_result
from rollout_is.cli.progress import Progress
from rollout_is.cli.render.coverage import coverage_lines
from rollout_is.cli.render.markup import escape, rows_to_csv, to_markdown
from rollout_is.cli.render.policies import step_tables, sweep_table
from rollout_is.cli.render.report import labelled
from rollout_is.cli.render.terminal import detect, for_file
from rollout_is.cli.render.text import render
from rollout_is.dumps.errors import UsageError

if TYPE_CHECKING:
    from rollout_is.analysis.summary import Summary


def command(
    dump: o.Shards,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", metavar="NAME|SPEC", help="a preset or a spec (repeatable)")
    ] = None,
    level: Annotated[list[str] | None, typer.Option("--level", help=f"grid: {' '.join(LEVELS)}")] = None,
    action: Annotated[list[str] | None, typer.Option("--action", help=f"grid: {' '.join(ACTIONS)}")] = None,
    bounds: Annotated[
        list[str] | None, typer.Option("--bounds", metavar="LOWER:UPPER", help="grid (repeatable)")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="step", help="also how each would have done over the run")
    ] = None,
    steps: o.Steps = None,
    mask: o.Mask = "response_mask",
    logprobs: o.Logprobs = None,
    column: o.Columns = None,
    allow_partial: o.AllowPartial = False,
    duplicates: o.DuplicatesOption = None,
    format_: o.FormatOption = o.Format.table,
    output: o.Output = None,
    force: o.Force = False,
    device: o.Device = "cpu",
    workers: o.Workers = None,
    local: o.Local = False,
    color: o.ColorOption = o.Color.auto,
    quiet: o.Quiet = False,
) -> int:
    """What each correction policy would do: tokens and sequences rejected, effective sample size kept, bias, KL left.

    Without --policy or a grid: one policy of each kind in use. Exit code 1 when no token is valid.
    """
    if by not in (None, "step"):
        raise UsageError(
            f"--by {by}", f"expected step, found {by!r}", "policies are followed over the run", "--by step"
        )
    texts = list(policy or ())
    chosen = [parse_policy(text) for text in texts] + _grid(level, action, bounds)
    chosen = chosen or [parse_policy(name) for name in DEFAULT]
    twice = [p.name for i, p in enumerate(chosen) if p.name in [q.name for q in chosen[:i]]]
    if twice:
        raise UsageError(f"--policy {twice[0]}", f"expected each policy once, found {twice[0]!r} twice")
    settings = o.settings_from(mask=mask, logprobs=logprobs, only="weights", device=device)
    columns = o.parse_columns(column)
    check_output(output, force)

    from rollout_is.analysis.pipeline import analyze  # imports torch
    from rollout_is.analysis.policies.consumer import PolicyConsumer

    with Progress(enabled=not quiet) as progress:
        summary = analyze(
            dump,
            settings=settings,
            columns=columns,
            steps=steps,
            allow_partial=allow_partial,
            duplicates=None if duplicates is None else duplicates.value,
            workers=workers,
            local=local,
            progress=progress,
            consumers=[PolicyConsumer(chosen, "sweep")],
        )
    result = order(summary.extra["sweep"]["policies"])
    write_result(_rendered(summary, result, by == "step", format_, output is not None, color), output, force)
    return 0 if summary.comparable else 1


def _grid(level: list[str] | None, action: list[str] | None, bounds: list[str] | None) -> list[Any]:
    levels, actions = o.split_names(level), o.split_names(action)
    check_levels("--level", levels)
    check_levels("--action", actions, ACTIONS)
    pairs = [parse_bounds(text) for text in o.split_names(bounds)]
    if not (levels or actions or pairs):
        return []
    return grid(levels or list(LEVELS), actions or ["truncate", "mask"], pairs or [(0.5, 2.0)])


def _rendered(
    summary: Summary,
    policies: Sequence[Mapping[str, Any]],
    by_step: bool,
    format_: o.Format,
    to_file: bool,
    color: o.Color,
) -> str:
    title = f"what {len(policies)} policies would do, least weight moved first"
    if format_ is o.Format.json:
        kept = [p if by_step else {k: v for k, v in p.items() if k != "steps"} for p in policies]
        data = {
            "schema": SCHEMA,
            "source": dict(summary.source),
            "coverage": dict(summary.coverage),
            "settings": dict(summary.settings),
            "policies": kept,
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"
    if format_ is o.Format.csv:
        return _csv(policies, by_step)
    about = [
        (label, text.partition("; bounds")[0]) for label, text in coverage_lines(summary)
    ]  # a policy has its own bounds
    tables = [sweep_table(policies, title), *(step_tables(policies) if by_step else [])]
    if format_ is o.Format.markdown:
        head = "# rollout-is sweep\n\n" + "".join(f"- {a}: {escape(b)}\n" for a, b in about)
        return head + "\n" + "\n".join(to_markdown(table) for table in tables)
    terminal = for_file() if to_file else detect(sys.stdout, color.value)
    follow = f"next: rollout-is analyze {summary.source.get('root', 'DUMP')} --policy NAME; rollout-is explain NAME\n"
    return "\n".join([labelled(about, terminal), *(render(t, terminal) for t in tables), follow])


def _csv(policies: Sequence[Mapping[str, Any]], by_step: bool) -> str:
    """One row a policy and figure (and step)."""
    rows: list[list[float | int | str | None]] = []
    for policy in policies:
        places = [("", policy["total"]), *(policy["steps"].items() if by_step else ())]
        for step, total in places:
            for name, value in total["counts"].items():
                rows.append([policy["name"], step, name, value, None, None])
            for name, s in total["figures"].items():
                rows.append([policy["name"], step, name, s["value"], s["n"], s.get("why")])
        rows.append([policy["name"], "", "front", int(policy["front"]), None, None])
    return rows_to_csv(["policy", "step", "figure", "value", "n", "why"], rows)
