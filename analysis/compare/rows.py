"""Rows of a comparison: figures of both sides, the change, a test where one is valid, corrected over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rollout_is.analysis.compare.direction import direction, why_untested
from rollout_is.analysis.compare.result import Row, Test
from rollout_is.analysis.compare.tails import holm, t_two_sided, welch_df
from rollout_is.analysis.summary import Statistic, Summary

ALPHA = 0.05

# What a comparison shows unless asked for more: per row one question, so that Holm's correction stays mild.
HEADLINE: tuple[str, ...] = (
    "mismatch.mismatch_logprob_abs_diff",
    "mismatch.mismatch_k3_kl",
    "mismatch.mismatch_kl",
    "mismatch.mismatch_prob_abs_diff",
    "mismatch.mismatch_extreme_fraction",
    "mismatch.mismatch_log_ppl_abs_diff",
    "mismatch.mismatch_ppl_ratio",
    "mismatch.mismatch_training_ppl",
    "mismatch.mismatch_rollout_ppl",
    "mismatch.mismatch_prob_pearson",
    "mismatch.mismatch_logprob_abs_diff_max",
    "mismatch.mismatch_chi2_token",
    "mismatch.mismatch_chi2_seq",
    "token.rollout_is_mean",
    "token.rollout_is_eff_sample_size",
    "token.rollout_is_ratio_fraction_high",
    "token.rollout_is_ratio_fraction_low",
    "sequence.rollout_is_mean",
    "sequence.rollout_is_eff_sample_size",
    "geometric.rollout_is_mean",
    "per_sequence.rollout_is_seq_mean",
    "per_sequence.rollout_is_seq_min",
    "per_sequence.rollout_is_seq_max",
    "veto.rollout_is_veto_fraction",
)
QUANTILES = ("min", "p0_1", "p1", "p5", "p25", "p50", "p75", "p95", "p99", "p99_9", "max")

# id -> the test of its change, where the sequences of both sides are at hand
Tests = Mapping[str, Test]


def welch(a: Statistic, b: Statistic, clusters_a: int, clusters_b: int) -> Test | None:
    """Welch's t-test of two independent means with clustered standard errors.

    Args:
        a, b: figures with their standard errors.
        clusters_a, clusters_b: how many clusters (sequences or groups) each side has.

    Returns:
        None when a standard error is missing, both are 0, or a side has fewer than two clusters.

    >>> test = welch(Statistic(1.0, 10, 0.1), Statistic(1.5, 10, 0.1), 11, 11)
    >>> test.df, round(test.p, 4)
    (20.0, 0.0021)
    """
    if a.value is None or b.value is None or a.stderr is None or b.stderr is None:
        return None
    if min(clusters_a, clusters_b) < 2:
        return None
    stderr = math.hypot(a.stderr, b.stderr)
    if stderr == 0.0:
        return None
    df = welch_df(a.stderr, clusters_a, b.stderr, clusters_b)
    return Test("Welch t", stderr, df, t_two_sided((b.value - a.value) / stderr, df))


def make_row(
    statistic_id: str,
    a: Statistic,
    b: Statistic,
    sides: tuple[Summary, Summary],
    clusters: tuple[int, int],
    tests: Tests | None = None,
) -> Row:
    """One row, its test not yet corrected and its verdict not yet given.

    Args:
        statistic_id: with its view.
        a, b: the figures.
        sides: the summaries they come from.
        clusters: on either side.
        tests: tests from sequences at hand; they go before Welch's.
    """
    change = None if a.value is None or b.value is None else b.value - a.value
    why = why_untested(statistic_id, a, b, sides)
    test = None
    if why is None:
        test = (tests or {}).get(statistic_id) or welch(a, b, *clusters)
        if test is None:
            same = a.value == b.value
            why = "both sides are constant and equal" if same else "no spread on either side to test against"
            if min(clusters) < 2:
                why = "fewer than two clusters"
    same = a.value is not None and a.value == b.value
    return Row(statistic_id, a, b, change, test, why or "", "same" if same else "untested")


def corrected(rows: Sequence[Row], alpha: float = ALPHA) -> tuple[Row, ...]:
    """The rows with p-values corrected over all that are tested (Holm), and their verdicts.

    A row that is bit-equal on both sides stays ``same`` but counts in the correction: it was a question too.
    """
    tested = [index for index, row in enumerate(rows) if row.test is not None]
    adjusted = holm([row.test.p for row in rows if row.test is not None])
    out = list(rows)
    for index, p in zip(tested, adjusted, strict=True):
        row = out[index]
        assert row.test is not None
        verdict = row.verdict
        if verdict != "same":
            assert row.a.value is not None and row.b.value is not None
            verdict = direction(row.statistic, row.a.value, row.b.value) if p < alpha else "~"
        out[index] = replace(row, test=replace(row.test, p_corrected=p), verdict=verdict)
    return tuple(out)


def rows_of(
    a: Summary,
    b: Summary,
    paths: Iterable[str],
    view: str = "masked",
    tests: Tests | None = None,
    clusters: tuple[int, ...] | None = None,
) -> list[Row]:
    """Rows of the paths that either side holds, not yet corrected.

    Args:
        a, b: the summaries.
        paths: below the view, such as ``token.rollout_is_mean``.
        view: of both sides.
        tests: by id with the view.
        clusters: on either side; None takes the sequences.
    """
    count_a, count_b = clusters or (cluster_count(a), cluster_count(b))
    found = []
    for path in paths:
        statistic_id = f"{view}.{path}"
        left, right = a.get(statistic_id), b.get(statistic_id)
        if left is None and right is None:
            continue
        absent = Statistic(None, 0, why="not in this summary")
        found.append(make_row(statistic_id, left or absent, right or absent, (a, b), (count_a, count_b), tests))
    return found


def cluster_count(summary: Summary) -> int:
    """Clusters that the standard errors of a summary rest on: its groups where they were dumped, else its sequences."""
    for key in ("clusters", "groups", "sequences"):
        value = summary.coverage.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def quantile_rows(
    a: Summary, b: Summary, level: str = "token", view: str = "masked", view_b: str | None = None
) -> tuple[Row, ...]:
    """How each order statistic of the log-ratio shifts; extremes are the logs of the extreme weights.

    Args:
        a, b: the summaries.
        level: ``token``, ``sequence`` or ``geometric``.
        view: of both sides; ``view_b`` of the second where it is another.
    """
    found = []
    for name in QUANTILES:
        key = f"rollout_is_{name}" if name in ("min", "max") else f"log_ratio_{name}"
        left, right = a.get(f"{view}.{level}.{key}"), b.get(f"{view_b or view}.{level}.{key}")
        if left is None or right is None:
            continue
        if name in ("min", "max"):
            left, right = _log(left), _log(right)
        change = None if left.value is None or right.value is None else right.value - left.value
        verdict = "same" if change == 0 else "untested"
        why = left.why or right.why or "an order statistic"
        found.append(Row(f"{view}.{level}.{key}", left, right, change, None, why, verdict))  # type: ignore[arg-type]
    return tuple(found)


def _log(weight: Statistic) -> Statistic:
    value = weight.log_value
    if value is None and weight.value is not None and weight.value > 0:
        value = math.log(weight.value)
    return Statistic(value, weight.n, why=None if value is not None else weight.why or "no log")
