"""SkyRL: both pickled layouts, padding rows, absent log-probs. The classes are made here; SkyRL is not installed."""

import pickle
import sys
import types

import numpy as np
import pytest
import torch

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry

TRAIN = torch.tensor([[-5.0, -1.0, -2.0], [-1.5, -0.5, -0.25], [-5.0, -1.0, -2.0]])
ROLLOUT = torch.tensor([[0.0, -1.25, -2.0], [-1.0, -0.5, -0.5], [0.0, -1.25, -2.0]])
MASK = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])


def as_numpy(tensor):
    return {
        "format": "numpy",
        "data": tensor.numpy().tobytes(),
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def as_saved(tensor):
    """What bfloat16, which numpy lacks, falls back to."""
    import io

    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return {"format": "torch", "data": buffer.getvalue()}


def state(**changes):
    tensors = {"action_log_probs": TRAIN, "rollout_logprobs": ROLLOUT, "loss_mask": MASK} | changes
    pack = {
        key: value if value is None or isinstance(value, dict) else as_numpy(value) for key, value in tensors.items()
    }
    return {"batch_dict": pack, "batch_size": 3, "device": torch.device("cpu"), "metadata": {"pad_size": 1}}


@pytest.fixture
def module(monkeypatch):
    """``module(name)``: an importable module with the classes, as long as the pickle is being written."""

    def make(name):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        made = sys.modules[name]

        class TrainingInputBatch(dict):
            def __getstate__(self):
                return self.the_state

        def _rebuild_tensor_batch(cls, state):
            raise AssertionError("nothing of the pickle may run")

        for value in (TrainingInputBatch, _rebuild_tensor_batch):
            value.__module__, value.__qualname__ = name, value.__name__
            setattr(made, value.__name__, value)
        return made

    return make


def new_pickle(module, **changes):
    made = module("skyrl.backends.skyrl_train.training_batch")

    class Writer:
        def __reduce__(self):
            return made._rebuild_tensor_batch, (made.TrainingInputBatch, state(**changes))

    return pickle.dumps(Writer(), protocol=4)


def old_pickle(module):
    made = module("skyrl_train.training_batch")
    batch = made.TrainingInputBatch(action_log_probs=TRAIN, rollout_logprobs=ROLLOUT, loss_mask=MASK)
    batch.the_state = state()
    return pickle.dumps(batch, protocol=4)


def test_new_layout(tmp_path, read_one, module):
    (tmp_path / "global_step_3_training_input.pkl").write_bytes(new_pickle(module))
    found = read_one(tmp_path)
    assert (found.info.format, found.info.step) == ("skyrl/training_input", 3)
    assert found.train.tolist() == TRAIN.flatten().tolist()
    assert found.rollout.tolist() == ROLLOUT.flatten().tolist()
    assert found.mask.tolist() == [False, True, True, True, True, True, False, False, False]
    assert found.columns["segment_is_pad"].tolist() == [False, False, True]
    assert "last 1 rows are padding" in found.notes["pad-rows"].message


def test_old_layout_with_tensors_pickled_twice(tmp_path, read_one, module):
    data = old_pickle(module)
    assert b"_load_from_bytes" in data  # the tensors themselves are in it, in the form that would run torch.load
    (tmp_path / "global_step_3_training_input.pkl").write_bytes(data)
    found = read_one(tmp_path)
    assert found.train.tolist() == TRAIN.flatten().tolist()
    assert found.mask.sum() == 5


def test_old_layout_without_the_second_copy(tmp_path, read_one, module):
    made = module("skyrl_train.training_batch")
    batch = made.TrainingInputBatch(action_log_probs=TRAIN, rollout_logprobs=ROLLOUT[:, [2, 1, 0]], loss_mask=MASK)
    batch.the_state = {"metadata": {}}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(batch, protocol=4))
    found = read_one(tmp_path / "a.pkl")
    assert found.train.tolist() == TRAIN.flatten().tolist()
    assert found.rollout.tolist() == ROLLOUT[:, [2, 1, 0]].flatten().tolist()


def test_bfloat16_as_saved_bytes(tmp_path, read_one, module):
    half = ROLLOUT.to(torch.bfloat16)
    (tmp_path / "a.pkl").write_bytes(new_pickle(module, rollout_logprobs=as_saved(half)))
    found = read_one(tmp_path / "a.pkl")
    assert found.info.dtypes["rollout"] == "BF16"
    assert np.array_equal(found.rollout, half.double().flatten().numpy())


@pytest.mark.parametrize(
    ("column", "code"),
    [("action_log_probs", "train-logprobs-missing"), ("rollout_logprobs", "rollout-logprobs-missing")],
)
def test_null_logprobs_are_answered(tmp_path, module, column, code):
    (tmp_path / "a.pkl").write_bytes(new_pickle(module, **{column: None}))
    with pytest.raises(DumpError, match="found None") as caught:
        registry.find(tmp_path / "a.pkl")
    assert caught.value.code == code


def test_a_shape_that_the_bytes_do_not_fill_is_refused(tmp_path, module):
    huge = as_numpy(TRAIN) | {"shape": (10**6, 10**9)}
    (tmp_path / "a.pkl").write_bytes(new_pickle(module, action_log_probs=huge))
    with pytest.raises(DumpError) as caught:
        registry.find(tmp_path / "a.pkl")
    assert caught.value.code == "tensor-not-stored"
    assert "action_log_probs" in caught.value.where
