"""miles ``policy_loss_debug/rank_{r}_call_{c}.pt``: what the policy loss saw, one file a micro-batch.

``train_log_probs`` are of the current policy. The files carry no context-parallel rank, so slices cannot be joined; beside a
``train_data`` folder they hold the same rollouts and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import torchfile
from rollout_is.dumps.foreign.format import Format, Harvest, Source, step_and_rank
from rollout_is.dumps.foreign.packed import Rows
from rollout_is.dumps.foreign.sniff import Sniffed
from rollout_is.dumps.notes import Note

if TYPE_CHECKING:
    from rollout_is.dumps.foreign.packed import Packed

_NAMES = {
    "train": "train_log_probs",
    "rollout": "rollout_log_probs",
    "mask": "local_loss_mask",
    "logprobs.old": "old_log_probs",
    "advantages": "advantages",
}


class MilesPolicyLossDebug(Format):
    """A loss call of miles."""

    name: ClassVar[str] = "miles/policy_loss_debug"
    priority: ClassVar[int] = 20
    train_policy: ClassVar[str] = "current"
    trainer: ClassVar[str] = "miles"
    yields_to: ClassVar[tuple[str, ...]] = ("miles/train_data",)

    def claims(self, file: Sniffed) -> bool:
        """A torch file with ``call`` and the loss inputs of samples."""
        return file.kind == "torch" and file.keys >= {"call", "samples", "old_log_probs", "local_loss_mask"}

    def harvest(self, files: Sequence[Sniffed]) -> Harvest:
        """Each file is a shard of no known step: the process-wide call counter does not restart per rollout."""
        return Harvest([Source(file.path, (file.path,), None, step_and_rank(file.path)[1]) for file in files])

    def read(self, source: Source) -> Packed:
        """The samples of one micro-batch."""
        where = source.path.name
        loaded = torchfile.load(source.path, where)
        samples = loaded.get("samples") if isinstance(loaded, dict) else None
        if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
            raise DumpError(where, "expected samples, a list of dicts, found something else", code="wrong-structure")
        rows, sliced, same = Rows(where, _NAMES), 0, True
        for sample in samples:
            rows.add({role: sample.get(key) for role, key in _NAMES.items()})
            response = sample.get("response_length")
            sliced += (
                isinstance(response, int)
                and sample.get("train_log_probs") is not None
                and response != len(sample["train_log_probs"])
            )
            old, rollout = sample.get("old_log_probs"), sample.get("rollout_log_probs")
            same = (
                same
                and old is not None
                and rollout is not None
                and bool((old.shape == rollout.shape) and (old == rollout).all())
            )
        packed = rows.finish({})
        packed.notes.append(
            Note(
                "train-policy-current",
                "notice",
                "train",
                "train_log_probs are of the current policy and drift over optimizer steps",
            )
        )
        if same:
            message = "old_log_probs equal rollout_log_probs on every token (--use-rollout-logprobs): logprobs.old is no second engine"
            packed.notes.append(Note("old-equals-rollout", "warning", "logprobs.old", message))
        if sliced:
            message = f"{sliced} samples are context-parallel slices that cannot be joined; only token statistics are of whole sequences"
            packed.notes.append(Note("slices-not-joined", "error", "", message))
        return packed
