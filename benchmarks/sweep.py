"""What twelve policies cost beside a plain analysis: ``python benchmarks/sweep.py [--repeat N]``. Target: at most 2x.

One process, one torch thread, page-cached files; the usual dump and one with many tokens outside every bound.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import data
import numpy as np
import torch
from measure import interleaved
from safetensors.torch import load_file, save_file

import rollout_is
from rollout_is.analysis.policies.consumer import PolicyConsumer
from rollout_is.analysis.policies.presets import parse_policy
from rollout_is.analysis.policies.sweep import DEFAULT
from rollout_is.analysis.settings import Settings

TARGET = 2.0


def noisy(path: Path, out: Path, share: float) -> Path:
    """The same dump with a share of its tokens far off policy."""
    tensors = load_file(path)
    rng = np.random.default_rng(12)
    n = tensors["train_logprobs"].numel()
    off = np.where(rng.uniform(size=n) < share, rng.normal(0, 1.0, n), 0.0)
    moved = tensors["train_logprobs"].double().numpy() + off
    tensors["train_logprobs"] = torch.from_numpy(moved.astype(np.float32))
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out, {"format": "rollout-is/1", "step": "1", "rank": "0"})
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    policies = [parse_policy(name) for name in DEFAULT if name != "none"]
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        usual = data.usual(Path(folder) / "usual", 1)[0]
        for label, path in (
            ("usual", usual),
            ("a tenth off policy", noisy(usual, Path(folder) / "noisy" / "a.safetensors", 0.1)),
        ):
            text = str(path)
            timings = interleaved(
                {
                    "analyze": (lambda text=text: rollout_is.analyze(text), data.POSITIONS),
                    f"sweep, {len(policies)} policies": (
                        lambda text=text: rollout_is.analyze(
                            text, settings=Settings(only="weights"), consumers=[PolicyConsumer(policies, "sweep")]
                        ),
                        data.POSITIONS,
                    ),
                },
                repeat,
            )
            base = timings["analyze"].cpu
            print(f"{label}: ns/position")
            for name, timing in timings.items():
                print(f"  {name:24}{timing.cpu:8.2f}{timing.cpu / base:8.2f}x")
                worst = max(worst, timing.cpu / base)
    print(f"worst {worst:.2f}x, to reach <= {TARGET:g}x")
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
