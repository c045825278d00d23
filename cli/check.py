"""``rollout-is check``: hold a dump or a saved summary against limits and a baseline, for CI."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollout_is.analysis.compare.saved import read_saved
from rollout_is.analysis.gate.baseline import DEFAULT_MARGIN, baseline_limits, check_margin
from rollout_is.analysis.gate.builtin import with_builtin
from rollout_is.analysis.gate.config import GateConfig, find_config, load_config
from rollout_is.analysis.gate.evaluate import Verdict, evaluate
from rollout_is.analysis.gate.limits import Limit
from rollout_is.analysis.summary import Summary
from rollout_is.cli import options as o
from rollout_is.cli.github import workflow_commands, write_step_summary
from rollout_is.cli.junit import to_junit
from rollout_is.cli.load import Loader
from rollout_is.cli.output import check_output, remark, write_result
from rollout_is.cli.render import gate as render
from rollout_is.cli.render.terminal import detect, for_file
from rollout_is.dumps.errors import UsageError

SCHEMA = "rollout-is/check/1"


def command(
    dump: o.Dump,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="summary of a known-good run (rollout-is baseline)"),
    ] = None,
    limits: Annotated[
        Path | None,
        typer.Option("--limits", metavar="FILE", help="TOML [default: rollout-is.toml or pyproject.toml, upwards]"),
    ] = None,
    margin: Annotated[
        float, typer.Option("--margin", help="with a baseline and no limits of your own: how far figures may move")
    ] = DEFAULT_MARGIN,
    strict: Annotated[bool, typer.Option("--strict", help="broken limits of severity warning fail too")] = False,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="report, but exit 0 whatever the limits say")] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="JUnit XML, one testcase a limit (overwritten)")
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="annotations and the step summary of GitHub Actions")
    ] = False,
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
    format_: o.FormatOption = o.Format.table,
    output: o.Output = None,
    force: o.Force = False,
    device: o.Device = "cpu",
    workers: o.Workers = None,
    color: o.ColorOption = o.Color.auto,
    quiet: o.Quiet = False,
) -> int:
    """Hold a dump or a saved summary against limits; exit code 1 when one is broken or could not be evaluated.

    Without any configuration a built-in set applies: valid tokens, all of them finite, none of them placeholders.
    """
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
    check_margin(margin)
    check_output(output, force)
    check_output(junit, force=True, option="--junit")
    config = _config(limits)
    reference = _baseline(baseline, config)
    chosen = _limits(config, reference, baseline, margin)
    loader = Loader(
        columns=columns,
        steps=steps,
        allow_partial=allow_partial,
        duplicates=None if duplicates is None else duplicates.value,
        workers=workers,
        quiet=quiet,
    )
    summary = loader.summary(dump, settings, doctor=any(limit.statistic.startswith("findings.") for limit in chosen))
    verdict = evaluate(summary, chosen, reference, strict=strict)
    write_result(_rendered(verdict, format_, output is not None, color), output, force)
    if junit is not None:
        write_result(to_junit(verdict), junit, force=True, option="--junit")
    if github:
        # GitHub reads commands from either stream; a JSON or CSV result must stay whole
        stream = sys.stdout if format_ is o.Format.table and output is None else sys.stderr
        stream.write(workflow_commands(verdict))
        write_step_summary(render.to_md(verdict))
    if not config.limits and reference is None:
        remark("no limits configured: only the built-in set was checked (rollout-is baseline writes more)", quiet)
    # Nothing comparable never exits 0 (METRICS.md, invariant 9), whatever was asked for.
    return 0 if verdict.passed or (exit_zero and summary.comparable) else 1


def _config(limits: Path | None) -> GateConfig:
    path = limits if limits is not None else find_config(Path.cwd())
    return GateConfig() if path is None else load_config(_shown(path))


def _shown(path: Path) -> Path:
    """The path as seen from here, which is what annotations and people need."""
    try:
        return path.relative_to(Path.cwd()) if path.is_absolute() else path
    except ValueError:
        return path


def _baseline(option: Path | None, config: GateConfig) -> Summary | None:
    path = str(option) if option is not None else config.baseline
    if path is None:
        return None
    if Path(path).is_dir() or Path(path).suffix == ".safetensors":
        raise UsageError(
            f"--baseline {path}",
            "expected a saved summary, found a dump",
            "a baseline is kept as figures, so that CI needs no old dump",
            f"rollout-is baseline {path} -o main.json",
            code="baseline-is-dump",
        )
    return read_saved(path)


def _limits(config: GateConfig, reference: Summary | None, option: Path | None, margin: float) -> tuple[Limit, ...]:
    limits = config.limits
    if not limits and reference is not None:
        limits = baseline_limits(reference, margin, str(option or config.baseline))
    return with_builtin(limits) if config.builtin else limits


def _rendered(verdict: Verdict, format_: o.Format, to_file: bool, color: o.Color) -> str:
    if format_ is o.Format.json:
        data = {
            "schema": SCHEMA,
            "passed": verdict.passed,
            "strict": verdict.strict,
            "verdict": render.headline(verdict),
            "limits": [outcome.to_dict() for outcome in verdict.outcomes],
            "notes": list(verdict.notes),
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"
    if format_ is o.Format.csv:
        return render.to_csv_text(verdict)
    if format_ is o.Format.markdown:
        return render.to_md(verdict)
    return render.to_text(verdict, for_file() if to_file else detect(sys.stdout, color.value))
