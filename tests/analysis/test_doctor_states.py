"""The doctor's building blocks against brute force, and the merge contract of every state."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doctored import Shard, logprobs

from rollout_is.analysis.batch import Block
from rollout_is.analysis.doctor.consumer import STATES, Doctor
from rollout_is.analysis.doctor.lag import LAGS, distances, overlaps
from rollout_is.analysis.doctor.periodic import period_of
from rollout_is.analysis.doctor.placeholder import candidates
from rollout_is.analysis.doctor.position import bin_start, position_bin
from rollout_is.analysis.doctor.state import State, magnitude_value, magnitudes, merged, quantile, share_of_top
from rollout_is.analysis.doctor.window import CHUNK, Window, select, takes_block
from rollout_is.analysis.engine import Engine
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.units import cut_units
from rollout_is.dumps.memory import MemoryShard, describe_tensors
from rollout_is.dumps.place import Place


def window(rng: np.random.Generator, sizes: list[int]) -> Window:
    n = sum(sizes)
    r = logprobs(rng, n)
    t = r + rng.normal(0, 0.3, n)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    whole = np.ones(len(sizes), bool)
    shard: Any = SimpleNamespace(name="s", step=1, rank=0)
    segment = np.arange(len(sizes))
    return Window(
        shard, t, r, t - r, np.arange(n), starts, segment, starts, whole, whole, np.zeros(len(sizes), np.int64)
    )


@pytest.mark.parametrize("sizes", [[1], [2, 1, 3], [5, 400, 7, 128, 129]])
def test_distances_and_overlaps_never_cross_a_boundary(sizes: list[int]) -> None:
    w = window(np.random.default_rng(3), sizes)
    for lag in LAGS:
        expected, partners = np.zeros(w.n), np.zeros(w.n, int)
        for start, size in zip(w.starts, sizes, strict=True):
            for i in range(start, start + size):
                if start <= i + lag < start + size:
                    expected[i] = abs(w.t[i] - w.r[i + lag])
                    partners[i] = 1
        np.testing.assert_allclose(distances(w, lag), expected, rtol=0, atol=1e-15)
        by_chunk = np.add.reduceat(partners, w.chunk_starts)
        assert overlaps(w, lag).tolist() == by_chunk.tolist()


def test_chunks_cut_pieces_and_never_join_them() -> None:
    w = window(np.random.default_rng(4), [5, 2 * CHUNK + 1, CHUNK])
    assert w.chunk_starts.tolist() == [0, 5, 5 + CHUNK, 5 + 2 * CHUNK, 6 + 2 * CHUNK]
    assert w.chunk_piece.tolist() == [0, 1, 1, 1, 2]


def test_select_keeps_flags_only_where_that_very_token_is_kept() -> None:
    w = window(np.random.default_rng(5), [3, 4, 2])
    keep = np.array([0, 1, 1, 0, 0, 0, 0, 1, 0], bool)
    cut = select(w, keep)
    assert cut.segment.tolist() == [0, 2]
    assert cut.begins.tolist() == [False, True]
    assert cut.ends.tolist() == [True, False]
    assert cut.index.tolist() == [1, 2, 0]
    assert select(w, np.zeros(9, bool)).n == 0


@pytest.mark.parametrize("p", [0.01, 0.25, 0.5, 0.99, 1.0])
def test_histogram_quantiles_are_within_their_bins(p: float) -> None:
    x = np.random.default_rng(6).lognormal(-4, 2, 5000)
    exact = np.sort(x)[max(0, int(np.ceil(p * 5000)) - 1)]
    assert quantile(magnitudes(x), p) == pytest.approx(exact, rel=0.13)


def test_histogram_of_extremes() -> None:
    h = magnitudes(np.array([0.0, np.inf, 1e300, 1e-300, -2.5]))
    assert h.sum() == 5
    assert h[0] == 2
    assert magnitude_value(0) == 0.0
    assert quantile(magnitudes(np.zeros(0)), 0.5) == 0.0


def test_share_of_the_worst_tokens() -> None:
    x = np.r_[np.full(990, 0.01), np.full(10, 10.0)]
    assert share_of_top(magnitudes(x), 0.01) == pytest.approx(100 / (100 + 9.9), rel=0.02)


def test_position_bins_rise_and_start_where_they_say() -> None:
    index = np.arange(100000)
    b = position_bin(index)
    assert (np.diff(b) >= 0).all()
    firsts = {int(k): int(index[b == k][0]) for k in np.unique(b)}
    assert all(bin_start(k) == first for k, first in firsts.items())


@pytest.mark.parametrize(("period", "jitter"), [(512, 0), (300, 1), (64, 2)])
def test_period_survives_a_few_strangers(period: int, jitter: int) -> None:
    rng = np.random.default_rng(period)
    at = np.arange(period - 1, 20 * period, period)
    found = period_of([np.sort(np.r_[at, rng.integers(0, 20 * period, jitter)])])
    assert found is not None
    assert (found[0], found[1]) == (period, period - 1)


def test_no_period_in_random_positions() -> None:
    rng = np.random.default_rng(8)
    assert all(period_of([np.sort(rng.choice(4096, 12, replace=False))]) is None for _ in range(200))


def test_candidates_are_known_fills_and_repeats() -> None:
    rng = np.random.default_rng(9)
    x = logprobs(rng, 3000)
    assert candidates(x) == []
    x[::50] = 0.0
    assert candidates(x) == [0.0]
    x[::40] = -2.5
    assert sorted(candidates(x)) == [-2.5, 0.0]


def test_sampling_takes_the_first_block_and_a_thirty_second_after_it() -> None:
    seen = taken = 0
    picked = []
    for _ in range(64):
        picked.append(takes_block(seen, taken))
        seen += 100
        taken += 100 if picked[-1] else 0
    assert picked[0]
    assert sum(picked) == 2


@pytest.mark.parametrize("tokens", [1, 7, 40, 99])
def test_a_block_cut_in_two_is_the_block(tokens: int) -> None:
    """Head and tail side by side: the same tokens, positions and sequences, at any cut."""
    rng = np.random.default_rng(tokens)
    mask = rng.random(160) < 0.7
    at = np.flatnonzero(mask)[:100]
    mask[at[-1] + 1 :] = False
    raw = torch.from_numpy(-rng.exponential(1, 160))
    t = raw[torch.from_numpy(at)]
    starts, sequence = np.array([0, 7, 30, 31, 77]), np.array([2, 3, 5, 6, 9])
    block = Block(1000, raw, raw, mask, t, t, t, t, starts, sequence, lambda count: at[:count])
    parts = (block.head(tokens), block.tail(tokens))
    assert sum(len(p.mask) for p in parts) == 160 and parts[1].start == 1000 + len(parts[0].mask)
    assert torch.equal(torch.cat([p.d for p in parts]), t)
    assert torch.equal(torch.cat([p.raw_train for p in parts]), raw)
    assert np.array_equal(np.concatenate([p.positions + p.start for p in parts]), at + 1000)
    owner = [np.repeat(p.sequence, np.diff(np.append(p.starts, len(p.d)))) for p in parts]
    assert np.array_equal(np.concatenate(owner), np.repeat(sequence, np.diff(np.append(starts, 100))))
    assert block.head(100) is block


def parts_of(seeds: list[int]) -> list[dict[str, State]]:
    out = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        r = logprobs(rng, 700)
        r[::31] = 0.0
        t = r + rng.normal(0, 0.4, 700)
        t[3] = np.nan
        shard = Shard(
            t,
            r,
            [70] * 10,
            extra={"policy_version": np.arange(700) // 350, "logprobs.ref": r, "group_ids": np.arange(10)},
        )
        columns = shard.tensors()
        info, _ = describe_tensors(columns, name=f"s{seed}", place=Place(step=seed, rank=0))
        opened = MemoryShard(info, columns)
        offsets = opened.offsets().numpy()
        (unit,) = cut_units(offsets)
        out.append(Engine(Settings(), [Doctor()]).run(opened, unit, offsets).consumed[0])
    return out


def plain(value: Any) -> Any:
    """Comparable data of any field."""
    if isinstance(value, State):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if hasattr(value, "rows"):
        return plain(value.rows)
    return value


def close(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (isinstance(a, float) and a == pytest.approx(b, rel=1e-12, abs=1e-12))


@pytest.mark.parametrize("kind", STATES, ids=lambda k: k.__name__)
def test_merge_contract(kind: type[State]) -> None:
    a, b, c = (part[kind.__name__] for part in parts_of([1, 2, 3]))
    before = plain(copy.deepcopy(a))
    left = merged(kind, [merged(kind, [a, b]), c])
    right = merged(kind, [a, merged(kind, [b, c])])
    assert close(plain(left), plain(right))  # associative, but for the last bit of a float sum
    assert plain(a) == before  # parts are not changed by being merged
    assert plain(merged(kind, [a])) == plain(merged(kind, [kind(), a, kind()]))  # the empty state is neutral
    assert plain(pickle.loads(pickle.dumps(a))) == before
    assert plain(merged(kind, [a, b, c])) == plain(merged(kind, [a, b, c]))
