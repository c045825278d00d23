"""One sequence of a million tokens, a million sequences of three: linear time, exact figures."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from made import Shard, stat, value

from rollout_is.analysis.summary import Summary


def columns(n: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    rng = np.random.default_rng(n)
    r = -rng.exponential(1.0, n)
    t = r + 0.01 * rng.standard_normal(n)
    return torch.from_numpy(t), torch.from_numpy(r), t - r


def seconds(act: Callable[[], Summary]) -> tuple[float, Summary]:
    start = time.perf_counter()
    got = act()
    return time.perf_counter() - start, got


def test_c111_a_million_sequences_of_three_tokens() -> None:
    n = 3_000_000
    t, r, d = columns(n)
    one = Shard(t, r, torch.ones(n, dtype=torch.bool), list(range(0, n + 1, 3)))
    took, got = seconds(one.summarize)
    assert got.coverage["sequences"] == 1_000_000
    x = np.exp(d.astype(np.longdouble)).reshape(-1, 3).mean(1)
    assert value(got, "masked.per_sequence.rollout_is_seq_mean") == pytest.approx(float(x.mean()), rel=1e-12)
    assert value(got, "masked.per_sequence.rollout_is_seq_std") == pytest.approx(float(x.std(ddof=1)), rel=1e-9)
    assert value(got, "masked.per_sequence.rollout_is_seq_max") == pytest.approx(float(x.max()), rel=1e-12)
    L = d.astype(np.longdouble).reshape(-1, 3).sum(1)
    assert value(got, "masked.sequence.rollout_is_mean") == pytest.approx(float(np.exp(L).mean()), rel=1e-12)
    median = np.sort(L)[499_999]
    assert value(got, "masked.sequence.log_ratio_p50") == pytest.approx(float(median), rel=0.01, abs=1e-6)
    assert took < 30


def test_c111_one_sequence_of_a_million_tokens() -> None:
    n = 1_000_000
    t, r, d = columns(n)
    took, got = seconds(Shard(t, r, torch.ones(n, dtype=torch.bool), [0, n]).summarize)
    total = float(d.astype(np.longdouble).sum())
    found = stat(got, "masked.sequence.rollout_is_mean")
    assert found.n == 1 and found.log_value == pytest.approx(total, rel=1e-10)
    assert stat(got, "masked.per_sequence.rollout_is_seq_std").why == "one sequence"
    assert took < 15


def test_time_is_linear_in_the_number_of_sequences() -> None:
    def of(sequences: int) -> float:
        n = 3 * sequences
        t, r, _ = columns(n)
        one = Shard(t, r, torch.ones(n, dtype=torch.bool), list(range(0, n + 1, 3)))
        return min(seconds(one.summarize)[0] for _ in range(2))

    of(20_000)  # first use pays for imports
    small, large = of(60_000), of(600_000)
    assert large < 10 * small * 2.5 + 0.5  # ten times the data; quadratic time would be a hundred times
