"""slime's first train_data file: a list a column, one file a rank, written by every rank of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import torchfile
from rollout_is.dumps.foreign.context_parallel import join_rank_files, merge_slices
from rollout_is.dumps.foreign.format import Format, Harvest, Source
from rollout_is.dumps.foreign.formats.slime import NAMES, add_sample, unused, without_train
from rollout_is.dumps.foreign.packed import Rows
from rollout_is.dumps.foreign.sniff import Sniffed

if TYPE_CHECKING:
    from rollout_is.dumps.foreign.packed import Packed

# Per-row columns; raw_reward is of the whole batch in every file and must not be taken for one.
_COLUMNS = [
    "log_probs",
    "rollout_log_probs",
    "loss_masks",
    "tokens",
    "advantages",
    "entropy",
    "ref_log_probs",
    "teacher_log_probs",
    "response_lengths",
    "total_lengths",
    "sample_indices",
    "rewards",
]


class SlimeV1(Format):
    """A rank's file of slime before 2026-08-12; also the base of miles' train_data."""

    name: ClassVar[str] = "slime/train_data-v1"
    priority: ClassVar[int] = 30
    train_policy: ClassVar[str] = "old"
    trainer: ClassVar[str] = "slime"

    def claims(self, file: Sniffed) -> bool:
        """A torch file with ``rollout_data`` as a dict of lists."""
        return file.kind == "torch" and file.keys >= {"rollout_data", "rollout_id", "loss_masks"}

    def harvest(self, files: Sequence[Sniffed]) -> Harvest:
        """Copies dropped, stages without log-probs left out, context-parallel slices joined where their layout is proven."""
        return join_rank_files(files)

    def read(self, source: Source) -> Packed:
        """Every row of one data-parallel rank, joined from its context-parallel files."""
        where = source.path.name
        loaded = [rank_data(torchfile.load(part, part.name), part.name) for part in source.parts]
        data = merge_slices(loaded, where) if len(loaded) > 1 else loaded[0]
        if not data.get("log_probs"):
            raise without_train(where)
        rows = Rows(where, NAMES)
        for index in range(len(data["log_probs"])):
            sample = {key: _item(data.get(key), index, len(data["log_probs"])) for key in _COLUMNS}
            sample["sample_index"] = sample.pop("sample_indices")
            add_sample(rows, sample)
        packed = rows.finish({})
        packed.dropped += unused(data)
        return packed


def rank_data(loaded: Any, where: str) -> dict[str, Any]:
    """The columns of a rank's file, with ``cp_rank`` and ``cp_size`` among them where the file says."""
    data = loaded.get("rollout_data") if isinstance(loaded, dict) else None
    if not isinstance(data, dict):
        raise DumpError(where, "expected rollout_data, a dict of lists, found something else", code="wrong-structure")
    for key in ("log_probs", "rollout_log_probs", "loss_masks"):
        if key in data and not isinstance(data[key], list | tuple):
            raise DumpError(f"{where}: {key}", "expected a list of tensors, found another type", code="wrong-structure")
    return {**data, **{key: loaded[key] for key in ("cp_rank", "cp_size", "qkv_format") if key in loaded}}


def _item(column: Any, index: int, rows: int) -> Any:
    if column is None or not hasattr(column, "__len__") or len(column) != rows:
        return None
    return column[index]
