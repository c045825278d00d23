"""prime-rl token exports: ``token_exports/step_{N}/rank_{R}.jsonl`` beside a ``STABLE`` marker.

``trainer_logprobs`` comes from the loss forward, so it is the *current* policy: with several optimizer steps a batch it holds
policy drift as well as engine mismatch. Sequences without a trainable token are not exported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign.format import Format, Harvest, Source, remark, step_and_rank
from rollout_is.dumps.foreign.infos import dropped_metadata, notes_metadata, stat_of
from rollout_is.dumps.foreign.jsonl import Index, JsonlShard, Row, array_text, build_index, numbers
from rollout_is.dumps.foreign.sniff import Sniffed
from rollout_is.dumps.notes import Note
from rollout_is.dumps.shard import ShardInfo

if TYPE_CHECKING:
    from rollout_is.dumps.shard import OpenShard

_KEYS = frozenset({"schema_version", "trainer_logprobs", "inference_logprobs"})
_USED = _KEYS | {"step", "rank", "loss_mask", "rl_weights", "ref_kl_weights", "token_ids", "advantages", "entropy"}
_OPTIONAL = (("token_ids", "token_ids", "I64"), ("advantages", "advantages", "F64"), ("entropy", "entropy", "F64"))


class PrimeRl(Format):
    """A rank's token export of one step."""

    name: ClassVar[str] = "prime-rl/token_export"
    priority: ClassVar[int] = 10
    train_policy: ClassVar[str] = "current"
    trainer: ClassVar[str] = "prime-rl"

    def claims(self, file: Sniffed) -> bool:
        """A JSON row with prime-rl's schema version and both log-probs."""
        return file.kind == "jsonl" and file.keys >= _KEYS

    def harvest(self, files: Sequence[Sniffed]) -> Harvest:
        """Finished steps only: a step folder without ``STABLE`` is still being written."""
        found = Harvest()
        waiting: dict[Path, list[Sniffed]] = {}
        for file in files:
            folder = file.path.parent
            if folder.name.startswith("step_") and not (folder / "STABLE").exists():
                waiting.setdefault(folder, []).append(file)
                continue
            by_path = step_and_rank(file.path)
            step, rank = file.row.get("step"), file.row.get("rank")
            found.sources.append(
                Source(
                    file.path,
                    (file.path,),
                    step if isinstance(step, int) else by_path[0],
                    rank if isinstance(rank, int) else by_path[1],
                )
            )
        for folder, left in sorted(waiting.items()):
            found.remarks.append(
                remark(
                    "unfinished-step", f"{folder.name} has no STABLE marker: {len(left)} unfinished files are left out"
                )
            )
            found.problems.append(
                DumpError(
                    str(folder),
                    "expected a STABLE marker in the step folder, found none",
                    "prime-rl writes STABLE when every rank has written its file; the step is not complete",
                    "wait for the step, or create an empty STABLE if the run was stopped and the files are whole",
                    code="unfinished-step",
                )
            )
        return found

    def info(self, source: Source) -> ShardInfo:
        """Rows and lengths from one pass over the bytes; no number is parsed."""
        size, mtime = stat_of(source.path)
        index = _index(str(source.path), size, mtime)
        weighted = index.flags["rl_weights"] + index.flags["ref_kl_weights"] > 0
        columns = {"train": "trainer_logprobs", "rollout": "inference_logprobs", "mask": "loss_mask"}
        if weighted:
            columns["mask"] = "loss_mask & (rl_weights | ref_kl_weights)"
        dtypes = {"train": "F64", "rollout": "F64", "mask": "BOOL"}
        for role, key, dtype in _OPTIONAL:
            if index.flags[key] == len(index.starts):
                columns[role], dtypes[role] = key, dtype
        if "export_sequence_idx" in index.scalars:
            columns["sequence_ids"], dtypes["sequence_ids"] = "export_sequence_idx", "I64"
        notes = list(source.remarks)
        notes.append(
            Note(
                "train-policy-current",
                "notice",
                "train",
                "trainer_logprobs are of the current policy (the loss forward): with several optimizer steps a batch, "
                "differences hold policy drift as well as engine mismatch",
            )
        )
        notes.append(
            Note(
                "fully-masked-not-exported",
                "info",
                "mask",
                "prime-rl does not export sequences without a trainable token, so none can be counted as fully masked",
            )
        )
        return ShardInfo(
            path=str(source.path),
            name=source.path.name,
            format=self.name,
            step=source.step,
            rank=source.rank,
            world_size=None,
            layout="packed",
            positions=int(index.lengths.sum()),
            segments=len(index.starts),
            columns=columns,
            dtypes=dtypes,
            metadata={"trainer": self.trainer, "train_policy": self.train_policy}
            | dropped_metadata(index.keys, _USED | {"export_sequence_idx"})
            | notes_metadata(notes),
            size=size,
            mtime_ns=mtime,
        )

    def open(self, source: Source, info: ShardInfo) -> OpenShard:
        """A shard that parses rows as they are read."""
        index = _index(info.path, info.size, info.mtime_ns)
        segments: dict[str, Any] = {}
        if "export_sequence_idx" in index.scalars:
            segments["sequence_ids"] = index.scalars["export_sequence_idx"].astype(np.int64)
        optional = [(role, key) for role, key, _ in _OPTIONAL if role in info.columns]
        return JsonlShard(info, index, lambda row, where: _parse(row, where, optional), segments)


def _has_numbers(key: bytes) -> Any:
    def test(line: bytes) -> bool:
        values = array_text(line, key)
        return values is not None and any(digit in values for digit in b"0123456789")

    return test


@lru_cache(maxsize=64)
def _index(path: str, size: int, mtime_ns: int) -> Index:
    keys = (b"rl_weights", b"ref_kl_weights", b"token_ids", b"advantages", b"entropy")
    watch = {key.decode(): _has_numbers(key) for key in keys}
    return build_index(Path(path), Path(path).name, b"trainer_logprobs", (b"export_sequence_idx",), watch)


def _parse(row: Mapping[str, Any], where: str, optional: list[tuple[str, str]]) -> Row:
    mask = numbers(row, "loss_mask", where) != 0
    # Tokens with neither weight have no sampling log-prob; prime-rl's own mismatch metric leaves them out.
    streams = [_weights(row, key, where) for key in ("rl_weights", "ref_kl_weights")]
    present = [stream for stream in streams if stream is not None]
    if present:
        used = present[0] != 0
        for stream in present[1:]:
            used = used | (stream != 0)
        mask = mask & used
    columns: Row = {
        "train": numbers(row, "trainer_logprobs", where),
        "rollout": numbers(row, "inference_logprobs", where),
        "mask": mask,
    }
    for role, key in optional:
        columns[role] = numbers(row, key, where, dtype=np.int64 if role == "token_ids" else np.float64)
    return columns


def _weights(row: Mapping[str, Any], key: str, where: str) -> NDArray[Any] | None:
    value = row.get(key)
    if not isinstance(value, list) or all(item is None for item in value):
        return None
    weights: NDArray[Any] = np.nan_to_num(numbers(row, key, where))
    return weights
