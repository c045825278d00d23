"""slime ``--dump-details`` / ``--save-debug-train-data``, both versions of the file.

v2 (since 2026-08-12): one file a rollout, a dict a sample. v1: one file a rank, a list a column, written by every rank:
tensor-parallel ranks are copies, pipeline stages before the last hold no log-probs. v1 files that carry ``cp_rank`` are
miles'. At mask-0 positions ``log_probs`` is real and ``rollout_log_probs`` 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import torchfile
from rollout_is.dumps.foreign.format import Format, Source
from rollout_is.dumps.foreign.packed import Rows
from rollout_is.dumps.foreign.sniff import Sniffed

if TYPE_CHECKING:
    from rollout_is.dumps.foreign.packed import Packed

NAMES = {
    "train": "log_probs",
    "rollout": "rollout_log_probs",
    "mask": "loss_masks",
    "token_ids": "tokens",
    "advantages": "advantages",
    "entropy": "entropy",
    "logprobs.ref": "ref_log_probs",
    "logprobs.teacher": "teacher_log_probs",
    "rewards": "local_raw_reward, else rewards",
    "sequence_ids": "sample_index",
    "prompt_lens": "total_lengths - response_lengths",
}


class SlimeV2(Format):
    """slime's gathered file, ``format_version`` 2."""

    name: ClassVar[str] = "slime/train_data-v2"
    priority: ClassVar[int] = 10
    train_policy: ClassVar[str] = "old"
    trainer: ClassVar[str] = "slime"

    def claims(self, file: Sniffed) -> bool:
        """A torch file with the keys of the second version."""
        return file.kind == "torch" and file.keys >= {"format_version", "samples", "dp_shards", "rollout_log_probs"}

    def read(self, source: Source) -> Packed:
        """Every sample of the rollout, in rollout order."""
        where = source.path.name
        loaded = torchfile.load(source.path, where)
        samples = loaded.get("samples") if isinstance(loaded, dict) else None
        if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
            raise DumpError(where, "expected samples, a list of dicts, found something else", code="wrong-structure")
        if samples and not any("log_probs" in sample for sample in samples):
            raise without_train(where)
        rows = Rows(where, NAMES)
        for sample in samples:
            add_sample(rows, sample)
        packed = rows.finish({})
        packed.dropped += unused(set().union(*samples))
        rollout_id = loaded.get("rollout_id")
        if isinstance(rollout_id, int):
            packed.metadata["step"] = str(rollout_id)
        return packed


_USED = frozenset(
    {"log_probs", "rollout_log_probs", "loss_masks", "tokens", "advantages", "entropy", "ref_log_probs"}
    | {"teacher_log_probs", "rewards", "local_raw_reward", "sample_index", "sample_indices", "response_lengths"}
    | {"total_lengths", "cp_rank", "cp_size", "qkv_format"}
)


def unused(keys: Iterable[str]) -> list[str]:
    """Columns of slime and miles that are not read."""
    return sorted(key for key in set(keys) - _USED if isinstance(key, str))


def add_sample(rows: Rows, sample: Mapping[str, Any]) -> None:
    """Append one sample under slime's names (they stay plural although a value is one sample's)."""
    response = sample.get("log_probs")
    tokens, length, total = sample.get("tokens"), sample.get("response_lengths"), sample.get("total_lengths")
    columns: dict[str, Any] = {
        "train": response,
        "rollout": sample.get("rollout_log_probs"),
        "mask": sample.get("loss_masks"),
    }
    for role in ("advantages", "entropy", "logprobs.ref", "logprobs.teacher"):
        columns[role] = sample.get(NAMES[role])
    if tokens is not None and isinstance(length, int) and len(tokens) >= length:
        columns["token_ids"] = tokens[len(tokens) - length :]  # prompt first, response last
    segment: dict[str, Any] = {
        "rewards": number(sample.get("local_raw_reward", sample.get("rewards"))),
        "sequence_ids": number(sample.get("sample_index")),
    }
    if isinstance(total, int) and isinstance(length, int):
        segment["prompt_lens"] = total - length
    rows.add(columns, segment)


def number(value: Any) -> float | int | None:
    """A plain number out of a number or a 0-dim tensor; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if hasattr(value, "dim") and value.dim() == 0:
        return float(value)
    return None


def without_train(where: str) -> DumpError:
    """The error for a train_data file without train log-probs."""
    return DumpError(
        where,
        "expected log_probs, found none in the file",
        "the forward that recomputes them was skipped (--use-rollout-logprobs without --get-mismatch-metrics), or this "
        "rank is a pipeline stage before the last",
        "run with --get-mismatch-metrics, or give the folder with the files of every rank",
        code="train-logprobs-missing",
    )
