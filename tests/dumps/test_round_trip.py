"""Random dumps, written by DumpWriter and by the safetensors library, come back the same whatever the dtypes."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rollout_is.dumps.reader import open_shard
from rollout_is.dumps.scan import scan
from rollout_is.dumps.writer import DumpWriter

FLOATS = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
MASKS = st.sampled_from(
    [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.uint16, torch.uint64, torch.bfloat16]
)
BOUNDS = st.sampled_from([torch.int32, torch.int64])
OPTIONAL = (
    "token_ids",
    "advantages",
    "policy_version",
    "entropy",
    "rewards",
    "group_ids",
    "sequence_ids",
    "prompt_lens",
    "segment_is_pad",
)


def make(draw):
    """Tensors of a random shard: sequences of 0 to 9 tokens, and a pad tail beyond the last bound."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = generator.integers(0, 10, draw(st.integers(0, 8)))
    pad = draw(st.integers(0, 5))
    end, count, segments = int(lengths.sum()), int(lengths.sum()) + pad, len(lengths)
    mask = torch.from_numpy(generator.integers(0, 2, count))
    mask[end:] = 0
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    cuts = sorted({0, segments, *generator.integers(0, segments + 1, 2).tolist()})
    values = {
        "train_logprobs": torch.from_numpy(generator.normal(-2, 1, count)).to(draw(FLOATS)),
        "rollout_logprobs": torch.from_numpy(generator.normal(-2, 1, count)).to(draw(FLOATS)),
        "response_mask": mask.to(draw(MASKS)),
        "cu_seqlens": bounds.to(draw(BOUNDS)),
        "cu_packs": bounds[cuts].to(draw(BOUNDS)),
        "mask.early": mask.clone(),
        "logprobs.again": torch.from_numpy(generator.normal(-2, 1, count)).to(draw(FLOATS)),
        "token_ids": torch.from_numpy(generator.integers(0, 50_000, count)),
        "advantages": torch.from_numpy(generator.normal(0, 1, count)).float(),
        "policy_version": torch.from_numpy(generator.integers(0, 5, count)),
        "entropy": torch.from_numpy(generator.uniform(0, 2, count)).half(),
        "rewards": torch.from_numpy(generator.normal(0, 1, segments)).float(),
        "group_ids": torch.from_numpy(generator.integers(0, 3, segments)),
        "sequence_ids": torch.arange(segments),
        "prompt_lens": torch.zeros(segments, dtype=torch.int32),
        "segment_is_pad": torch.zeros(segments, dtype=torch.bool),
    }
    dropped = draw(st.sets(st.sampled_from(["cu_packs", "mask.early", "logprobs.again", *OPTIONAL])))
    return {name: value for name, value in values.items() if name not in dropped}


def check(info, values, step):
    """An open shard serves exactly the values that were dumped."""
    count = values["train_logprobs"].numel()
    assert (info.step, info.positions, info.segments) == (step, count, values["cu_seqlens"].numel() - 1)
    with open_shard(info) as opened:
        assert torch.equal(opened.offsets(), values["cu_seqlens"].long())
        packs = opened.pack_offsets()
        assert packs is None if "cu_packs" not in values else torch.equal(packs, values["cu_packs"].long())
        names = {"train_logprobs": "train", "rollout_logprobs": "rollout", "response_mask": "mask"}
        for name, value in values.items():
            if name.startswith("cu_"):
                continue
            role = names.get(name, name)
            assert info.columns[role] == name
            if name in ("rewards", "group_ids", "sequence_ids", "prompt_lens", "segment_is_pad"):
                found = opened.segment_column(role)
                assert found.dtype == value.dtype and torch.equal(found, value)
                continue
            middle = count // 2
            parts = [opened.read(role, start, stop).clone() for start, stop in ((0, middle), (middle, count))]
            assert parts[0].dtype == value.dtype and torch.cat(parts).tolist() == value.tolist()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_round_trip(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("dump")
    values = make(data.draw)
    with DumpWriter(folder / "ours") as writer:
        path = writer.write(step=5, **values)
    stored = load_file(path)
    assert stored.keys() == values.keys()
    assert all(
        stored[name].dtype == values[name].dtype and stored[name].tolist() == values[name].tolist() for name in values
    )
    save_file(values, folder / "step_5.safetensors")
    for where in (folder / "ours", folder / "step_5.safetensors"):
        (info,) = scan(where).shards
        check(info, values, 5)


@pytest.mark.parametrize("count", [1, 65_537, 300_000])
def test_blocks_of_any_size(tmp_path, count):
    values = {
        "train_logprobs": torch.randn(count, generator=torch.manual_seed(1)).bfloat16(),
        "rollout_logprobs": torch.randn(count, generator=torch.manual_seed(2)),
        "response_mask": torch.arange(count) % 3 > 0,
        "cu_seqlens": torch.tensor([0, count]),
    }
    with DumpWriter(tmp_path) as writer:
        writer.write(step=0, **values)
    (info,) = scan(tmp_path).shards
    with open_shard(info) as opened:
        for role, name in (("train", "train_logprobs"), ("rollout", "rollout_logprobs"), ("mask", "response_mask")):
            for block in (65_536, 1000):
                parts = [opened.read(role, at, min(at + block, count)).clone() for at in range(0, count, block)]
                assert torch.equal(torch.cat(parts), values[name])
