"""Rank files of slime v1 and miles: which hold the same rows, which are copies, and how context-parallel slices join.

Context parallelism cuts a sequence in zigzag: with ``chunk = ceil(total / (2 cp))``, rank r owns chunks r and 2 cp - 1 - r of
the logits, and of these the response positions [prompt - 1, total - 1). Slices are joined only when their lengths prove
that layout in every row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import torchfile
from rollout_is.dumps.foreign.format import Harvest, Source, remark, step_and_rank
from rollout_is.dumps.foreign.sniff import Sniffed
from rollout_is.dumps.notes import Note

if TYPE_CHECKING:
    from pathlib import Path

_SLICED = ("log_probs", "rollout_log_probs", "advantages", "entropy", "ref_log_probs", "teacher_log_probs")


@dataclass(frozen=True)
class _RankFile:
    path: Path
    step: int | None
    rank: int | None
    rows: str  # digest of which sequences it holds
    values: str  # digest of its log-probs
    whole: bool  # every row has its whole response


def join_rank_files(files: Sequence[Sniffed]) -> Harvest:
    """Group the files of every rank into shards that hold each sequence once.

    Args:
        files: rank files as sniffed, any number of steps.
    Returns:
        a source for each set of rows; remarks say what was dropped and why.
    """
    from rollout_is.dumps.foreign.formats.slime import without_train

    found = Harvest()
    groups: dict[tuple[int | None, str], list[_RankFile]] = {}
    stages = 0
    for file in files:
        where = file.path.name
        if "log_probs" not in file.keys and "<truncated>" not in file.keys:
            stages += 1
            found.problems.append(without_train(where))
            continue
        seen = _look(file, where)
        groups.setdefault((seen.step, seen.rows), []).append(seen)
    if stages:
        found.remarks.append(
            remark(
                "stages-left-out", f"{stages} rank files hold no log_probs (pipeline stages before the last): left out"
            )
        )
    for (_, _), members in sorted(groups.items(), key=lambda item: item[1][0].path):
        first, distinct = members[0], _distinct(members)
        remarks: list[Note] = []
        if len(members) > len(distinct):
            remarks.append(
                remark(
                    "copies-dropped",
                    f"{len(members) - len(distinct)} copies of {first.path.name} (tensor parallelism): dropped",
                )
            )
        if len(distinct) > 1 and all(member.whole for member in distinct):
            remarks.append(
                remark(
                    "copies-differ",
                    f"{', '.join(m.path.name for m in distinct[1:])} hold the same sequences as {first.path.name} with other values: "
                    "the first rank's are used",
                )
            )
            distinct = distinct[:1]
        parts = tuple(member.path for member in distinct)
        if len(parts) > 1:
            remarks.append(
                remark(
                    "slices-joined",
                    f"{len(parts)} context-parallel slices joined: {', '.join(part.name for part in parts)}",
                )
            )
        found.sources.append(Source(first.path, parts, first.step, first.rank, tuple(remarks)))
    return found


def _distinct(members: list[_RankFile]) -> list[_RankFile]:
    kept: dict[str, _RankFile] = {}
    for member in members:
        kept.setdefault(member.values, member)
    return list(kept.values())


def _look(file: Sniffed, where: str) -> _RankFile:
    from rollout_is.dumps.foreign.formats.slime_v1 import rank_data

    loaded = torchfile.load(file.path, where)
    data = rank_data(loaded, where)
    step, rank = step_and_rank(file.path)
    identity = data.get("sample_indices")
    if not isinstance(identity, list) or not all(isinstance(item, int) for item in identity):
        identity = [_bytes(tokens) for tokens in data.get("tokens", [])]
    train, rollout, masks = (data.get(key) or [] for key in ("log_probs", "rollout_log_probs", "loss_masks"))
    return _RankFile(
        file.path,
        loaded.get("rollout_id") if isinstance(loaded.get("rollout_id"), int) else step,
        loaded.get("rank") if isinstance(loaded.get("rank"), int) else rank,
        hashlib.sha256(repr(identity).encode()).hexdigest(),
        hashlib.sha256(
            b"|".join([_bytes(v) for v in (*train, *rollout)] + [repr(data.get("cp_rank")).encode()])
        ).hexdigest(),
        all(len(value) == len(mask) for value, mask in zip(train, masks, strict=False)),
    )


def _bytes(value: Any) -> bytes:
    import torch

    if isinstance(value, torch.Tensor):
        return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return repr(value).encode()


def zigzag(total: int, response: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Ranges of response positions that a context-parallel rank holds, in the order in which it holds them.

    Args:
        total: tokens of prompt and response.
        response: tokens of the response.
        rank: context-parallel rank.
        size: context-parallel size.
    Source: slime and miles, ``get_logits_and_tokens_offset_with_cp``.

    >>> zigzag(total=8, response=6, rank=0, size=2), zigzag(total=8, response=6, rank=1, size=2)
    ([(0, 1), (5, 6)], [(1, 3), (3, 5)])
    """
    prompt = total - response
    chunk = -(-total // (2 * size))
    held = []
    for number in (rank, 2 * size - 1 - rank):
        start, stop = max(number * chunk, prompt - 1), min((number + 1) * chunk, total - 1)
        if start < stop:
            held.append((start - prompt + 1, stop - prompt + 1))
    return held


def merge_slices(parts: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """One rank's columns out of the slices of all its context-parallel ranks.

    Args:
        parts: columns of each file; sliced columns as lists of 1-D tensors.
        where: file name for messages.
    Returns:
        the columns of the first part with the sliced ones made whole.
    Raises:
        DumpError: the lengths do not prove the zigzag layout, or prove it for no single assignment of ranks.
    """
    import torch

    size = len(parts)
    order = _assign(parts, where)
    first = parts[0]
    merged = dict(first)
    totals, responses = first["total_lengths"], first["response_lengths"]
    for key in _SLICED:
        if not all(isinstance(part.get(key), list | tuple) and len(part[key]) == len(totals) for part in parts):
            merged.pop(key, None)
            continue
        rows = []
        for row, (total, response) in enumerate(zip(totals, responses, strict=True)):
            whole = torch.zeros(int(response), dtype=parts[0][key][row].dtype)
            for part, rank in zip(parts, order, strict=True):
                taken = 0
                for start, stop in zigzag(int(total), int(response), rank, size):
                    whole[start:stop] = part[key][row][taken : taken + stop - start]
                    taken += stop - start
                if taken != len(part[key][row]):
                    raise _unproven(
                        where,
                        f"{key}[{row}] of context-parallel rank {rank} has {len(part[key][row])} values, not {taken}",
                    )
            rows.append(whole)
        merged[key] = rows
    return merged


def _assign(parts: list[dict[str, Any]], where: str) -> list[int]:
    """The context-parallel rank of each part: as the files say, else the only one that fits; checked by lengths either way."""
    size = len(parts)
    for part in parts:
        if part.get("qkv_format", "thd") != "thd":
            raise _unproven(where, f"qkv_format is {part['qkv_format']}, whose slices are padded differently")
        if part.get("cp_size", size) != size:
            raise _unproven(where, f"{size} distinct slices, but cp_size is {part['cp_size']}")
        if not isinstance(part.get("total_lengths"), list) or not isinstance(part.get("response_lengths"), list):
            raise _unproven(where, "total_lengths or response_lengths is missing")
    order = []
    for part in parts:
        fits = [rank for rank in range(size) if _fits(part, rank, size)]
        said = part.get("cp_rank")
        if said is not None:
            fits = [rank for rank in fits if rank == said]
        if len(fits) != 1:
            raise _unproven(
                where, f"the lengths fit {len(fits) or 'no'} context-parallel ranks and the file does not settle it"
            )
        order.append(fits[0])
    if sorted(order) != list(range(size)):
        raise _unproven(where, f"the files are slices {sorted(order)} of {size}")
    return order


def _fits(part: dict[str, Any], rank: int, size: int) -> bool:
    rows = zip(part["total_lengths"], part["response_lengths"], part["log_probs"], strict=True)
    return all(
        sum(stop - start for start, stop in zigzag(int(total), int(response), rank, size)) == len(values)
        for total, response, values in rows
    )


def _unproven(where: str, found: str) -> DumpError:
    return DumpError(
        where,
        f"expected context-parallel slices in a proven zigzag layout, found: {found}",
        "files of ranks are missing, or another layout was used; joining them by guess would misplace tokens",
        "give all rank files of the step, use a miles of 2026-08-17 or later (it writes cp_rank), or dump whole responses",
        code="slices-not-proven",
    )
