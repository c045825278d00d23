"""Which fault explains which finding: the cause is named, the consequence is attached to it and not listed beside it."""

from __future__ import annotations

from rollout_is.analysis.doctor.verdict import Draft, Scene

# cause (id or its first part) -> consequences, ids or first parts. The order is that of naming: an earlier cause takes first.
CONSEQUENCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("copies.zero", ("copies", "placeholder", "numerics", "weights", "tails")),
    ("copies.closer_to_ref", ("where.step", "where.rank", "where.position", "passes", "tails")),
    (
        "scale.probabilities",
        ("alignment", "numerics.positive", "support", "weights", "where", "tails", "placeholder", "scale"),
    ),
    ("scale.sign", ("alignment", "numerics.positive", "support", "weights", "where", "tails", "placeholder", "scale")),
    ("scale.log_base", ("alignment", "support", "weights", "where", "tails", "scale")),
    ("scale.divided", ("alignment", "support", "weights", "where", "tails", "scale")),
    ("alignment.growing", ("alignment", "placeholder", "scale", "support", "weights", "where", "tails", "passes")),
    ("alignment.lag_inside", ("alignment", "placeholder", "scale", "support", "weights", "where", "tails", "passes")),
    ("alignment.lag_varies", ("alignment", "placeholder", "scale", "support", "weights", "where", "tails", "passes")),
    ("alignment.lag", ("alignment", "placeholder", "scale", "support", "weights", "where", "tails", "passes")),
    (
        "placeholder",
        ("alignment.periodic", "support", "weights", "where", "tails", "copies", "passes", "numerics.positive"),
    ),
    ("missing.nonfinite", ("tails",)),
    (
        "where.sequences",
        (
            "tails",
            "where.length",
            "where.position",
            "passes",
            "weights",
            "support.top_candidate",
            "alignment.unrelated",
        ),
    ),
    ("support.top_candidate", ("alignment.unrelated", "weights", "scale", "tails", "where.length", "where.position")),
    ("alignment.unrelated", ("placeholder.stray", "scale", "support", "weights", "where", "tails", "alignment")),
    ("alignment.periodic", ("alignment.first_token", "alignment.last_token", "tails", "weights", "where", "support")),
    ("alignment.first_token", ("weights", "where.position", "where.length", "tails", "support")),
    ("alignment.last_token", ("weights", "where.position", "where.length", "tails", "support")),
    ("support.truncated", ("weights", "scale", "tails", "where.length", "where.position")),
    ("scale", ("scale.metadata", "support", "weights", "tails", "where.length", "where.position")),
    ("where.rank", ("tails", "where.sequences", "where.length")),
    ("where.step", ("tails", "where.sequences", "where.length", "where.version")),
    ("where.version", ("where.position", "where.length", "tails", "where.sequences")),
    ("where.position", ("where.length", "tails")),
    ("passes", ("copies.train_pass",)),
)
FEW = 0.02  # a cause that touches less than this share of the tokens does not explain a finding about all of them
WHOLE = ("scale", "support", "alignment.unrelated")  # findings about the bulk of the tokens


def _is(id: str, name: str) -> bool:
    return id == name or id.startswith(name + ".")


def attach(scene: Scene, drafts: list[Draft]) -> list[Draft]:
    """The causes, worst first, each with its consequences in ``explains``."""
    left = list(drafts)
    for name, consequences in CONSEQUENCES:
        for cause in [d for d in left if _is(d.id, name)]:
            if cause not in left:
                continue
            for other in list(left):
                if other is cause or not any(_is(other.id, c) for c in consequences):
                    continue
                if _explains(scene, cause, other):
                    cause.explains.append(other)
                    cause.explains.extend(other.explains)
                    other.explains = []
                    left.remove(other)
    return sorted(left, key=lambda d: d.rank_key)


def _explains(scene: Scene, cause: Draft, other: Draft) -> bool:
    """Whether the cause sits where the other finding does."""
    if cause.id == other.id:
        return False
    for mine, theirs in ((cause.scope.ranks, other.scope.ranks), (cause.scope.steps, other.scope.steps)):
        if mine and theirs and not set(mine) & set(theirs):
            return False
    if _is(other.id, "placeholder") and cause.id != "alignment.growing" and not _is(cause.id, "copies"):
        # a shift pulls in the fill beside the response: as many tokens a sequence as the lag, no more
        return (other.tokens or 0) <= 3 * max(1, other.sequences or 0) or cause.id.startswith("scale")
    if other.id == "where.rank":  # a fault of all ranks alike does not make one rank stand out
        return bool(cause.scope.ranks) and set(other.scope.ranks) <= set(cause.scope.ranks)
    if other.id == "where.step":
        return bool(cause.scope.steps) and set(other.scope.steps) <= set(cause.scope.steps)
    if any(_is(other.id, name) for name in WHOLE) and (cause.token_share or 0.0) < FEW:
        return False
    if cause.id == "where.sequences" and other.id == "alignment.unrelated" and other.scope.ranks:
        return False  # every sequence of those ranks is unrelated: that is why they are catastrophic
    if other.id == "where.sequences" and cause.sequences is not None and other.sequences is not None:
        return 2 * cause.sequences >= other.sequences or (cause.token_share or 0) > 0.5
    return True
