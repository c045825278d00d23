"""NeMo-RL ``train_data_step{N}.jsonl``: written on every run, a row a sequence, padded to the batch maximum.

``prev_logprobs`` is the trainer's old policy, ``generation_logprobs`` the engine; value i is token i. The mask is
``token_loss_mask`` times ``sample_loss_mask``; files from before 2026-02-21 hold no mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rollout_is.dumps.foreign.format import Format, Source
from rollout_is.dumps.foreign.infos import dropped_metadata, notes_metadata, stat_of
from rollout_is.dumps.foreign.jsonl import Index, JsonlShard, Row, array_text, build_index, numbers, scalar
from rollout_is.dumps.foreign.sniff import Sniffed
from rollout_is.dumps.notes import Note
from rollout_is.dumps.shard import ShardInfo

if TYPE_CHECKING:
    from rollout_is.dumps.shard import OpenShard

_BOTH = frozenset({"generation_logprobs", "prev_logprobs"})
_USED = _BOTH | {"token_loss_mask", "sample_loss_mask", "token_ids", "advantages", "rewards", "idx", "input_lengths"}


class NemoRl(Format):
    """NeMo-RL's step file of training data."""

    name: ClassVar[str] = "nemo-rl/train_data"
    priority: ClassVar[int] = 10
    train_policy: ClassVar[str] = "old"
    trainer: ClassVar[str] = "NeMo-RL"

    def claims(self, file: Sniffed) -> bool:
        """A JSON row with both log-probs under NeMo-RL's names."""
        return file.kind == "jsonl" and file.keys >= _BOTH

    def info(self, source: Source) -> ShardInfo:
        """Rows and lengths from one pass over the bytes; no number is parsed."""
        size, mtime = stat_of(source.path)
        index = _index(str(source.path), size, mtime)
        rows = len(index.starts)
        masked = index.flags["masked"]
        columns = {"train": "prev_logprobs", "rollout": "generation_logprobs"}
        columns["mask"] = (
            "token_loss_mask * sample_loss_mask" if masked else "generation_logprobs != 0 (no mask in the file)"
        )
        dtypes = {"train": "F64", "rollout": "F64", "mask": "BOOL"}
        for role, key, dtype in (("token_ids", "token_ids", "I64"), ("advantages", "advantages", "F64")):
            if index.flags[key] == rows:
                columns[role], dtypes[role] = key, dtype
        for role, key in (("rewards", "rewards"), ("sequence_ids", "idx")):
            if key in index.scalars:
                columns[role], dtypes[role] = key, "F64" if role == "rewards" else "I64"
        metadata = {"trainer": self.trainer, "train_policy": self.train_policy}
        return ShardInfo(
            path=str(source.path),
            name=source.path.name,
            format=self.name,
            step=source.step,
            rank=source.rank,
            world_size=None,
            layout="rectangular" if len(set(index.lengths.tolist())) == 1 else "packed",
            positions=int(index.lengths.sum()),
            segments=rows,
            columns=columns,
            dtypes=dtypes,
            metadata=metadata | dropped_metadata(index.keys, _USED) | notes_metadata(_notes(index, source)),
            size=size,
            mtime_ns=mtime,
        )

    def open(self, source: Source, info: ShardInfo) -> OpenShard:
        """A shard that parses rows as they are read."""
        index = _index(info.path, info.size, info.mtime_ns)
        segments: dict[str, Any] = {}
        if "rewards" in index.scalars:
            segments["rewards"] = index.scalars["rewards"]
        if "idx" in index.scalars:
            segments["sequence_ids"] = index.scalars["idx"].astype(np.int64)
        masked = bool(index.flags["masked"])
        roles = frozenset(info.columns)
        return JsonlShard(info, index, lambda row, where: _parse(row, where, masked, roles), segments)


def _all_zero(line: bytes) -> bool:
    values = array_text(line, b"prev_logprobs")
    return values is not None and not values.translate(None, b"0., -\t")


def _dropped(line: bytes) -> bool:
    return scalar(line, b"sample_loss_mask") == 0.0


@lru_cache(maxsize=64)
def _index(path: str, size: int, mtime_ns: int) -> Index:
    """Cached by size and time of change: every work unit of a step file shares one index."""
    return build_index(
        Path(path),
        Path(path).name,
        b"generation_logprobs",
        (b"rewards", b"idx", b"input_lengths"),
        {
            "zero": _all_zero,
            "masked": lambda line: b'"token_loss_mask"' in line,
            "dropped": _dropped,
            "token_ids": lambda line: b'"token_ids"' in line,
            "advantages": lambda line: b'"advantages"' in line,
        },
    )


def _notes(index: Index, source: Source) -> list[Note]:
    rows = len(index.starts)
    notes = list(source.remarks)
    if index.flags["zero"] == rows:
        notes.append(
            Note(
                "placeholder-train-logprobs",
                "error",
                "train",
                "prev_logprobs is 0 at every position: loss_fn.force_on_policy_ratio skips the forward and "
                "leaves a placeholder, so no figure compares the two engines (set seq_logprob_error_threshold "
                "or turn force_on_policy_ratio off)",
            )
        )
    if not index.flags["masked"]:
        notes.append(
            Note(
                "mask-reconstructed",
                "warning",
                "mask",
                "no masks in the file (NeMo-RL before 2026-02-21): positions with generation_logprobs other than 0 "
                "inside input_lengths serve, so tokens generated with log-prob exactly 0 are left out",
            )
        )
    if index.flags["dropped"]:
        message = (
            f"sample_loss_mask drops {index.flags['dropped']} of {rows} rows (already after NeMo-RL's own rejection)"
        )
        notes.append(Note("rows-dropped-by-trainer", "info", "mask", message))
    return notes


def _parse(row: Mapping[str, Any], where: str, masked: bool, roles: frozenset[str]) -> Row:
    rollout = numbers(row, "generation_logprobs", where)
    columns: Row = {"train": numbers(row, "prev_logprobs", where), "rollout": rollout}
    if masked:
        keep = numbers(row, "token_loss_mask", where) != 0
        factor = _first(row.get("sample_loss_mask", 1.0))
        columns["mask"] = keep if factor is None or factor != 0 else np.zeros_like(keep)
    else:
        length = _first(row.get("input_lengths"))
        inside = np.arange(rollout.size) < (rollout.size if length is None else length)
        columns["mask"] = (rollout != 0) & inside
    if "token_ids" in roles:
        columns["token_ids"] = numbers(row, "token_ids", where, dtype=np.int64)
    if "advantages" in roles:
        columns["advantages"] = numbers(row, "advantages", where)
    return columns


def _first(value: Any) -> float | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, int | float) else None
