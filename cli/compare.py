"""``rollout-is compare``: runs against each other, or the views, masks and scoring passes of one dump."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from rollout_is.analysis.catalog import catalog, lookup
from rollout_is.analysis.compare.result import Comparison
from rollout_is.analysis.compare.rows import ALPHA, HEADLINE
from rollout_is.analysis.compare.runs import SERIES, PairTests, compare_runs, refuse_differences
from rollout_is.analysis.compare.saved import is_saved
from rollout_is.analysis.compare.steps import BLOCK
from rollout_is.analysis.compare.views import compare_views
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import VIEWS
from rollout_is.cli import options as o
from rollout_is.cli.load import Loaded, Loader, label_of
from rollout_is.cli.output import check_output, write_result
from rollout_is.cli.render import compare as render
from rollout_is.cli.render.terminal import detect, for_file
from rollout_is.dumps.errors import UsageError


def command(
    sides: Annotated[
        list[str],
        typer.Argument(metavar="A [B ...]", help="dumps, saved summaries, or label=path; each against the first"),
    ],
    views: Annotated[
        str | None,
        typer.Option("--views", metavar="A,B", help="two views of one dump [default with one side: unmasked,masked]"),
    ] = None,
    masks: Annotated[str | None, typer.Option("--masks", metavar="A,B", help="two masks of one dump")] = None,
    logprobs: Annotated[
        str | None,
        typer.Option(
            "--logprobs", metavar="A,B[,C]", help="scoring passes of one dump: the odd one out, the noise floor"
        ),
    ] = None,
    view: Annotated[str, typer.Option("--view", help=f"of both sides: {' '.join(VIEWS)}")] = "masked",
    stat: Annotated[
        list[str] | None,
        typer.Option("--stat", metavar="NAME", help="only these statistics (repeatable, explain's names)"),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="every statistic (more rows, so a milder change passes for noise)")
    ] = False,
    alpha: Annotated[float, typer.Option("--alpha", help="level of the corrected tests")] = ALPHA,
    block: Annotated[int, typer.Option("--block", min=1, help="steps a block of the block means")] = BLOCK,
    strict: Annotated[
        bool, typer.Option("--strict", help="refuse when settings differ that bear on the figures")
    ] = False,
    unpaired: Annotated[
        bool, typer.Option("--unpaired", help="independent samples, even where sequences are the same")
    ] = False,
    ignore_steps: Annotated[bool, typer.Option("--ignore-steps", help="compare although no step is common")] = False,
    lower: o.Lower = None,
    upper: o.Upper = 2.0,
    veto_lower: o.VetoLower = None,
    veto_upper: o.VetoUpper = None,
    steps: o.Steps = None,
    mask: o.Mask = "response_mask",
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
    """Compare runs, or the views, masks or scoring passes of one dump: figures with their errors, the change, ~ for noise.

    Exit code 1 when nothing can be compared; a change, however large, is no failure here (that is check's business).
    """
    settings = o.settings_from(
        lower=lower,
        upper=upper,
        veto_lower=veto_lower,
        veto_upper=veto_upper,
        mask=mask,
        by=["step"],
        device=device,
    )
    if not 0 < alpha < 1:
        raise UsageError(f"--alpha {alpha}", f"expected a level between 0 and 1, found {alpha}", fix="--alpha 0.05")
    o.choices("--view", [view], VIEWS)
    check_output(output, force)
    loader = Loader(
        columns=o.parse_columns(column),
        steps=steps,
        allow_partial=allow_partial,
        duplicates=None if duplicates is None else duplicates.value,
        workers=workers,
        quiet=quiet,
    )
    paths = _paths(stat, all_)
    within = _within(sides, views, masks, logprobs)
    if within == "masks":
        comparison = _masks(sides[0], _names("--masks", masks), loader, settings, view, paths, alpha, block)
    elif within == "logprobs":
        comparison = _passes(sides[0], _names("--logprobs", logprobs), loader, settings, view, alpha, block)
    elif within == "views":
        chosen = _names("--views", views or "unmasked,masked")
        for name in chosen:
            o.choices("--views", [name], VIEWS)
        label, path = label_of(sides[0])
        comparison = compare_views(loader.summary(path, settings), chosen, paths, label)
    else:
        comparison = _runs(sides, loader, settings, view, paths, alpha, block, ignore_steps, not unpaired)
    if strict:
        refuse_differences(comparison)
    write_result(_rendered(comparison, format_, output is not None, color), output, force)
    return 0


def _within(sides: Sequence[str], views: str | None, masks: str | None, logprobs: str | None) -> str | None:
    given = [name for name, value in (("views", views), ("masks", masks), ("logprobs", logprobs)) if value is not None]
    if len(given) > 1:
        raise UsageError(
            " ".join(f"--{name}" for name in given),
            "expected one of --views, --masks and --logprobs, found several",
            "each of them is a comparison of its own",
            f"leave out all but --{given[0]}",
        )
    if given and len(sides) > 1:
        raise UsageError(
            " ".join(sides),
            f"expected one dump with --{given[0]}, found {len(sides)}",
            f"--{given[0]} compares within one dump",
            f"rollout-is compare {sides[0]} --{given[0]} ...",
        )
    return given[0] if given else "views" if len(sides) == 1 else None


def _names(option: str, value: str | None) -> list[str]:
    names = list(dict.fromkeys(o.split_names([value or ""])))
    if len(names) < 2:
        raise UsageError(
            f"{option} {value}",
            f"expected two different names A,B, found {value!r}",
            "the first is what the others are compared with",
            f"such as {option} {'unmasked,masked' if option == '--views' else 'A,B'}",
        )
    return names


def _paths(stat: Sequence[str] | None, everything: bool) -> tuple[str, ...]:
    if everything:
        return tuple(f"{section}.{name}" for section, name in catalog())
    if not stat:
        return HEADLINE
    paths = []
    for name in o.split_names(stat):
        entry = lookup(name)
        if entry is None:
            import difflib

            known = sorted({name for _, name in catalog()} | {f"{section}.{name}" for section, name in catalog()})
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(
                f"--stat {name}",
                f"expected the name of one statistic, found {name!r}",
                "a name that several levels have needs its level: token.rollout_is_mean",
                f"did you mean {near[0]}?" if near else "rollout-is explain lists all names",
            )
        paths.append(entry.path)
    return tuple(dict.fromkeys(paths))


def _runs(
    specs: Sequence[str],
    loader: Loader,
    settings: Settings,
    view: str,
    paths: Sequence[str],
    alpha: float,
    block: int,
    ignore_steps: bool,
    pair_up: bool,
) -> Comparison:
    named = _distinct([label_of(spec) for spec in specs])
    loaded = [loader.with_sequences(path, settings) for _, path in named]
    labels = [label for label, _ in named]
    sides = [one.side(label) for label, one in zip(labels, loaded, strict=True)]
    tests = _tests(labels, loaded, view, same_dump=False) if pair_up else None
    comparison = compare_runs(
        sides, view=view, paths=paths, tests=tests, alpha=alpha, block=block, ignore_steps=ignore_steps
    )
    comparison = _with_overlays(comparison, loaded)
    too_many = [
        label for label, one in zip(labels, loaded, strict=True) if one.histogram is not None and one.sequences is None
    ]
    if too_many and pair_up:
        note = f"too many sequences to look for pairs in {', '.join(too_many)}: tested as independent samples"
        pairs = tuple(replace(pair, notes=(*pair.notes, note)) for pair in comparison.pairs)
        comparison = replace(comparison, pairs=pairs)
    return comparison


def _tests(labels: Sequence[str], loaded: Sequence[Loaded], view: str, same_dump: bool) -> list[PairTests | None]:
    """A test from the sequences of every pair that has them; the sums are those of the masked view."""
    first = loaded[0].sequences
    if first is None or view != "masked":
        return [None] * (len(loaded) - 1)
    from rollout_is.analysis.compare.paired import join, paired_tests

    tests: list[PairTests | None] = []
    for label, other in zip(labels[1:], loaded[1:], strict=True):
        joined = None if other.sequences is None else join(first, other.sequences, (labels[0], label), same_dump)
        tests.append(None if joined is None else paired_tests(joined, view))
    return tests


def _with_overlays(comparison: Comparison, loaded: Sequence[Loaded]) -> Comparison:
    first = loaded[0].histogram
    if first is None:
        return comparison
    from rollout_is.analysis.compare.overlay import EDGES, Overlay

    pairs = tuple(
        pair if other.histogram is None else replace(pair, overlay=Overlay(EDGES, first, other.histogram))
        for pair, other in zip(comparison.pairs, loaded[1:], strict=True)
    )
    return replace(comparison, pairs=pairs)


def _masks(
    spec: str,
    names: Sequence[str],
    loader: Loader,
    settings: Settings,
    view: str,
    paths: Sequence[str],
    alpha: float,
    block: int,
) -> Comparison:
    _, path = label_of(spec)
    chosen = [replace(settings, mask=name.removeprefix("mask.")) for name in names]
    comparison, _ = _same_dump(
        path, names, chosen, loader, view, paths, alpha, block, {"settings.mask", "columns.mask", "dtypes.mask"}
    )
    return replace(comparison, kind="masks")


def _passes(
    spec: str, names: Sequence[str], loader: Loader, settings: Settings, view: str, alpha: float, block: int
) -> Comparison:
    from rollout_is.analysis.compare.passes import PASS_PATHS, judge, pass_pairs

    _, path = label_of(spec)
    pairs = pass_pairs([name.removeprefix("logprobs.") for name in names])
    if len(pairs) < 2:
        raise UsageError(
            f"--logprobs {','.join(names)}",
            "expected a scoring pass beside train and rollout, found none",
            "train against rollout alone is what analyze shows",
            "name a logprobs.NAME column, such as --logprobs train,train_again",
        )
    labels = [f"{a} | {b}" for a, b in pairs]
    chosen = [replace(settings, train=a, rollout=b) for a, b in pairs]
    expected = {f"{part}.{key}" for part in ("settings", "columns", "dtypes") for key in ("train", "rollout")}
    comparison, loaded = _same_dump(path, labels, chosen, loader, view, PASS_PATHS, alpha, block, expected, ())
    summaries = {pair: one.summary for pair, one in zip(pairs, loaded, strict=True)}
    verdict, extra = judge(summaries)
    return replace(comparison, kind="logprobs", verdict=verdict, extra=extra)


def _same_dump(
    path: str,
    labels: Sequence[str],
    chosen: Sequence[Settings],
    loader: Loader,
    view: str,
    paths: Sequence[str],
    alpha: float,
    block: int,
    expected: set[str],
    series: Sequence[str] = SERIES,
) -> tuple[Comparison, list[Loaded]]:
    """Several analyses of one dump, tested pair by pair: every sequence is on both sides."""
    if is_saved(path):
        raise UsageError(
            path,
            "expected a dump, found a saved summary",
            "a saved summary holds the figures of one mask and one pair of scoring passes",
            "name the dump itself",
            code="compare-needs-dump",
        )
    loaded = [loader.with_sequences(path, settings) for settings in chosen]
    sides = [one.side(label) for label, one in zip(labels, loaded, strict=True)]
    tests = _tests(labels, loaded, view, same_dump=True)
    comparison = compare_runs(
        sides, view=view, paths=paths, series=series, tests=tests, alpha=alpha, block=block, expected=expected
    )
    return _with_overlays(comparison, loaded), loaded


def _distinct(named: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Labels that tell the sides apart: where two are alike, the paths."""
    labels = [label for label, _ in named]
    if len(set(labels)) < len(labels):
        labels = [path for _, path in named]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({index})" for index, label in enumerate(labels, 1)]
    return [(label, path) for label, (_, path) in zip(labels, named, strict=True)]


def _rendered(comparison: Comparison, format_: o.Format, to_file: bool, color: o.Color) -> str:
    if format_ is o.Format.json:
        return json.dumps(comparison.to_dict(), indent=1, allow_nan=False) + "\n"
    if format_ is o.Format.csv:
        return render.to_csv(comparison)
    if format_ is o.Format.markdown:
        return render.to_md(comparison)
    return render.to_text(comparison, for_file() if to_file else detect(sys.stdout, color.value))
