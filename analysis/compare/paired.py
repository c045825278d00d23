"""Tests from sequences at hand: two dumps that hold the same sequences are compared pair by pair.

The change of a mean is a difference of two ratios. Each cluster (sequence, or group where dumped) contributes its linearised
residual on either side; a cluster that both sides hold contributes the difference, so what both share cancels. Nothing is
assumed about clusters that only one side holds: they enter as in two independent samples.
Source: linearised variance of a ratio estimator, Cochran, Sampling Techniques, 1977, sections 6.4 and 6.11.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollout_is.analysis.batch import Floats
from rollout_is.analysis.compare.result import Test
from rollout_is.analysis.compare.runs import NothingComparable, PairTests
from rollout_is.analysis.compare.sequences import QUANTITIES, SequenceSums, Words, mix
from rollout_is.analysis.compare.tails import t_two_sided

Match = Literal["place", "sequence_ids", "token_ids"]
_D, _ABS, _D2, _E, _TRAIN, _E2, _EXP_ABS, _EXTREME, _HIGH, _LOW, _PROB_ABS = range(len(QUANTITIES))

Numerator = Callable[[Floats, Floats], Floats]

# path below the view -> numerator of each sequence, from its sums [Q, V] and its n [V]; the denominator is n
TOKEN_MEANS: Mapping[str, Numerator] = {
    "mismatch.mismatch_kl": lambda s, n: -s[_D],
    "mismatch.mismatch_k2_kl": lambda s, n: s[_D2] / 2,
    "mismatch.mismatch_k3_kl": lambda s, n: s[_E] - s[_D],
    "mismatch.mismatch_logprob_abs_diff": lambda s, n: s[_ABS],
    "mismatch.mismatch_prob_abs_diff": lambda s, n: s[_PROB_ABS],
    "mismatch.mismatch_mult_prob_error": lambda s, n: s[_EXP_ABS],
    "mismatch.mismatch_extreme_fraction": lambda s, n: s[_EXTREME],
    "mismatch.mismatch_chi2_token": lambda s, n: s[_E2] + 2 * s[_E],
    "token.rollout_is_mean": lambda s, n: n + s[_E],
    "token.rollout_is_ratio_fraction_high": lambda s, n: s[_HIGH],
    "token.rollout_is_ratio_fraction_low": lambda s, n: s[_LOW],
}
# the same with 1 as the denominator: means over sequences
SEQUENCE_MEANS: Mapping[str, Numerator] = {
    "mismatch.mismatch_training_log_ppl": lambda s, n: -s[_TRAIN] / n,
    "mismatch.mismatch_rollout_log_ppl": lambda s, n: (s[_D] - s[_TRAIN]) / n,
    "mismatch.mismatch_training_ppl": lambda s, n: np.exp(-s[_TRAIN] / n),
    "mismatch.mismatch_rollout_ppl": lambda s, n: np.exp((s[_D] - s[_TRAIN]) / n),
    "mismatch.mismatch_log_ppl_diff": lambda s, n: -s[_D] / n,
    "mismatch.mismatch_log_ppl_abs_diff": lambda s, n: np.abs(s[_D]) / n,
    "mismatch.mismatch_ppl_ratio": lambda s, n: np.exp(-s[_D] / n),
    "sequence.rollout_is_mean": lambda s, n: np.exp(s[_D]),
    "geometric.rollout_is_mean": lambda s, n: np.exp(s[_D] / n),
    "per_sequence.rollout_is_seq_mean": lambda s, n: 1 + s[_E] / n,
}


@dataclass(frozen=True)
class Joined:
    """Both sides' sequences with a common numbering of clusters.

    Attributes:
        a, b: the sequences.
        cluster_a, cluster_b: int64 [V] cluster of each; equal numbers are one cluster.
        clusters: how many there are.
        matched: sequences of ``b`` whose key ``a`` holds too.
        by: what the key was.
    """

    a: SequenceSums
    b: SequenceSums
    cluster_a: np.ndarray[tuple[int], np.dtype[np.int64]]
    cluster_b: np.ndarray[tuple[int], np.dtype[np.int64]]
    clusters: int
    matched: int
    by: Match


def join(a: SequenceSums, b: SequenceSums, labels: tuple[str, str], same_dump: bool = False) -> Joined | None:
    """Find the sequences that both sides hold.

    Args:
        a, b: per-sequence sums.
        labels: for messages.
        same_dump: two passes over one dump: shard and segment are the key.

    Returns:
        None when neither ids nor tokens were dumped on both sides, or no sequence is common.

    Raises:
        NothingComparable: the same ``sequence_ids`` hold other tokens at every sequence.
    """
    by: Match
    if same_dump:
        by, left, right = "place", a.place, b.place
    elif a.ids is not None and b.ids is not None:
        by = "sequence_ids"
        left, right = _keyed(a.step, a.ids.view(np.uint64)), _keyed(b.step, b.ids.view(np.uint64))
        if np.isin(right, left).any():
            left, right = _refuse_other_tokens(a, b, left, right, labels)
    elif a.tokens is not None and b.tokens is not None:
        by, left, right = "token_ids", _keyed(a.step, a.tokens), _keyed(b.step, b.tokens)
    else:
        return None
    matched = int(np.isin(right, left).sum())
    if matched == 0:
        return None
    if a.groups is not None and b.groups is not None:
        # members of one group answer one prompt: they are not independent, within a side or across
        left, right = a.groups.view(np.uint64), b.groups.view(np.uint64)
    _, number = np.unique(np.concatenate([left, right]), return_inverse=True)
    return Joined(a, b, number[: len(a)], number[len(a) :], int(number.max()) + 1, matched, by)


def paired_tests(joined: Joined, view: str = "masked") -> PairTests:
    """Tests of every mean that the sums give, pooled and at every step.

    Args:
        joined: from ``join``.
        view: prefix of the ids; the sums are those of the valid tokens.
    """
    by_step: dict[str, Mapping[str, Test]] = {}
    for step in np.intersect1d(joined.a.step, joined.b.step):
        inside = _at_step(joined, int(step))
        if inside is not None:
            by_step[str(step)] = _tests(inside, view)
    total = max(len(joined.a), len(joined.b))
    names = {"place": "the same dump", "sequence_ids": "sequence_ids", "token_ids": "equal tokens"}
    notes = (
        ()
        if joined.by == "place"
        else (
            f"{joined.matched:,} of {total:,} sequences are held by both sides (by {names[joined.by]}) and tested pair by pair"
            + ("" if joined.matched == total else "; the others as independent samples"),
        )
    )
    return PairTests(_tests(joined, view), by_step, joined.matched, joined.clusters, notes)


def _at_step(joined: Joined, step: int) -> Joined | None:
    in_a, in_b = joined.a.step == step, joined.b.step == step
    left, right = joined.cluster_a[in_a], joined.cluster_b[in_b]
    shared = np.isin(right, left)
    if not shared.any():
        return None  # no common sequence at this step: two independent samples, as the summaries have it
    _, number = np.unique(np.concatenate([left, right]), return_inverse=True)
    return Joined(
        joined.a.select(in_a),
        joined.b.select(in_b),
        number[: len(left)],
        number[len(left) :],
        int(number.max()) + 1,
        int(shared.sum()),
        joined.by,
    )


def _tests(joined: Joined, view: str) -> dict[str, Test]:
    found: dict[str, Test] = {}
    n_a, n_b = joined.a.n.astype(np.float64), joined.b.n.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        for means, den_a, den_b in (
            (TOKEN_MEANS, n_a, n_b),
            (SEQUENCE_MEANS, np.ones(len(n_a)), np.ones(len(n_b))),
        ):
            for path, numerator in means.items():
                test = _test(joined, numerator(joined.a.sums, n_a), den_a, numerator(joined.b.sums, n_b), den_b)
                if test is not None:
                    found[f"{view}.{path}"] = test
    return found


def _test(joined: Joined, num_a: Floats, den_a: Floats, num_b: Floats, den_b: Floats) -> Test | None:
    if joined.clusters < 2 or not (np.isfinite(num_a).all() and np.isfinite(num_b).all()):
        return None
    total_a, total_b = den_a.sum(), den_b.sum()
    mean_a, mean_b = math.fsum(num_a) / total_a, math.fsum(num_b) / total_b
    residual = np.bincount(joined.cluster_b, (num_b - mean_b * den_b) / total_b, joined.clusters)
    residual -= np.bincount(joined.cluster_a, (num_a - mean_a * den_a) / total_a, joined.clusters)
    variance = joined.clusters / (joined.clusters - 1) * math.fsum(residual * residual)
    stderr = math.sqrt(variance)
    change = mean_b - mean_a
    # the same numbers on both sides leave rounding behind, not spread
    if stderr <= 1e-12 * max(abs(mean_a), abs(mean_b)) or stderr == 0.0:
        return None if change else Test("paired t", 0.0, joined.clusters - 1, 1.0)
    df = joined.clusters - 1
    return Test("paired t", stderr, float(df), t_two_sided(change / stderr, df))


def _refuse_other_tokens(
    a: SequenceSums, b: SequenceSums, left: Words, right: Words, labels: tuple[str, str]
) -> tuple[Words, Words]:
    """Sequences of one id must hold the same tokens; those that do not become clusters of their own side."""
    if a.tokens is None or b.tokens is None:
        return left, right
    whole_a, whole_b = mix(left, a.tokens), mix(right, b.tokens)
    if np.isin(whole_b, whole_a).any():
        return whole_a, whole_b
    shared = int(np.isin(right, left).sum())
    raise NothingComparable(
        f"{labels[0]} and {labels[1]}",
        f"expected the same tokens under the same sequence_ids, found other tokens at all {shared:,} common sequences",
        "sequence_ids that only count positions say nothing across runs, or one side was tokenised again",
        "add --unpaired to compare the two as independent samples",
        code="compare-other-tokens",
    )


def _keyed(step: np.ndarray[tuple[int], np.dtype[np.int64]], key: Words) -> Words:
    return mix(step.view(np.uint64), key)
