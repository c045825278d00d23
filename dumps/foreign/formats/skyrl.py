"""SkyRL ``trainer.dump_data_batch``: a plain pickle of a ``TrainingInputBatch``, read without SkyRL and without unpickling it.

Response tensors are right-aligned since 2026-03-18 and left-aligned before: only the mask tells which positions are the
response, so rows are never cut by length. The last ``pad_size`` rows are copies with an empty mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import unpickle
from rollout_is.dumps.foreign.format import Format, Source
from rollout_is.dumps.foreign.rebuild import TENSOR_NAMES, tensor
from rollout_is.dumps.foreign.rectangles import rectangular
from rollout_is.dumps.foreign.sniff import Sniffed
from rollout_is.dumps.notes import Note

if TYPE_CHECKING:
    from rollout_is.dumps.foreign.packed import Packed

_MODULES = ("skyrl.backends.skyrl_train.training_batch", "skyrl_train.training_batch")
_CLASSES = frozenset(
    f"{module}.{name}"
    for module in _MODULES
    for name in ("_rebuild_tensor_batch", "TrainingInputBatch", "TensorBatch", "TensorList")
)
_NAMES = {
    "train": "action_log_probs",
    "rollout": "rollout_logprobs",
    "mask": "loss_mask",
    "mask.response": "response_mask",
    "advantages": "advantages",
    "logprobs.ref": "base_action_log_probs",
}


class SkyRl(Format):
    """The training batch of one global step."""

    name: ClassVar[str] = "skyrl/training_input"
    priority: ClassVar[int] = 10
    train_policy: ClassVar[str] = "old"
    trainer: ClassVar[str] = "SkyRL"

    def claims(self, file: Sniffed) -> bool:
        """A plain pickle that asks for SkyRL's batch class."""
        return file.kind == "pickle" and any(name.endswith("training_batch.TrainingInputBatch") for name in file.names)

    def read(self, source: Source) -> Packed:
        """All rows of the step as the driver held them."""
        where = source.path.name
        node = unpickle.load(source.path.read_bytes(), where, _CLASSES | TENSOR_NAMES)
        batch, metadata = _contents(node, where)
        for role in ("train", "rollout"):
            key = _NAMES[role]
            if batch.get(key) is None:
                raise DumpError(
                    f"{where}: {key}",
                    "expected log-probs, found None",
                    "the loss optimises against rollout log-probs, so SkyRL skipped the policy forward"
                    if role == "train"
                    else "the generator returned no log-probs",
                    "choose a loss that needs the policy forward for the steps that you dump"
                    if role == "train"
                    else "set generator.sampling_params.logprobs",
                    code=f"{role}-logprobs-missing",
                )
        columns = {
            role: tensor(batch[key], f"{where}: {key}") for role, key in _NAMES.items() if batch.get(key) is not None
        }
        segments: dict[str, Any] = {}
        pad = metadata.get("pad_size")
        rows = int(columns["train"].shape[0]) if columns["train"].dim() == 2 else 0
        if isinstance(pad, int) and 0 < pad <= rows:
            import torch

            segments["segment_is_pad"] = torch.arange(rows) >= rows - pad
        packed = rectangular(where, columns, segments, {**_NAMES, "segment_is_pad": "metadata.pad_size"})
        if segments:
            message = f"the last {pad} rows are padding for the data-parallel size (copies of row 0 with an empty mask)"
            packed.notes.append(Note("pad-rows", "info", "mask", message))
        packed.dropped += sorted(
            key
            for key, value in batch.items()
            if value is not None and isinstance(key, str) and key not in _NAMES.values()
        )
        return packed


def _contents(node: Any, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors and the metadata, from a rebuilt batch (new) or a dict with a state (old)."""
    if isinstance(node, unpickle.Node):
        state = node.args[1] if node.name.endswith("._rebuild_tensor_batch") and len(node.args) == 2 else node.state
        if isinstance(state, dict):
            batch = state.get("batch_dict") or node.entries
            metadata = state.get("metadata")
            if isinstance(batch, dict) and batch:
                return batch, metadata if isinstance(metadata, dict) else {}
        if node.entries:
            return node.entries, {}
    raise DumpError(
        where, "expected a TrainingInputBatch with tensors, found another structure", code="wrong-structure"
    )
