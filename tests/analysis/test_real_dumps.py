"""Real train/rollout numerics: recorded figures of the trimmed dumps, and the full reference dumps where they are at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import oracle
import pytest
from made import Shard, analyze, assert_agrees, group_value, value
from oracle import coverage
from safetensors.torch import load_file

from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary

REAL = Path(__file__).parents[1] / "vectors" / "real"
FULL = Path(__file__).parents[2].parent / "shared" / "reference" / "real_dumps"
NAMES = ("healthy", "all_masked", "multi_turn", "bad_rank", "stale")
needs_full = pytest.mark.skipif(
    not FULL.is_dir(), reason="the full reference dumps (../shared) are not part of a clone"
)


def load(folder: Path) -> list[Shard]:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        x = load_file(path)
        found.append(Shard(x["train_logprobs"], x["rollout_logprobs"], x["response_mask"], x["cu_seqlens"].tolist()))
    return found


@cache
def analysed(folder: Path) -> Summary:
    return analyze(folder, settings=Settings(by=("step", "rank")))


@pytest.mark.parametrize("name", NAMES)
def test_trimmed_dump_gives_the_recorded_figures(name: str) -> None:
    truth = json.loads((REAL / name / "truth.json").read_text())
    got = analysed(REAL / name)
    wrong = []
    for key, want in truth["statistics"].items():
        have = value(got, key)
        tolerance = max(0.01 * abs(want), 1e-6) if "log_ratio_p" in key else 1e-9 * abs(want) + 1e-13
        if abs(have - want) > tolerance:
            wrong.append(f"{key}: {have!r}, recorded {want!r}")
    assert not wrong, "\n".join(wrong)
    assert {k: got.coverage[k] for k in truth["coverage"]} == truth["coverage"]


@pytest.mark.parametrize("name", NAMES)
def test_trimmed_dump_agrees_with_the_oracle(name: str) -> None:
    assert_agrees(analysed(REAL / name), load(REAL / name))


def test_the_pad_artefact_on_real_data() -> None:
    got = analysed(REAL / "healthy")
    assert value(got, "padded.per_sequence.rollout_is_seq_min") == 0.0
    assert value(got, "padded.per_sequence.rollout_is_seq_max_deviation") == 1.0
    assert value(got, "masked.per_sequence.rollout_is_seq_min") > 0.98
    assert value(got, "masked.per_sequence.rollout_is_seq_max_deviation") < 0.02


def test_the_bad_rank_and_the_stale_step_stand_out() -> None:
    name = "masked.mismatch.mismatch_logprob_abs_diff"
    bad = analysed(REAL / "bad_rank")
    good_rank, bad_rank = (group_value(bad, "rank", key, name) for key in ("0", "1"))
    assert good_rank is not None and bad_rank is not None and bad_rank > 5 * good_rank
    stale = analysed(REAL / "stale")
    before, after = (group_value(stale, "step", key, name) for key in ("2", "3"))
    assert before is not None and after is not None and after > 5 * before


def figures(truth: dict[str, Any], view: str) -> Iterator[tuple[str, float]]:
    """(our id, value) of every figure in the reference truth that METRICS.md defines."""
    token, sequence = truth[view]["token"], truth[view]["sequence"]
    for key, x in token.items():
        if key.startswith("rollout_is_"):
            yield f"{view}.token.{key}", x
        elif key.startswith("mismatch_"):
            yield f"{view}.mismatch.{key}", x
    for key, x in token["log_ratio_quantiles"].items():
        yield f"{view}.token.log_ratio_{key.replace('.', '_')}", x
    for key, x in sequence.items():
        if key.startswith("rollout_is_seq_"):
            yield f"{view}.per_sequence.{key}", x
        elif key.startswith("mismatch_"):
            yield f"{view}.mismatch.{key}", x
    for theirs, ours, chi2 in (("product", "sequence", "seq"), ("geometric", "geometric", "geometric")):
        for key in ("mean", "std", "eff_sample_size"):
            yield f"{view}.{ours}.rollout_is_{key}", sequence[theirs][key]
        yield f"{view}.mismatch.mismatch_chi2_{chi2}", sequence[theirs]["chi2"]


def wrong_figures(get: Any, truth: dict[str, Any]) -> list[str]:
    wrong = []
    for view in ("masked", "padded", "unmasked"):
        for key, want in figures(truth, view):
            have = get(key)
            # The truth interpolates its quantiles. Means that cancel: 1e-12 of the mean absolute summand (|d| < 2 here).
            quantile, cancels = "log_ratio_p" in key, ("_kl" in key or "diff" in key or "chi2" in key)
            if quantile:
                tolerance = max(0.012 * abs(want), 2e-6)
            else:
                tolerance = 1e-9 * abs(want) + (2e-12 if cancels else 0.0)
            if have is None or abs(have - want) > tolerance:
                wrong.append(f"{key}: {have!r}, truth {want!r}")
    return wrong


@needs_full
@pytest.mark.parametrize("name", NAMES)
def test_full_reference_dump_gives_its_truth(name: str) -> None:
    truth = json.loads((FULL / name / "truth.json").read_text())
    got = analysed(FULL / name)
    wrong = wrong_figures(lambda key: value(got, key), truth)
    assert not wrong, "\n".join(wrong)
    counts = truth["counts"]
    assert got.coverage["positions"] == counts["positions"]
    assert got.coverage["valid_tokens"] == counts["valid_tokens"]
    assert got.coverage["segments"] == counts["segments"]
    assert got.coverage["sequences"] == counts["sequences"]
    assert got.coverage["fully_masked"] == counts["fully_masked_segments"]
    assert got.coverage["fully_masked_with_content"] == counts["fully_masked_with_rollout"]
    low = got.get("unmasked.sequence.rollout_is_min")
    assert low is not None and low.value is None
    assert low.log_value == pytest.approx(truth["unmasked"]["sequence"]["product"]["log_min"], rel=1e-9)


@needs_full
@pytest.mark.parametrize("name", NAMES)
def test_full_reference_dump_by_step_and_rank(name: str) -> None:
    truth = json.loads((FULL / name / "truth.json").read_text())
    got = analysed(FULL / name)
    for by, block in (("step", truth["per_step"]), ("rank", truth["per_rank"])):
        assert sorted(got.groups[by]) == sorted(block)
        for key, figures in block.items():
            group = got.groups[by][key]
            assert (group.valid_tokens, group.sequences) == (figures["valid_tokens"], figures["sequences"])
            for metric, want in figures.items():
                if metric.startswith("mismatch_"):
                    have = group_value(got, by, key, f"masked.mismatch.{metric}")
                elif metric.startswith("rollout_is_"):
                    have = group_value(got, by, key, f"masked.token.{metric}")
                else:
                    continue
                assert have == pytest.approx(want, rel=1e-9, abs=1e-13), (by, key, metric)


@needs_full
@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_itself_agrees_with_the_truth(name: str) -> None:
    truth = json.loads((FULL / name / "truth.json").read_text())
    packed = [s.packed() for s in load(FULL / name)]
    expected = oracle.summarize(packed)
    wrong = wrong_figures(lambda key: expected[key].value, truth)
    assert not wrong, "\n".join(wrong)
    assert coverage(packed)["fully_masked_with_content"] == truth["counts"]["fully_masked_with_rollout"]
