"""What every format's tests share: the samples with their figures, and shards read into numpy without our statistics."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from rollout_is.dumps.foreign import registry
from rollout_is.dumps.foreign.infos import notes_of

SAMPLES = Path(__file__).parents[2] / "vectors" / "foreign"


@dataclass
class Read:
    """A shard as arrays."""

    info: object
    train: np.ndarray
    rollout: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    packs: np.ndarray | None
    columns: dict = field(default_factory=dict)

    @property
    def notes(self):
        return {note.code: note for note in notes_of(self.info.metadata)}

    @property
    def messages(self):
        return [note.message for note in notes_of(self.info.metadata)]

    def rows(self):
        """(train, rollout, mask) of each segment."""
        return [
            (self.train[a:b], self.rollout[a:b], self.mask[a:b])
            for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)
        ]


def read_shard(info):
    with registry.open_shard(info) as shard:
        total = info.positions
        offsets = shard.offsets().numpy().copy()
        packs = shard.pack_offsets()
        columns = {}
        for role in info.columns:
            if role in ("sequence_ids", "group_ids", "rewards", "prompt_lens", "segment_is_pad"):
                columns[role] = shard.segment_column(role).numpy().copy()
            elif role not in ("offsets", "packs", "train", "rollout", "mask"):
                columns[role] = shard.read(role, 0, total).numpy().copy()
        arrays = [shard.read(role, 0, total).double().numpy().copy() for role in ("train", "rollout")]
        mask = shard.read("mask", 0, total).numpy() != 0
    assert offsets[0] == 0
    assert len(offsets) == info.segments + 1
    assert all(array.shape == (total,) for array in arrays)
    return Read(info, *arrays, mask.copy(), offsets, None if packs is None else packs.numpy().copy(), columns)


@pytest.fixture
def samples():
    return SAMPLES


@pytest.fixture
def read():
    """``read(path)``: all shards of a path as arrays, in canonical order."""
    return lambda path: [read_shard(info) for info in registry.find(path)]


@pytest.fixture
def read_one(read):
    """``read_one(path)``: the one shard of a path."""

    def one(path):
        found = read(path)
        assert len(found) == 1
        return found[0]

    return one


def figures(shards):
    """The figures of an expected.json in plain numpy, pad segments left out."""
    per_sequence, parts = [], []
    for shard in shards:
        pads = shard.columns.get("segment_is_pad", np.zeros(len(shard.offsets) - 1, bool))
        for (train, rollout, mask), pad in zip(shard.rows(), pads, strict=True):
            if pad:
                assert not mask.any()
                continue
            ratio = train[mask] - rollout[mask]
            parts.append(ratio)
            per_sequence.append(np.exp(ratio).mean() if ratio.size else None)
    d = np.concatenate(parts)
    return {
        "num_sequences": len(per_sequence),
        "num_sequences_with_valid_tokens": sum(x is not None for x in per_sequence),
        "num_valid_response_tokens": d.size,
        "mean_log_ratio": d.mean(),
        "mean_abs_log_ratio": np.abs(d).mean(),
        "max_abs_log_ratio": np.abs(d).max(),
        "per_sequence_mean_ratio": per_sequence,
    }


@pytest.fixture
def agrees():
    """``agrees(shards, expected)``: the figures within 1e-6 of an entry of an expected.json."""

    def check(shards, expected):
        found = figures(shards)
        for key, value in found.items():
            assert value == pytest.approx(expected[key], abs=1e-6), key

    return check


def sample_cases(which, folders=("files", "directories")):
    """(trainer, path inside the trainer's folder, expected entry) of the samples; ``which`` picks by has_train_logprobs."""
    cases = []
    for file in sorted(SAMPLES.glob("*/expected.json")):
        content = json.loads(file.read_text())
        for kind in folders:
            for path, entry in content.get(kind, {}).items():
                if entry.get("has_train_logprobs", True) == which:
                    cases.append(pytest.param(file.parent / path, entry, id=f"{file.parent.name}/{path}"))
    return cases
