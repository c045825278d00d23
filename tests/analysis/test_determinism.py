"""Same dump, same bits: any order of files, any number of workers, one process or ``torchrun`` ranks (``runtime`` apart)."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from made import Settings, Shard, analyze, randomly, stable, stat, write_dump

from rollout_is.analysis.summary import Summary
from rollout_is.analysis.units import UNIT_POSITIONS

BOUNDS = Settings(veto_lower=0.5, veto_upper=2.0, by=("step", "rank", "position", "length"), top=5)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine shards of three steps: ordinary ones, one of several units with a sequence longer than a unit, one all masked, one empty."""
    rng = np.random.default_rng(42)
    shards = [randomly(rng, segments=40, length=60) for _ in range(9)]
    lengths = [UNIT_POSITIONS + 100_000, 40, 300_000, 3, 50_000]
    n = sum(lengths)
    r = -rng.exponential(1.0, n).astype(np.float32)
    t = (r + 0.01 * rng.standard_normal(n)).astype(np.float32)
    mask = torch.from_numpy(rng.random(n) < 0.8)
    shards[3] = Shard(torch.from_numpy(t), torch.from_numpy(r), mask, np.cumsum([0, *lengths]).tolist())
    shards[5].mask = torch.zeros_like(shards[5].mask)
    shards[7] = Shard(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool), [0])
    return write_dump(tmp_path_factory.mktemp("dump"), shards, ranks=3)


@pytest.fixture(scope="module")
def alone(dump: Path) -> str:
    return stable(analyze(dump, settings=BOUNDS, workers=1))


def test_the_same_twice(dump: Path, alone: str) -> None:
    assert stable(analyze(dump, settings=BOUNDS, workers=1)) == alone


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_workers_change_not_one_bit(dump: Path, alone: str, workers: int) -> None:
    assert stable(analyze(dump, settings=BOUNDS, workers=workers)) == alone


def figures(summary: Summary) -> str:
    """Everything that does not name files."""
    data = summary.to_dict()
    return json.dumps({key: data[key] for key in ("coverage", "views", "groups")})


def test_order_and_names_of_files_change_not_one_bit(dump: Path, tmp_path: Path) -> None:
    want = analyze(dump, settings=BOUNDS)
    paths = sorted(dump.rglob("*.safetensors"))
    for seed in (1, 2):
        mixed = paths.copy()
        random.Random(seed).shuffle(mixed)
        assert stable(analyze(mixed, settings=BOUNDS, workers=seed)) == stable(analyze(paths, settings=BOUNDS))
        folder = tmp_path / str(seed)
        folder.mkdir()
        for i, path in enumerate(mixed):  # other names, written in another order: the metadata says step and rank
            shutil.copy(path, folder / f"{i:03d}.safetensors")
        assert figures(analyze(folder, settings=BOUNDS)) == figures(want)


@pytest.mark.parametrize("place", [0, 1, 2, None])
@pytest.mark.parametrize("workers", [1, 3])
def test_c13_an_all_masked_rank_in_any_place(tmp_path: Path, place: int | None, workers: int) -> None:
    rng = np.random.default_rng(13)
    shards = [randomly(rng, noise=0.05) for _ in range(3)]
    real = [s for i, s in enumerate(shards) if place is not None and i != place]
    for i, one in enumerate(shards):
        if place is None or i == place:
            one.mask = torch.zeros_like(one.mask)
    got = analyze(write_dump(tmp_path / "all", shards, ranks=3), workers=workers)
    if place is None:
        for metric in ("min", "max", "mean"):
            assert stat(got, f"masked.token.rollout_is_{metric}").value is None
            assert stat(got, f"masked.token.rollout_is_{metric}").why == "no valid tokens"
        return
    only = analyze(write_dump(tmp_path / "real", real, ranks=2))
    assert got.to_dict()["views"]["masked"] == only.to_dict()["views"]["masked"]


def torchrun(ranks: int, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "rollout_is", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("ranks", [1, 3])
def test_torchrun_prints_the_same_bits(dump: Path, ranks: int) -> None:
    done = torchrun(ranks, "analyze", str(dump), "--format", "json")
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout)
    printed.pop("runtime")
    want = analyze(dump, settings=Settings()).to_dict()
    want.pop("runtime")
    want = json.loads(json.dumps(want))
    for key in ("views", "groups", "coverage", "notes", "settings"):
        assert printed[key] == want[key], key


def test_more_ranks_than_units_and_all_masked(tmp_path: Path) -> None:
    one = randomly(np.random.default_rng(1), segments=3)
    one.mask = torch.zeros_like(one.mask)
    done = torchrun(3, "analyze", str(write_dump(tmp_path, [one])), "--format", "json")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    printed = json.loads(done.stdout)
    assert printed["views"]["masked"]["token"]["rollout_is_min"]["value"] is None


def test_a_rank_that_meets_a_bad_shard_ends_all_with_one_message(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    folder = write_dump(tmp_path, [randomly(rng) for _ in range(4)], ranks=4)
    bad = folder / "step_00000001" / "rank_00002.safetensors"
    bad.write_bytes(bad.read_bytes()[:-60])
    done = torchrun(2, "analyze", str(folder))
    assert done.returncode == 1  # the launcher's; ours stands beside
    assert done.stdout == ""
    assert done.stderr.count("short by 60") == 1 and "rank_00002" in done.stderr


def test_local_ranks_of_one_node_give_the_same_figures(dump: Path) -> None:
    done = torchrun(2, "analyze", str(dump), "--own-shards", "--format", "json")
    assert done.returncode == 0, done.stderr[-3000:]
    printed, want = json.loads(done.stdout), json.loads(analyze(dump).to_json())
    assert printed["views"] == want["views"] and printed["coverage"] == want["coverage"]
