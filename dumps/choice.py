"""Which column serves ``mask``, ``train`` and ``rollout`` when the user picks another mask or scoring pass by NAME."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.text import listing, shown

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.dumps.shard import OpenShard, ShardInfo


def choose(
    info: ShardInfo, *, mask: str = "response_mask", train: str = "train", rollout: str = "rollout"
) -> dict[str, str]:
    """Role -> the role of the shard that serves it, for ``mask``, ``train`` and ``rollout``.

    Args:
        info: the shard.
        mask: ``response_mask`` or NAME of a ``mask.NAME`` column.
        train, rollout: ``train``, ``rollout`` or NAME of a ``logprobs.NAME`` column.

    Raises:
        DumpError: a NAME that this shard does not hold.
    """
    return {
        "mask": _mask_role(info, mask),
        "train": _pass_role(info, train, "train"),
        "rollout": _pass_role(info, rollout, "rollout"),
    }


def _mask_role(info: ShardInfo, mask: str) -> str:
    if mask in ("response_mask", "mask") or mask == info.columns.get("mask") or not info.columns:
        return "mask"
    return _known(info, f"mask.{mask.removeprefix('mask.')}", f"--mask {mask}", "response_mask", "mask.")


def _pass_role(info: ShardInfo, choice: str, side: str) -> str:
    if choice in ("train", "rollout"):
        return choice
    if not info.columns:  # a shard without any tensor has every column, with nothing in it
        return side
    return _known(
        info,
        f"logprobs.{choice.removeprefix('logprobs.')}",
        f"--logprobs, {side} side {choice}",
        "train, rollout",
        "logprobs.",
    )


def _known(info: ShardInfo, role: str, given: str, always: str, prefix: str) -> str:
    if role in info.columns:
        return role
    others = sorted(column.removeprefix(prefix) for column in info.columns if column.startswith(prefix))
    raise DumpError(
        f"{info.name}: {shown(given)}",
        f"expected one of {always}{', ' if others else ''}{listing(others, 20, '')}, found no column {shown(role)}",
        "the name is misspelt, the column was left out (see the notes), or this shard was dumped without it",
        f"dump it as {shown(role)}, or choose one that is there",
        code="column-missing",
    )


class RoleView:
    """An ``OpenShard`` that serves other columns of another one behind ``mask``, ``train`` and ``rollout``."""

    def __init__(self, shard: OpenShard, roles: dict[str, str]) -> None:
        self.info = shard.info
        self._shard = shard
        self._roles = roles

    def offsets(self) -> Tensor:
        """As of the shard."""
        return self._shard.offsets()

    def pack_offsets(self) -> Tensor | None:
        """As of the shard."""
        return self._shard.pack_offsets()

    def segment_column(self, role: str) -> Tensor | None:
        """As of the shard."""
        return self._shard.segment_column(role)

    def read(self, role: str, start: int, stop: int) -> Tensor:
        """Positions [start, stop) of the column that serves the role."""
        return self._shard.read(self._roles.get(role, role), start, stop)

    def __enter__(self) -> Self:
        self._shard.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._shard.__exit__(*exc)
