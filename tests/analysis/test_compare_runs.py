"""Comparing summaries: what is tested and what not, settings first, steps, and refusals (C59, C78, C130)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from gate_summaries import ABS_DIFF, K3, TOKEN_MEAN, series, summary

from rollout_is.analysis.compare.result import Comparison, Row
from rollout_is.analysis.compare.runs import NothingComparable, Side, compare_runs, refuse_differences
from rollout_is.analysis.compare.settings_diff import settings_differences
from rollout_is.analysis.compare.views import compare_views
from rollout_is.analysis.summary import Statistic, Summary


def compare(a: Summary, b: Summary, **options: Any) -> Comparison:
    return compare_runs([Side("a", a), Side("b", b)], **options)


def row(comparison: Comparison, statistic: str) -> Row:
    return next(row for row in comparison.pairs[0].rows if row.statistic == statistic)


def test_a_real_change_noise_and_equal_figures() -> None:
    a = summary(
        {
            ABS_DIFF: Statistic(0.010, 10000, 0.001),
            K3: Statistic(1e-4, 10000, 1e-5),
            TOKEN_MEAN: Statistic(1.0, 10000, 1e-4),
        }
    )
    b = summary(
        {
            ABS_DIFF: Statistic(0.050, 10000, 0.001),
            K3: Statistic(1.1e-4, 10000, 1e-5),
            TOKEN_MEAN: Statistic(1.0, 10000, 1e-4),
        }
    )
    found = compare(a, b)
    assert {r.statistic: r.verdict for r in found.pairs[0].rows} == {ABS_DIFF: "worse", K3: "~", TOKEN_MEAN: "same"}
    assert row(compare(b, a), ABS_DIFF).verdict == "better"
    changed = row(found, ABS_DIFF)
    assert changed.change == pytest.approx(0.04)
    assert changed.test is not None
    assert changed.test.stderr == pytest.approx(0.001 * math.sqrt(2))
    assert changed.test.df == pytest.approx(126)  # two sides of 64 sequences each
    assert "no real change" not in found.verdict
    assert found.verdict == "b against a: 1 worse of 3 tested"


def test_p_values_are_corrected_for_the_rows() -> None:
    # z = 2.2 is a change alone (p = 0.03) and none among three rows
    a = summary({s: Statistic(0.0, 10000, 1.0) for s in (ABS_DIFF, K3, TOKEN_MEAN)})
    b = summary(
        {s: Statistic(2.2 * math.sqrt(2), 10000, 1.0) for s in (ABS_DIFF,)}
        | {s: Statistic(0.1, 10000, 1.0) for s in (K3, TOKEN_MEAN)}
    )
    alone = compare(a, b, paths=["mismatch.mismatch_logprob_abs_diff"])
    together = compare(a, b)
    assert row(alone, ABS_DIFF).verdict == "worse"
    assert row(together, ABS_DIFF).verdict == "~"
    lone, crowded = row(alone, ABS_DIFF).test, row(together, ABS_DIFF).test
    assert lone is not None and crowded is not None
    assert lone.p == crowded.p
    assert crowded.p_corrected == pytest.approx(3 * lone.p)


@pytest.mark.parametrize(
    ("statistic", "why"),
    [
        ("masked.mismatch.mismatch_logprob_abs_diff_max", "extreme"),
        ("masked.per_sequence.rollout_is_seq_min", "extreme"),
        ("masked.token.rollout_is_eff_sample_size", "ratio of weight sums"),
        ("masked.sequence.rollout_is_eff_sample_size", "ratio of weight sums"),
        ("masked.token.log_ratio_p99", "order statistic"),
        ("masked.sequence.pareto_k", "fit"),
        ("masked.mismatch.mismatch_chi2_seq", "chi-squared of products"),
        ("masked.mismatch.mismatch_prob_pearson", "no standard error"),
    ],
)
def test_no_test_is_claimed_where_none_is_valid(statistic: str, why: str) -> None:
    # a standard error that somebody wrote into the file does not make a test valid
    stderr = None if "pearson" in statistic else 1e-6
    shape = {"masked.sequence.pareto_k": Statistic(0.1, 64)}
    a, b = (summary(shape | {statistic: Statistic(value, 64, stderr)}) for value in (0.1, 0.9))
    found = compare(a, b, paths=[statistic.partition(".")[2]])
    only = row(found, statistic)
    assert (only.test, only.verdict) == (None, "untested")
    assert why in only.why
    assert "nothing could be tested" in found.verdict


@pytest.mark.parametrize(
    ("shape", "tested"),
    [
        (Statistic(0.2, 64), True),
        (Statistic(0.7, 64), False),
        (Statistic(None, 64, why="too few sequences"), False),
        (None, False),
    ],
)
def test_products_are_tested_only_where_the_tail_allows_it(shape: Statistic | None, tested: bool) -> None:
    mean = "masked.sequence.rollout_is_mean"
    figures = {} if shape is None else {"masked.sequence.pareto_k": shape}
    a, b = (summary(figures | {mean: Statistic(value, 64, 0.01)}) for value in (1.0, 2.0))
    assert (row(compare(a, b), mean).test is not None) is tested


def test_null_on_one_side_is_null_with_its_reason() -> None:
    k3 = {K3: Statistic(0.1, 9, 0.1)}
    a = summary(k3 | {ABS_DIFF: Statistic(0.1, 9, 0.1)})
    b = summary(k3 | {ABS_DIFF: Statistic(None, 0, why="no valid tokens")})
    only = row(compare(a, b), ABS_DIFF)
    assert (only.change, only.test, only.why) == (None, None, "no valid tokens")
    assert row(compare(a, summary(k3)), ABS_DIFF).why == "not in this summary"


def test_c59_another_logprob_mode_is_no_regression_and_stands_first() -> None:
    a = summary({ABS_DIFF: Statistic(0.01, 9999, 1e-5)}, source={"metadata": {"logprobs_mode": "raw"}})
    b = summary(
        {ABS_DIFF: Statistic(0.2, 9999, 1e-5)},
        source={"metadata": {"logprobs_mode": "processed"}, "dtypes": {"rollout": "BF16"}},
    )
    found = compare(a, b)
    assert [d.key for d in found.pairs[0].differences] == ["metadata.logprobs_mode", "dtypes.rollout"]
    assert [d.key for d in found.pairs[0].defining] == ["metadata.logprobs_mode"]
    assert row(found, ABS_DIFF).verdict == "changed"
    assert found.verdict.startswith(
        "b does not measure what a does: metadata.logprobs_mode is raw there and processed here"
    )
    with pytest.raises(NothingComparable, match="logprobs_mode raw and processed and 1 more"):
        refuse_differences(found)
    refuse_differences(compare(a, a))
    commit = summary(
        {ABS_DIFF: Statistic(0.01, 9999, 1e-5)}, source={"metadata": {"logprobs_mode": "raw", "commit": "abc"}}
    )
    assert [d.key for d in compare(a, commit).pairs[0].differences] == ["metadata.commit"]
    refuse_differences(compare(a, commit))  # shown, but nobody knows what it means


def test_a_dtype_alone_is_a_circumstance_and_a_regression_stays_one() -> None:
    a = summary(
        {ABS_DIFF: Statistic(0.01, 9999, 1e-5)},
        source={"dtypes": {"rollout": "F32"}, "metadata": {"rank": "0", "run": "x"}},
    )
    b = summary(
        {ABS_DIFF: Statistic(0.2, 9999, 1e-5)},
        source={"dtypes": {"rollout": "BF16"}, "metadata": {"rank": "1", "run": "y"}},
    )
    found = compare(a, b)
    assert [(d.key, d.defining) for d in found.pairs[0].differences] == [("dtypes.rollout", False)]
    assert row(found, ABS_DIFF).verdict == "worse"


def test_settings_that_only_show_or_place_are_no_difference() -> None:
    a = summary({}, settings={"by": ["step"], "top": 0, "device": "cpu"})
    b = summary({}, settings={"by": [], "top": 20, "device": "cuda"})
    assert settings_differences(a, b) == ()
    assert [d.key for d in settings_differences(a, summary({}, settings={"upper": 5.0, "by": []}))] == [
        "settings.upper"
    ]


def test_c78_product_and_geometric_chi2_have_their_own_rows() -> None:
    # 100 tokens of d = 0.05: the two conventions differ by five orders of magnitude under one trainer's name
    product, geometric = math.expm1(2 * 100 * 0.05), math.expm1(2 * 0.05)
    figures = {
        "masked.mismatch.mismatch_chi2_seq": Statistic(product, 1),
        "masked.mismatch.mismatch_chi2_geometric": Statistic(geometric, 1),
    }
    found = compare(
        summary(figures), summary(figures), paths=["mismatch.mismatch_chi2_seq", "mismatch.mismatch_chi2_geometric"]
    )
    assert [round(r.a.value or 0.0, 3) for r in found.pairs[0].rows] == [22025.466, 0.105]


STALE = {str(step): 0.010 if step < 5 else 0.100 for step in range(1, 13)}


def test_c130_the_step_at_which_a_lasting_difference_starts() -> None:
    before = series({step: 0.010 for step in STALE})
    found = compare(before, series(STALE))
    (one,) = found.pairs[0].series
    assert (one.starts_at, one.share_after, one.isolated) == ("5", 1.0, ())
    assert found.verdict == "b against a: 1 worse of 1 tested; mismatch_logprob_abs_diff differs from step 5 on"
    assert (one.median_a, one.median_b) == (0.010, 0.100)
    assert [(b.first, b.last) for b in one.blocks] == [("1", "8"), ("9", "12")]
    assert one.blocks[0].b == pytest.approx((4 * 0.010 + 4 * 0.100) / 8)


def test_c130_one_spike_is_no_lasting_difference() -> None:
    steps = {str(step): 0.010 for step in range(1, 21)}
    found = compare(series(steps), series(steps | {"9": 5.0}))
    (one,) = found.pairs[0].series
    assert (one.starts_at, one.isolated) == (None, ("9",))
    assert one.median_b == 0.010
    pooled = row(found, ABS_DIFF)
    assert pooled.b.value == pytest.approx(0.2595)  # the mean that the spike carries


def test_a_difference_from_the_first_step_starts_there() -> None:
    steps = {str(step): 0.010 for step in range(1, 7)}
    (one,) = compare(series(steps), series({step: 0.1 for step in steps})).pairs[0].series
    assert one.starts_at == "1"


def test_noise_starts_nowhere() -> None:
    a = series({str(s): 0.010 + 1e-5 * (s % 3) for s in range(1, 9)})
    b = series({str(s): 0.010 + 1e-5 * (s % 2) for s in range(1, 9)})
    (one,) = compare(a, b).pairs[0].series
    assert (one.starts_at, one.isolated) == (None, ())


def test_block_means_weigh_steps_by_their_tokens() -> None:
    def of(values: dict[str, tuple[float, int]]) -> Summary:
        return summary(
            {ABS_DIFF: Statistic(0.1, 100, 1e-3)},
            {step: {ABS_DIFF: Statistic(v, n, 1e-3)} for step, (v, n) in values.items()},
        )

    uneven = of({"1": (1.0, 1), "2": (0.0, 99), "3": (0.5, 7)})
    (one,) = compare(uneven, uneven, block=2).pairs[0].series
    assert [block.a for block in one.blocks] == [pytest.approx(0.01), 0.5]


def test_nothing_comparable_is_refused_with_the_reason() -> None:
    a = series({"1": 0.01, "2": 0.01})
    with pytest.raises(NothingComparable, match="found steps 1, 2 and steps 3, 4") as caught:
        compare(a, series({"3": 0.01, "4": 0.01}))
    assert caught.value.exit_code == 1
    assert row(compare(a, series({"3": 0.01, "4": 0.01}), ignore_steps=True), ABS_DIFF).verdict == "same"
    with pytest.raises(NothingComparable, match="found none on this one"):
        compare(a, summary({}, valid_tokens=0))
    with pytest.raises(NothingComparable, match="the view 'corrected'"):
        compare(a, a, view="corrected")
    with pytest.raises(NothingComparable, match="value on both sides, found none of 2"):
        compare(a, summary({K3: Statistic(0.1, 9, 0.1)}))
    nothing = Summary({}, {"valid_tokens": 5}, {}, {})
    with pytest.raises(NothingComparable, match="found none"):
        compare(a, nothing)


def test_a_dump_without_steps_is_not_one_with_other_steps() -> None:
    found = compare(series({"1": 0.01, "2": 0.01}), series({"unknown": 0.01}))
    assert "no step series in b" in found.pairs[0].notes[0]
    assert found.pairs[0].series == ()


def test_partly_common_steps_are_compared_and_said() -> None:
    found = compare(series({"1": 0.01, "2": 0.01}), series({"2": 0.01, "3": 0.01}))
    assert list(found.pairs[0].series[0].steps) == ["2"]
    assert found.pairs[0].notes == (
        "the pooled figures cover different steps (steps 1, 2 in a, steps 2, 3 in b); the series below compare the common ones",
    )
    without = compare(series({"1": 0.01}), summary({ABS_DIFF: Statistic(0.01, 9, 1e-3)}))
    assert without.pairs[0].notes == ("no step series in b: not compared step by step (analyze with --by step)",)


def test_three_sides_share_one_correction() -> None:
    a, b, c = (series({"1": value}, stderr=1e-3) for value in (0.010, 0.0128, 0.0101))
    both = compare_runs([Side("a", a), Side("b", b), Side("c", c)])
    alone = compare(a, b)
    tests = [pair.rows[0].test for pair in both.pairs]
    assert tests[0] is not None and alone.pairs[0].rows[0].test is not None
    assert tests[0].p_corrected == pytest.approx(2 * tests[0].p)
    assert alone.pairs[0].rows[0].test.p_corrected == tests[0].p


def test_quantiles_shift_and_extremes_are_read_as_logs() -> None:
    def of(shift: float) -> Summary:
        return summary(
            {
                ABS_DIFF: Statistic(0.1, 9, 0.01),
                "masked.token.log_ratio_p50": Statistic(0.0 + shift, 9),
                "masked.token.rollout_is_max": Statistic(
                    None, 9, why="overflow", log_value=800.0 + shift, has_log=True
                ),
                "masked.token.rollout_is_min": Statistic(0.5, 9),
            }
        )

    shifted = {r.statistic.rpartition(".")[2]: r.change for r in compare(of(0.0), of(0.25)).pairs[0].quantiles}
    assert shifted == {"rollout_is_min": 0.0, "log_ratio_p50": 0.25, "rollout_is_max": 0.25}


def test_views_of_one_summary_are_never_tested() -> None:
    figures = {
        "unmasked.mismatch.mismatch_logprob_abs_diff": Statistic(1.575, 16384, 0.01),
        ABS_DIFF: Statistic(0.0094, 10000, 1e-4),
        "unmasked.mismatch.mismatch_k3_kl": Statistic(0.1, 16384, 0.01),
        K3: Statistic(0.1, 16384, 0.01),
    }
    found = compare_views(summary(figures), ["unmasked", "masked"])
    assert [(r.statistic, r.verdict, r.test) for r in found.pairs[0].rows] == [
        ("mismatch.mismatch_logprob_abs_diff", "untested", None),
        ("mismatch.mismatch_k3_kl", "same", None),
    ]
    assert found.verdict == "masked against unmasked: 1 of 2 figures differ"
    with pytest.raises(NothingComparable, match="correction policy"):
        compare_views(summary(figures), ["masked", "corrected"])
    with pytest.raises(NothingComparable, match="expected valid tokens"):
        compare_views(summary(figures, valid_tokens=0), ["unmasked", "masked"])


def test_the_result_is_json() -> None:
    found = compare(series(STALE), series(STALE))
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["schema"] == "rollout-is/compare/1"
    assert data["pairs"][0]["rows"][0]["a"]["value"] == pytest.approx(0.07)
    assert list(data["pairs"][0]["series"][0]["steps"]) == list(STALE)
