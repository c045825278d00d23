"""k-hat against a published implementation, its degenerate answers, and the merging state."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rollout_is.analysis.pareto import TopLogWeights, pareto_k, reliable_below, tail_length

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "pareto_k.json").read_text())


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: str(case["name"]))
def test_matches_the_published_implementation(case: dict[str, object]) -> None:
    log_weights = np.array(case["log_weights"])
    found = pareto_k(log_weights, log_weights.size)
    assert found.n == log_weights.size
    assert found.value == pytest.approx(case["k"], rel=1e-9, abs=1e-9)


def test_only_the_tail_and_its_cutoff_are_needed() -> None:
    log_weights = np.random.default_rng(1).normal(size=5000)
    top = np.sort(log_weights)[-(tail_length(5000) + 1) :]
    assert pareto_k(top, 5000) == pareto_k(log_weights, 5000)
    with pytest.raises(ValueError, match="needs the 214 largest, found 213"):
        pareto_k(top[1:], 5000)


def test_shift_of_the_logs_changes_nothing() -> None:
    log_weights = np.random.default_rng(2).normal(size=400)
    here, far = pareto_k(log_weights, 400), pareto_k(log_weights - 30_000.0, 400)
    assert here.value is not None and far.value == pytest.approx(here.value, abs=1e-9)


def test_weights_thousands_of_nats_apart_have_a_finite_shape() -> None:
    found = pareto_k(np.linspace(-9000.0, 9000.0, 200), 200)
    assert found.value is not None and math.isfinite(found.value) and found.value > 100


@pytest.mark.parametrize(
    ("log_weights", "why"),
    [
        ([], "too few sequences"),
        (np.linspace(-1, 1, 20), "too few sequences"),
        (np.full(100, 0.25), "all ratios equal"),
        ([0.0] * 60 + [1.0] * 40, "too many ties"),
        (np.append(np.linspace(-1, 1, 50), np.nan), "non-finite"),
        (np.append(np.linspace(-1, 1, 50), np.inf), "non-finite"),
    ],
)
def test_degenerate_cases_have_worded_answers(log_weights: object, why: str) -> None:
    values = np.asarray(log_weights, dtype=np.float64)
    found = pareto_k(values, values.size)
    assert found.value is None
    assert found.why == why


def test_zero_weights_stay_in_the_count() -> None:
    log_weights = np.append(np.random.default_rng(3).normal(size=150), np.full(50, -np.inf))
    assert pareto_k(log_weights, 200).value is not None
    assert pareto_k(np.full(200, -np.inf), 200).why == "all ratios equal"


def test_equal_at_the_top_only_is_ties_not_equality() -> None:
    top = np.zeros(tail_length(1000) + 1)
    assert pareto_k(top, 1000, smallest=-3.0).why == "too many ties"
    assert pareto_k(top, 1000, smallest=0.0).why == "all ratios equal"


def test_state_merges_in_any_order_to_the_same_bits() -> None:
    log_weights = np.random.default_rng(4).normal(size=3000)
    capacity = tail_length(3000) + 1
    forward, backward = TopLogWeights(capacity), TopLogWeights(capacity)
    for order, state in ((1, forward), (-1, backward)):
        for piece in np.array_split(log_weights, 7)[::order]:
            part = TopLogWeights(capacity)
            part.update(piece)
            state.merge(part)
    assert forward.values.tolist() == backward.values.tolist() == np.sort(log_weights)[::-1][:capacity].tolist()
    assert forward.result() == backward.result() == pareto_k(log_weights, 3000)


def test_state_counts_non_finite_and_refuses_a_number() -> None:
    state = TopLogWeights(10)
    state.update([1.0, np.nan, np.inf, -np.inf])
    assert (state.n, state.nonfinite, state.smallest) == (2, 2, -math.inf)
    assert state.result().why == "non-finite"
    assert TopLogWeights(10).result().why == "too few sequences"


def test_threshold_of_trust() -> None:
    assert reliable_below(100) == 0.5
    assert reliable_below(10**9) == 0.7
    assert reliable_below(1) == -math.inf


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_ratios_that_differ_by_rounding_alone_are_ties(scale: float) -> None:
    """A constant offset between the sides (C57), taken from log-probs of other sizes: d is the same but for its last bits."""
    r = -np.random.default_rng(5).gamma(0.6, 0.9, 400) - 0.05
    d = (r + 0.1) - r
    assert len(np.unique(d)) > 3
    assert pareto_k(scale * d, 400).why == "all ratios equal"
    d[:50] += 0.2
    assert pareto_k(scale * d, 400).why == "too many ties"
