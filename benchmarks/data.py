"""Benchmark shards: packed, 9 bytes a position (f32, f32, bool), 2**22 positions each unless said. Seeded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

POSITIONS = 1 << 22
PACK = 1 << 15
PROMPT = 0.16  # share of a sequence that is prompt


def log_probs(rng: np.random.Generator, mask: NDArray[np.bool_]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Train and rollout: small gaps with a heavy tail at valid positions, a rollout of 0 at the others."""
    n = len(mask)
    rollout = rng.standard_exponential(n, dtype=np.float32)
    np.negative(rollout, out=rollout)
    gap = rng.standard_normal(n, dtype=np.float32)
    gap *= np.float32(0.02)
    gap[::97] *= 10  # a tail
    train = rollout - gap.clip(-0.9, 0.9) * np.maximum(rollout, -1)  # a certain token has no gap
    rollout[~mask] = 0
    return train, rollout


def write(path: Path, mask: NDArray[np.bool_], cu: NDArray[np.int32], step: int, seed: int) -> None:
    train, rollout = log_probs(np.random.default_rng(seed), mask)
    columns = {
        "train_logprobs": torch.from_numpy(train),
        "rollout_logprobs": torch.from_numpy(rollout),
        "response_mask": torch.from_numpy(mask),
        "cu_seqlens": torch.from_numpy(cu),
    }
    if not len(mask) % PACK and (np.isin(np.arange(0, len(mask) + 1, PACK), cu)).all():
        columns["cu_packs"] = torch.arange(0, len(mask) + 1, PACK, dtype=torch.int32)
    meta = {"format": "rollout-is/1", "layout": "packed", "step": str(step), "rank": "0", "world_size": "1"}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(columns, path, metadata=meta)


def usual(folder: Path, shards: int, positions: int = POSITIONS, first: int = 0) -> list[Path]:
    """Packs of sequences of some 2000 tokens, 15 % of them of several turns, the tail of each pack a pad segment."""
    paths = []
    for shard in range(first, first + shards):
        path = folder / f"step_{shard:08d}" / "rank_00000.safetensors"
        paths.append(path)
        if path.exists():
            continue
        rng = np.random.default_rng([7, shard])
        mask = np.zeros(positions, dtype=bool)
        bounds = [0]
        for pack in range(0, positions, PACK):
            at = pack
            while True:
                length = int(min(16384, max(64, rng.lognormal(7.6, 0.6))))
                if at + length > pack + PACK:
                    break
                response = at + int(length * PROMPT)
                mask[response : at + length] = True
                if rng.random() < 0.15:
                    for _ in range(4):
                        tool = int(rng.integers(response, at + length))
                        mask[tool : min(tool + 60, at + length)] = False
                at += length
                bounds.append(at)
            if bounds[-1] < pack + PACK:
                bounds.append(pack + PACK)
        write(path, mask, np.array(bounds, dtype=np.int32), shard, 100 + shard)
    return paths


def regular(path: Path, length: int, hole_every: int = 0, positions: int = POSITIONS) -> Path:
    """Sequences of one length; with ``hole_every`` a token in so many is masked at random."""
    if path.exists():
        return path
    cu = np.append(np.arange(0, positions, length), positions).astype(np.int32)
    place = np.arange(positions) - np.repeat(cu[:-1], np.diff(cu))
    mask = place >= int(length * PROMPT)
    if hole_every:
        mask &= np.random.default_rng(9).random(positions) >= 1 / hole_every
    write(path, mask, cu, 0, 11)
    return path
