"""The shape checks of the test run are on, and they catch what they name."""

from __future__ import annotations

import numpy as np
import pytest
from shapes import ShapeError

from rollout_is.analysis import clusters, histogram, populations, split, weights


def test_a_float32_vector_of_log_weights_is_caught() -> None:
    with pytest.raises(ShapeError):
        weights.row_of(np.zeros(3, np.float32), -1.0, 1.0)  # type: ignore[arg-type]


def test_two_lengths_in_one_call_are_caught() -> None:
    with pytest.raises(ShapeError):
        clusters.row_of([np.zeros(3), np.zeros(4)], np.ones(3))


def test_a_table_of_another_width_is_caught() -> None:
    with pytest.raises(ShapeError):
        populations.Table(np.arange(2), np.zeros((3, 2)), np.zeros(2), np.zeros(2))


def test_a_mask_of_integers_is_caught() -> None:
    with pytest.raises(ShapeError):
        split.Runs(np.ones(4, np.int64))


def test_what_fits_passes() -> None:
    assert weights.row_of(np.zeros(3), -1.0, 1.0).n == 3
    assert histogram.Histogram.of_values(np.ones(5)).total == 5
    assert clusters.row_of([np.ones(3)], np.ones(3)).clusters == 3
