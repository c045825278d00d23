"""v1/: shards of format rollout-is/1 that must load for ever, one for each layout and dtype. Never make them differently.

A later version of the format adds a folder beside this one; a change that no longer reads these files is a regression.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from shardfile import f32, offsets, write

LENGTHS = [7, 12, 5, 16]
T = sum(LENGTHS)
Columns = dict[str, torch.Tensor]


def base(seed: int) -> Columns:
    """40 positions, three sequences and a pad segment. Values are multiples of 1/64, so every float dtype but bf16 holds them."""
    rng = np.random.default_rng([20266, seed])
    rollout = -rng.integers(1, 128, T) / 64
    train = np.minimum(rollout + rng.integers(-4, 5, T) / 64, 0)
    mask = np.concatenate([np.arange(n) >= 2 for n in LENGTHS[:-1]] + [np.zeros(LENGTHS[-1], bool)])
    rollout[-LENGTHS[-1] :] = 0
    return {
        "train_logprobs": f32(train),
        "rollout_logprobs": f32(rollout),
        "response_mask": torch.from_numpy(mask),
        "cu_seqlens": offsets(LENGTHS),
    }


def cast(columns: Columns, dtype: torch.dtype) -> Columns:
    return columns | {k: columns[k].to(dtype) for k in ("train_logprobs", "rollout_logprobs")}


def shards() -> dict[str, tuple[Columns, dict[str, str]]]:
    """Name -> (columns, metadata beyond the common)."""
    made: dict[str, tuple[Columns, dict[str, str]]] = {}
    for seed, (name, dtype) in enumerate(
        {
            "packed_f32": torch.float32,
            "packed_bf16": torch.bfloat16,
            "packed_f16": torch.float16,
            "packed_f64": torch.float64,
        }.items()
    ):
        made[name] = cast(base(seed), dtype), {}

    flat = base(10)
    grid = {k: flat[k].reshape(4, 10) for k in ("train_logprobs", "rollout_logprobs", "response_mask")}
    made["rectangular"] = grid, {"layout": "rectangular"}

    unit = {k: v[None] for k, v in base(11).items() if k != "cu_seqlens"}
    made["one_row"] = unit | {"cu_seqlens": base(11)["cu_seqlens"].long()}, {}

    labelled = base(12)
    mask = labelled.pop("response_mask")
    labelled["labels"] = torch.where(mask, torch.arange(T) + 5, -100)
    made["labels"] = labelled, {}

    lengths = base(13)
    del lengths["cu_seqlens"]
    lengths["seq_lens"] = torch.tensor(LENGTHS, dtype=torch.int64)
    made["lengths"] = lengths, {}

    aliased = base(14)
    made["aliases"] = (
        {
            "old_log_probs": aliased["train_logprobs"],
            "rollout_log_probs": aliased["rollout_logprobs"],
            "loss_mask": aliased["response_mask"].to(torch.int64),
            "cu_seq_lens_q": aliased["cu_seqlens"],
        },
        {},
    )

    packs = base(15)
    packs["cu_packs"] = torch.tensor([0, 19, 40], dtype=torch.int64)
    packs["response_mask"] = packs["response_mask"].float()
    made["packs"] = packs, {}

    full = base(16)
    full |= {
        "cu_packs": torch.tensor([0, 19, 40], dtype=torch.int32),
        "token_ids": torch.arange(T, dtype=torch.int32) + 100,
        "advantages": f32(np.repeat([0.5, -0.5, 1.0, 0.0], LENGTHS)),
        "policy_version": torch.from_numpy(np.repeat([3, 3, 4, 4], LENGTHS).astype(np.int32)),
        "entropy": f32(np.arange(T) / 64),
        "sequence_ids": torch.tensor([11, 12, 13, -1]),
        "group_ids": torch.tensor([1, 1, 2, -1]),
        "rewards": f32(np.array([1.0, 0.0, 0.5, 0.0])),
        "prompt_lens": torch.tensor([2, 2, 2, 0], dtype=torch.int32),
        "segment_is_pad": torch.tensor([False, False, False, True]),
        "mask.loss": full["response_mask"].to(torch.uint8),
        "logprobs.ref": full["train_logprobs"] - 0.25,
    }
    made["all_columns"] = full, {"trainer_metrics": '{"rollout_is_seq_min": 0.0}', "some_later_key": "kept"}
    return made


def v1(root: Path) -> None:
    for step, (name, (columns, more)) in enumerate(shards().items(), 1):
        meta = {"format": "rollout-is/1", "layout": "packed", "step": str(step), "rank": "0", "world_size": "1"}
        write(root / "v1" / f"{name}.safetensors", columns, meta | more)
