"""Files without train log-probs are recognised and answered: what they lack, and the shortest way to it."""

import json
import pickle
import sqlite3
import sys
import types

import pytest
import torch

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry


def answered(path):
    with pytest.raises(DumpError) as caught:
        registry.find(path)
    error = caught.value
    assert error.code in ("rollout-only", "text-only", "train-only")
    assert error.why.startswith("it lacks ")
    assert error.fix
    return error


ROWS = {
    "open-instruct": (
        {"prompt_tokens": [1], "response_tokens": [2, 3], "logprobs": [-0.5, float("nan")], "reward": 1.0},
        "saved rollouts of open-instruct",
    ),
    "pipeline-rl training": (
        {"input_ids": [[1, 2]], "labels": [[-100, 2]], "old_logprobs": [[0.0, -1.0]], "seq_boundaries": [0, 2]},
        "training stream of PipelineRL",
    ),
    "roll board": (
        {"logprobs": [[-1.0]], "log_probs2": [[-1.0]], "new_response_mask": [[1]]},
        "two forwards of the trainer",
    ),
    "areal": ({"task_id": 1, "sample_idx": 0, "seqlen": 9, "prompt_len": 2, "head_version": 0, "reward": 1.0}, "AReaL"),
    "ms-swift": ({"step": [1, 1], "prompt": ["a", "b"], "completion": ["c", "d"]}, "ms-swift"),
    "verl text": ({"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 1}, "trainer.rollout_data_dir"),
    "miles trajectory": ({"sample_index": 0, "prompt": "p", "messages": []}, "a log of rollouts"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_json_lines(tmp_path, kind):
    row, said = ROWS[kind]
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    for given in (tmp_path, tmp_path / "x.jsonl"):
        assert said in str(answered(given))


def test_a_summary_line_before_the_rows(tmp_path):
    lines = [{"reward_mean": 0.5}, {"prompt": "a", "response": "b", "reward": 1.0}]
    (tmp_path / "train_rollout_1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert answered(tmp_path).code == "text-only"


def test_a_list_of_samples_on_a_line(tmp_path):
    (tmp_path / "0.jsonl").write_text(json.dumps([{"input_ids": [1], "labels": [1], "logprobs": [-1.0]}]) + "\n")
    assert "actor stream of PipelineRL" in str(answered(tmp_path))


def named_class(monkeypatch, module, name):
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    made = type(name, (), {"__module__": module})
    setattr(sys.modules[module], name, made)
    return made


def test_xtuner_debug_rollout(tmp_path, monkeypatch):
    state = named_class(monkeypatch, "xtuner.v1.data_proto.rl_data", "RolloutState")()
    state.logprobs = [-0.5]
    torch.save([[state]], tmp_path / "debug_rollout_1.pt")
    assert "docs/trainers/xtuner.md" in answered(tmp_path).fix


def test_roll_rollout_mock(tmp_path, monkeypatch):
    batch = named_class(monkeypatch, "roll.distributed.scheduler.protocol", "DataProto")()
    (tmp_path / "step_000001.pkl").write_bytes(pickle.dumps(batch))
    assert "a rollout batch of ROLL" in str(answered(tmp_path))


def test_verl_tq_batch(tmp_path, monkeypatch):
    named_class(monkeypatch, "tensordict._reductions", "_make_td")
    function = sys.modules["tensordict._reductions"]._make_td

    class Batch:
        def __reduce__(self):
            return function, ()

    torch.save(
        {"tensordict": Batch(), "tags": [], "keys": ["rollout_log_probs"], "global_steps": 1}, tmp_path / "tq_batch.pt"
    )
    error = answered(tmp_path)
    assert "skip.rollout_tq" in error.problem
    assert "old_log_probs" in error.why


def test_nemo_rl_replay_buffer(tmp_path):
    torch.save(
        {"trajectories": [], "trajectory_versions": [1], "target_weight_versions": [1]}, tmp_path / "replay_buffer.pt"
    )
    assert "train_data_step" in answered(tmp_path).fix


def test_prime_rl_micro_batches(tmp_path):
    # msgpack: [[[1, 2], [true, false]]] as array-like structs
    (tmp_path / "rank_0.bin").write_bytes(b"\x91\x92\x92\x01\x02\x92\xc3\xc2" + b"\0" * 16)
    assert "enable_token_export" in answered(tmp_path).fix


def test_tinker_capture_store(tmp_path):
    with sqlite3.connect(tmp_path / "capture.db") as store:
        store.execute("create table wire_rows (id integer, body blob)")
    store.close()
    assert "tinker-cookbook" in str(answered(tmp_path))


def test_trl_completions(tmp_path):
    """A parquet file is only recognised: its footer names the columns in plain text."""
    (tmp_path / "completions_00001.parquet").write_bytes(
        b"PAR1" + b"\0" * 40 + b"\x04step\x06prompt\ncompletion\tadvantage\0\0PAR1"
    )
    assert "docs/trainers/trl.md" in answered(tmp_path).fix
