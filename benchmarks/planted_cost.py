"""What the doctor adds to a plain analysis, which takes a glance of it: CPU time a position of both.

python benchmarks/planted_cost.py --write docs/doctor.md
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from rollout_is.analysis.doctor.consumer import Doctor
from rollout_is.analysis.engine import Engine
from rollout_is.analysis.glance import with_glance
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.units import cut_units
from rollout_is.dumps.memory import MemoryShard, describe_tensors

START, STOP = "<!-- cost: start -->", "<!-- cost: end -->"


def columns(positions: int, length: int, *, heavy: bool = False, zeros: float = 0.0) -> dict[str, torch.Tensor]:
    """Random columns: gamma-like log-probs, a fifth of each sequence masked."""
    rng = np.random.default_rng(0)
    r = -0.06 - rng.gamma(0.5, 0.8, positions)
    r = np.where(rng.random(positions) < zeros, 0.0, r)
    noise = rng.standard_t(2, positions) if heavy else rng.standard_normal(positions)
    t = np.where(r == 0, -1e-8, r + 0.01 * noise)
    edges = np.unique(np.append(np.arange(0, positions, length), positions))
    return {
        "train_logprobs": torch.from_numpy(t.astype(np.float32)),
        "rollout_logprobs": torch.from_numpy(r.astype(np.float32)),
        "response_mask": torch.from_numpy(np.arange(positions) % length >= length // 5),
        "cu_seqlens": torch.from_numpy(edges.astype(np.int64)),
    }


def measure(data: dict[str, torch.Tensor], repeats: int = 5) -> tuple[float, float]:
    """(plain, with the doctor) CPU nanoseconds a position, best of the repeats."""
    info, _ = describe_tensors(data, name="cost")
    best = {"plain": float("inf"), "doctor": float("inf")}
    with MemoryShard(info, data) as shard:
        offsets = shard.offsets().numpy()
        for _ in range(repeats):
            for name in ("plain", "doctor"):
                consumers = [Doctor()] if name == "doctor" else with_glance((), info.positions)
                engine = Engine(Settings(), consumers)
                started = time.process_time()
                for unit in cut_units(offsets):
                    engine.run(shard, unit, offsets)
                best[name] = min(best[name], time.process_time() - started)
    return best["plain"] / info.positions * 1e9, best["doctor"] / info.positions * 1e9


def main() -> None:
    """Print the table; write it between the marks of a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| dump | plain | with the doctor | ratio |", "|:---|---:|---:|---:|"]
    for name, data in (
        ("sequences of 1,000", columns(4 << 20, 1000)),
        ("sequences of 1,000, heavy tails", columns(4 << 20, 1000, heavy=True)),
        ("sequences of 1,000, 40 % exact zeros", columns(4 << 20, 1000, zeros=0.4)),
        ("sequences of 20", columns(4 << 20, 20)),
        ("one shard of 65,536 positions", columns(1 << 16, 500)),
    ):
        plain, doctor = measure(data)
        lines.append(f"| {name} | {plain:.1f} ns | {doctor:.1f} ns | {doctor / plain:.2f} |")
    table = "\n".join(lines) + "\n"
    print(table)
    if arguments.write:
        head, _, rest = arguments.write.read_text().partition(START)
        arguments.write.write_text(f"{head}{START}\n{table}{STOP}{rest.partition(STOP)[2]}")


if __name__ == "__main__":
    main()
