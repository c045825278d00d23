"""verl: what a DataProto lacks, and the two ways in which it is serialised. verl and tensordict are not installed."""

import io
import pickle
import sys
import types

import numpy as np
import pytest
import torch

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """``saved(state)``: a pickle of a DataProto with that state."""
    for name in ("verl", "verl.protocol"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    class DataProto:
        def __getstate__(self):
            return self.the_state

    DataProto.__module__, DataProto.__qualname__ = "verl.protocol", "DataProto"
    sys.modules["verl.protocol"].DataProto = DataProto

    def make(state, name="step_5.dp"):
        proto = DataProto()
        proto.the_state = state
        path = tmp_path / name
        path.write_bytes(pickle.dumps(proto, protocol=4))
        return path

    return make


def as_numpy(**tensors):
    """The batch under VERL_DATAPROTO_SERIALIZATION_METHOD=numpy."""
    items = {key: (str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for key, t in tensors.items()}
    return ([2], None, items)


OLD = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, -0.25, -3.0]])
ROLLOUT = OLD - 0.125
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_numpy_serialisation(saved, read_one):
    uid = np.array(["b", "a"], dtype=object)
    found = read_one(
        saved((as_numpy(old_log_probs=OLD, rollout_log_probs=ROLLOUT, response_mask=MASK), {"uid": uid}, {}))
    )
    assert (found.info.format, found.info.step, found.info.layout) == ("verl/DataProto", 5, "rectangular")
    assert found.train.tolist() == OLD.flatten().tolist()
    assert found.mask.tolist() == [True, True, False, True, True, True]
    assert found.columns["group_ids"].tolist() == [0, 1]


def test_groups_of_the_sample(samples, read_one):
    found = read_one(samples / "verl/hook_save_to_disk/step_1.dp")
    assert found.columns["group_ids"].tolist() == [0] * 4 + [1] * 4
    assert "prompts" in found.info.metadata["dropped"]


def test_a_rollout_batch_is_answered(saved):
    path = saved((as_numpy(rollout_log_probs=ROLLOUT, response_mask=MASK), {}, {}), "gen_batch.dp")
    with pytest.raises(DumpError, match="expected old_log_probs") as caught:
        registry.find(path)
    assert caught.value.code == "rollout-only"
    assert "docs/trainers/verl.md" in caught.value.fix


def test_missing_engine_logprobs_are_answered(saved):
    with pytest.raises(DumpError, match="expected rollout_log_probs") as caught:
        registry.find(saved((as_numpy(old_log_probs=OLD, response_mask=MASK), {}, {})))
    assert "calculate_log_probs" in caught.value.fix


def test_bypass_mode_is_said(saved, read_one):
    state = (as_numpy(old_log_probs=OLD, rollout_log_probs=OLD, response_mask=MASK), {}, {})
    assert read_one(saved(state)).notes["train-equals-rollout"].severity == "error"


@pytest.fixture
def consolidated(monkeypatch):
    """``consolidated(leaves, storage)``: torch.save bytes of a consolidated TensorDict with that table."""
    for name in ("tensordict", "tensordict._reductions"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    def _rebuild_tensordict_files_consolidated(meta, storage):
        raise AssertionError("nothing of the pickle may run")

    function = _rebuild_tensordict_files_consolidated
    function.__module__, function.__qualname__ = "tensordict._reductions", function.__name__
    setattr(sys.modules["tensordict._reductions"], function.__name__, function)

    def make(leaves, storage):
        class Batch:
            def __reduce__(self):
                return function, ({"leaves": leaves, "cls": "TensorDict"}, storage)

        buffer = io.BytesIO()
        torch.save(Batch(), buffer)
        return buffer.getvalue()

    return make


def table(columns):
    """Leaves and storage as tensordict lays them out: each leaf padded to 8 bytes."""
    leaves, blob = {}, b""
    for key, tensor in columns.items():
        data = tensor.numpy().tobytes()
        pad = -len(data) % 8
        leaves[key] = (str(tensor.dtype), list(tensor.shape), len(blob), len(blob) + len(data) + pad, pad)
        blob += data + b"\0" * pad
    return leaves, torch.frombuffer(bytearray(blob), dtype=torch.uint8)


COLUMNS = {
    "old_log_probs": OLD[:, :1].clone(),
    "rollout_log_probs": ROLLOUT[:, :1].clone(),
    "response_mask": MASK[:, :1].clone(),
}


def test_leaves_with_padding(saved, consolidated, read_one):
    odd = {key: column[:1] for key, column in COLUMNS.items()}  # 4 bytes each: padded
    found = read_one(saved((consolidated(*table(odd)), {}, {})))
    assert found.train.tolist() == [-1.0]
    assert found.rollout.tolist() == [-1.125]
    assert found.mask.tolist() == [True]


@pytest.mark.parametrize(
    "leaf",
    [
        ("torch.float32", [2, 1], 0, 1 << 40, 0),
        ("torch.float32", [2, 10**12], 0, 8, 0),
        ("torch.float32", [2, -1], 0, 8, 0),
        ("torch.nothing", [2, 1], 0, 8, 0),
        ("torch.float32", "ab", 0, 8, 0),
        7,
    ],
)
def test_a_table_that_lies_is_refused(saved, consolidated, leaf):
    leaves, storage = table(COLUMNS)
    leaves["old_log_probs"] = leaf
    with pytest.raises(DumpError) as caught:
        registry.find(saved((consolidated(leaves, storage), {}, {})))
    assert caught.value.code in ("tensor-not-stored", "wrong-structure")
