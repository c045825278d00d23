"""Dumps made by tests: tensors in memory, their shards on disk (written by safetensors alone) and the oracle's view of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agree import differences
from oracle import Packed
from oracle import summarize as oracle_summary
from safetensors.torch import save_file
from torch import Tensor

from rollout_is.analysis.pipeline import analyze, summarize
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Statistic, Summary


@dataclass
class Shard:
    """Tensors of one shard, as a trainer would hold them."""

    train: Tensor
    rollout: Tensor
    mask: Tensor
    cu: list[int]
    columns: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "train_logprobs": self.train,
            "rollout_logprobs": self.rollout,
            "response_mask": self.mask,
            "cu_seqlens": torch.tensor(self.cu, dtype=torch.int32),
            **self.columns,
        }

    def packed(self) -> Packed:
        pad, groups = self.columns.get("segment_is_pad"), self.columns.get("group_ids")
        return Packed(
            self.train.double().numpy(),
            self.rollout.double().numpy(),
            (self.mask != 0).numpy(),
            self.cu,
            None if pad is None else pad.tolist(),
            None if groups is None else groups.tolist(),
        )

    def write(self, path: Path, **metadata: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        meta = {"format": "rollout-is/1", **{k: str(v) for k, v in metadata.items()}}
        save_file({k: v.contiguous() for k, v in self.tensors().items()}, path, meta)
        return path

    def summarize(self, **settings: Any) -> Summary:
        cu = torch.tensor(self.cu, dtype=torch.int32)
        return summarize(self.train, self.rollout, self.mask, cu, settings=Settings(**settings), **self.columns)


def shard(
    train: Any,
    rollout: Any,
    mask: Any,
    cu: Sequence[int],
    *,
    dtype: torch.dtype = torch.float64,
    **columns: Any,
) -> Shard:
    """A shard from plain lists or arrays."""
    return Shard(
        torch.from_numpy(np.array(train, np.float64)).to(dtype),
        torch.from_numpy(np.array(rollout, np.float64)).to(dtype),
        torch.as_tensor(mask).bool(),
        list(cu),
        {name: torch.as_tensor(value) for name, value in columns.items()},
    )


def sequences(*ds: Sequence[float], r: float | None = None, dtype: torch.dtype = torch.float64) -> Shard:
    """One sequence for each list of log-ratios, all valid; rollout log-probs vary unless ``r`` is given."""
    d = np.array([x for one in ds for x in one], np.float64)
    rollout = -1.0 - 0.25 * (np.arange(len(d)) % 7) if r is None else np.full(len(d), r)
    cu = np.cumsum([0, *[len(one) for one in ds]]).tolist()
    return shard(rollout + d, rollout, np.ones(len(d), bool), cu, dtype=dtype)


def randomly(
    rng: np.random.Generator,
    *,
    segments: int = 12,
    length: int = 40,
    noise: float = 0.3,
    offset: float = 0.0,
    dtype: torch.dtype = torch.float32,
    rollout_dtype: torch.dtype | None = None,
    holes: bool = True,
    pads: bool = True,
    tail: int = 0,
) -> Shard:
    """Prompts masked, spans masked inside, zero-length segments, fully masked segments with content and pad-like, a tail."""
    lengths = rng.integers(1, 2 * length, segments)
    if pads and segments > 3:
        lengths[rng.integers(0, segments)] = 0
    cu = np.concatenate([[0], np.cumsum(lengths)])
    n = int(cu[-1]) + tail
    r = -rng.exponential(2.0, n) - 1e-3
    t = r + offset + noise * rng.standard_normal(n)
    mask = np.ones(n, bool)
    kinds = rng.integers(0, 4, segments)
    for i, kind in enumerate(kinds):
        a, b = int(cu[i]), int(cu[i + 1])
        if kind == 0 and pads:
            mask[a:b] = False  # with content
        elif kind == 1 and pads and i % 2:
            mask[a:b], r[a:b], t[a:b] = False, 0.0, -7.3  # pad-like
        elif holes and b - a > 2:
            mask[a : a + int(rng.integers(0, (b - a) // 2 + 1))] = False
            c = int(rng.integers(a, b))
            mask[c : c + 3] = False
    mask[int(cu[-1]) :] = False
    mask[0 : int(cu[1])] = True  # never empty as a whole
    return Shard(
        torch.from_numpy(t).to(dtype),
        torch.from_numpy(r).to(rollout_dtype or dtype),
        torch.from_numpy(mask),
        cu.tolist(),
    )


def write_dump(folder: Path, shards: Iterable[Shard], *, ranks: int = 1, first_step: int = 1, **metadata: Any) -> Path:
    """Shards in the recommended layout: ``ranks`` shards to a step, in the given order."""
    for i, one in enumerate(shards):
        step, rank = first_step + i // ranks, i % ranks
        path = folder / f"step_{step:08d}" / f"rank_{rank:05d}.safetensors"
        one.write(path, **{"step": step, "rank": rank, "world_size": ranks, **metadata})
    return folder


def assert_agrees(summary: Summary, shards: Iterable[Shard], *, rel: float = 1e-9, **bounds: Any) -> None:
    """Every statistic of the three views equals the oracle's."""
    found = differences(summary.get, oracle_summary([s.packed() for s in shards], **bounds), rel=rel)
    assert not found, f"{len(found)} disagreements with the oracle:\n" + "\n".join(found[:40])


def stat(summary: Summary, name: str) -> Statistic:
    """The statistic with this id, which must be there."""
    found = summary.get(name)
    assert found is not None, f"{name} is not in the summary"
    return found


def value(summary: Summary, name: str) -> float:
    """Its value, which must not be null."""
    found = stat(summary, name)
    assert found.value is not None, f"{name} is null: {found.why}"
    return found.value


def group_value(summary: Summary, by: str, key: str, name: str) -> float | None:
    """The value of ``view.section.name`` in one group."""
    view, section, metric = name.split(".")
    return summary.groups[by][key].views[view][section][metric].value


def messages(summary: Summary, code: str) -> str:
    """All messages of the notes with this code, joined; fails when there is none."""
    found = [note.message for note in summary.notes if note.code == code]
    assert found, f"no note {code!r}; notes are {sorted({n.code for n in summary.notes})}"
    return " | ".join(found)


def codes(summary: Summary) -> set[str]:
    return {note.code for note in summary.notes}


def stable(summary: Summary) -> str:
    """The JSON of a summary without what may differ between runs."""
    data = summary.to_dict()
    data.pop("runtime")
    return json.dumps(data, indent=1, allow_nan=False)


def view(summary: Summary, name: str) -> str:
    """The JSON of one view."""
    return json.dumps(summary.to_dict()["views"][name], indent=1, allow_nan=False)


__all__ = ["Settings", "analyze", "summarize"]
