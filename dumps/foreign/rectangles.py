"""[B, L] columns as one rectangular shard: a row is a segment, padding included, and the mask alone says what counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign.packed import DTYPE_NAMES, Packed

if TYPE_CHECKING:
    from torch import Tensor

_NEEDED = ("train", "rollout", "mask")


def rectangular(
    where: str, columns: Mapping[str, Tensor], segments: Mapping[str, Tensor], names: Mapping[str, str]
) -> Packed:
    """A shard out of [B, L] columns.

    Args:
        where: file name for messages.
        columns: role -> [B, L]; optional ones of another shape are dropped and named.
        segments: role -> [B].
        names: role -> name in the file.
    Raises:
        DumpError: train, rollout and mask of different shapes, or log-probs that are no floats.
    """
    import torch

    shape = columns["train"].shape
    dropped: list[str] = []
    kept: dict[str, Tensor] = {}
    for role, column in columns.items():
        known = str(column.dtype).removeprefix("torch.") in DTYPE_NAMES
        if column.shape != shape or len(shape) != 2 or not known:
            if role in _NEEDED:
                raise DumpError(
                    f"{where}: {names.get(role, role)}",
                    f"expected [B, L] as {names.get('train', 'train')} {tuple(columns['train'].shape)}, found {tuple(column.shape)}",
                    "columns over prompt and response beside columns over the response alone",
                    "dump train, rollout and mask over the same positions",
                    code="wrong-shape",
                )
            dropped.append(names.get(role, role))
            continue
        if role in ("train", "rollout") and not column.is_floating_point():
            raise DumpError(
                f"{where}: {names.get(role, role)}", f"expected log-probs, found {column.dtype}", code="wrong-dtype"
            )
        kept[role] = column.detach().contiguous().reshape(-1)
    rows, length = int(shape[0]), int(shape[1])
    if not rows:
        raise DumpError(where, "expected at least one sequence, found none", code="no-sequences")
    whole = {role: column for role, column in segments.items() if column.shape == (rows,)}
    dropped += [names.get(role, role) for role in segments if role not in whole]
    offsets = torch.arange(rows + 1, dtype=torch.int64) * length
    used = {role: names.get(role, role) for role in (*kept, *whole)} | {"offsets": "rows"}
    return Packed(kept, whole, offsets, None, used, "rectangular", dropped=dropped)
