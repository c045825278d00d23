"""Tail probabilities and Holm's correction against numbers recorded from scipy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_is.analysis.compare.rows import welch
from rollout_is.analysis.compare.tails import holm, incomplete_beta, normal_two_sided, t_two_sided, welch_df
from rollout_is.analysis.summary import Statistic

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "tails.json").read_text())


@pytest.mark.parametrize(("t", "df", "expected"), RECORDED["t"])
def test_t(t: float, df: float, expected: float) -> None:
    assert t_two_sided(t, df) == pytest.approx(expected, rel=1e-11)
    assert t_two_sided(-t, df) == t_two_sided(t, df)


@pytest.mark.parametrize(("z", "expected"), RECORDED["normal"])
def test_normal(z: float, expected: float) -> None:
    assert normal_two_sided(z) == pytest.approx(expected, rel=1e-12)
    assert t_two_sided(z, math.inf) == normal_two_sided(z)


@pytest.mark.parametrize(("a", "b", "x", "expected"), RECORDED["beta"])
def test_incomplete_beta(a: float, b: float, x: float, expected: float) -> None:
    assert incomplete_beta(a, b, x) == pytest.approx(expected, rel=1e-10, abs=1e-300)


def test_ends_and_refusals() -> None:
    assert (incomplete_beta(2, 3, 0.0), incomplete_beta(2, 3, 1.0)) == (0.0, 1.0)
    assert t_two_sided(math.inf, 3) == 0.0
    for df in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="degrees of freedom"):
            t_two_sided(1.0, df)


@pytest.mark.parametrize("case", RECORDED["welch"])
def test_welch_is_the_textbook_test_when_every_cluster_is_one_value(case: dict[str, Any]) -> None:
    def mean(values: list[float]) -> Statistic:
        array = np.array(values)
        return Statistic(float(array.mean()), len(array), float(array.std(ddof=1) / math.sqrt(len(array))))

    test = welch(mean(case["a"]), mean(case["b"]), len(case["a"]), len(case["b"]))
    assert test is not None
    assert test.kind == "Welch t"
    assert test.df == pytest.approx(case["df"], rel=1e-12)
    assert test.p == pytest.approx(case["p"], rel=1e-9)


def test_no_welch_without_errors_spread_or_clusters() -> None:
    known, unknown, exact = Statistic(1.0, 9, 0.1), Statistic(1.0, 9), Statistic(1.0, 9, 0.0)
    assert welch(known, unknown, 9, 9) is None
    assert welch(exact, exact, 9, 9) is None
    assert welch(known, known, 1, 9) is None
    assert welch(known, Statistic(None, 0, 0.1, "no valid tokens"), 9, 9) is None
    one_sided = welch(known, exact, 9, 100)
    assert one_sided is not None
    assert one_sided.df == 8.0


def test_welch_df_survives_tiny_errors() -> None:
    assert welch_df(1e-200, 11, 1e-200, 11) == 20.0


def holm_by_definition(p_values: list[float]) -> list[float]:
    """Corrected p of i: the largest of (m - k + 1) p_(k) over the ranks up to its own."""
    ordered = sorted(p_values)
    m = len(ordered)
    return [max(min(1.0, (m - k) * ordered[k]) for k in range(m) if ordered[k] <= p) for p in p_values]


def test_holm() -> None:
    rng = np.random.default_rng(3)
    for size in (0, 1, 2, 7, 30):
        p_values = [float(p) for p in rng.uniform(0, 0.2, size)]
        assert holm(p_values) == pytest.approx(holm_by_definition(p_values))
    assert holm([0.01, 0.01, 0.01]) == [0.03, 0.03, 0.03]
