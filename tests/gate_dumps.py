"""Dumps for the tests of compare and check, written shard by shard with plain noise of known size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

SEQUENCES, LENGTH, PROMPT, PAD = 24, 40, 8, 64


def write_dump(
    folder: Path,
    noise: Mapping[int, float],
    *,
    seed: int = 1,
    noise_seed: int | None = None,
    ids: bool = False,
    tokens: bool = True,
    mask_all: bool = False,
    bad_rank: float | None = None,
    metadata: Mapping[str, str] | None = None,
    passes: Mapping[str, float] | None = None,
    masks: bool = False,
) -> Path:
    """One shard a step and rank (two ranks): ``noise`` gives the standard deviation of the log-ratio at each step.

    Args:
        folder: made here.
        noise: step -> standard deviation.
        seed: of tokens, log-probs and lengths: equal seeds give the same sequences.
        noise_seed: of the noise; ``seed`` when not given.
        ids, tokens: dump ``sequence_ids``, ``token_ids``.
        mask_all: the fault of a lost mask: every position is valid.
        bad_rank: noise of rank 1, in place of the step's.
        metadata: of every shard.
        passes: ``logprobs.NAME`` -> its noise about train.
        masks: also ``mask.pre_rejection`` (all valid tokens) while ``response_mask`` drops every third sequence.
    """
    folder.mkdir(parents=True)
    for step, sd in noise.items():
        for rank in (0, 1):
            rng = np.random.default_rng([seed, step, rank])
            errors = np.random.default_rng([seed if noise_seed is None else noise_seed, step, rank, 7])
            lengths = rng.integers(PROMPT + 4, LENGTH, SEQUENCES)
            total = int(lengths.sum()) + PAD
            place = np.concatenate([np.arange(n) for n in lengths] + [np.full(PAD, -1)])
            valid = place >= PROMPT
            train = -rng.exponential(1.0, total)
            rollout = np.where(valid, train + errors.normal(0.0, bad_rank if bad_rank and rank else sd, total), 0.0)
            mask = np.ones(total, bool) if mask_all else valid
            columns = {
                "train_logprobs": train,
                "rollout_logprobs": rollout,
            }
            for name, size in (passes or {}).items():
                columns[f"logprobs.{name}"] = train + errors.normal(0.0, size, total)
            tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}
            if masks:
                tensors["mask.pre_rejection"] = torch.tensor(mask)
                sequence = np.repeat(np.arange(SEQUENCES + 1), [*lengths, PAD])
                mask = mask & (sequence % 3 != 0)
            tensors["response_mask"] = torch.tensor(mask)
            tensors["cu_seqlens"] = torch.tensor([0, *np.cumsum([*lengths, PAD])], dtype=torch.int32)
            if tokens:
                tensors["token_ids"] = torch.tensor(rng.integers(0, 50000, total), dtype=torch.int32)
            if ids:
                tensors["sequence_ids"] = torch.arange(SEQUENCES + 1) + rank * 100
            told = {"format": "rollout-is/1", "step": str(step), "rank": str(rank), "world_size": "2"}
            save_file(tensors, folder / f"step_{step:04d}_rank_{rank}.safetensors", told | dict(metadata or {}))
    return folder
