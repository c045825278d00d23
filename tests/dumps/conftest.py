"""Makers of shard files: good ones by the safetensors library, bad ones byte by byte. Neither uses our own writer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


def good_tensors(**changes):
    """A shard of two sequences and a pad tail (case C01's layout); ``name=None`` leaves a tensor out."""
    tensors = {
        "train_logprobs": torch.tensor([-1.0, -2.0, -3.0, -1.5, -0.5, 0.0, 0.0, 0.0]),
        "rollout_logprobs": torch.tensor([-1.1, -2.1, -2.9, -1.5, -0.6, 0.0, 0.0, 0.0]),
        "response_mask": torch.tensor([1, 1, 0, 1, 1, 0, 0, 0], dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 3, 5, 8], dtype=torch.int32),
    }
    tensors.update(changes)
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.fixture
def shard(tmp_path):
    """``shard("step_1/rank_0", train_logprobs=...)``: a file under ``tmp_path / "dump"``; the rest as in ``good_tensors``."""

    def make(name="step_00000001/rank_00000", metadata=None, only=None, **changes) -> Path:
        path = tmp_path / "dump" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(only if only is not None else good_tensors(**changes), path, metadata=metadata)
        return path

    return make


@pytest.fixture
def raw(tmp_path):
    """``raw(header, body)``: a file of exactly these parts; the header is JSON-encoded unless it is bytes."""

    def make(header, body=b"", name="bad", length=None) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / "dump" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
        return path

    return make


@pytest.fixture
def dump(tmp_path) -> Path:
    """The folder that ``shard`` and ``raw`` write into."""
    return tmp_path / "dump"
