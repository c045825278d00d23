"""A policy on tensors in memory: the weight and the fate of every token. float64; the definition that the streamed form must meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.policies.rules import Policy, Rule

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Applied:
    """What a policy does to packed tokens.

    Attributes:
        weights: float64 [T] multipliers; 0 where the mask is False and where a token was rejected.
        keep: bool [T] the mask afterwards: valid tokens that were not masked out (zeroed ones stay in it).
        zeroed: bool [T] valid tokens left in n with weight 0.
        changed: bool [T] surviving tokens whose weight was cut.
        rejected_by: for each rule of the policy, bool [T] of the valid tokens that it alone rejects.
    """

    weights: Floats
    keep: Bools
    zeroed: Bools
    changed: Bools
    rejected_by: tuple[Bools, ...]


def evaluate(
    policy: Policy,
    train_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    cu_seqlens: ArrayLike,
    *,
    advantages: ArrayLike | None = None,
) -> Applied:
    """Apply a policy to one step's tokens.

    Args:
        policy: what to apply.
        train_logprobs, rollout_logprobs: [T] natural logarithms.
        response_mask: [T], nonzero = valid.
        cu_seqlens: [S+1] segment boundaries.
        advantages: [T], for rules that look at their sign.

    Raises:
        ValueError: the policy needs advantages and there are none.

    >>> from rollout_is.analysis.policies.spec import parse_spec
    >>> done = evaluate(parse_spec("token:truncate:upper=2"), [-1.0, -1.0], [-3.0, -1.0], [1, 1], [0, 2])
    >>> done.weights.tolist(), done.changed.tolist()
    ([2.0, 1.0], [True, False])
    """
    mask = np.asarray(response_mask).ravel() != 0
    t, r = (np.asarray(x, dtype=np.float64).ravel() for x in (train_logprobs, rollout_logprobs))
    offsets = np.asarray(cu_seqlens, dtype=np.int64).ravel()
    sequence = np.full(
        mask.size, -1, dtype=np.int64
    )  # which segment each position lies in; -1 beyond the last boundary
    sequence[: offsets[-1]] = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    at = np.flatnonzero(mask & (sequence >= 0))
    d, owner = t[at] - r[at], sequence[at]
    segments = offsets.size - 1
    if policy.needs_advantages and advantages is None:
        raise ValueError(f"policy {policy.name} needs advantages")
    tokens = _Tokens(d, np.exp(t[at]) - np.exp(r[at]), owner, segments)
    adv = None if advantages is None else np.asarray(advantages, dtype=np.float64).ravel()[at]

    failures = [_fails(rule, tokens, adv) for rule in policy.rules]
    masked = np.zeros(at.size, dtype=bool)
    zeroed = np.zeros(at.size, dtype=bool)
    for rule, fails in zip(policy.rules, failures, strict=True):
        if rule.action == "mask":
            masked |= fails
        else:
            zeroed |= fails
    zeroed &= ~masked
    weight = policy.weight
    raw = np.ones(at.size)
    if weight.level != "none":
        logs = tokens.level(weight.level, None)
        raw = np.exp(logs if weight.safety is None else np.clip(logs, -weight.safety, weight.safety))
    w = np.clip(raw, weight.lower, weight.upper) if weight.lower is not None or weight.upper is not None else raw
    changed = (w != raw) & ~masked & ~zeroed
    w = np.where(zeroed, 0.0, w)
    if weight.normalize == "token":
        w = w / w.mean() if w.size and w.mean() > 0 else w
    elif weight.normalize == "sequence":
        means = tokens.sums(w)[tokens.n > 0] / tokens.n[tokens.n > 0]
        w = w / means.mean() if means.size and means.mean() > 0 else w

    def packed(values: Any, dtype: type) -> Any:
        out = np.zeros(mask.size, dtype=dtype)
        out[at] = values
        return out

    return Applied(
        packed(np.where(masked, 0.0, w), np.float64),
        packed(~masked, np.bool_),
        packed(zeroed, np.bool_),
        packed(changed, np.bool_),
        tuple(packed(fails, np.bool_) for fails in failures),
    )


@dataclass(frozen=True)
class _Tokens:
    d: Floats
    dprob: Floats
    owner: Ints
    segments: int

    @property
    def n(self) -> Ints:
        return np.bincount(self.owner, minlength=self.segments).astype(np.int64)

    def sums(self, x: Floats) -> Floats:
        return np.bincount(self.owner, weights=x, minlength=self.segments).astype(np.float64)

    def level(self, level: str, safety: float | None) -> Floats:
        """Log-ratio of a level at each valid token."""
        d = self.d if safety is None else np.clip(self.d, -safety, safety)
        if level == "token":
            return d
        sums = self.sums(d)
        return (sums if level == "sequence" else sums / np.maximum(self.n, 1))[self.owner]


_K: dict[str, Callable[[Floats], Floats]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: np.expm1(d) - d,
    "mult": lambda d: np.exp(np.abs(d)),
}


def _statistic(rule: Rule, tokens: _Tokens) -> Floats:
    """The tested value at each valid token: log-ratios for levels."""
    if rule.is_ratio:
        return tokens.level(rule.statistic, rule.safety)
    scope, kind = rule.statistic.split(".")
    if kind == "dprob":
        return tokens.dprob
    d = tokens.d if rule.safety is None else np.clip(tokens.d, -rule.safety, rule.safety)
    x = _K[kind](d)
    if scope == "token":
        return x
    if scope == "max":
        largest = np.full(tokens.segments, -np.inf)
        np.maximum.at(largest, tokens.owner, x)
        return largest[tokens.owner]
    sums = tokens.sums(x)
    return (sums if scope == "sum" else sums / np.maximum(tokens.n, 1))[tokens.owner]


def _fails(rule: Rule, tokens: _Tokens, advantages: Floats | None) -> Bools:
    x = _statistic(rule, tokens)
    low, high = rule.log_bounds()
    below, above = (x < low, x > high) if rule.inclusive else (x <= low, x >= high)
    if rule.advantage == "sign" and advantages is not None:
        fails = np.where(advantages > 0, above, below)
    elif rule.advantage == "negative" and advantages is not None:
        fails = (below | above) & (advantages < 0)
    else:
        fails = below | above
    if rule.veto:
        hit = np.zeros(tokens.segments, dtype=bool)
        hit[tokens.owner[fails]] = True
        return hit[tokens.owner]
    return fails
