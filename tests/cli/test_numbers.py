"""Three significant digits, never cut; what cannot be held is shown as its log."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_is.analysis.summary import Statistic
from rollout_is.cli.render.numbers import figure, percent, shown, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1.00"),
        (0.99996, "1.00"),
        (-0.99996, "-1.00"),
        (0.9994, "0.999"),
        (99.96, "100"),
        (9.996, "10.0"),
        (0.001, "0.00100"),
        (0.00099996, "0.00100"),
        (9.99e-4, "9.99e-4"),
        (9999.4, "9999"),
        (9999.6, "1.00e4"),
        (1e300, "1.00e300"),
        (-1.5e-12, "-1.50e-12"),
        (5e-324, "4.94e-324"),
    ],
)
def test_figure(value: float | None, text: str) -> None:
    assert figure(value) == text


@given(st.floats(-1.79e308, 1.79e308))
def test_a_figure_reads_back_within_three_digits_and_stays_short(value: float) -> None:
    text = figure(value)
    assert len(text) <= 10
    # the smallest subnormals have no three digits to keep
    assert math.isclose(float(text), value, rel_tol=0.0051, abs_tol=1e-320)


@pytest.mark.parametrize(
    ("statistic", "text"),
    [
        (None, "-"),
        (Statistic(None, 0, why="no valid tokens"), "-"),
        (Statistic(None, 3, why="below float64", log_value=-7503.9, has_log=True), "exp(-7504)"),
        (Statistic(None, 3, why="above float64", log_value=1000.0, has_log=True), "exp(1000)"),
        (Statistic(0.0, 3, log_value=-746.0, has_log=True), "exp(-746)"),
        (Statistic(0.0, 3, log_value=None, has_log=True), "0"),
        (Statistic(1.9287e-22, 3, log_value=-50.0, has_log=True), "1.93e-22"),
    ],
)
def test_shown(statistic: Statistic | None, text: str) -> None:
    assert shown(statistic) == text


def test_percent_of_nothing_is_no_number() -> None:
    assert percent(0, 0) == ""


def test_sparkline_keeps_gaps_and_extremes() -> None:
    assert sparkline([0.0, None, 7.0, math.inf]) == "▁ █ "
    assert sparkline([0.0, 7.0], unicode=False).isascii()
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([None]) == ""
