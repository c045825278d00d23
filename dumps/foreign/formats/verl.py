"""verl ``DataProto.save_to_disk``: a plain pickle around a consolidated TensorDict, read without verl and without tensordict.

verl itself saves rollouts this way (no train log-probs); a one-line hook after ``old_log_probs`` saves both. SkyRL-agent's
``current_batch_after_step.pkl`` is the same object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import unpickle
from rollout_is.dumps.foreign.consolidated import tensors
from rollout_is.dumps.foreign.format import Format, Source
from rollout_is.dumps.foreign.rebuild import TENSOR_NAMES, from_bytes, objects
from rollout_is.dumps.foreign.rectangles import rectangular
from rollout_is.dumps.foreign.sniff import Sniffed
from rollout_is.dumps.notes import Note

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.dumps.foreign.packed import Packed

_NAMES = {
    "train": "old_log_probs",
    "rollout": "rollout_log_probs",
    "mask": "response_mask",
    "token_ids": "responses",
    "advantages": "advantages",
    "entropy": "entropys",
    "logprobs.ref": "ref_log_prob",
    "group_ids": "uid",
}


class VerlDataProto(Format):
    """A saved verl batch."""

    name: ClassVar[str] = "verl/DataProto"
    priority: ClassVar[int] = 10
    train_policy: ClassVar[str] = "old"
    trainer: ClassVar[str] = "verl"

    def claims(self, file: Sniffed) -> bool:
        """A plain pickle that asks for verl's DataProto."""
        return file.kind == "pickle" and "verl.protocol.DataProto" in file.names

    def read(self, source: Source) -> Packed:
        """All rows of the batch; both log-probs must be in it."""
        where = source.path.name
        allowed = {"verl.protocol.DataProto", "verl.protocol.DataProtoItem", "_io.BytesIO"} | TENSOR_NAMES
        node = unpickle.load(source.path.read_bytes(), where, allowed)
        batch, others = _contents(node, where)
        if "old_log_probs" not in batch:
            raise DumpError(
                where,
                f"expected old_log_probs, found {', '.join(sorted(batch)) or 'no tensor'}",
                "this is a rollout batch (skip.rollout, or saved before the trainer's forward): it holds the engine's side only",
                "save the batch after old_log_probs are computed and before rollout correction: docs/trainers/verl.md",
                code="rollout-only",
            )
        for key in ("rollout_log_probs", "response_mask"):
            if key not in batch:
                raise DumpError(
                    where,
                    f"expected {key}, found {', '.join(sorted(batch))}",
                    "the engine was not asked for log-probs"
                    if key.startswith("rollout")
                    else "the batch was saved too early",
                    "set actor_rollout_ref.rollout.calculate_log_probs=true",
                    code="column-missing",
                )
        columns = {role: batch[key] for role, key in _NAMES.items() if key in batch}
        segments = {}
        groups = group_ids(objects(others.get("uid"), where))
        if groups is not None:
            segments["group_ids"] = groups
        packed = rectangular(where, columns, segments, _NAMES)
        if bool((packed.columns["train"] == packed.columns["rollout"])[packed.columns["mask"] != 0].all()):
            message = "old_log_probs equal rollout_log_probs on every token: bypass mode copies one into the other"
            packed.notes.append(Note("train-equals-rollout", "error", "train", message))
        packed.dropped += sorted(key for key in batch if key not in _NAMES.values())
        return packed


def group_ids(names: list[Any] | None) -> Tensor | None:
    """int64 numbers for group names, by first appearance."""
    import torch

    if not names or not all(isinstance(name, str | int) for name in names):
        return None
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(str(name), len(numbers)) for name in names])


def _contents(node: Any, where: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    state = node.state if isinstance(node, unpickle.Node) else None
    if isinstance(state, tuple) and len(state) == 3:
        batch, others, _ = state
        if isinstance(batch, bytes):
            return tensors(batch, where), others if isinstance(others, dict) else {}
        if isinstance(batch, tuple) and len(batch) == 3 and isinstance(batch[2], dict):  # serialised as numpy
            found = {}
            for key, item in batch[2].items():
                if not (isinstance(key, str) and isinstance(item, tuple | list) and len(item) == 3):
                    raise DumpError(where, "expected (dtype, shape, bytes) by name", code="wrong-structure")
                found[key] = from_bytes(item[2], item[1], item[0], f"{where}: {key}")
            return found, others if isinstance(others, dict) else {}
    raise DumpError(where, "expected a DataProto with a tensor batch, found another structure", code="wrong-structure")
