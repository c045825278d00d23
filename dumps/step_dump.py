"""``StepDump``: collects the micro-batches of a step where the loss is computed, and writes one shard at the step's end."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rollout_is.dumps.adapters import join_packs
from rollout_is.dumps.shard import SEGMENT_ROLES
from rollout_is.dumps.writer import DumpWriter

if TYPE_CHECKING:
    from torch import Tensor


class StepDump:
    """One line in the micro-batch loop, one at the step's end; nothing on ranks that hold copies.

    Args:
        directory: the dump's folder.
        rank, world_size: among the ranks that own data, such as the data-parallel rank and size.
        owner: False on tensor-, sequence- or pipeline-parallel ranks that hold copies or nothing: every call returns at once.
        every: write only steps divisible by it.
        max_bytes: about how large a shard may become; beyond it whole sequences are left out, evenly and the same on every run,
            and the shard's metadata says how many (``sampled``).
        **settings: further arguments of ``DumpWriter`` (``run``, ``trainer``, ``train_policy``, ``queue_size``, ...).

    >>> import tempfile, torch
    >>> from rollout_is.dumps.adapters import padded
    >>> lp = torch.full((2, 3), -1.0)
    >>> with tempfile.TemporaryDirectory() as folder, StepDump(folder, trainer="demo") as dump:
    ...     for _ in range(2):
    ...         dump.add(padded(lp, lp - 0.1, torch.ones(2, 3)))
    ...     dump.end_step(7).name
    'rank_00000.safetensors'
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        owner: bool = True,
        every: int = 1,
        max_bytes: int | None = None,
        **settings: Any,
    ) -> None:
        self.writer: DumpWriter | None = None
        if owner:
            self.writer = DumpWriter(directory, rank=rank, world_size=world_size, every=every, **settings)
        self._max_bytes = max_bytes
        self._packs: list[dict[str, Tensor]] = []

    def wants(self, step: int) -> bool:
        """Whether this rank writes this step: ask it before gathering anything that costs.

        Args:
            step: the training step.
        """
        return self.writer is not None and step % self.writer.every == 0

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """Keep a micro-batch; copied to the CPU at once, because trainers write into these tensors afterwards.

        Args:
            columns: as the helpers of ``adapters`` give them.
        """
        if self.writer is not None:
            self._packs.append({name: column.detach().to("cpu", copy=True) for name, column in columns.items()})

    def end_step(self, step: int, trainer_metrics: Mapping[str, Any] | None = None) -> Path | None:
        """Write what was added since the last step as one shard.

        Args:
            step: the training step; each once.
            trainer_metrics: what the trainer itself logged at this step.
        Returns:
            where the shard will stand; None on ranks without data, without micro-batches, and for steps left out.
        Raises:
            DumpError: the tensors do not fit together, or an earlier shard could not be written.
        """
        packs, self._packs = self._packs, []
        if self.writer is None or not packs:
            return None
        columns = join_packs(packs)
        metadata: dict[str, object] = {}
        if self._max_bytes is not None:
            columns, kept, total = thin(columns, self._max_bytes, step)
            if kept < total:
                metadata["sampled"] = f"{kept} of {total} sequences"
        return self.writer.write(step=step, trainer_metrics=trainer_metrics, metadata=metadata, **columns)

    def close(self) -> None:
        """Wait for the disk and end."""
        if self.writer is not None:
            self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.writer is not None:
            self.writer.__exit__(kind, error, trace)


def thin(columns: Mapping[str, Tensor], max_bytes: int, step: int) -> tuple[dict[str, Tensor], int, int]:
    """Packed columns with whole sequences left out until they fit about a number of bytes.

    Every n-th sequence stays, n the smallest that fits; which ones turns with the step, so a sequence's place in the batch
    is no bias over a run.

    Args:
        columns: packed columns with ``cu_seqlens``.
        max_bytes: of the shard, about.
        step: the training step.
    Returns:
        the columns that stay, the number of segments kept, and the number there were.

    >>> import torch
    >>> lp = torch.full((8,), -1.0)
    >>> cut, kept, total = thin({"train_logprobs": lp, "rollout_logprobs": lp, "response_mask": lp < 0,
    ...                          "cu_seqlens": torch.tensor([0, 2, 4, 6, 8])}, max_bytes=40, step=0)
    >>> kept, total, cut["cu_seqlens"].tolist()
    (2, 4, [0, 2, 4])
    """
    import torch

    bounds = columns["cu_seqlens"]
    total = int(bounds.numel()) - 1
    size = sum(column.numel() * column.element_size() for name, column in columns.items() if name not in _BOUNDS)
    every = min(max(-(-size // max(max_bytes, 1)), 1), max(total, 1))
    if every == 1:
        return dict(columns), total, total
    # A hash, not the step itself: under ``every=10`` all steps are alike modulo 5, and the same rows would stay each time.
    chosen = torch.arange(total) % every == zlib.crc32(step.to_bytes(8, "little")) % every
    lengths = bounds[1:] - bounds[:-1]
    inside = torch.repeat_interleave(chosen, lengths)
    kept: dict[str, Tensor] = {}
    for name, column in columns.items():
        if name not in _BOUNDS:
            flat = column.reshape(-1)
            kept[name] = flat[chosen] if name in SEGMENT_ROLES else flat[: inside.numel()][inside]
    kept["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[chosen].cumsum(0)])
    return kept, int(chosen.sum()), total


_BOUNDS = ("cu_seqlens", "cu_packs")
