"""Group F of the public cases: temperature, other scales, truncated support, the wrong candidate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from doctored import Shard, examine, explained, ids, logprobs


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def drawn(rng: np.random.Generator, log_p: np.ndarray) -> np.ndarray:
    return (log_p + rng.gumbel(size=log_p.shape)).argmax(axis=1)


@pytest.fixture(scope="module")
def c54() -> tuple[np.ndarray, np.ndarray]:
    """(logits [4000, 64], sampled tokens at T = 0.6)."""
    rng = np.random.default_rng(54)
    logits = rng.normal(0, 2, (4000, 64))
    return logits, drawn(rng, log_softmax(logits / 0.6))


def test_c54_temperature_on_one_side(c54: tuple[np.ndarray, np.ndarray]) -> None:
    logits, token = c54
    at = np.arange(4000)
    t, r = log_softmax(logits / 0.6)[at, token], log_softmax(logits)[at, token]
    findings = examine(Shard(t, r, [100] * 40))
    assert ids(findings) == ["scale.temperature"]
    finding = findings[0]
    assert "slope != 1: temperature on one side?" in finding.message
    figures = finding.evidence["figures"]
    assert figures["slope"] == pytest.approx(1.43, abs=0.05)
    assert figures["slope"] == pytest.approx(np.polyfit(r, t, 1)[0], rel=1e-5)
    assert figures["temperature_ratio"] == pytest.approx(1 / 0.6, rel=0.1)
    assert figures["mean_weight"] == pytest.approx(1.40, abs=0.05)
    assert "the tokens were sampled from the train side's distribution" in finding.message
    assert explained(finding) == ["weights.mean"]


def test_c54_the_other_way_round_names_the_other_side(c54: tuple[np.ndarray, np.ndarray]) -> None:
    logits, token = c54
    at = np.arange(4000)
    r, t = log_softmax(logits / 0.6)[at, token], log_softmax(logits)[at, token]
    findings = examine(Shard(t, r, [100] * 40))
    assert ids(findings) == ["scale.temperature"]
    assert "sampled from the rollout side's distribution" in findings[0].message


def test_c54_same_temperature_on_both_sides_is_silent(c54: tuple[np.ndarray, np.ndarray]) -> None:
    logits, token = c54
    rng = np.random.default_rng(1)
    at = np.arange(4000)
    r = log_softmax(logits / 0.6)[at, token]
    t = log_softmax((logits + rng.normal(0, 0.02, logits.shape)) / 0.6)[at, token]
    assert ids(examine(Shard(t, r, [100] * 40))) == []


def test_c56_temperature_zero_is_listed_by_sequence_and_in_the_metadata() -> None:
    rng = np.random.default_rng(56)
    r = logprobs(rng, 1000)
    t = r + rng.normal(0, 0.01, 1000)
    t[200:300], t[700:800] = np.nan, -np.inf
    metadata = {"train_temperature": "0", "rollout_temperature": "1"}
    findings = examine(Shard(t, r, [100] * 10, metadata=metadata))
    assert ids(findings) == ["missing.nonfinite", "scale.metadata"]
    first, second = findings[0], findings[1]
    assert (
        "200 valid tokens without a finite log-prob (100 NaN in train, 100 -inf in train) in 2 sequences"
        in first.message
    )
    assert "2 sequences have no finite token at all" in first.message
    assert first.evidence["places"][0]["sequence"] == 2
    assert second.severity == "notice"
    assert "temperature 0 on the train side, 1 on the rollout side" in second.message
    assert "temperature 0 is greedy" in second.message


def test_c57_truncated_support_is_a_one_sided_offset(c54: tuple[np.ndarray, np.ndarray]) -> None:
    rng = np.random.default_rng(57)
    log_p = log_softmax(c54[0])
    order = np.argsort(-log_p, axis=1)
    ranked = np.take_along_axis(np.exp(log_p), order, axis=1)
    keep = np.zeros(log_p.shape, bool)
    np.put_along_axis(keep, order, np.cumsum(ranked, axis=1) - ranked < 0.9, axis=1)
    mass = np.where(keep, np.exp(log_p), 0).sum(axis=1)
    kept = np.where(keep, log_p - np.log(mass)[:, None], -np.inf)
    token = drawn(rng, kept)
    at = np.arange(4000)
    findings = examine(Shard(log_p[at, token], kept[at, token], [100] * 40))
    assert ids(findings) == ["support.truncated"]
    figures = findings[0].evidence["figures"]
    assert figures["mean_weight"] == pytest.approx(0.905, abs=0.01)
    assert figures["mean_weight"] == pytest.approx(mass.mean(), rel=1e-5)  # d = log S for every token
    assert figures["largest_weight"] == pytest.approx(mass.max(), rel=1e-5)
    assert figures["largest_weight"] < 1
    assert figures["mean_d"] == pytest.approx(-0.10, abs=0.01)
    assert "constant negative offset: truncated sampling (S = 0.9" in findings[0].message
    assert explained(findings[0]) == ["weights.mean"]


def test_top_candidate_instead_of_the_sampled_token(c54: tuple[np.ndarray, np.ndarray]) -> None:
    logits, _ = c54
    rng = np.random.default_rng(3)
    log_p = log_softmax(logits)
    token = drawn(rng, log_p)
    t = log_p[np.arange(4000), token] + rng.normal(0, 0.005, 4000)
    findings = examine(Shard(t, log_p.max(axis=1), [100] * 40))
    assert ids(findings) == ["support.top_candidate"]
    assert "r is never below t" in findings[0].message


@pytest.mark.parametrize(
    ("change", "id", "words"),
    [
        (lambda r: r / 0.7, "scale.divided", "divided by a temperature after the softmax"),
        (lambda r: r / math.log(2), "scale.log_base", "the rollout side is in bits"),
        (lambda r: r / math.log(10), "scale.log_base", "the rollout side is in log base 10"),
        (np.exp, "scale.probabilities", "the rollout column holds probabilities"),
        (lambda r: -r, "scale.sign", "the rollout column has the opposite sign"),
    ],
)
def test_other_scales(change: object, id: str, words: str) -> None:
    rng = np.random.default_rng(11)
    r = logprobs(rng, 3000)
    t = r + rng.normal(0, 0.01, 3000)
    findings = examine(Shard(t, change(r), [100] * 30))  # type: ignore[operator]
    assert ids(findings) == [id]
    assert words in findings[0].message


def test_c59_logprobs_mode_that_differs_by_side() -> None:
    rng = np.random.default_rng(59)
    r = logprobs(rng, 500)
    metadata = {"train_logprobs_mode": "raw", "rollout_logprobs_mode": "processed", "rollout_top_p": "0.9"}
    findings = examine(Shard(r + rng.normal(0, 0.01, 500), r, [50] * 10, metadata=metadata))
    assert ids(findings) == ["scale.metadata"]
    assert "logprobs_mode raw on the train side, processed on the rollout side" in findings[0].message


def test_weights_away_from_one_without_a_known_cause() -> None:
    """Half of the tokens up by .3, half down by .2: the sum of pi_train over what was sampled is not 1."""
    rng = np.random.default_rng(12)
    r = logprobs(rng, 20000) - 1
    t = r + np.where(rng.random(20000) < 0.5, 0.3, -0.2)
    findings = examine(Shard(t, r, [100] * 200))
    assert ids(findings) == ["weights.mean"]
    finding = findings[0]
    oracle = np.exp(t - r).mean()
    assert finding.evidence["figures"]["mean_weight"] == pytest.approx(oracle, rel=1e-5)
    assert "r is not the log-prob of the distribution that was sampled" in finding.message
