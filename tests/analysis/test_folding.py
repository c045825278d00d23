"""Folding the histograms on arrival, as very large dumps do, changes nothing but the memory that is held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made import Settings, Shard, analyze, randomly, stable, write_dump

from rollout_is.analysis import pipeline, units


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(units, "UNIT_POSITIONS", 64)
    monkeypatch.setattr(units, "CHUNK_POSITIONS", 32)
    monkeypatch.setattr(units, "BLOCK_TOKENS", 32)
    rng = np.random.default_rng(8)
    shards = [randomly(rng, segments=20, length=40) for _ in range(4)]
    long = randomly(rng, segments=1, length=200)
    return write_dump(tmp_path, [*shards, long], ranks=5)


def both(path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> tuple[str, str]:
    kept = stable(analyze(path, settings=settings))
    monkeypatch.setattr(pipeline, "KEPT_UNITS", 0)
    return kept, stable(analyze(path, settings=settings))


@pytest.mark.parametrize("by", [(), ("length",), ("position", "pack"), ("step",)])
def test_not_one_bit(dump: Path, monkeypatch: pytest.MonkeyPatch, by: tuple[str, ...]) -> None:
    kept, folded = both(dump, monkeypatch, Settings(by=by, top=3))
    assert kept == folded


def test_rows_hold_no_histogram_then(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "KEPT_UNITS", 0)
    seen: list[int] = []
    whole = pipeline.assemble

    def spy(partials, *rest):  # type: ignore[no-untyped-def]
        seen.extend(
            len(row.token.weights.histogram.keys) for p in partials for row in p.rows["", ""] if row is not None
        )
        return whole(partials, *rest)

    monkeypatch.setattr(pipeline, "assemble", spy)
    analyze(dump)
    assert len(seen) > 20 and not any(seen)


def test_the_figures_without_copies(tmp_path: Path, dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = randomly(np.random.default_rng(9), segments=30, length=40)
    twice = Shard(one.train, one.rollout, one.mask, one.cu)
    other = randomly(np.random.default_rng(10), segments=30, length=40)
    path = write_dump(tmp_path / "copies", [one, twice, other], ranks=3)
    kept = analyze(path).extra["without_duplicates"]
    monkeypatch.setattr(pipeline, "KEPT_UNITS", 0)
    folded = analyze(path).extra["without_duplicates"]
    assert kept["sequences_left_out"] == folded["sequences_left_out"] > 5
    k_hat = folded["views"]["masked"]["sequence"].pop("pareto_k")
    assert k_hat["value"] is None and "large" in k_hat["why"]
    kept["views"]["masked"]["sequence"].pop("pareto_k")
    assert kept == folded
