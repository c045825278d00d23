"""``rollout-is analyze``: the tables of one dump, before and after masking."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rollout_is.analysis.compare.saved import is_saved, read_saved
from rollout_is.analysis.summary import VIEWS, Summary
from rollout_is.cli import options as o
from rollout_is.cli.corrections import AsOption, AuditOption, NoteAbove, PolicyOption, prepare
from rollout_is.cli.output import check_output, remark, runtime_line, write_result
from rollout_is.cli.progress import Progress
from rollout_is.cli.render import report
from rollout_is.cli.render.terminal import detect, for_file
from rollout_is.cli.render.views import LEVELS
from rollout_is.dumps.errors import UsageError

NOTHING_VALID = 1


def command(
    dump: o.Dump,
    view: Annotated[list[str] | None, typer.Option("--view", help=f"only these: {' '.join(VIEWS)}")] = None,
    level: Annotated[list[str] | None, typer.Option("--level", help=f"only these: {' '.join(LEVELS)}")] = None,
    lower: o.Lower = None,
    upper: o.Upper = 2.0,
    veto_lower: o.VetoLower = None,
    veto_upper: o.VetoUpper = None,
    steps: o.Steps = None,
    mask: o.Mask = "response_mask",
    logprobs: o.Logprobs = None,
    column: o.Columns = None,
    by: o.By = None,
    top: o.Top = 0,
    only: o.Only = None,
    policy: PolicyOption = None,
    as_: AsOption = None,
    audit: AuditOption = False,
    note_above: NoteAbove = 0.1,
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
    verbose: o.Verbose = False,
) -> int:
    """Importance weights and train/rollout mismatch of a dump, before and after masking.

    Exit code 1 when no token is valid, 3 when the dump cannot be read.
    """
    views, levels = o.choices("--view", view, VIEWS), o.choices("--level", level, LEVELS)
    settings = o.settings_from(
        lower=lower,
        upper=upper,
        veto_lower=veto_lower,
        veto_upper=veto_upper,
        mask=mask,
        logprobs=logprobs,
        by=by,
        top=top,
        only=only,
        device=device,
    )
    columns = o.parse_columns(column)
    check_output(output, force)
    extras = prepare(policy, as_, audit, settings, note_above)
    if len(dump) == 1 and is_saved(dump[0]):
        _refuse_for_saved(dump[0], settings != o.settings_from(), columns or steps or extras.consumers)
        return _report(read_saved(dump[0]), views, levels, format_, output, force, color)

    from rollout_is.analysis.pipeline import analyze  # imports torch

    with Progress(enabled=not quiet) as progress:
        summary = analyze(
            dump,
            settings=extras.settings,
            columns=columns,
            steps=steps,
            allow_partial=allow_partial,
            duplicates=None if duplicates is None else duplicates.value,
            workers=workers,
            local=local,
            progress=progress,
            consumers=extras.consumers,
        )
    summary = extras.finish(summary)
    if verbose:
        remark(runtime_line(summary.runtime), quiet)
    return _report(summary, views, levels, format_, output, force, color)


def _report(
    summary: Summary,
    views: Sequence[str],
    levels: Sequence[str],
    format_: o.Format,
    output: Path | None,
    force: bool,
    color: o.Color,
) -> int:
    summary = report.choose(with_findings(summary), views, levels)
    write_result(rendered(summary, format_, output is not None, color), output, force)
    return 0 if summary.comparable else NOTHING_VALID


def _refuse_for_saved(path: str, other_settings: bool, selection: object) -> None:
    """A saved summary holds figures, not tokens: nothing can be computed again from it."""
    if other_settings or selection:
        raise UsageError(
            path,
            "expected a dump for options that change the figures, found a saved summary",
            "a summary holds figures, not tokens; only --view, --level and --format can choose among them",
            "analyze the dump again with these options",
            code="saved-settings",
        )


def with_findings(summary: Summary) -> Summary:
    """The summary with its verdict; one that already carries findings keeps them."""
    from rollout_is.analysis.findings import findings

    return summary if summary.findings else replace(summary, findings=findings(summary))


def rendered(summary: Summary, format_: o.Format, to_file: bool = False, color: o.Color = o.Color.auto) -> str:
    """A summary in one of the formats, for stdout or for a file."""
    if format_ is o.Format.json:
        return summary.to_json()
    if format_ is o.Format.csv:
        return report.to_csv(summary)
    if format_ is o.Format.markdown:
        return report.to_md(summary)
    terminal = for_file() if to_file else detect(sys.stdout, color.value)
    return report.to_text(summary, terminal)
