"""What a dump costs a training step, and what a token costs on disk beside the trainers' own dumps.

``.venv-trainers/bin/python benchmarks/trainer_cost.py`` after ``make test-trainers`` has made that environment. The step is
TRL's GRPO on the tiny model of tests/trainers, run with and without the writer in turn.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import trl

from rollout_is import DumpWriter
from rollout_is.dumps.adapters import padded

ROOT = Path(__file__).parents[1]
STEPS, RUNS = 6, 3


def tiny():
    """The maker of the trainer, from the tests."""
    spec = importlib.util.spec_from_file_location("test_trl", ROOT / "tests" / "trainers" / "test_trl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock(transformers.TrainerCallback):
    """Seconds of each optimizer step, generation included."""

    def __init__(self):
        self.marks = []

    def on_step_begin(self, *args, **kwargs):
        self.marks.append(time.perf_counter())

    def on_train_end(self, *args, **kwargs):
        self.marks.append(time.perf_counter())

    @property
    def steps(self):
        return [b - a for a, b in zip(self.marks[1:-1], self.marks[2:], strict=True)]  # the first step warms up


def step_seconds(module, dumping, folder):
    """Seconds of each step of one run, and the seconds spent in the dump's own calls."""
    inside = []
    settings = {"dump_dir": folder / "dump"} if dumping else {}
    cls = module.documented_class() if dumping else trl.GRPOTrainer
    trainer = module.make(cls, folder, "token_truncate", **settings)
    trainer.args.max_steps = STEPS
    clock = Clock()
    trainer.add_callback(clock)
    if dumping:
        for name in ("add", "end_step"):
            setattr(trainer.dump, name, timed(getattr(trainer.dump, name), inside))
    trainer.train()
    if dumping:
        trainer.dump.close()
    return clock.steps, inside


def timed(call, into):
    """The call with its seconds noted."""

    def wrapper(*args, **kwargs):
        began = time.perf_counter()
        result = call(*args, **kwargs)
        into.append(time.perf_counter() - began)
        return result

    return wrapper


def cost_of_a_step():
    """Median step with and without, and the dump's share of a step."""
    module = tiny()
    plain, dumped, inside = [], [], []
    for _ in range(RUNS):
        for dumping in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                steps, calls = step_seconds(module, dumping, Path(folder))
                (dumped if dumping else plain).extend(steps)
                inside += calls
    calls = 2 * statistics.median(inside)
    print(f"step without the writer   {1e3 * statistics.median(plain):8.1f} ms (median of {len(plain)})")
    print(f"step with the writer      {1e3 * statistics.median(dumped):8.1f} ms (median of {len(dumped)})")
    print(
        f"inside add and end_step   {1e3 * calls:8.2f} ms a step, {100 * calls / statistics.median(plain):.2f} % of it"
    )


def cost_of_a_token():
    """Bytes a token on disk for one batch of 64 responses of 512 tokens, in our format and in the trainers' own layouts."""
    rows, length = 64, 512
    generator = torch.Generator().manual_seed(1)
    train = -torch.rand(rows, length, generator=generator)
    rollout = train + 0.01 * torch.randn(rows, length, generator=generator)
    mask = torch.ones(rows, length, dtype=torch.int32)
    tokens = torch.randint(0, 150_000, (rows, length), generator=generator)
    zeros = torch.zeros(length)
    sizes = {}
    for name, kind in (("rollout-is/1, float32", torch.float32), ("rollout-is/1, bfloat16", torch.bfloat16)):
        with tempfile.TemporaryDirectory() as folder, DumpWriter(folder) as writer:
            columns = padded(train.to(kind), rollout.to(kind), mask.bool(), lengths=[length] * rows)
            path = writer.write(step=0, **columns)
            writer.flush()
            sizes[name] = path.stat().st_size
    lists = {name: column.tolist() for name, column in (("t", train), ("r", rollout), ("m", mask), ("i", tokens))}
    sizes["NeMo-RL train_data"] = sum(
        len(
            json.dumps(
                {
                    "token_ids": [lists["i"][i]],
                    "token_loss_mask": [lists["m"][i]],
                    "advantages": [[0.5] * length],
                    "generation_logprobs": [lists["r"][i]],
                    "prev_logprobs": [lists["t"][i]],
                }
            )
        )
        for i in range(rows)
    )
    buffer = io.BytesIO()
    samples = [
        {
            "log_probs": train[i].clone(),
            "rollout_log_probs": rollout[i].clone(),
            "loss_masks": mask[i].clone(),
            "tokens": tokens[i].clone(),
        }
        | {key: zeros.clone() for key in ("advantages", "returns", "kl")}
        for i in range(rows)
    ]
    torch.save({"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": []}, buffer)
    sizes["slime train_data v2"] = len(buffer.getvalue())
    for name, size in sizes.items():
        print(f"{name:<24}  {size / (rows * length):8.1f} bytes a token")


if __name__ == "__main__":
    cost_of_a_step()
    cost_of_a_token()
    sys.stdout.flush()
