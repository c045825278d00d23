"""Step, rank and world size of a shard: from its metadata, else from its path. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.text import shown

# step_00000412, global_step_1, step-3, step=7, rollout_12; never the step of "footstep" or of "step_size_3".
_STEP = re.compile(r"(?:^|[^a-z])(?:step|rollout|iter|iteration)[_\-=.]?(\d+)(?![\da-z])", re.IGNORECASE)
_RANK = re.compile(r"(?:^|[^a-z])rank[_\-=.]?(\d+)(?![\da-z])", re.IGNORECASE)
_MAX = 2**63 - 1


@dataclass(frozen=True)
class Place:
    """Where in a run a shard belongs; None is unknown."""

    step: int | None = None
    rank: int | None = None
    world_size: int | None = None


def place_of(name: str, metadata: Mapping[str, str], parent: str = "") -> Place:
    """Step, rank and world size of a shard.

    Args:
        name: its path inside the dump.
        metadata: the header's strings; they win over the path.
        parent: the folder that the dump stands in, asked for a step only when nothing inside the dump names one.

    Raises:
        DumpError: a value that is no whole number >= 0, or a rank outside its world.

    >>> place_of("step_00000412/rank_00003.safetensors", {"world_size": "8"})
    Place(step=412, rank=3, world_size=8)
    """
    step = _number(name, metadata, "step")
    rank = _number(name, metadata, "rank")
    world_size = _number(name, metadata, "world_size")
    if step is None:
        step = _last(_STEP, name, name)
        if step is None and parent:
            step = _last(_STEP, parent.rpartition("/")[2], name)
    if rank is None:
        rank = _last(_RANK, name, name)
    if world_size == 0 or (world_size is not None and rank is not None and rank >= world_size):
        raise DumpError(
            f"{name}: metadata world_size",
            f"expected a rank below the world size, found rank {rank} of {world_size}",
            "ranks count from 0; or the shard was copied from a larger run",
            "correct the metadata",
            code="metadata-rank",
        )
    return Place(step, rank, world_size)


def path_place(name: str) -> Place:
    """What the path alone says: of a file whose header cannot be read. Absurd numbers are no numbers."""
    try:
        return place_of(name, {})
    except DumpError:
        return Place()


def _last(pattern: re.Pattern[str], text: str, name: str) -> int | None:
    """The match nearest to the file's own name."""
    found = pattern.findall(text)
    return _whole(found[-1], name, "in its path") if found else None


def _number(name: str, metadata: Mapping[str, str], key: str) -> int | None:
    text = metadata.get(key)
    return None if text is None or text == "" else _whole(text.strip(), name, f"as metadata {key}")


def _whole(text: str, name: str, where: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= _MAX:
        return int(text)
    raise DumpError(
        name,
        f"expected a whole number >= 0 (at most {_MAX}) {where}, found {shown(text, 40)!r}",
        "a counter was never set, or a float was written",
        "write the number as decimal digits",
        code="metadata-number",
    )
