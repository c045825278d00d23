"""Limits on series and baselines: what each rule sees, and that nothing which cannot be evaluated passes (C123, C124, C126)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from gate_summaries import ABS_DIFF, K3, TOKEN_MEAN, series, summary

from rollout_is.analysis.gate.baseline import baseline_limits
from rollout_is.analysis.gate.builtin import with_builtin
from rollout_is.analysis.gate.config import limits_from_mapping
from rollout_is.analysis.gate.evaluate import Outcome, Verdict, evaluate
from rollout_is.analysis.gate.limits import MaxChange
from rollout_is.analysis.summary import Statistic, Summary
from rollout_is.dumps.notes import Note

SPIKE = {str(step): 1.0 for step in range(1, 20)} | {"20": 50.0}  # C123


def one(summary_: Summary, statistic: str, limit: dict[str, Any], baseline: Summary | None = None) -> Outcome:
    (outcome,) = evaluate(summary_, limits_from_mapping({statistic: limit}), baseline).outcomes
    return outcome


@pytest.mark.parametrize(
    ("rule", "status", "value"),
    [
        ("mean", "fail", 3.45),
        ("median", "pass", 1.0),
        ("trimmed_mean", "pass", 1.0),
        ("last", "fail", 50.0),
        ("any", "fail", 50.0),
        ({"share": 0.05}, "pass", 50.0),
        ({"share": 0.04}, "fail", 50.0),
    ],
)
def test_c123_one_late_spike(rule: Any, status: str, value: float) -> None:
    outcome = one(series(SPIKE), ABS_DIFF, {"max": 2.0, "per_step": rule})
    assert (outcome.status, outcome.value) == (status, pytest.approx(value))


def test_c123_drift_at_the_end_escapes_the_median_and_not_the_last_step() -> None:
    drift = series({str(step): 1.0 if step <= 15 else step - 14.0 for step in range(1, 21)})
    assert one(drift, ABS_DIFF, {"max": 2.0, "per_step": "median"}).status == "pass"
    late = one(drift, ABS_DIFF, {"max": 2.0, "per_step": "last"})
    assert (late.status, late.value, late.steps) == ("fail", 6.0, ("20",))
    share = one(drift, ABS_DIFF, {"max": 2.0, "per_step": {"share": 0.1}})
    assert share.status == "fail"
    assert share.message == "step 20: 6 is above the maximum 2; 4 of 20 steps outside (17, 18, 19, 20)"


def test_steps_are_ordered_by_number() -> None:
    outcome = one(series({"9": 1.0, "10": 5.0, "8": 1.0}), ABS_DIFF, {"max": 2.0, "per_step": "last"})
    assert (outcome.status, outcome.value) == ("fail", 5.0)


def test_c124_an_unexplained_improvement_is_flagged_too() -> None:
    before, now = series({"1": 0.010}), series({"1": 0.004})
    two_sided = one(now, ABS_DIFF, {"max_change": {"relative": 0.5}}, before)
    assert two_sided.status == "fail"
    assert two_sided.message == "fell from 0.01 to 0.004: a change of 0.006, allowed is 0.005"
    assert (two_sided.baseline, two_sided.change) == (0.010, pytest.approx(-0.006))
    rising = {"max_change": {"relative": 0.5, "direction": "increase"}}
    assert one(now, ABS_DIFF, rising, before).status == "pass"
    assert one(before, ABS_DIFF, rising, now).status == "fail"
    assert one(now, ABS_DIFF, {"max_change": {"relative": 0.5, "absolute": 0.01}}, before).status == "pass"


def test_c124_each_step_against_its_own_past() -> None:
    before = series({"1": 0.010, "2": 0.100, "3": 0.010})
    now = series({"1": 0.010, "2": 0.100, "3": 0.100})
    outcome = one(now, ABS_DIFF, {"max_change": "50 %", "per_step": "any"}, before)
    assert (outcome.status, outcome.steps, outcome.baseline) == ("fail", ("3",), 0.010)


def test_c124_missing_steps_are_errors_whichever_side_lacks_them() -> None:
    short, long = series({"1": 0.01, "2": 0.01}), series({"1": 0.01, "2": 0.01, "3": 0.01})
    limit = {"max_change": "50 %", "per_step": "any"}
    assert one(short, ABS_DIFF, limit, long).message == "missing step 3, which the baseline holds"
    assert one(long, ABS_DIFF, limit, short).message == "step 3 missing from the baseline"
    assert one(short, ABS_DIFF, {"max": 1, "per_step": "any"}, long).status == "error"
    assert one(long, ABS_DIFF, {"max": 1, "per_step": "any"}, short).status == "pass"


NO_VALUE = Statistic(None, 0, why="no valid tokens")


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({}, "no such statistic"),
        ({ABS_DIFF: NO_VALUE}, "no value: no valid tokens"),
        ({ABS_DIFF: Statistic(math.nan, 5)}, "the value is nan"),
        ({ABS_DIFF: Statistic(math.inf, 5)}, "the value is inf"),
        (
            {ABS_DIFF: Statistic(None, 5, why="overflow", log_value=1000.0, has_log=True)},
            "no value: overflow (its log is 1000)",
        ),
    ],
)
@pytest.mark.parametrize("severity", ["error", "warning"])
def test_what_cannot_be_evaluated_never_passes(figures: dict[str, Statistic], says: str, severity: str) -> None:
    limits = limits_from_mapping({ABS_DIFF: {"max": 1.0, "severity": severity}})
    verdict = evaluate(summary(figures), limits)
    assert not verdict.passed
    assert (verdict.outcomes[0].status, verdict.outcomes[0].value) == ("error", None)
    assert says in verdict.outcomes[0].message


def test_a_misspelt_statistic_is_an_error_with_the_right_name() -> None:
    outcome = one(summary({ABS_DIFF: Statistic(0.1, 5)}), "masked.mismatch.mismatch_logprob_abs_dif", {"max": 1})
    assert outcome.status == "error"
    assert f"did you mean {ABS_DIFF}?" in outcome.message
    assert "no view 'corrected'" in one(summary({}), "corrected.token.rollout_is_mean", {"max": 1}).message


def test_a_null_step_is_an_error_and_named() -> None:
    broken = summary(
        {ABS_DIFF: Statistic(0.1, 5)}, {"1": {ABS_DIFF: Statistic(0.1, 5)}, "2": {ABS_DIFF: NO_VALUE}, "3": {}}
    )
    assert one(broken, ABS_DIFF, {"max": 1, "per_step": "median"}).message == "step 2: no value: no valid tokens"
    lacking = summary({ABS_DIFF: Statistic(0.1, 5)}, {"1": {ABS_DIFF: Statistic(0.1, 5)}, "3": {}})
    assert one(lacking, ABS_DIFF, {"max": 1, "per_step": "last"}).message == f"step 3 holds no {ABS_DIFF}"
    assert "--by step" in one(summary({ABS_DIFF: Statistic(0.1, 5)}), ABS_DIFF, {"max": 1, "per_step": "last"}).message
    assert "no step series" in one(series({"1": 1.0}), "coverage.sequences", {"min": 1, "per_step": "any"}).message


def test_a_change_without_a_usable_baseline_is_an_error() -> None:
    now = series({"1": 0.01})
    limit = {"max_change": "50 %"}
    assert "none is given" in one(now, ABS_DIFF, limit).message
    assert (
        one(now, ABS_DIFF, limit, summary({ABS_DIFF: NO_VALUE})).message == "in the baseline: no value: no valid tokens"
    )
    assert one(now, ABS_DIFF, limit, summary({})).status == "error"


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"settings": {"mask": "pre_rejection"}}, "settings.mask"),
        ({"settings": {"rollout": "prefill"}}, "settings.rollout"),
        ({"source": {"metadata": {"train_policy": "current"}}}, "metadata.train_policy"),
        ({"source": {"metadata": {"train_temperature": "0.6"}}}, "metadata.train_temperature"),
        ({"source": {"metadata": {"logprobs_mode": "processed"}}}, "metadata.logprobs_mode"),
    ],
)
def test_a_baseline_of_another_definition_is_an_error(other: dict[str, Any], key: str) -> None:
    figures = {ABS_DIFF: Statistic(0.01, 100, 1e-4)}
    outcome = one(summary(figures), ABS_DIFF, {"max_change": "50 %"}, summary(figures, **other))
    assert outcome.status == "error"
    assert f"another definition: {key}" in outcome.message


def test_bounds_matter_to_fractions_only_and_a_dtype_is_no_definition() -> None:
    high = "masked.token.rollout_is_ratio_fraction_high"
    figures = {ABS_DIFF: Statistic(0.01, 100), high: Statistic(0.01, 100)}
    other = summary(figures, settings={"upper": 5.0}, source={"dtypes": {"rollout": "BF16"}})
    assert one(summary(figures), ABS_DIFF, {"max_change": "50 %"}, other).status == "pass"
    assert "settings.upper" in one(summary(figures), high, {"max_change": "50 %"}, other).message


def test_bounds_are_inclusive_and_figures_are_told_apart() -> None:
    assert one(series({"1": 0.1}), ABS_DIFF, {"max": 0.1}).status == "pass"
    assert one(series({"1": 0.10001}), ABS_DIFF, {"max": 0.1}).message == "0.10001 is above the maximum 0.1"
    assert one(series({"1": 0.1}), ABS_DIFF, {"min": 0.2}).message == "0.1 is below the minimum 0.2"
    # C126: exact zero is demanded of the elements through their extreme, since an average hides them
    largest = "masked.mismatch.mismatch_logprob_abs_diff_max"
    exact = summary({ABS_DIFF: Statistic(1e-9, 10000), largest: Statistic(0.0237, 10000)})
    assert one(exact, largest, {"max": 0}).status == "fail"


def test_warnings_pass_unless_strict_and_no_limit_is_no_pass() -> None:
    limits = limits_from_mapping({ABS_DIFF: {"max": 0.001, "severity": "warning"}})
    now = series({"1": 0.01})
    assert evaluate(now, limits).passed
    assert not evaluate(now, limits, strict=True).passed
    assert not Verdict(()).passed
    assert not evaluate(now, ()).passed


def test_urgency_puts_failures_first() -> None:
    now = summary({ABS_DIFF: Statistic(0.5, 5), K3: Statistic(0.5, 5)})
    limits = limits_from_mapping(
        {
            "coverage.sequences": {"min": 1},
            K3: {"max": 0.1, "severity": "warning"},
            TOKEN_MEAN: {"max": 1},
            ABS_DIFF: {"max": 0.1},
        }
    )
    order = [outcome.limit.statistic for outcome in evaluate(now, limits).by_urgency()]
    assert order == [ABS_DIFF, TOKEN_MEAN, K3, "coverage.sequences"]


def test_the_built_in_set_refuses_what_cannot_be_trusted() -> None:
    built_in = with_builtin(())
    healthy = summary({})
    assert evaluate(healthy, built_in).passed
    for broken in ({"nonfinite_valid_tokens": 1}, {"valid_tokens": 0, "sequences": 0}):
        assert not evaluate(summary({}, **broken), built_in).passed
    own = limits_from_mapping({"coverage.nonfinite_valid_tokens": {"max": 5}})
    assert evaluate(summary({}, nonfinite_valid_tokens=3), with_builtin(own)).passed


def test_notes_can_be_gated() -> None:
    plain = summary({})
    noted = replace(plain, notes=(Note("duplicate-shards", "warning", "", "two alike"),))
    assert one(noted, "notes.duplicate-shards", {"max": 0}).status == "fail"
    assert one(plain, "notes.duplicate-shards", {"max": 0}).status == "pass"
    misspelt = one(plain, "notes.duplicate-shard", {"max": 0})
    assert (misspelt.status, misspelt.message) == (
        "error",
        "no note is called 'duplicate-shard'; did you mean duplicate-shards?",
    )


def test_findings_can_be_gated_where_the_doctor_has_looked() -> None:
    def looked(*ids: str) -> Summary:
        return replace(summary({}), extra={"doctor": {"ids": list(ids)}})

    for statistic in ("findings.alignment.lag", "findings.alignment"):
        assert one(looked("alignment.lag"), statistic, {"max": 0}).status == "fail"
        assert one(looked("scale.temperature"), statistic, {"max": 0}).status == "pass"
        assert one(looked(), statistic, {"max": 0}).status == "pass"
    assert one(looked("alignment.lag_varies"), "findings.alignment.lag", {"max": 0}).status == "pass"
    # no finding without a look is not a clean bill
    unseen = one(summary({}), "findings.alignment", {"max": 0})
    assert (unseen.status, "has not looked" in unseen.message) == ("error", True)
    misspelt = one(looked(), "findings.alignmnt.lag", {"max": 0})
    assert (misspelt.status, misspelt.message) == (
        "error",
        "no finding is called 'alignmnt.lag'; did you mean alignment.lag?",
    )


def test_baseline_limits_hold_the_run_they_come_from_and_catch_real_changes() -> None:
    steps = {str(step): 0.0094 + 0.0001 * (step % 2) for step in range(1, 5)}
    good = series(steps)
    limits = baseline_limits(good)
    assert evaluate(good, limits, good).passed
    assert {limit.per_step is None for limit in limits} == {True, False}
    stale = series({"1": 0.0094, "2": 0.0095, "3": 0.1107, "4": 0.0965})
    caught = evaluate(stale, limits, good)
    assert [outcome.status for outcome in caught.outcomes] == ["fail", "fail"]
    assert caught.outcomes[1].steps == ("3", "4")


def test_baseline_bands_follow_margin_noise_and_ideal() -> None:
    extreme = "masked.mismatch.mismatch_extreme_fraction"
    kl = "masked.mismatch.mismatch_kl"
    good = summary(
        {
            ABS_DIFF: Statistic(0.01, 10000, 1e-5),
            kl: Statistic(1e-6, 10000, 1e-4),
            TOKEN_MEAN: Statistic(1.004, 10000, 1e-6),
            extreme: Statistic(0.0, 10000, 0.0),
        }
    )
    bands = {limit.statistic: limit.max_change for limit in baseline_limits(good, 0.25)}
    assert bands == {
        ABS_DIFF: MaxChange(0.25, 8e-5),
        kl: MaxChange(0.25, 8e-4),  # eight standard errors: noise decides
        TOKEN_MEAN: MaxChange(absolute=0.001),  # a quarter of the distance from 1
        extreme: MaxChange(0.25, 3e-4),  # never seen: three in n
    }
