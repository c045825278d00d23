"""Tensors in memory are served and refused like a file."""

import pytest
import torch

from rollout_is.dumps.choice import RoleView, choose
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.memory import MemoryShard, describe_tensors
from rollout_is.dumps.reader import open_shard
from rollout_is.dumps.scan import scan


def tensors():
    generator = torch.manual_seed(3)
    return {
        "train_logprobs": -torch.rand(1, 12, generator=generator),
        "rollout_logprobs": -torch.rand(12, generator=generator).bfloat16(),
        "labels": torch.tensor([-100, 1, 2, -100, 3, 4, 5, 0, -100, -100, -100, -100]),
        "seq_lens": torch.tensor([3, 5, 4], dtype=torch.int32),
        "cu_packs": torch.tensor([0, 8, 12]),
        "rewards": torch.tensor([0.5, 1.0, 0.0]),
        "mask.loss": torch.arange(12),
        "logprobs.again": torch.zeros(12),
    }


def test_serves_what_the_file_serves(shard, dump):
    made = tensors()
    shard(only=made)
    (info,) = scan(dump).shards
    described, notes = describe_tensors(made)
    assert notes == () and described.columns == info.columns and described.dtypes == info.dtypes
    for choice in ({}, {"mask": "loss", "train": "again", "rollout": "train"}):
        with open_shard(info, **choice) as file, MemoryShard(described, made, **choice) as memory:
            assert torch.equal(file.offsets(), memory.offsets())
            assert torch.equal(file.pack_offsets(), memory.pack_offsets())
            assert torch.equal(file.segment_column("rewards"), memory.segment_column("rewards"))
            for role in ("train", "rollout", "mask", "mask.loss", "labels"):
                for start, stop in ((0, 12), (3, 7), (12, 12)):
                    ours, theirs = memory.read(role, start, stop), file.read(role, start, stop)
                    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_refuses_what_the_file_refuses():
    made = tensors() | {"seq_lens": torch.tensor([3, 5, 6])}
    info, _ = describe_tensors(made, name="batch 3")
    with pytest.raises(DumpError, match="batch 3: seq_lens") as caught:
        MemoryShard(info, made).offsets()
    assert caught.value.code == "lengths-past-end"
    with pytest.raises(DumpError, match="nope"):
        MemoryShard(info, made, mask="nope")
    with pytest.raises(ValueError, match="expected 0 <= start"):
        MemoryShard(info, made).read("train", 0, 13)
    with pytest.raises(DumpError, match="entropy"):
        MemoryShard(info, made).read("entropy", 0, 1)


def test_gradients_and_strides_do_not_matter():
    made = tensors()
    wide = torch.zeros(12, 2, requires_grad=True)
    made["train_logprobs"] = wide[:, 0]
    info, _ = describe_tensors(made)
    part = MemoryShard(info, made).read("train", 2, 5)
    assert part.tolist() == [0, 0, 0] and not part.requires_grad


def test_no_tensors():
    info, _ = describe_tensors({})
    with MemoryShard(info, {}) as opened:
        assert opened.offsets().tolist() == [0] and opened.read("mask", 0, 0).dtype == torch.bool


def test_role_view_serves_other_columns():
    made = tensors()
    info, _ = describe_tensors(made)
    view = RoleView(MemoryShard(info, made), choose(info, mask="loss", train="again"))
    with view as opened:
        assert opened.read("mask", 0, 3).tolist() == [0, 1, 2] and opened.read("train", 0, 1).item() == 0
        assert torch.equal(opened.read("rollout", 0, 12), made["rollout_logprobs"])
        assert opened.offsets().tolist() == [0, 3, 8, 12] and opened.pack_offsets().tolist() == [0, 8, 12]
        assert opened.segment_column("rewards").tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([0.0] * 12, "found list"),
        (torch.zeros(12).numpy(), "found ndarray"),
        (None, "found NoneType"),
        (2.0, "found float"),
        (torch.zeros(12).to_sparse(), "found torch.sparse_coo"),
        (torch.zeros(12, device="meta"), "found meta"),
    ],
)
def test_what_is_no_dense_tensor_is_refused_by_name(value, words):
    with pytest.raises(DumpError, match="train_logprobs") as caught:
        describe_tensors(tensors() | {"train_logprobs": value})
    assert caught.value.code == "tensor-expected" and words in caught.value.problem
