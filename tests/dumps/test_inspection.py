"""What inspect says of a dump: everything that headers know, and each bad shard by name."""

import json

import pytest
import torch

from rollout_is.dumps.errors import DumpError, UsageError
from rollout_is.dumps.inspection import inspect


def test_a_good_dump(shard, dump):
    for step in (1, 2):
        for rank in (0, 1):
            shard(f"step_{step}/rank_{rank}", metadata={"world_size": "2", "run": "r"}, rewards=torch.zeros(3))
    found = inspect(dump)
    assert json.loads(json.dumps(found)) == found
    assert found["ok"] is True and found["problems"] == [] and found["notes"] == [] and found["root"] == str(dump)
    coverage = found["coverage"]
    assert (coverage["shards"], coverage["positions"], coverage["segments"]) == (4, 32, 12)
    assert (coverage["steps"], coverage["ranks"], coverage["world_sizes"]) == ([1, 2], [0, 1], [2])
    assert coverage["size"] == sum(path.stat().st_size for path in dump.rglob("*.safetensors"))
    assert found["columns"]["train"] == {"tensors": {"train_logprobs": 4}, "dtypes": {"F32": 4}, "shards": 4}
    first = found["shards"][0]
    assert (first["name"], first["step"], first["rank"], first["positions"]) == ("step_1/rank_0.safetensors", 1, 0, 8)
    assert first["dtypes"]["mask"] == "BOOL" and first["metadata"]["run"] == "r"


def test_bad_shards_are_listed_not_raised(shard, raw, dump):
    shard("step_1/rank_0")
    shard("step_2/rank_0", rollout_logprobs=None)
    raw(b"{", name="step_3/rank_0")
    (dump / "gone.safetensors").symlink_to(dump / "nowhere")
    found = inspect(dump)
    assert found["ok"] is False and found["coverage"]["shards"] == 1 and found["coverage"]["bad_shards"] == 3
    assert {problem["code"] for problem in found["problems"]} == {"column-missing", "header-not-json", "file-missing"}
    assert all(problem["where"] and problem["problem"] for problem in found["problems"])


def test_nothing_but_bad_shards(raw, dump):
    for index in range(12):
        raw(b"{", name=f"step_{index}/rank_0")
    found = inspect(dump)
    assert found["ok"] is False and found["shards"] == [] and len(found["problems"]) == 12


def test_c122_c103_doubled_and_missing_shards_are_told(shard, dump):
    shard("a/step_1/rank_0", metadata={"world_size": "2"})
    shard("b/step_1/rank_0", metadata={"world_size": "2"})
    found = inspect(dump)
    assert found["ok"] is False and len(found["shards"]) == 2
    assert {note["code"] for note in found["notes"]} == {"duplicates-kept", "ranks-missing"}
    assert len(inspect(dump, duplicates="newest")["shards"]) == 1


def test_columns_of_several_names(shard, dump):
    shard("step_1/rank_0")
    shard("step_2/rank_0", train_logprobs=None, old_log_probs=torch.zeros(8).bfloat16())
    train = inspect(dump)["columns"]["train"]
    assert train == {"tensors": {"train_logprobs": 1, "old_log_probs": 1}, "dtypes": {"F32": 1, "BF16": 1}, "shards": 2}


def test_c88_a_choice_of_columns(shard, dump):
    shard("step_1/rank_0", old_log_probs=torch.zeros(8))
    assert inspect(dump)["problems"][0]["code"] == "column-ambiguous"
    assert inspect(dump, columns={"train": "old_log_probs"})["columns"]["train"]["tensors"] == {"old_log_probs": 1}


def test_what_is_still_an_error(tmp_path, shard, dump):
    for path in (tmp_path / "nope", tmp_path):
        with pytest.raises(DumpError):
            inspect(path)
    shard("step_1/rank_0")
    with pytest.raises(DumpError, match="steps 1 to 1"):
        inspect(dump, steps="7")
    with pytest.raises(UsageError):
        inspect(dump, columns={"nope": "x"})
    assert inspect(dump, steps="1")["coverage"]["steps"] == [1]
