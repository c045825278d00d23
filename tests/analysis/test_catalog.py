"""The catalog holds every statistic of METRICS.md, once, with its words."""

from __future__ import annotations

import pytest

from rollout_is.analysis.catalog import catalog, find, ids, lookup, names
from rollout_is.analysis.summary import SECTIONS

QUANTILES = ["p0_1", "p1", "p5", "p25", "p50", "p75", "p95", "p99", "p99_9"]
LEVEL = [
    *(
        f"rollout_is_{x}"
        for x in ("mean", "std", "min", "max", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low")
    ),
    "rollout_is_max_weight_share",
    *(f"log_ratio_{q}" for q in QUANTILES),
]
# Copied from METRICS.md by hand, not from the catalog.
NAMES = {
    "token": LEVEL,
    "sequence": [*LEVEL, "pareto_k"],
    "geometric": LEVEL,
    "per_sequence": [
        f"rollout_is_seq_{x}" for x in ("mean", "std", "min", "max", "max_deviation", "fraction_high", "fraction_low")
    ],
    "veto": ["rollout_is_catastrophic_token_fraction", "rollout_is_veto_fraction"],
    "mismatch": [
        f"mismatch_{x}"
        for x in [
            "kl",
            "k2_kl",
            "k3_kl",
            "logprob_abs_diff",
            "logprob_diff_std",
            "logprob_abs_diff_max",
            "prob_abs_diff",
            "prob_abs_diff_max",
            "prob_pearson",
            "mult_prob_error",
            "extreme_fraction",
            "identical_fraction",
            "training_log_ppl",
            "rollout_log_ppl",
            "training_ppl",
            "rollout_ppl",
            "log_ppl_diff",
            "log_ppl_abs_diff",
            "log_ppl_diff_max",
            "log_ppl_diff_min",
            "ppl_ratio",
            "chi2_token",
            "chi2_seq",
            "chi2_geometric",
        ]
    ],
}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_holds_its_statistics_and_no_other(section: str) -> None:
    assert sorted(names(section)) == sorted(NAMES[section])


def test_every_entry_has_its_words() -> None:
    for entry in catalog().values():
        for field in ("formula", "source", "high", "low", "action"):
            assert getattr(entry, field).strip(), (entry.path, field)
        assert entry.better in ("near 1", "near 0", "lower", "higher", None)


def test_signed_figures_say_their_direction() -> None:
    signed = ["mismatch_kl", "mismatch_log_ppl_diff", "mismatch_log_ppl_diff_max", "mismatch_log_ppl_diff_min"]
    for name in [*signed, *(f"log_ratio_{q}" for q in QUANTILES)]:
        for entry in find(name):
            assert "positive: " in entry.direction and "negative: " in entry.direction, entry.path
    # k1 is mean(r - t): positive means that rollout gave the sampled tokens more probability
    assert find("mismatch_kl")[0].direction.startswith("positive: rollout more confident")
    # d is t - r: the other way round
    assert find("log_ratio_p50")[0].direction.startswith("positive: train gives")


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("rollout_is_mean", "near 1"),
        ("rollout_is_eff_sample_size", "higher"),
        ("mismatch_kl", "near 0"),
        ("mismatch_k3_kl", "lower"),
        ("mismatch_prob_pearson", "higher"),
        ("mismatch_training_ppl", None),
        ("rollout_is_seq_max_deviation", "lower"),
    ],
)
def test_which_way_is_good(name: str, better: str | None) -> None:
    assert {entry.better for entry in find(name)} == {better}


def test_extremes_are_reduced_as_extremes_whatever_their_name() -> None:
    for entry in catalog().values():
        if entry.name.endswith(("_max", "_min", "_max_deviation")):
            assert entry.reduction in ("min", "max"), entry.path
        elif not entry.name.startswith(("log_ratio_", "pareto")):
            assert entry.reduction == "pooled sum", entry.path


def test_padded_equals_masked_exactly_for_statistics_of_tokens() -> None:
    for entry in catalog().values():
        assert entry.same_when_padded == (entry.unit == "token"), entry.path


@pytest.mark.parametrize(
    "bad", ["", ".", "masked", "masked.", "masked.token.", "masked.token.nope", "token", "rollout_is_mean", "a.b.c.d"]
)
def test_what_is_no_id_is_none(bad: str) -> None:
    assert lookup(bad) is None


def test_ids_are_unique_and_found() -> None:
    every = list(ids())
    assert len(every) == len(set(every)) == 3 * sum(map(len, NAMES.values()))
    assert all(lookup(one) is not None for one in every)
