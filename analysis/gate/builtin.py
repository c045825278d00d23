"""The limits that hold when nobody wrote any: a dump that cannot be trusted must not pass."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_is.analysis.gate.limits import Limit, Origin

_BUILT_IN = Origin("built in")

BUILT_IN: tuple[Limit, ...] = (
    Limit(
        "coverage.nonfinite_valid_tokens",
        max=0.0,
        origin=_BUILT_IN,
        reason="NaN or infinity at a valid token: the row of logits was garbage, and hiding it flatters every figure",
    ),
    Limit(
        "notes.all-zero-side", max=0.0, origin=_BUILT_IN, reason="one side is 0 everywhere: placeholders, not log-probs"
    ),
    Limit(
        "notes.both-zero",
        max=0.0,
        origin=_BUILT_IN,
        reason="both sides are 0: this is not agreement, the data is missing",
    ),
    Limit(
        "notes.constant-value",
        max=0.0,
        origin=_BUILT_IN,
        reason="one value at many valid tokens: placeholders scored as log-probs, or the prompt inside the mask",
    ),
    Limit(
        "notes.duplicate-shards",
        max=0.0,
        origin=_BUILT_IN,
        reason="two shards hold the same data: what was copied counts twice",
    ),
    Limit("coverage.valid_tokens", min=1.0, origin=_BUILT_IN, reason="no valid token: nothing was compared"),
    Limit(
        "coverage.sequences", min=1.0, origin=_BUILT_IN, reason="every segment is fully masked: nothing was compared"
    ),
)


def with_builtin(limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """The configured limits and those of the built-in set whose statistic has no limit of its own.

    >>> [limit.statistic for limit in with_builtin([])][0]
    'coverage.nonfinite_valid_tokens'
    """
    configured = {limit.statistic for limit in limits}
    return (*(limit for limit in BUILT_IN if limit.statistic not in configured), *limits)
