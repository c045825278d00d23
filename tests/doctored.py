"""Small faulty dumps for the doctor's tests, run through the real engine; the random generator is that of the benchmark."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_is.analysis.doctor.consumer import Doctor
from rollout_is.analysis.doctor.diagnose import diagnose
from rollout_is.analysis.engine import Engine
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Finding
from rollout_is.analysis.units import cut_units
from rollout_is.dumps.memory import MemoryShard, describe_tensors
from rollout_is.dumps.place import Place

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # planted, planted_kinds, planted_faults


@dataclass
class Shard:
    """One shard: arrays of all positions, sequences by their lengths."""

    train: Any
    rollout: Any
    lengths: Sequence[int]
    mask: Any = None
    step: int | None = None
    rank: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    rollout_dtype: torch.dtype = torch.float64

    def tensors(self) -> dict[str, torch.Tensor]:
        n = len(self.train)
        mask = np.ones(n, bool) if self.mask is None else np.asarray(self.mask)
        return {
            "train_logprobs": torch.tensor(np.asarray(self.train), dtype=torch.float64),
            "rollout_logprobs": torch.tensor(np.asarray(self.rollout), dtype=torch.float64).to(self.rollout_dtype),
            "response_mask": torch.tensor(mask),
            "cu_seqlens": torch.tensor(np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)),
            **{name: torch.tensor(np.asarray(column)) for name, column in self.extra.items()},
        }


def examine(*shards: Shard) -> tuple[Finding, ...]:
    """The doctor's findings on shards in memory."""
    engine = Engine(Settings(), [Doctor()])
    parts = []
    for number, shard in enumerate(shards):
        columns = shard.tensors()
        info, _ = describe_tensors(
            columns,
            name=f"step_{shard.step}_rank_{shard.rank}",
            metadata=shard.metadata,
            place=Place(step=shard.step, rank=shard.rank),
        )
        with MemoryShard(info, columns) as opened:
            offsets = opened.offsets().numpy()
            for unit in cut_units(offsets, number):
                parts.append((unit, info, engine.run(opened, unit, offsets).consumed[0]))
    return diagnose(parts)


def ids(findings: Sequence[Finding], least: str = "notice") -> list[str]:
    """Ids of the findings listed at that severity and above."""
    order = ("info", "notice", "warning", "error")
    return [f.id for f in findings if order.index(f.severity) >= order.index(least)]


def explained(finding: Finding) -> list[str]:
    """Ids of the consequences attached to a finding."""
    return [x["id"] for x in finding.evidence["explains"]]


def logprobs(rng: np.random.Generator, n: int) -> Any:
    """Log-probs like those of text: gamma-distributed, mean -0.46, far enough below 0 for noise of 0.01."""
    return -0.06 - rng.gamma(0.5, 0.8, n)
