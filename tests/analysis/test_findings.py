"""The verdict follows from the stored figures: what is wrong, worst first, silent when all is well."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_is.analysis.findings import findings
from rollout_is.analysis.summary import Statistic, Summary
from rollout_is.dumps.notes import Note

# The healthy real dump of the reference set.
HEALTHY = {
    "token.rollout_is_mean": 1.0000424162846746,
    "token.rollout_is_eff_sample_size": 0.999827995730733,
    "mismatch.mismatch_logprob_abs_diff": 0.009392779213736609,
    "mismatch.mismatch_mult_prob_error": 1.0094795208824021,
    "mismatch.mismatch_prob_pearson": 0.9999674732931132,
    "per_sequence.rollout_is_seq_min": 0.9911543074890099,
    "per_sequence.rollout_is_seq_mean": 1.0000040055324906,
}
COVERAGE = {
    "positions": 163840,
    "valid_tokens": 110332,
    "segments": 563,
    "sequences": 512,
    "fully_masked": 0,
    "fully_masked_with_content": 0,
    "nonfinite_valid_tokens": 0,
}


def summary(
    figures: dict[str, float] | None = None,
    padded: dict[str, float] | None = None,
    coverage: dict[str, int] | None = None,
    stderr: float | None = 4e-5,
    **more: Any,
) -> Summary:
    def views(values: dict[str, float]) -> dict[str, dict[str, Statistic]]:
        out: dict[str, dict[str, Statistic]] = {}
        for path, value in values.items():
            section, name = path.split(".")
            out.setdefault(section, {})[name] = Statistic(value, 110332, stderr if name == "rollout_is_mean" else None)
        return out

    masked = HEALTHY | (figures or {})
    return Summary(
        {"path": "my dump"},
        COVERAGE | (coverage or {}),
        {"mask": "response_mask"},
        {"masked": views(masked), "padded": views(masked | (padded or {}))},
        **more,
    )


def ids(s: Summary) -> list[tuple[str, str]]:
    return [(f.id, f.severity) for f in findings(s)]


def test_a_healthy_dump_has_no_finding() -> None:
    assert ids(summary()) == []


def test_padding_is_said_with_its_figures() -> None:
    found = findings(
        summary(
            padded={"per_sequence.rollout_is_seq_min": 0.0, "per_sequence.rollout_is_seq_mean": 0.9094174970384282},
            coverage={"fully_masked": 51},
        )
    )
    assert [f.id for f in found] == ["padding.counted_as_sequences"]
    assert found[0].severity == "notice"
    assert "51 pad segments would be counted as sequences: rollout_is_seq_min 0 -> 0.991" in found[0].message
    assert "rollout_is_seq_mean 0.909 -> 1.00" in found[0].message
    assert found[0].source and found[0].next


def test_one_pad_segment_is_one() -> None:
    found = findings(summary(padded={"per_sequence.rollout_is_seq_min": 0.0}, coverage={"fully_masked": 1}))
    assert found[0].message.startswith("1 pad segment would")


def test_content_under_the_mask_is_not_called_padding() -> None:
    found = findings(
        summary(
            padded={"per_sequence.rollout_is_seq_min": 0.0},
            coverage={"fully_masked": 175, "fully_masked_with_content": 56},
        )
    )
    assert "175 fully masked segments (119 pad-like, 56 with content)" in found[0].message


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"token.rollout_is_mean": 0.49}, "weights.mean"),
        ({"token.rollout_is_mean": 2.01}, "weights.mean"),
        ({"token.rollout_is_mean": 0.905}, "weights.mean"),  # top-p 0.9 on one side: case C57
        ({"token.rollout_is_mean": 1.4}, "weights.mean"),  # temperature on one side: case C54
        ({"token.rollout_is_eff_sample_size": 0.29}, "weights.ess"),
        ({"mismatch.mismatch_logprob_abs_diff": 0.11}, "mismatch.large"),
        ({"mismatch.mismatch_mult_prob_error": 1.06}, "mismatch.large"),  # the stale real dump
        ({"mismatch.mismatch_prob_pearson": 0.42}, "mismatch.uncorrelated"),
    ],
)
def test_a_figure_beyond_its_threshold_is_a_warning(figures: dict[str, float], expected: str) -> None:
    found = findings(summary(figures))
    assert [(f.id, f.severity) for f in found] == [(expected, "warning")]
    assert found[0].source and found[0].next.startswith("rollout-is ") and found[0].evidence


@pytest.mark.parametrize(
    "figures",
    [
        {"token.rollout_is_mean": 0.985},
        {"token.rollout_is_eff_sample_size": 0.31},
        {"mismatch.mismatch_logprob_abs_diff": 0.036},
        {"mismatch.mismatch_mult_prob_error": 1.04},
        {"mismatch.mismatch_prob_pearson": 0.874},
    ],
)
def test_noise_that_trainers_live_with_is_none(figures: dict[str, float]) -> None:
    assert ids(summary(figures)) == []


def test_a_mean_away_from_one_counts_by_its_error() -> None:
    assert ids(summary({"token.rollout_is_mean": 1.1}, stderr=0.05)) == []
    assert ids(summary({"token.rollout_is_mean": 1.1}, stderr=None)) == []
    assert ids(summary({"token.rollout_is_mean": 1.1}, stderr=0.001)) == [("weights.mean", "warning")]


def test_errors_come_first_and_nothing_valid_is_one() -> None:
    nothing = findings(Summary({}, {"positions": 8, "valid_tokens": 0}, {}, {}))
    assert [(f.id, f.severity) for f in nothing] == [("coverage.nothing_valid", "error")]
    found = findings(summary({"token.rollout_is_eff_sample_size": 0.1}, coverage={"nonfinite_valid_tokens": 3}))
    assert [f.id for f in found] == ["coverage.nonfinite", "weights.ess"]
    assert "3 of 110,332 valid tokens" in found[0].message


def test_warnings_of_the_engine_join_and_its_remarks_do_not() -> None:
    notes = (
        Note("placeholder", "error", "rollout", "rollout is exactly 0 at 43 % of valid tokens"),
        Note("ranks-missing", "warning", "", "ranks are missing: step 1: 1 of 2 ranks"),
        Note("mask-values", "notice", "response_mask", "mask has values {0, 1, 2}"),
    )
    assert ids(summary(notes=notes)) == [("note.placeholder", "error"), ("note.ranks-missing", "warning")]


def test_the_next_command_can_be_pasted_into_a_shell() -> None:
    found = findings(summary({"token.rollout_is_eff_sample_size": 0.1}))
    assert "'my dump'" in found[0].next
    assert "DUMP" in findings(Summary({}, {"positions": 8, "valid_tokens": 0}, {}, {}))[0].next


def test_words_for_an_empty_dump_and_thresholds_without_unshipped_pages() -> None:
    empty = summary(coverage=COVERAGE | {"valid_tokens": 0, "positions": 0})
    assert "holds no positions" in findings(empty)[0].message
    bad = summary(
        coverage=COVERAGE | {"nonfinite_valid_tokens": 3}, notes=(Note("duplicate-sequences", "warning", "", "copies"),)
    )
    found = (*findings(empty), *findings(bad))
    assert {"coverage.nothing_valid", "coverage.nonfinite", "note.duplicate-sequences"} <= {f.id for f in found}
    assert all(f.source and "METRICS.md" not in f.source and "DESIGN.md" not in f.source for f in found)
