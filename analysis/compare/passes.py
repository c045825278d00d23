"""Scoring passes of one dump against each other: which is the odd one out, and how high the noise floor is.

A second train pass over the same tokens differs from the first by batch shape and kernels alone: what train and rollout differ
by beyond that is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from rollout_is.analysis.summary import Summary

MEASURE = "masked.mismatch.mismatch_logprob_abs_diff"
# The odd one out is named when the others agree this much better than any of them agrees with it: three passes of equal noise
# give equal gaps, and at 1.5 the odd one has 3.5 times the variance of the others.
CLEAR = 1.5

PASS_PATHS = (
    "mismatch.mismatch_logprob_abs_diff",
    "mismatch.mismatch_k3_kl",
    "mismatch.mismatch_kl",
    "mismatch.mismatch_prob_abs_diff",
    "mismatch.mismatch_extreme_fraction",
    "mismatch.mismatch_logprob_abs_diff_max",
    "token.rollout_is_mean",
    "token.rollout_is_eff_sample_size",
)


def pass_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs to score, the noise floor (two train passes) first, then train against rollout.

    >>> pass_pairs(["train", "train_again"])
    [('train', 'train_again'), ('train', 'rollout'), ('train_again', 'rollout')]
    """
    listed = list(dict.fromkeys([*names, *(name for name in ("train", "rollout") if name not in names)]))
    order = sorted(listed, key=lambda name: (name == "rollout", name != "train", listed.index(name)))

    def rank(pair: tuple[str, str]) -> tuple[bool, bool]:
        return (not is_floor(pair), "rollout" in pair and pair[0] != "train")

    return sorted(combinations(order, 2), key=rank)


def is_floor(pair: tuple[str, str]) -> bool:
    """Whether both are passes of the trainer: their difference is noise."""
    return all(name.startswith("train") for name in pair)


def judge(summaries: Mapping[tuple[str, str], Summary]) -> tuple[str, dict[str, Any]]:
    """The verdict over all pairs of passes.

    Args:
        summaries: pair of passes -> the analysis of the first against the second.

    Returns:
        one line, and its data: ``passes`` (mean absolute difference by pair), ``odd_one_out``, ``noise_floor``.
    """
    gaps = {pair: _gap(summary) for pair, summary in summaries.items()}
    known = {pair: gap for pair, gap in gaps.items() if gap is not None}
    odd = odd_one_out(known)
    floors = {pair: gap for pair, gap in known.items() if is_floor(pair)}
    data: dict[str, Any] = {
        "passes": [{"a": a, "b": b, "mean_abs_diff": gap} for (a, b), gap in gaps.items()],
        "odd_one_out": odd,
        "noise_floor": min(floors.values()) if floors else None,
    }
    sentences = []
    if odd is not None:
        others = [pair for pair in known if odd not in pair]
        apart = min(gap for pair, gap in known.items() if odd in pair)
        close = max(known[pair] for pair in others)
        named = ", ".join(dict.fromkeys(name for pair in others for name in pair))
        sentences.append(
            f"{odd} is the odd one out: {named} agree to {close:.3g}, {odd} differs by {apart:.3g} and more"
        )
    elif len(known) >= 3:
        sentences.append(
            f"no pass is the odd one out: all differ alike ({min(known.values()):.3g} to {max(known.values()):.3g})"
        )
    engine = known.get(("train", "rollout"))
    if floors and engine is not None:
        floor = min(floors.values())
        factor = f", {engine / floor:.3g} times the floor" if floor > 0 else ""
        sentences.append(f"noise floor between train passes {floor:.3g}; train against rollout {engine:.3g}{factor}")
    return "; ".join(sentences) or "the passes could not be compared", data


def odd_one_out(gaps: Mapping[tuple[str, str], float]) -> str | None:
    """The pass that differs from all others while those agree; None when no pass stands out (or there are only two).

    >>> odd_one_out({("a", "b"): 0.01, ("a", "c"): 0.2, ("b", "c"): 0.21})
    'c'
    >>> odd_one_out({("a", "b"): 0.2, ("a", "c"): 0.2, ("b", "c"): 0.21}) is None
    True
    """
    names = list(dict.fromkeys(name for pair in gaps for name in pair))
    if len(names) < 3:
        return None
    for name in names:
        apart = [gap for pair, gap in gaps.items() if name in pair]
        close = [gap for pair, gap in gaps.items() if name not in pair]
        if len(apart) == len(names) - 1 and close and min(apart) > CLEAR * max(close):
            return name
    return None


def _gap(summary: Summary) -> float | None:
    statistic = summary.get(MEASURE)
    return None if statistic is None else statistic.value
