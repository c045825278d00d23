"""What the writer does with one step's tensors: the reader's own checks, then one copy to the CPU in the stored shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollout_is.dumps import aliases
from rollout_is.dumps.errors import DumpError, UsageError
from rollout_is.dumps.memory import MemoryShard, describe_tensors
from rollout_is.dumps.shard import SEGMENT_ROLES
from rollout_is.dumps.text import shown

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = frozenset(
    {known[0] for known in aliases.REQUIRED.values()}
    | {"labels", "cu_seqlens", "seq_lens", "cu_packs", "pack_lens"}
    | {known[0] for known in aliases.OPTIONAL.values()}
)


def check_and_copy(
    tensors: Mapping[str, Tensor | None], name: str, metadata: Mapping[str, str], layout: str | None
) -> tuple[dict[str, Tensor], str]:
    """Refuse what the reader would refuse, and copy the rest.

    Args:
        tensors: canonical name -> tensor on any device; None is left out.
        name: how errors call the shard.
        metadata: its metadata.
        layout: ``packed``, ``rectangular`` or None to follow the shapes.

    Returns:
        Contiguous copies on the CPU ([T] when packed, [B, L] when rectangular), and the layout.

    Raises:
        DumpError: as the scan, ``offsets`` and ``pack_offsets`` raise it; an optional column that does not fit; a mask that
            is negative or NaN, or valid outside every sequence.
        UsageError: a column that the format does not know.
    """
    import torch

    given = {key: value for key, value in tensors.items() if value is not None}
    for key, value in given.items():
        if key not in _NAMES and not key.startswith(("mask.", "logprobs.")):
            raise UsageError(
                f"DumpWriter.write({shown(key)}=...)",
                f"expected a column of the format, found {shown(key)!r}",
                f"columns are {', '.join(sorted(_NAMES))}, mask.NAME, logprobs.NAME",
                code="column-role-unknown",
            )
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"DumpWriter.write({key}=...)", f"expected a tensor, found {type(value).__name__}", code="writer-usage"
            )
    if layout is not None:
        metadata = {**metadata, "layout": layout}
    info, notes = describe_tensors(given, name=name, metadata=metadata)
    for note in notes:
        if note.code in ("column-refused", "column-ambiguous"):
            raise DumpError(
                f"{name}: {note.metric}",
                note.message,
                fix="leave the column out, or dump it for the same tokens",
                code=note.code,
            )
    copies = {key: _copy(value, key, info.layout) for key, value in given.items()}
    shard = MemoryShard(info, copies)
    end = int(shard.offsets()[-1])
    shard.pack_offsets()
    _check_mask(shard.read("mask", 0, info.positions), end, f"{name}: {info.columns['mask']}" if info.columns else name)
    return copies, info.layout


def _copy(value: Tensor, name: str, layout: str) -> Tensor:
    import torch

    copy = value.detach().to(device="cpu", memory_format=torch.contiguous_format, copy=True)
    return copy if layout == "rectangular" and name not in SEGMENT_ROLES else copy.reshape(-1)


def _check_mask(mask: Tensor, end: int, where: str) -> None:
    import torch

    if mask.dtype.is_floating_point and not bool(torch.isfinite(mask).all()):
        index = int((~torch.isfinite(mask)).nonzero()[0, 0])
        raise DumpError(
            f"{where}[{index}]", f"expected a finite value >= 0, found {float(mask[index])}", code="mask-value"
        )
    if mask.dtype.is_signed and bool((mask < 0).any()):
        index = int((mask < 0).nonzero()[0, 0])
        raise DumpError(
            f"{where}[{index}]",
            f"expected a value >= 0, found {float(mask[index]):g}",
            "an integer mask was inverted with ~",
            "use 1 - mask, or a bool mask",
            code="mask-value",
        )
    # numpy, as older torch cannot compare its unsigned dtypes; bfloat16 is the one that numpy lacks
    tail = mask[end:].float() if mask.dtype is torch.bfloat16 else mask[end:]
    outside = tail.numpy() != 0
    if outside.any():
        index = end + int(outside.argmax())
        raise DumpError(
            f"{where}[{index}]",
            f"expected 0 past the last sequence bound ({end:,}), found a valid token",
            "cu_seqlens does not cover every token",
            "end it at the last valid token or later",
            code="valid-outside",
        )
