"""What every open shard has in common: which column serves a role, and the checked bounds. Subclasses bring the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NoReturn

from rollout_is.dumps.choice import choose
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.offsets import check_offsets, check_packs, lengths_to_offsets, rows_to_offsets
from rollout_is.dumps.shard import SEGMENT_ROLES, ShardInfo
from rollout_is.dumps.text import listing, shown

if TYPE_CHECKING:
    from torch import Tensor


class ServedShard(ABC):
    """The part of ``OpenShard`` that does not depend on where the tensors lie.

    Args:
        info: the shard.
        mask: ``response_mask`` or NAME of a ``mask.NAME`` column.
        train, rollout: ``train``, ``rollout`` or NAME of a ``logprobs.NAME`` column: what those roles serve.

    Raises:
        DumpError: a NAME that this shard does not hold.
    """

    def __init__(
        self, info: ShardInfo, *, mask: str = "response_mask", train: str = "train", rollout: str = "rollout"
    ) -> None:
        self.info = info
        self._offsets: Tensor | None = None
        self._role = choose(info, mask=mask, train=train, rollout=rollout)

    @abstractmethod
    def _whole(self, role: str) -> Tensor:
        """The whole tensor of a role in its stored shape, on the CPU; the caller may keep it."""

    def _where(self, role: str) -> str:
        return f"{self.info.name}: {shown(self.info.columns[role])}"

    def _absent(self, role: str) -> NoReturn:
        raise DumpError(
            f"{self.info.name}: {shown(role)}",
            f"expected a column for {shown(role)}, found {listing(sorted(self.info.columns), 20)}",
            code="column-missing",
        )

    def offsets(self) -> Tensor:
        """cu_seqlens, checked: int64 [S+1], starts at 0, non-decreasing, last <= T."""
        if self._offsets is None:
            self._offsets = self._find_offsets()
        return self._offsets

    def _find_offsets(self) -> Tensor:
        columns, info = self.info.columns, self.info
        if info.layout == "rectangular":
            return rows_to_offsets(info.segments, info.positions // info.segments if info.segments else 0)
        if "lengths" in columns:
            return lengths_to_offsets(self._whole("lengths"), info.positions, self._where("lengths"))
        if "offsets" in columns:
            return check_offsets(self._whole("offsets"), info.positions, self._where("offsets"))
        return rows_to_offsets(0, 0)

    def pack_offsets(self) -> Tensor | None:
        """Token offsets of the packs, checked: int64 [P+1]; None when the shard is one pack."""
        columns, positions = self.info.columns, self.info.positions
        if "pack_lengths" in columns:
            packs = lengths_to_offsets(self._whole("pack_lengths"), positions, self._where("pack_lengths"))
            return check_packs(packs, self.offsets(), self._where("pack_lengths"))
        if "packs" in columns:
            packs = check_offsets(self._whole("packs"), positions, self._where("packs"))
            return check_packs(packs, self.offsets(), self._where("packs"))
        return None

    def segment_column(self, role: str) -> Tensor | None:
        """A whole [S] column of SEGMENT_ROLES, or None when it is not dumped."""
        if role not in SEGMENT_ROLES:
            raise ValueError(f"{role!r} is no role of segments: {SEGMENT_ROLES}")
        return self._whole(role).reshape(-1) if role in self.info.columns else None
