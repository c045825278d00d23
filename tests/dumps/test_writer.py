"""DumpWriter: whole shards only, errors at once or at the next call, a bounded queue that says when it waited."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rollout_is.dumps import serialize
from rollout_is.dumps.errors import DumpError, UsageError
from rollout_is.dumps.reader import open_shard
from rollout_is.dumps.scan import scan
from rollout_is.dumps.writer import DumpWriter


def batch(count=8, **changes):
    made = {
        "train_logprobs": -torch.rand(count),
        "rollout_logprobs": -torch.rand(count),
        "response_mask": torch.ones(count, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 3, count], dtype=torch.int32),
    }
    made.update(changes)
    return {name: value for name, value in made.items() if value is not None}


def refused(folder, code, *words, kind=DumpError, options=None, **changes):
    with DumpWriter(folder, **(options or {})) as writer:
        with pytest.raises(kind) as caught:
            writer.write(**{"step": 1, **batch(), **changes})
        assert caught.value.code == code, caught.value
        for word in words:
            assert word in str(caught.value), caught.value
        assert writer.stats.written == 0
    assert not os.path.exists(folder) or os.listdir(folder) == []


def test_writes_what_safetensors_reads(tmp_path):
    made = batch(
        rewards=torch.tensor([1.0, 0.0]), **{"mask.loss": torch.zeros(8), "logprobs.ref": torch.zeros(8).bfloat16()}
    )
    with DumpWriter(
        tmp_path, rank=3, world_size=8, run="r1", trainer="mine", train_policy="old", metadata={"temperature": 0.7}
    ) as writer:
        path = writer.write(
            step=412,
            trainer_metrics={
                "kl": torch.tensor(0.5),
                "n": np.int64(3),
                "bad": float("nan"),
                "nested": {"x": torch.ones(2)},
            },
            **made,
        )
    assert path == tmp_path / "step_00000412" / "rank_00003.safetensors"
    stored = load_file(path)
    assert stored.keys() == made.keys() and all(torch.equal(stored[name], made[name]) for name in made)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    metrics = json.loads(metadata.pop("trainer_metrics"))
    assert (
        metrics["kl"] == 0.5
        and metrics["n"] == 3
        and metrics["nested"] == {"x": [1.0, 1.0]}
        and metrics["bad"] != metrics["bad"]
    )
    assert metadata == {
        "format": "rollout-is/1",
        "layout": "packed",
        "step": "412",
        "rank": "3",
        "world_size": "8",
        "run": "r1",
        "trainer": "mine",
        "train_policy": "old",
        "temperature": "0.7",
    }
    assert writer.stats.written == 1 and writer.stats.bytes == path.stat().st_size


def test_a_trainer_may_import_it_from_the_room():
    program = "import sys; from rollout_is.dumps import DumpWriter; DumpWriter('x'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_scan_finds_what_was_written(tmp_path):
    for rank in range(2):
        with DumpWriter(tmp_path, rank=rank, world_size=2) as writer:
            for step in range(5):
                writer.write(step=step, **batch())
    found = scan(tmp_path)
    assert [(info.step, info.rank) for info in found.shards] == [(step, rank) for step in range(5) for rank in range(2)]
    assert found.notes == () and found.problems == ()


def test_steps_of_any_library(tmp_path):
    with DumpWriter(tmp_path) as writer:
        for step in (np.int64(1), torch.tensor(2), 3):
            writer.write(step=step, **batch())
    assert [info.step for info in scan(tmp_path).shards] == [1, 2, 3]


def test_every(tmp_path):
    with DumpWriter(tmp_path, every=3) as writer:
        paths = [writer.write(step=step, **batch()) for step in range(7)]
    assert [path is not None for path in paths] == [True, False, False, True, False, False, True]
    assert (writer.stats.written, writer.stats.skipped) == (3, 4)


def test_one_row_and_strided_and_attached_tensors(tmp_path):
    wide = torch.rand(8, 2, requires_grad=True)
    made = batch(train_logprobs=-wide[:, 0], rollout_logprobs=-torch.rand(1, 8), cu_seqlens=torch.tensor([[0, 3, 8]]))
    with DumpWriter(tmp_path) as writer:
        path = writer.write(step=1, **made)
    stored = load_file(path)
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == {
        "train_logprobs": [8],
        "rollout_logprobs": [8],
        "response_mask": [8],
        "cu_seqlens": [3],
    }
    assert torch.equal(stored["train_logprobs"], made["train_logprobs"].detach())


def test_rectangular(tmp_path):
    rows = torch.zeros(2, 4)
    made = {
        "train_logprobs": rows,
        "rollout_logprobs": rows,
        "response_mask": torch.ones(2, 4),
        "rewards": torch.zeros(2),
    }
    with DumpWriter(tmp_path) as writer:
        path = writer.write(step=1, **made)
        one = writer.write(
            step=2, train_logprobs=rows, rollout_logprobs=rows, labels=torch.zeros(2, 4, dtype=torch.int64)
        )
    assert load_file(path)["train_logprobs"].shape == (2, 4)
    infos = scan(tmp_path).shards
    assert [(info.layout, info.positions, info.segments) for info in infos] == [("rectangular", 8, 2)] * 2
    with open_shard(infos[1]) as opened:
        assert opened.read("mask", 0, 8).all() and one is not None
    with DumpWriter(tmp_path / "row", layout="rectangular") as writer:
        writer.write(step=1, train_logprobs=rows[:1], rollout_logprobs=rows[:1], response_mask=torch.ones(1, 4))
    assert scan(tmp_path / "row").shards[0].segments == 1


def test_the_trainer_may_reuse_its_tensors_at_once(tmp_path):
    made = batch()
    kept = {name: value.clone() for name, value in made.items()}
    with DumpWriter(tmp_path) as writer:
        path = writer.write(step=1, **made)
        for value in made.values():
            value.zero_()
    assert all(torch.equal(stored, kept[name]) for name, stored in load_file(path).items())


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"cu_seqlens": torch.tensor([5, 13, 17])}, "offsets-start", "cu_seqlens[0]"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, "offsets-decrease", "cu_seqlens[2]"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "offsets-past-end", "1 past the end"),
        ({"cu_seqlens": torch.tensor([3, 5])}, "offsets-are-lengths", "lengths"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "dtype-unsupported", "F32"),
        ({"cu_seqlens": None}, "column-missing", "cu_seqlens missing"),
        ({"response_mask": None}, "column-missing", "mask missing"),
        ({"cu_packs": torch.tensor([0, 4, 8])}, "packs-inside-sequence", "cu_packs[1]"),
        ({"rollout_logprobs": torch.zeros(6)}, "length-differs", "equals the number of sequences (2)"),
        ({"train_logprobs": torch.zeros(8, dtype=torch.int64)}, "dtype-unsupported", "I64"),
        ({"train_logprobs": torch.zeros(1, 1, 8)}, "shape-rank", "[1, 1, 8]"),
        ({"advantages": torch.zeros(10)}, "column-refused", "equals the number of sequences (2)"),
        ({"rewards": torch.zeros(3)}, "column-refused", "[2]"),
        ({"response_mask": torch.tensor([1.0, float("nan"), 0, 0, 0, 0, 0, 0])}, "mask-value", "[1]"),
        ({"response_mask": ~torch.tensor([0, 1, 0, 0, 0, 0, 0, 0])}, "mask-value", "[0]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "valid-outside", "[4]"),
    ],
)
def test_bad_input_is_refused_at_once_with_the_readers_errors(tmp_path, changes, code, words):
    refused(tmp_path / "dump", code, words, "step 1, rank 0", **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantage": torch.zeros(8)}, "advantage"),
        ({"rewards": [1.0, 2.0]}, "list"),
        ({"step": -1}, "-1"),
        ({"step": True}, "True"),
        ({"step": 1.0}, "1.0"),
    ],
)
def test_wrong_use(tmp_path, changes, words):
    with DumpWriter(tmp_path) as writer, pytest.raises(UsageError, match=words):
        writer.write(**{"step": 1, **batch(), **changes})


@pytest.mark.parametrize(
    "options", [{"rank": 2, "world_size": 2}, {"rank": -1}, {"queue_size": 0}, {"every": 0}, {"layout": "ragged"}]
)
def test_wrong_settings(tmp_path, options):
    with pytest.raises(UsageError):
        DumpWriter(tmp_path, **options)


def test_a_refused_step_may_be_given_again(tmp_path):
    with DumpWriter(tmp_path, queue_size=1) as writer:
        for _ in range(3):
            with pytest.raises(DumpError):
                writer.write(step=1, **batch(cu_seqlens=torch.tensor([1, 8])))
        writer.write(step=1, **batch())
        with pytest.raises(UsageError, match="second time"):
            writer.write(step=1, **batch())
    with pytest.raises(UsageError, match="closed"):
        writer.write(step=2, **batch())
    writer.close()


def test_a_slow_disk_makes_the_trainer_wait_and_is_counted(tmp_path, monkeypatch):
    gate = threading.Event()
    save = serialize.save_shard

    def slow(path, tensors, metadata):
        gate.wait(10)
        return save(path, tensors, metadata)

    monkeypatch.setattr(serialize, "save_shard", slow)
    with DumpWriter(tmp_path, queue_size=2) as writer:
        writer.write(step=1, **batch())
        writer.write(step=2, **batch())
        assert writer.stats.stalls == 0 and writer.stats.written == 0
        threading.Timer(0.2, gate.set).start()
        began = time.monotonic()
        writer.write(step=3, **batch())
        assert time.monotonic() - began > 0.1
        assert writer.stats.stalls == 1 and writer.stats.stalled_seconds > 0.1
    assert writer.stats.written == 3


def full_disk(path, tensors, metadata):
    raise OSError(28, "No space left on device")


def test_a_disk_error_is_raised_at_the_next_write(tmp_path, monkeypatch):
    writer = DumpWriter(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(serialize, "save_shard", full_disk)
        writer.write(step=1, **batch())
        with pytest.raises(DumpError, match="No space left") as caught:
            writer.flush()
    assert caught.value.code == "dump-write-failed" and isinstance(caught.value.__cause__, OSError)
    assert "step_00000001" in caught.value.where and writer.stats.failed == 1
    writer.write(step=1, **batch())  # told once, then it goes on
    writer.close()
    assert writer.stats.written == 1

    with monkeypatch.context() as patch:
        patch.setattr(serialize, "save_shard", full_disk)
        writer = DumpWriter(tmp_path / "b")
        writer.write(step=1, **batch())
        while writer.stats.failed == 0:
            time.sleep(0.001)
        with pytest.raises(DumpError, match="No space left"):
            writer.write(step=2, **batch())
    writer.close()


def test_a_disk_error_is_raised_at_close(tmp_path, monkeypatch):
    monkeypatch.setattr(serialize, "save_shard", full_disk)
    with pytest.raises(DumpError, match="No space left"), DumpWriter(tmp_path) as writer:
        writer.write(step=1, **batch())


def test_an_error_of_the_trainer_is_not_hidden_by_a_disk_error(tmp_path, monkeypatch):
    monkeypatch.setattr(serialize, "save_shard", full_disk)
    with pytest.raises(KeyError) as caught, DumpWriter(tmp_path) as writer:
        writer.write(step=1, **batch())
        raise KeyError("mine")
    assert "No space left" in caught.value.__notes__[0]


def test_a_lost_shard_that_nobody_asked_about_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr(serialize, "save_shard", full_disk)
    writer = DumpWriter(tmp_path)
    writer.write(step=1, **batch())
    while writer.stats.failed == 0 or writer._thread is not None:
        time.sleep(0.001)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer.__del__()
    writer._error = None
    assert "No space left" in str(caught[0].message)


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    write = os.write
    calls = []

    def fails(fd, data):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return write(fd, data[: max(1, len(data) // 2)])

    with monkeypatch.context() as patch:
        patch.setattr(serialize.os, "write", fails)
        with pytest.raises(OSError, match="No space"):
            serialize.save_shard(tmp_path / "a.safetensors", batch(), {})
    assert os.listdir(tmp_path) == []


def test_partial_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    made = batch()
    with monkeypatch.context() as patch:
        patch.setattr(serialize.os, "write", lambda fd, data: write(fd, data[:5]))
        serialize.save_shard(tmp_path / "a.safetensors", made, {"k": "v"})
    assert all(torch.equal(stored, made[name]) for name, stored in load_file(tmp_path / "a.safetensors").items())


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(DumpError, match="expected to write the shard") as caught,
        DumpWriter(tmp_path / "file") as writer,
    ):
        writer.write(step=1, **batch())
    assert caught.value.code == "dump-write-failed"


PROGRAM = """
import sys, torch
from rollout_is.dumps.writer import DumpWriter
writer = DumpWriter(sys.argv[1], queue_size=2)
count = 200_000
made = dict(train_logprobs=torch.full((count,), -1.0), rollout_logprobs=torch.full((count,), -1.5),
            response_mask=torch.ones(count, dtype=torch.bool), cu_seqlens=torch.tensor([0, count]))
print("ready", flush=True)
for step in range(int(sys.argv[2])):
    writer.write(step=step, **made)
"""


def test_the_interpreter_waits_for_the_last_shard_without_close(tmp_path):
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "3"], check=True, timeout=60, stdout=subprocess.DEVNULL
    )
    assert len(scan(tmp_path).shards) == 3


FORKING = """
import os, sys, torch
from rollout_is.dumps import serialize, shape
from rollout_is.dumps.writer import DumpWriter
torch.set_num_threads(1)  # a fork does not inherit the threads of the pool
count = 200_000
made = dict(train_logprobs=torch.full((count,), -1.0), rollout_logprobs=torch.full((count,), -1.5),
            response_mask=torch.ones(count, dtype=torch.bool), cu_seqlens=torch.tensor([0, count]))
for folder in sys.stdin:
    process = os.fork()
    if process == 0:
        writer = DumpWriter(folder.strip(), queue_size=2)
        for step in range(100_000):
            writer.write(step=step, **made)
    print(process, flush=True)
    os.waitpid(process, 0)
    print("dead", flush=True)
"""


def test_killed_at_random_points_leaves_whole_shards_only(tmp_path):
    chance = random.Random(5)
    shards = temporaries = 0
    # Each attempt is a fork of one process that has torch already: 12 kills for the price of one start.
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        for attempt in range(12):
            folder = tmp_path / str(attempt)
            parent.stdin.write(f"{folder}\n")
            parent.stdin.flush()
            process = int(parent.stdout.readline())
            time.sleep(chance.uniform(0.005, 0.1))
            os.kill(process, signal.SIGKILL)
            assert parent.stdout.readline() == "dead\n"
            temporaries += len(list(folder.rglob(".*.tmp-*")))
            if not list(folder.rglob("*.safetensors")):
                continue
            found = scan(folder)
            assert found.problems == ()
            for info in found.shards:
                with open_shard(info) as opened:
                    assert (opened.read("train", 0, 200_000) == -1.0).all() and (
                        opened.read("rollout", 0, 200_000) == -1.5
                    ).all()
                    assert opened.read("mask", 0, 200_000).all()
                shards += 1
    assert shards > 0, "every process was killed before it wrote anything"
    assert temporaries > 0, "no process was killed in the middle of a write"
