"""Checks of sequence and pack bounds, shared by every kind of shard. All arithmetic in int64."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_is.dumps.errors import DumpError

if TYPE_CHECKING:
    from torch import Tensor


def check_offsets(values: Tensor, positions: int, where: str) -> Tensor:
    """Sequence (or pack) bounds as int64 [S+1]: 0 first, non-decreasing, last <= T.

    Args:
        values: int32 or int64, [S+1] or [1, S+1], as stored.
        positions: T.
        where: file and tensor, for errors.

    Returns:
        int64 [S+1] on the CPU.

    Raises:
        DumpError: wrong dtype or rank, first not 0, negative, decreasing (int32 wrapped?), past the end, or lengths
            in place of offsets.

    >>> import torch
    >>> check_offsets(torch.tensor([[0, 3, 5]], dtype=torch.int32), 6, "a: cu_seqlens")
    tensor([0, 3, 5])
    """
    import torch

    flat = _flat(values, where, "S+1")
    if flat.numel() == 0:
        if positions == 0:
            return torch.zeros(1, dtype=torch.int64)
        raise DumpError(
            where, "expected at least [0], found no value", fix="dump [0] for no sequence", code="offsets-empty"
        )
    first, last = int(flat[0]), int(flat[-1])
    falls = flat[1:] < flat[:-1]  # compared, not subtracted: a difference of extremes overflows
    in_range = int(flat.min()) >= 0 and int(flat.max()) <= positions
    total = int(flat.sum()) if in_range else -1
    # Lengths sum to T; offsets that start at 0 and end at T cannot, beyond one sequence.
    if total == positions and positions > 0 and (first != 0 or bool(falls.any())):
        raise DumpError(
            where,
            f"expected offsets that begin with 0, found lengths: the {flat.numel():,} values sum to {positions:,}, the number of tokens",
            "sequence lengths were dumped under the name of offsets",
            "dump the cumulative sum with a 0 in front, or name it seq_lens (--column lengths=NAME)",
            code="offsets-are-lengths",
        )
    if first != 0:
        problem = f"expected the first value to be 0, found {first:,}"
        if last != positions:
            problem += f", and the last to be at most {positions:,} (the number of tokens), found {last:,}"
        raise DumpError(
            f"{where}[0]",
            problem,
            "the bounds were rebuilt from a slice that begins inside a sequence, or the leading 0 was dropped",
            "shift the bounds so that they begin with 0",
            code="offsets-start",
        )
    if bool(falls.any()):
        index = int(falls.nonzero()[0, 0]) + 1
        before, after = int(flat[index - 1]), int(flat[index])
        wrapped = before > 2**30 and after < before - 2**31
        raise DumpError(
            f"{where}[{index}]",
            f"expected a value >= {before:,}, found {after:,}: offsets decrease"
            + (" (int32 wrap?)" if wrapped else ""),
            "a 32-bit sum overflowed"
            if wrapped
            else "padding such as -1, or bounds of several packs one after another",
            "compute offsets in int64" if wrapped else "cut the padding, and shift each pack by the tokens before it",
            code="offsets-decrease",
        )
    if last > positions:
        raise DumpError(
            f"{where}[{flat.numel() - 1}]",
            f"expected at most {positions:,} (the number of tokens), found {last:,}: {last - positions:,} past the end",
            "the columns were cut after packing, or the bounds belong to another pack or to the whole of a split sequence",
            "dump the bounds of the same tokens",
            code="offsets-past-end",
        )
    return flat


def lengths_to_offsets(values: Tensor, positions: int, where: str) -> Tensor:
    """Lengths [S] as offsets int64 [S+1], checked like offsets.

    Raises:
        DumpError: wrong dtype or rank, a negative length, a sum past the end, or offsets in place of lengths.

    >>> import torch
    >>> lengths_to_offsets(torch.tensor([3, 0, 2]), 6, "a: seq_lens")
    tensor([0, 3, 3, 5])
    """
    import torch

    flat = _flat(values, where, "S")
    negative = flat < 0
    if bool(negative.any()):
        index = int(negative.nonzero()[0, 0])
        raise DumpError(
            f"{where}[{index}]",
            f"expected a length >= 0, found {int(flat[index]):,}",
            "padding such as -1 was kept",
            "cut it",
            code="lengths-negative",
        )
    too_long = flat > positions  # before the sum, which such values could overflow
    if bool(too_long.any()) or int(flat.sum()) > positions:
        index = int(too_long.nonzero()[0, 0]) if bool(too_long.any()) else flat.numel() - 1
        total = sum(flat.tolist())
        rising = (
            flat.numel() > 1
            and int(flat[0]) == 0
            and bool((flat[1:] >= flat[:-1]).all())
            and int(flat[-1]) <= positions
        )
        raise DumpError(
            f"{where}[{index}]",
            f"expected lengths that sum to at most {positions:,} (the number of tokens), found a sum of {total:,}",
            "offsets were dumped under the name of lengths"
            if rising
            else "the lengths count prompts or padding that the columns leave out",
            "name it cu_seqlens (--column offsets=NAME)" if rising else "dump the lengths of the same tokens",
            code="lengths-are-offsets" if rising else "lengths-past-end",
        )
    return torch.cat([torch.zeros(1, dtype=torch.int64), flat.cumsum(0)])


def check_packs(packs: Tensor, offsets: Tensor, where: str) -> Tensor:
    """Pack bounds (already checked as offsets) must be sequence bounds too: a sequence lies in one pack.

    Edges past the last sequence bound lie in the pad tail, and are fine.

    Raises:
        DumpError: a pack edge inside a sequence, or sequences past the last pack.
    """
    import torch

    last = int(offsets[-1])
    if packs.numel() > 1 and int(packs[-1]) < last:  # [0] names no pack, as if the column were absent
        raise DumpError(
            f"{where}[{packs.numel() - 1}]",
            f"expected the last pack to end at or past the last sequence bound ({last:,}), found {int(packs[-1]):,}",
            "a pack is missing, or the bounds were cut",
            "dump the packs whole, with the bounds of the same tokens",
            code="packs-end-early",
        )
    inner = packs[packs < last].contiguous()
    nearest = torch.searchsorted(offsets, inner)
    inside = offsets[nearest.clamp(max=offsets.numel() - 1)] != inner
    if bool(inside.any()):
        index = int(inside.nonzero()[0, 0])
        sequence = int(nearest[index]) - 1
        raise DumpError(
            f"{where}[{index}]",
            f"expected a sequence bound, found {int(inner[index]):,}, inside sequence {sequence} "
            f"[{int(offsets[sequence]):,}, {int(offsets[sequence + 1]):,})",
            "the packs belong to another split of the tokens (sequence parallel slices?)",
            "dump the packs whole, with the bounds of the same tokens",
            code="packs-inside-sequence",
        )
    return packs


def rows_to_offsets(rows: int, length: int) -> Tensor:
    """Bounds of a rectangular [B, L] shard: each row is a segment. int64 [B+1].

    >>> rows_to_offsets(2, 3)
    tensor([0, 3, 6])
    """
    import torch

    return torch.arange(rows + 1, dtype=torch.int64) * length


def _flat(values: Tensor, where: str, expected: str) -> Tensor:
    import torch

    if values.dtype not in (torch.int32, torch.int64):
        raise DumpError(
            where,
            f"expected int32 or int64, found {str(values.dtype).removeprefix('torch.')}",
            "bounds were computed in another type",
            "cast them to int64",
            code="dtype-unsupported",
        )
    if values.dim() == 2 and values.shape[0] == 1:
        values = values[0]
    if values.dim() != 1:
        raise DumpError(
            where,
            f"expected [{expected}], found {list(values.shape)}",
            "bounds of several packs were stacked",
            "concatenate them, each shifted by the tokens before it",
            code="shape-offsets",
        )
    return values.detach().to(device="cpu", dtype=torch.int64)
