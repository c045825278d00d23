"""A grid of policies side by side: which ones, and which of them no other beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_is.analysis.policies.presets import parse_policy
from rollout_is.analysis.policies.rules import LEVELS, Policy
from rollout_is.dumps.errors import UsageError

SCHEMA = "rollout-is/sweep/1"
# One of each kind that is in use; none needs advantages.
DEFAULT = (
    "none",
    "nemo-rl/is",
    "verl/token_tis",
    "openrlhf/tis",
    "xtuner/both",
    "icepop",
    "slime/mis",
    "verl/seq_tis",
    "verl/seq_is_rs",
    "verl/geo_rs",
    "verl/k3_rs",
    "nemo-rl/seq-mask-tis",
    "trl/sequence_mask",
)
ACTIONS = ("truncate", "clip", "zero", "mask")


def grid(levels: Sequence[str], actions: Sequence[str], bounds: Sequence[tuple[float, float]]) -> list[Policy]:
    """Every level with every action and every pair of bounds; truncation has no lower bound, so it is taken once for each upper.

    >>> [p.name for p in grid(["token"], ["truncate", "mask"], [(0.5, 2.0)])]
    ['token:truncate:upper=2', 'token:mask:lower=0.5,upper=2']
    """
    names = []
    for level in levels:
        for action in actions:
            for lower, upper in bounds:
                low = "" if action == "truncate" else f"lower={lower:g},"
                names.append(f"{level}:{action}:{low}upper={upper:g}")
    return [parse_policy(name) for name in dict.fromkeys(names)]


def parse_bounds(text: str) -> tuple[float, float]:
    """``lower:upper`` as numbers.

    Raises:
        UsageError: not two numbers with lower < upper.
    """
    lower, _, upper = text.partition(":")
    try:
        low, high = float(lower), float(upper)
    except ValueError:
        low = high = 0.0
    if not 0 < low < high:
        raise UsageError(
            f"--bounds {text}",
            f"expected LOWER:UPPER with 0 < lower < upper, found {text!r}",
            "bounds are on ratios" if low <= high else "the bounds are reversed",
            "for example --bounds 0.5:2",
            code="policy-bounds",
        )
    return low, high


def check_levels(option: str, values: Sequence[str], allowed: Sequence[str] = LEVELS) -> None:
    """Refuse a word that is not in the vocabulary."""
    for value in values:
        if value not in allowed:
            raise UsageError(
                f"{option} {value}", f"expected one of {', '.join(allowed)}, found {value!r}", code="policy-spec"
            )


def order(policies: Sequence[Mapping[str, Any]], key: str = "total") -> list[dict[str, Any]]:
    """Policies from the least to the most interference, each marked ``front`` when no other beats it.

    A policy is beaten by one that keeps at least its effective sample size and moves at most its share of weight mass, one of them
    strictly. ``none`` is the reference and never on the front; nor is one without figures.
    """

    def pair(policy: Mapping[str, Any]) -> tuple[float, float] | None:
        figures = policy[key]["figures"]
        ess, moved = figures["ess_kept"]["value"], figures["weight_moved_fraction"]["value"]
        return None if ess is None or moved is None or policy["name"] == "none" else (ess, moved)

    pairs = [pair(policy) for policy in policies]
    known = [p for p in pairs if p is not None]
    marked = []
    for policy, mine in zip(policies, pairs, strict=True):
        beaten = mine is None or any(o[0] >= mine[0] and o[1] <= mine[1] and o != mine for o in known)
        marked.append({**policy, "front": not beaten})
    worst = (0.0, float("inf"))
    places = dict(zip(map(id, marked), pairs, strict=True))

    def place(policy: dict[str, Any]) -> tuple[bool, float, float]:
        ess, moved = places[id(policy)] or worst
        return policy["name"] != "none", moved, -ess

    return sorted(marked, key=place)
