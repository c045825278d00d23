"""miles ``--dump-details``: ``train_data/{rollout}_{rank}.pt``, slime's first layout with ``cp_rank`` and ``cp_size``."""

from __future__ import annotations

from typing import ClassVar

from rollout_is.dumps.foreign.formats.slime_v1 import SlimeV1
from rollout_is.dumps.foreign.sniff import Sniffed


class MilesTrainData(SlimeV1):
    """A rank's file of miles; slices of context-parallel ranks are joined by ``cp_rank``."""

    name: ClassVar[str] = "miles/train_data"
    priority: ClassVar[int] = 20
    trainer: ClassVar[str] = "miles"

    def claims(self, file: Sniffed) -> bool:
        """slime's first layout with one of miles' keys."""
        return super().claims(file) and bool(file.keys & {"cp_rank", "qkv_format"})
