"""Compare summaries of runs: refuse what cannot be compared, list what differs in the settings, then the rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollout_is.analysis.compare.result import Comparison, Pair, Row, Series
from rollout_is.analysis.compare.rows import ALPHA, HEADLINE, Tests, cluster_count, corrected, quantile_rows, rows_of
from rollout_is.analysis.compare.settings_diff import Difference, concerns, settings_differences
from rollout_is.analysis.compare.steps import BLOCK, is_real, step_series
from rollout_is.analysis.findings import shell_path
from rollout_is.analysis.summary import Group, Summary
from rollout_is.dumps.errors import RolloutIsError

SERIES = (
    "mismatch.mismatch_logprob_abs_diff",
    "mismatch.mismatch_k3_kl",
    "mismatch.mismatch_kl",
    "token.rollout_is_mean",
)


class NothingComparable(RolloutIsError):
    """Two sides without anything to compare: exit code 1, never a pass."""

    exit_code = 1


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        label: as shown.
        summary: its figures, grouped by step where steps are to be compared.
        clusters: how many clusters its standard errors rest on, where tokens were at hand; None takes its sequences.
    """

    label: str
    summary: Summary
    clusters: int | None = None


@dataclass(frozen=True)
class PairTests:
    """Tests from the sequences of two dumps: pooled by id, and by step and id.

    Attributes:
        matched: sequences that both sides hold.
        clusters: of the tests.
        notes: what a reader must know of the matching.
    """

    pooled: Tests
    by_step: Mapping[str, Tests]
    matched: int
    clusters: int
    notes: tuple[str, ...] = field(default=())


def compare_runs(
    sides: Sequence[Side],
    *,
    view: str = "masked",
    paths: Sequence[str] = HEADLINE,
    series: Sequence[str] = SERIES,
    tests: Sequence[PairTests | None] | None = None,
    alpha: float = ALPHA,
    block: int = BLOCK,
    ignore_steps: bool = False,
    expected: Collection[str] = (),
) -> Comparison:
    """Compare every side with the first.

    Args:
        sides: two or more.
        view: ``masked`` unless one wants to see what padding did.
        paths: statistics below the view; p-values are corrected over all rows that they give, of all pairs together.
        series: those that are compared step by step.
        tests: one entry a pair (sides 2, 3, ...), where the sequences are at hand.
        alpha: level of the corrected tests.
        block: steps a block of the block means.
        ignore_steps: compare pooled figures even where no step is common.
        expected: settings that differ by intent (``settings.mask`` when two masks are compared); they are not listed.

    Raises:
        NothingComparable: a side is empty, or both know their steps and share none.
    """
    first, others = sides[0], sides[1:]
    for side in sides:
        _refuse_empty(side, view)
    loose: list[list[Row]] = []
    for index, other in enumerate(others):
        if not ignore_steps:
            _refuse_disjoint(first, other)
        given = tests[index] if tests else None
        clusters = tuple(
            cluster_count(side.summary) if side.clusters is None else side.clusters for side in (first, other)
        )
        rows = rows_of(first.summary, other.summary, paths, view, given.pooled if given else None, clusters)
        _refuse_no_row(first, other, rows)
        loose.append(rows)
    flat = corrected([row for rows in loose for row in rows], alpha)
    pairs = []
    for index, other in enumerate(others):
        start = sum(len(rows) for rows in loose[:index])
        given = tests[index] if tests else None
        found = flat[start : start + len(loose[index])]
        pairs.append(_pair(first, other, found, view, given, alpha, block, frozenset(expected), series))
    return Comparison("runs", tuple(pairs), verdict_line(pairs), alpha)


def refuse_differences(comparison: Comparison) -> None:
    """Under ``--strict`` sides with different settings are not compared at all; metadata of unknown meaning is let pass.

    Raises:
        NothingComparable: a setting, column, dtype or known metadata differs; names the first and counts the rest.
    """
    for pair in comparison.pairs:
        grave = [difference for difference in pair.differences if difference.known]
        if grave:
            first, rest = grave[0], len(grave) - 1
            more = f" and {rest} more" if rest else ""
            raise NothingComparable(
                f"{pair.a} and {pair.b}",
                f"expected equal settings, found {first.key} {first.a} and {first.b}{more}",
                "--strict compares like with like only",
                "leave --strict out to see the differences and the figures side by side",
                code="compare-settings",
            )


def _pair(
    a: Side,
    b: Side,
    rows: tuple[Row, ...],
    view: str,
    tests: PairTests | None,
    alpha: float,
    block: int,
    expected: frozenset[str],
    series: Sequence[str],
) -> Pair:
    by_step = tests.by_step if tests else None
    found = (step_series(a.summary, b.summary, f"{view}.{path}", by_step, block, alpha) for path in series)
    differences = tuple(d for d in settings_differences(a.summary, b.summary) if d.key not in expected)
    return Pair(
        a.label,
        b.label,
        differences,
        tuple(_not_a_regression(row, differences) for row in rows),
        tuple(one for one in found if one is not None),
        quantile_rows(a.summary, b.summary, "token", view),
        (*_step_notes(a, b), *(tests.notes if tests else ())),
        tests.matched if tests else None,
        tests.clusters if tests else None,
    )


def _not_a_regression(row: Row, differences: Sequence[Difference]) -> Row:
    """Figures of another quantity are neither better nor worse, however far apart they are."""
    if row.verdict in ("better", "worse") and any(concerns(d, row.statistic) for d in differences):
        return replace(row, verdict="changed")
    return row


def _refuse_empty(side: Side, view: str) -> None:
    tokens = side.summary.coverage.get("valid_tokens")
    if tokens == 0 or (view == "unmasked" and side.summary.coverage.get("positions") == 0):
        raise NothingComparable(
            side.label,
            "expected valid tokens on both sides, found none on this one",
            "every position is masked, or the dump is empty",
            f"rollout-is inspect {shell_path(side.summary)}",
            code="compare-empty-side",
        )
    if view not in side.summary.views:
        raise NothingComparable(
            side.label,
            f"expected the view {view!r}, found {', '.join(side.summary.views) or 'none'}",
            "the summary was made without it",
            "analyze the dump again, or choose another --view",
            code="compare-no-view",
        )


def _refuse_no_row(a: Side, b: Side, rows: Sequence[Row]) -> None:
    if not any(row.change is not None for row in rows):
        found = f"none of {len(rows)}" if rows else "none at all"
        raise NothingComparable(
            f"{a.label} and {b.label}",
            f"expected a statistic with a value on both sides, found {found}",
            "one of the summaries was made with other options (--only weights), or its figures are null",
            "analyze both dumps with the same options, or choose statistics with --stat",
            code="compare-no-statistic",
        )


def _refuse_disjoint(a: Side, b: Side) -> None:
    left, right = _known_steps(a), _known_steps(b)
    if left and right and not set(left) & set(right):
        raise NothingComparable(
            f"{a.label} and {b.label}",
            f"expected common steps, found {_span(left)} and {_span(right)}",
            "the two sides cover different parts of training",
            "choose steps that both hold with --steps, or add --ignore-steps to compare the pooled figures all the same",
            code="compare-no-common-steps",
        )


def _known_steps(side: Side) -> dict[str, Group]:
    return {step: group for step, group in side.summary.groups.get("step", {}).items() if step != "unknown"}


def _step_notes(a: Side, b: Side) -> tuple[str, ...]:
    left, right = _known_steps(a), _known_steps(b)
    if not left or not right:
        missing = [side.label for side, steps in ((a, left), (b, right)) if not steps]
        return (f"no step series in {' and '.join(missing)}: not compared step by step (analyze with --by step)",)
    if set(left) != set(right):
        covered = f"{_span(left)} in {a.label}, {_span(right)} in {b.label}"
        return (f"the pooled figures cover different steps ({covered}); the series below compare the common ones",)
    return ()


def _span(steps: Mapping[str, object]) -> str:
    names = list(steps)
    return f"steps {', '.join(names)}" if len(names) <= 6 else f"steps {names[0]} to {names[-1]} ({len(names)})"


def verdict_line(pairs: Sequence[Pair]) -> str:
    """One line: what differs, from which step, or that nothing does."""
    sentences = []
    for pair in pairs:
        real = [row for row in pair.rows if is_real(row)]
        tested = sum(row.test is not None for row in pair.rows)
        if pair.defining:
            named = pair.defining[0]
            sentences.append(
                f"{pair.b} does not measure what {pair.a} does: {named.key} is {named.a} there and {named.b} here; "
                f"{len(real)} of {tested} tested figures differ, which is no regression until the settings agree"
            )
        elif not tested:
            sentences.append(f"{pair.b} against {pair.a}: nothing could be tested")
        elif not real:
            sentences.append(f"{pair.b} against {pair.a}: no real change in {tested} tested figures")
        else:
            sentences.append(f"{pair.b} against {pair.a}: {_counted(real)} of {tested} tested{_onset(pair.series)}")
    return "; ".join(sentences)


def _counted(rows: Sequence[Row]) -> str:
    words = []
    for verdict in ("worse", "better", "changed"):
        number = sum(row.verdict == verdict for row in rows)
        if number:
            words.append(f"{number} {verdict}")
    return ", ".join(words)


def _onset(series: Sequence[Series]) -> str:
    for one in series:
        if one.starts_at is not None:
            name = one.statistic.rpartition(".")[2]
            return f"; {name} differs from step {one.starts_at} on"
    return ""
