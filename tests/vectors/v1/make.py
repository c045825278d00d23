"""Makes the files of this folder: tiny rollout-is/1 shards that must load for ever, and what they hold (expected.json).

Run ``python tests/vectors/v1/make.py`` only to add a file; files that stand here are never made anew. Written by the safetensors
library, not by DumpWriter, so that reader and writer cannot drift together.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent


def log_probs(count: int, seed: int) -> torch.Tensor:
    """``count`` log-probs in (-4, 0), from a seed."""
    return -4 * torch.rand(count, generator=torch.Generator().manual_seed(seed))


def shards() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, str] | None]]:
    """File name -> (tensors, metadata)."""
    base = {"format": "rollout-is/1"}
    packed = {
        "train_logprobs": log_probs(12, 1),
        "rollout_logprobs": log_probs(12, 2),
        "response_mask": torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 4, 8, 12], dtype=torch.int32),
    }
    rows = {name: tensor[:6].reshape(2, 3).half() for name, tensor in packed.items() if name.endswith("logprobs")}
    return {
        "packed": (
            packed,
            {**base, "step": "412", "rank": "3", "world_size": "8", "trainer_metrics": '{"mismatch_kl": 0.5}'},
        ),
        "every_column": (
            {
                **packed,
                "cu_packs": torch.tensor([0, 8, 12]),
                "token_ids": torch.arange(12, dtype=torch.int32),
                "advantages": torch.linspace(-1, 1, 12),
                "policy_version": torch.arange(12) // 4,
                "entropy": torch.linspace(0, 2, 12).bfloat16(),
                "sequence_ids": torch.tensor([800, 801, 802]),
                "group_ids": torch.tensor([5, 5, 6], dtype=torch.int32),
                "rewards": torch.tensor([1.0, 0.0, 0.5]),
                "prompt_lens": torch.tensor([1, 1, 0], dtype=torch.int32),
                "segment_is_pad": torch.tensor([False, False, True]),
                "mask.pre_rejection": torch.ones(12, dtype=torch.uint8),
                "logprobs.train_again": log_probs(12, 3).double(),
            },
            {**base, "step": "1", "rank": "0", "world_size": "1", "layout": "packed", "some_later_key": "kept"},
        ),
        "trainer_names": (
            {
                "old_logprobs": log_probs(8, 4).bfloat16().reshape(1, 8),
                "rollout_log_probs": log_probs(8, 5).reshape(1, 8),
                "shifted_labels": torch.tensor([[-100, 7, 0, 9, -100, 3, -100, -100]]),
                "cu_seq_lens_q": torch.tensor([[0, 3, 6]], dtype=torch.int32),
            },
            None,
        ),
        "lengths": (
            {
                "prev_logprobs": log_probs(8, 6).double(),
                "generation_logprobs": log_probs(8, 7).half(),
                "token_loss_mask": torch.tensor([1, 1, 0, 1, 1, 0, 0, 0]),
                "input_lengths": torch.tensor([3, 0, 4]),
            },
            {"step": "0"},
        ),
        "rectangular": (
            {**rows, "response_mask": torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])},
            {**base, "rank": "0"},
        ),
        "empty": ({name: tensor[:0] for name, tensor in packed.items()}, base),
        "no_tensors": ({}, None),
    }


def values(tensor: torch.Tensor) -> list[float]:
    """Exact values: every dtype used here fits a double."""
    return [float(value) for value in tensor.reshape(-1).tolist()]


def main() -> None:
    """Write the files that do not stand yet, and expected.json for all."""
    expected = {}
    for name, (tensors, metadata) in shards().items():
        path = HERE / f"{name}.safetensors"
        if not path.exists():
            save_file(tensors, path, metadata=metadata)
        expected[name] = {
            "metadata": metadata or {},
            "tensors": {key: {"dtype": str(value.dtype), "values": values(value)} for key, value in tensors.items()},
        }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
