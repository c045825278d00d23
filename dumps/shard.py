"""What every dump looks like to the analysis, whatever file it came from: shards with named columns, read by slices.

``ShardInfo`` is what the scan knows from headers; ``OpenShard`` serves the bytes. A native safetensors shard streams from
disk; a foreign one is parsed into a ``MemoryShard`` first. No torch is imported until a shard is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor

# Roles of [S] columns: one value a segment. All roles and the names that trainers have for them stand in aliases.py; the
# open-ended ones are written "mask.NAME" and "logprobs.NAME" ([T] each).
SEGMENT_ROLES = ("sequence_ids", "group_ids", "rewards", "prompt_lens", "segment_is_pad")


@dataclass(frozen=True)
class ShardInfo:
    """One shard as its header describes it. Picklable; holds no file handle and no tensor.

    Attributes:
        path: the file.
        name: the path as shown to a user (relative to the dump).
        format: ``rollout-is/1`` or the name of a foreign format.
        step, rank, world_size: from metadata, else from the path, else None.
        layout: ``packed`` or ``rectangular``.
        positions: T, the number of token positions (B * L when rectangular).
        segments: S, the number of segments (zero-length ones included).
        columns: role -> the name of the tensor that plays it (``{"train": "old_log_probs", ...}``).
        dtypes: role -> safetensors dtype name (``F32``, ``BF16``, ``BOOL``, ``I64``, ...).
        metadata: the header's strings, unknown keys kept.
        size: bytes of the file.
        mtime_ns: its time of change at the scan, to detect a file that changes while it is read.
    """

    path: str
    name: str
    format: str
    step: int | None
    rank: int | None
    world_size: int | None
    layout: str
    positions: int
    segments: int
    columns: Mapping[str, str]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, str] = field(default_factory=dict)
    size: int = 0
    mtime_ns: int = 0

    @property
    def sort_key(self) -> tuple[int, int, int, int, str]:
        """Canonical order of shards: by step, then rank (unknown last), then name. Never the order of the file system."""
        step, rank = self.step, self.rank
        return (step is None, step or 0, rank is None, rank or 0, self.name)


class OpenShard(Protocol):
    """A shard whose columns can be read. A context manager; not shared between processes."""

    info: ShardInfo

    def offsets(self) -> Tensor:
        """cu_seqlens, checked: int64 [S+1], starts at 0, non-decreasing, last <= T."""
        ...

    def pack_offsets(self) -> Tensor | None:
        """Token offsets of the packs, checked: int64 [P+1]; None when the shard is one pack."""
        ...

    def segment_column(self, role: str) -> Tensor | None:
        """A whole [S] column of SEGMENT_ROLES, or None when it is not dumped."""
        ...

    def read(self, role: str, start: int, stop: int) -> Tensor:
        """Positions [start, stop) of a [T] column in its stored dtype.

        The tensor is valid until the next read of the same role (buffers are reused). ``labels`` dumped in place of a
        mask are served as the mask (bool: label != -100). Raises DumpError when the file changed since the scan.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
