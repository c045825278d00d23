"""The committed sample dumps are what their scripts make, and safetensors itself reads them."""

from __future__ import annotations

import filecmp
import io
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rollout_is.cli.app import main

SAMPLES = Path(__file__).resolve().parents[1] / "sample_dumps"
QUICK = ("packed_padding", "multi_turn", "all_masked", "broken", "v1")


def files_of(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def remade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    script = [sys.executable, str(SAMPLES / "make.py"), *QUICK, "--to", str(folder)]
    done = subprocess.run(script, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", QUICK)
def test_regenerated_bit_for_bit(remade: Path, name: str) -> None:
    expected = files_of(SAMPLES / name)
    assert expected, f"{name} is not committed"
    assert files_of(remade / name) == expected
    _, different, missing = filecmp.cmpfiles(SAMPLES / name, remade / name, expected, shallow=False)
    assert different == missing == []


def test_samples_are_small() -> None:
    total = sum(p.stat().st_size for p in SAMPLES.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    assert total < 3_000_000


def test_packed_padding_is_the_fault_at_its_clearest() -> None:
    """Counted by hand from the raw columns: the figures that the README of the samples states."""
    means, segments = [], 0
    for path in sorted((SAMPLES / "packed_padding").rglob("*.safetensors")):
        columns = load_file(path)
        ratio = (columns["train_logprobs"].double() - columns["rollout_logprobs"].double()).exp()
        for start, stop in pairwise(columns["cu_seqlens"].tolist()):
            segments += 1
            kept = ratio[start:stop][columns["response_mask"][start:stop]]
            if kept.numel():
                means.append(float(kept.mean()))
            else:
                assert not columns["rollout_logprobs"][start:stop].any()
    assert (len(means), segments) == (147, 171)
    assert min(means) == pytest.approx(0.991134, abs=1e-6)
    assert max(abs(x - 1) for x in means) == pytest.approx(0.010769, abs=1e-6)
    assert sum(means) / segments == pytest.approx(0.860374, abs=1e-6)


def report(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return main(["analyze", *argv], stdout=out, stderr=err), out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name", sorted(p.name for p in (SAMPLES / "broken").iterdir()))
def test_every_broken_sample_is_refused_in_four_lines(name: str) -> None:
    code, out, err = report(str(SAMPLES / "broken" / name))
    assert (code, out) == (3, "")
    where, problem, *rest = err.removeprefix("error: ").splitlines()
    assert where and problem.startswith("  ")
    assert [line.split(":")[0].strip() for line in rest if not line.startswith("    ")] == ["why", "fix"]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "name", ["truncated", "lfs_pointer", "mask_nan", "offsets_past_end", "two_candidates", "rank_missing"]
)
def test_one_bad_shard_never_hides_the_good_one(name: str) -> None:
    code, out, _ = report(str(SAMPLES / "broken" / name), "--allow-partial", "--format", "json")
    assert code == 0
    coverage = json.loads(out)["coverage"]
    assert (coverage["positions"], coverage["sequences"]) == (48, 4)


def test_nothing_valid_exits_1() -> None:
    code, out, _ = report(str(SAMPLES / "all_masked"), "--format", "json")
    figures = json.loads(out)["views"]["masked"]["token"]
    assert code == 1
    assert {(f["value"], f["why"]) for f in figures.values()} == {(None, "no valid tokens")}


@pytest.mark.parametrize("name", sorted(p.name for p in (SAMPLES / "v1").iterdir()))
def test_v1_files_load_for_ever(name: str) -> None:
    """18 valid tokens in three sequences, wherever the mask and the bounds come from; bf16 rounds, the others do not."""
    code, out, err = report(str(SAMPLES / "v1" / name), "--format", "json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["coverage"]["valid_tokens"] == 18
    assert summary["coverage"]["sequences"] == 3
    largest = summary["views"]["masked"]["mismatch"]["mismatch_logprob_abs_diff_max"]["value"]
    assert 0 < largest <= (0.0625 if "bf16" not in name else 0.08)
