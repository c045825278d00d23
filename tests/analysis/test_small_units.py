"""Hostile little dumps against the oracle, with units and blocks of a few positions: every seam between them is crossed.

The sizes are knobs of speed; the figures may depend on them only in their last digits.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agree import differences
from made import Shard, assert_agrees, stable, view
from oracle import coverage
from oracle import summarize as oracle_summary

from rollout_is.analysis import units

pytestmark = pytest.mark.usefixtures("each_kernel")

SIZES = [(1 << 20, 1 << 16, 1 << 15), (64, 3, 16), (16, 2, 5), (30, 1 << 16, 30), (100, 2, 7)]


@pytest.fixture(params=range(len(SIZES)), ids=lambda i: "unit{}-segments{}-block{}".format(*SIZES[i]))
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    positions, segments, block = SIZES[request.param]
    monkeypatch.setattr(units, "UNIT_POSITIONS", positions)
    monkeypatch.setattr(units, "UNIT_SEGMENTS", segments)
    monkeypatch.setattr(units, "CHUNK_POSITIONS", block)
    monkeypatch.setattr(units, "BLOCK_TOKENS", block)
    return int(request.param)


def log_ratios(rng: np.random.Generator, n: int, kind: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    d = rng.standard_normal(n) * 10.0 ** rng.integers(-4, 2)
    if kind == 1:
        d = 0.01 * d + 0.05 * rng.standard_normal(n) + rng.choice([-5.0, -1.0, 0.1, 1.0, 5.0])
    if kind == 2:  # a heavy tail
        d = np.where(rng.random(n) < 0.1, rng.standard_normal(n) * 400, d)
    if kind == 3:  # around and beyond what float64 holds
        d = np.where(rng.random(n) < 0.3, rng.choice([-1000.0, 1000.0, -310, 310, -299, 299, 700, -700, 740.0], n), d)
    if kind == 4:
        d = np.full(n, float(rng.choice([0.0, 0.5, -0.5, 3.0])))
    if kind == 5:
        d = rng.choice([0.0, 0.0, 0.1, -0.1], n)
    if kind == 6:  # sequences of their own
        d = np.repeat(rng.standard_normal(n // 3 + 1) * rng.choice([0.1, 50, 200]), 3)[:n]
    return d


def hostile(seed: int) -> tuple[Shard, dict[str, float]]:
    rng = np.random.default_rng(seed)
    segments, length = int(rng.integers(1, 12)), int(rng.choice([1, 2, 5, 40, 200]))
    lengths = rng.integers(0, 2 * length + 1, segments)
    lengths[0] += 3
    cu = np.concatenate([[0], np.cumsum(lengths)])
    n = int(cu[-1]) + int(rng.integers(0, 4))
    kind = seed % 9
    r = -rng.exponential(2, n) - 1e-3
    t = r + log_ratios(rng, n, kind)
    if kind == 7:
        for side in (t, r):
            bad = rng.random(n) < 0.1
            side[bad] = rng.choice([np.nan, np.inf, -np.inf], int(bad.sum()))
    if kind == 8:
        r[rng.random(n) < 0.3] = 0
        t[rng.random(n) < 0.1] = 0
    mask = rng.random(n) < rng.choice([0.05, 0.5, 0.9, 1.0])
    for i in range(segments):
        if rng.random() < 0.25:
            mask[cu[i] : cu[i + 1]] = False
    mask[cu[-1] :] = False
    if rng.random() < 0.3:
        r[~mask] = rng.choice([0, np.nan, -np.inf, 1.0])
    dtype = (torch.float64, torch.float64, torch.float32)[rng.integers(0, 3)]
    columns = {"group_ids": torch.from_numpy(rng.integers(0, 4, segments))} if rng.random() < 0.3 else {}
    bounds = {}
    if rng.random() < 0.5:
        bounds["veto_lower"] = float(rng.choice([1e-4, 0.5, 1.5]))
    if rng.random() < 0.5:
        bounds["veto_upper"] = float(rng.choice([2.0, 1e4]))
    if rng.random() < 0.5:
        bounds["lower"] = float(rng.choice([0.01, 0.9, 1.0, 1.2]))
    one = Shard(
        torch.from_numpy(t).to(dtype), torch.from_numpy(r).to(dtype), torch.from_numpy(mask), cu.tolist(), columns
    )
    return one, bounds


@pytest.mark.parametrize("first", range(0, 18, 9))
def test_hostile_dumps_agree_with_the_oracle(size: int, first: int) -> None:
    problems = []
    for seed in range(1000 * size + first, 1000 * size + first + 9):  # one of each kind
        one, bounds = hostile(seed)
        got = one.summarize(**bounds)
        stable(got)
        found = differences(got.get, oracle_summary([one.packed()], **bounds))
        want = coverage([one.packed()])
        found += [f"coverage.{k}: {got.coverage[k]}, expected {v}" for k, v in want.items() if got.coverage[k] != v]
        by = ("length", "position", "probability", *(["group"] if one.columns else []))
        if not got.coverage["valid_tokens"] > got.coverage["nonfinite_valid_tokens"]:
            found = [
                line for line in found if not line.startswith("padded.")
            ]  # pads alone: null says more than weight 1
        if one.summarize(by=by, **bounds).views != got.views:
            found.append("groupings change the views")
        problems += [f"seed {seed}: {line}" for line in found]
    assert not problems, "\n".join(problems[:30])


def test_long_sequences_cross_every_seam(size: int) -> None:
    rng = np.random.default_rng(8)
    lengths = [3, 150, 1, 300, 64, 0, 129, 511, 17, 5, 2, 2, 2]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    n = int(cu[-1])
    r = -rng.exponential(1.0, n)
    mask = rng.random(n) < 0.7
    mask[cu[3] : cu[3] + 200] = False  # whole units without a valid token at the start of a sequence
    mask[cu[7] + 100 : cu[8]] = False  # and at its end
    mask[cu[4] : cu[5]] = False
    one = Shard(
        torch.from_numpy(r + 0.02 * rng.standard_normal(n)), torch.from_numpy(r), torch.from_numpy(mask), cu.tolist()
    )
    one.columns["group_ids"] = torch.arange(len(lengths)) % 3
    bounds = {"veto_lower": 0.995, "veto_upper": 1.005}
    got = one.summarize(by=("group", "length", "position"), **bounds)
    assert_agrees(got, [one], **bounds)
    valid = int(mask.sum())
    for by in ("group", "length", "position"):
        assert sum(g.valid_tokens for g in got.groups[by].values()) == valid
    counts = [g.sequences for g in got.groups["group"].values()]
    assert sum(counts) == got.coverage["sequences"]


def test_a_masked_tail_changes_not_one_bit_of_the_masked_view(size: int) -> None:
    one, _ = hostile(9)
    end = one.cu[-1]
    short = Shard(one.train[:end], one.rollout[:end], one.mask[:end], one.cu)
    pad = torch.full((50,), -7.0, dtype=one.train.dtype)
    long = Shard(
        torch.cat([one.train[:end], pad]),
        torch.cat([one.rollout[:end], 0 * pad]),
        torch.cat([one.mask[:end], torch.zeros(50, dtype=torch.bool)]),
        one.cu,
    )
    assert view(short.summarize(), "masked") == view(long.summarize(), "masked")
