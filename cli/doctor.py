"""``rollout-is doctor``: what is wrong with the log-probs of a dump, with evidence."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_is.analysis.compare.saved import is_saved
from rollout_is.cli import options as o
from rollout_is.cli.output import check_output, remark, runtime_line, write_result
from rollout_is.cli.progress import Progress
from rollout_is.cli.render import doctor as render
from rollout_is.cli.render.terminal import detect, for_file
from rollout_is.dumps.errors import UsageError

if TYPE_CHECKING:
    from rollout_is.analysis.doctor import Diagnosis

NOTHING_VALID = FOUND = 1


class FailOn(StrEnum):
    """From which severity on the exit code is 1."""

    error = "error"
    warning = "warning"
    notice = "notice"


Shards = Annotated[list[str], typer.Argument(metavar="DUMP...", help="folders, files or globs of shards")]


def command(
    dump: Shards,
    steps: o.Steps = None,
    mask: o.Mask = "response_mask",
    logprobs: o.Logprobs = None,
    column: o.Columns = None,
    fail_on: Annotated[
        FailOn | None, typer.Option("--fail-on", help="exit 1 when something of this severity or worse is found")
    ] = None,
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
    """What is wrong with these log-probs: shifts, temperatures, placeholders, copies, bad ranks, each with its evidence.

    Exit code 0 whatever is found, unless --fail-on says otherwise; 1 when no token is valid, 3 when the dump cannot be read.
    """
    settings = o.settings_from(mask=mask, logprobs=logprobs, device=device)
    columns = o.parse_columns(column)
    check_output(output, force)
    for path in dump:
        if is_saved(path):
            raise UsageError(
                path,
                "expected a dump, found a saved summary",
                "the doctor looks at tokens, and a summary holds figures only",
                "name the dump that the summary was made of",
                code="doctor-saved",
            )

    from rollout_is.analysis.doctor import run  # imports torch

    with Progress(enabled=not quiet) as progress:
        found = run(
            dump,
            settings=settings,
            columns=columns,
            steps=steps,
            allow_partial=allow_partial,
            duplicates=None if duplicates is None else duplicates.value,
            workers=workers,
            local=local,
            progress=progress,
        )
    if not _prints():
        return 0
    if verbose:
        remark(f"shards read: {found.summary.coverage.get('shards', 0)}; {runtime_line(found.summary.runtime)}", quiet)
    write_result(_rendered(found, format_, output, color), output, force)
    if not found.summary.comparable:
        return NOTHING_VALID
    return FOUND if fail_on is not None and found.at_least(fail_on.value) else 0


def _prints() -> bool:
    """Under torchrun every rank holds the result and rank 0 prints it."""
    import os

    return int(os.environ.get("RANK", "0")) == 0


def _rendered(found: Diagnosis, format_: o.Format, output: Path | None, color: o.Color) -> str:
    if format_ is o.Format.json:
        return json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n"
    if format_ is o.Format.markdown:
        return render.markdown(found.findings, found.summary.coverage)
    if format_ is o.Format.csv:
        return render.csv(found.findings)
    terminal = for_file() if output is not None else detect(sys.stdout, color.value)
    return render.text(found.findings, found.summary.coverage, terminal)
