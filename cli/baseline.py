"""``rollout-is baseline``: reference figures and limits from a known-good run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rollout_is.analysis.gate.baseline import DEFAULT_MARGIN, baseline_limits, check_margin, limits_toml
from rollout_is.analysis.gate.builtin import with_builtin
from rollout_is.analysis.gate.evaluate import evaluate
from rollout_is.cli import options as o
from rollout_is.cli.load import Loader
from rollout_is.cli.output import check_output, remark, write_result
from rollout_is.cli.render.gate import headline, to_text
from rollout_is.cli.render.terminal import detect


def command(
    dump: o.Dump,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="the baseline, such as main.json")],
    limits_out: Annotated[
        Path | None, typer.Option("--limits-out", metavar="FILE", help="also write limits, such as rollout-is.toml")
    ] = None,
    margin: Annotated[
        float, typer.Option("--margin", help="how far figures may move: 0.5 is half of their distance from the ideal")
    ] = DEFAULT_MARGIN,
    lower: o.Lower = None,
    upper: o.Upper = 2.0,
    veto_lower: o.VetoLower = None,
    veto_upper: o.VetoUpper = None,
    steps: o.Steps = None,
    mask: o.Mask = "response_mask",
    logprobs: o.Logprobs = None,
    column: o.Columns = None,
    allow_partial: o.AllowPartial = False,
    duplicates: o.DuplicatesOption = None,
    force: o.Force = False,
    device: o.Device = "cpu",
    workers: o.Workers = None,
    quiet: o.Quiet = False,
) -> int:
    """Write the figures of a known-good run, and limits around them, for rollout-is check.

    A run that breaks the built-in limits is no baseline: exit code 1, nothing is written.
    """
    check_margin(margin)
    settings = o.settings_from(
        lower=lower,
        upper=upper,
        veto_lower=veto_lower,
        veto_upper=veto_upper,
        mask=mask,
        logprobs=logprobs,
        by=["step"],
        device=device,
    )
    columns = o.parse_columns(column)
    check_output(output, force)
    check_output(limits_out, force)
    loader = Loader(
        columns=columns,
        steps=steps,
        allow_partial=allow_partial,
        duplicates=None if duplicates is None else duplicates.value,
        workers=workers,
        quiet=quiet,
    )
    summary = loader.summary(dump, settings)
    sound = evaluate(summary, with_builtin([]))
    if not sound.passed:
        import sys

        sys.stderr.write("not a baseline: " + headline(sound) + "\n" + to_text(sound, detect(sys.stderr)))
        return 1
    limits = baseline_limits(summary, margin)
    write_result(summary.to_json(), output, force)
    if limits_out is not None:
        shown = os.path.relpath(output, limits_out.parent)
        write_result(limits_toml(limits, summary, Path(shown).as_posix()), limits_out, force)
    written = f"{output}" if limits_out is None else f"{output} and {limits_out} ({len(limits)} limits)"
    remark(f"wrote {written}; next: rollout-is check DUMP --baseline {output}", quiet)
    return 0
