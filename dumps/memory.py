"""A shard whose tensors are in memory: what ``summarize`` analyses, and what a foreign file is parsed into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from rollout_is.dumps.columns import check_columns
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.layout import describe
from rollout_is.dumps.notes import Note
from rollout_is.dumps.place import Place
from rollout_is.dumps.served import ServedShard
from rollout_is.dumps.shard import ShardInfo

if TYPE_CHECKING:
    from torch import Tensor


class MemoryShard(ServedShard):
    """An ``OpenShard`` over tensors.

    Args:
        info: as ``describe_tensors`` gives it; ``info.columns`` names keys of ``tensors``.
        tensors: name -> tensor, on any device; a column moves to the CPU by slices, as it is read.
        mask, train, rollout: which columns those roles serve, as for ``open_shard``.
    """

    def __init__(
        self,
        info: ShardInfo,
        tensors: Mapping[str, Tensor],
        *,
        mask: str = "response_mask",
        train: str = "train",
        rollout: str = "rollout",
    ) -> None:
        super().__init__(info, mask=mask, train=train, rollout=rollout)
        self._tensors = tensors
        self._columns: dict[str, Tensor] = {}

    def _whole(self, role: str) -> Tensor:
        return self._tensors[self.info.columns[role]].detach().cpu()

    def read(self, role: str, start: int, stop: int) -> Tensor:
        """Positions [start, stop) of a [T] column in its stored dtype; labels as the mask."""
        if not 0 <= start <= stop <= self.info.positions:
            raise ValueError(f"expected 0 <= start <= stop <= {self.info.positions}, found {start}, {stop}")
        column = self._columns.get(role)
        if column is None:
            column = self._columns[role] = self._flat(role)
        part = column[start:stop].cpu()
        return part != -100 if self._serves_labels(role) else part

    def _serves_labels(self, role: str) -> bool:
        return self._role.get(role, role) == "mask" and "labels" in self.info.columns

    def _flat(self, role: str) -> Tensor:
        import torch

        source = self._role.get(role, role)
        if source not in self.info.columns:
            if self.info.positions == 0:
                return torch.empty(0, dtype=torch.bool if role == "mask" else torch.float32)
            self._absent(role)
        # A lazily negated tensor (torch._neg_view) holds other bits than its values.
        return self._tensors[self.info.columns[source]].detach().resolve_neg().reshape(-1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._columns.clear()


def describe_tensors(
    tensors: Mapping[str, Tensor],
    *,
    name: str = "tensors",
    path: str = "",
    metadata: Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
    place: Place | None = None,
    format: str = "memory",
) -> tuple[ShardInfo, tuple[Note, ...]]:
    """Check tensors as if they stood in a shard, and describe them.

    Args:
        tensors: name -> tensor; canonical names or known aliases.
        name: how errors call the shard.
        path: where it came from, if anywhere.
        metadata: strings, such as ``{"layout": "rectangular"}``.
        columns: role -> name of a tensor, where the names do not settle it.
        place: step, rank, world size.
        format: what ``ShardInfo.format`` shall say.

    Returns:
        The shard (open it with ``MemoryShard(info, tensors)``) and notes on what was left out.

    Raises:
        DumpError: what the scan of a file would raise.

    >>> import torch
    >>> lp = torch.zeros(3)
    >>> info, _ = describe_tensors({"train_logprobs": lp, "rollout_logprobs": lp, "response_mask": lp > 0,
    ...                             "cu_seqlens": torch.tensor([0, 3])})
    >>> info.positions, info.segments, info.dtypes["mask"]
    (3, 1, 'BOOL')
    """
    shapes = {}
    for tensor, value in tensors.items():
        _check_tensor(f"{name}: {tensor}", value)
        dtype = dtype_name(value)
        if dtype is None:
            raise DumpError(
                f"{name}: {tensor}", f"expected real numbers, found {value.dtype}", code="dtype-unsupported"
            )
        shapes[tensor] = (dtype, tuple(value.shape))
    return describe(
        shapes,
        metadata or {},
        path=path,
        name=name,
        place=place or Place(),
        columns=check_columns(columns),
        format=format,
        size=sum(value.numel() * value.element_size() for value in tensors.values()),
    )


def _check_tensor(where: str, value: object) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        raise DumpError(
            where,
            f"expected a tensor, found {type(value).__name__}",
            "lists and arrays are not converted unasked; bounds and other choices belong in settings=Settings(...)",
            "torch.as_tensor(...)",
            code="tensor-expected",
        )
    if value.layout != torch.strided or value.device.type == "meta":
        raise DumpError(
            where,
            f"expected a dense tensor with values, found {'meta' if value.device.type == 'meta' else value.layout}",
            "a sparse or nested tensor, or one that was never filled",
            "make it dense, such as tensor.to_dense()",
            code="tensor-expected",
        )


def dtype_name(tensor: Tensor) -> str | None:
    """The safetensors name of a tensor's dtype, or None for one that no column may have.

    >>> import torch
    >>> dtype_name(torch.zeros(1, dtype=torch.bfloat16))
    'BF16'
    """
    from rollout_is.dumps.torch_dtypes import NAMES

    return NAMES.get(tensor.dtype)
