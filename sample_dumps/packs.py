"""The samples made from a formula: packed_padding, multi_turn, all_masked. Noise is seeded and the same on every machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from shardfile import f32, offsets, shard_path, write

PACK = 1024  # positions of a pack
META = {
    "format": "rollout-is/1",
    "layout": "packed",
    "train_policy": "old",
    "train_temperature": "1.0",
    "rollout_temperature": "1.0",
    "train_dtype": "bfloat16",
    "rollout_dtype": "bfloat16",
    "trainer": "sample",
}

# (rng, n tokens of a response) -> (train, rollout, mask), each [n]
Response = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray, np.ndarray]]


def noisy_response(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs of a healthy run: mostly confident tokens, a gap of a few hundredths that vanishes as a token gets certain."""
    rollout = -rng.standard_exponential(n) * rng.choice([0.02, 0.3, 2.0], n, p=[0.5, 0.3, 0.2])
    noise = rng.standard_normal(n).clip(-4, 4) * np.minimum(0.12 * -rollout, 0.08)
    return rollout + noise, rollout, np.ones(n, dtype=bool)


def tool_response(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A response of several turns: model, tool, model, tool, model. The engine has no log-prob for what a tool said: 0."""
    train, rollout, mask = noisy_response(rng, n)
    cuts = np.sort(rng.choice(np.arange(4, n - 4), 4, replace=False))
    for start, stop in (cuts[:2], cuts[2:]):
        mask[start:stop] = False
        rollout[start:stop] = 0.0
        train[start:stop] = -4.0 * rng.standard_exponential(stop - start)  # the model would not have said it
    return train, rollout, mask


def pack_shard(rng: np.random.Generator, packs: int, response: Response) -> dict[str, torch.Tensor]:
    """One shard: packs filled with prompt + response sequences, the rest of each pack a segment of padding."""
    train, rollout, mask, lengths, first_of_pack = [], [], [], [], [0]
    for _ in range(packs):
        room = PACK
        while True:
            prompt, n = int(rng.integers(8, 40)), int(rng.integers(40, 220))
            if prompt + n > room - 16:
                break
            t, r, m = response(rng, n)
            train += [-2.0 * rng.standard_exponential(prompt), t]
            rollout += [np.zeros(prompt), r]  # prompts were not sampled
            mask += [np.zeros(prompt, dtype=bool), m]
            lengths.append(prompt + n)
            room -= prompt + n
        # The fault: the tail of the pack stands in cu_seqlens like a sequence. Its rollout is the fill value 0.
        train.append(np.full(room, -11.5) - 0.25 * rng.standard_exponential(room))
        rollout.append(np.zeros(room))
        mask.append(np.zeros(room, dtype=bool))
        lengths.append(room)
        first_of_pack.append(first_of_pack[-1] + PACK)
    return {
        "train_logprobs": f32(np.concatenate(train)),
        "rollout_logprobs": f32(np.concatenate(rollout)),
        "response_mask": torch.from_numpy(np.concatenate(mask)),
        "cu_seqlens": offsets(lengths),
        "cu_packs": torch.tensor(first_of_pack, dtype=torch.int32),
    }


def sequence_means(tensors: dict[str, torch.Tensor]) -> list[float]:
    """Mean ratio over valid tokens of each segment as the faulty trainer took it: a segment without any gives 0."""
    ratio = (tensors["train_logprobs"].double() - tensors["rollout_logprobs"].double()).exp()
    cu = tensors["cu_seqlens"].tolist()
    means = []
    for start, stop in pairwise(cu):
        kept = ratio[start:stop][tensors["response_mask"][start:stop]]
        means.append(float(kept.mean()) if kept.numel() else 0.0)
    return means


def make(folder: Path, seed: int, steps: range, ranks: int, packs: int, response: Response, run: str) -> None:
    """Write steps x ranks shards. What the trainer logged (pads counted) rides along in the metadata of each step."""
    rng = np.random.default_rng(seed)
    for step in steps:
        shards = [pack_shard(rng, packs, response) for _ in range(ranks)]
        means = [x for tensors in shards for x in sequence_means(tensors)]
        logged = {
            "rollout_is_seq_mean": round(sum(means) / len(means), 6),
            "rollout_is_seq_min": round(min(means), 6),
            "rollout_is_seq_max": round(max(means), 6),
            "rollout_is_seq_max_deviation": round(max(abs(x - 1) for x in means), 6),
        }
        for rank, tensors in enumerate(shards):
            meta = META | {"step": str(step), "rank": str(rank), "world_size": str(ranks), "run": run}
            write(shard_path(folder, step, rank), tensors, meta | {"trainer_metrics": json.dumps(logged)})


def packed_padding(root: Path) -> None:
    make(root / "packed_padding", 20261, range(410, 414), 2, 3, noisy_response, "packed-padding")


def multi_turn(root: Path) -> None:
    make(root / "multi_turn", 20262, range(60, 62), 2, 3, tool_response, "multi-turn")


def all_masked(root: Path) -> None:
    """A shard in which a filter left nothing: every response was dropped from the loss."""
    rng = np.random.default_rng(20263)
    for rank in range(2):
        tensors = pack_shard(rng, 1, noisy_response)
        tensors["response_mask"] = torch.zeros_like(tensors["response_mask"])
        meta = META | {"step": "7", "rank": str(rank), "world_size": "2", "run": "all-masked"}
        write(shard_path(root / "all_masked", 7, rank), tensors, meta)
