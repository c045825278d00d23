"""Random dumps with the numerics of a language model, healthy or with one fault planted: what the doctor is judged by.

Every token has logits over a small vocabulary and is sampled from the engine's own distribution, so the mean importance weight
of a healthy dump is 1, as it is for real engines; trainer noise is put on the logits, not on the log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCABULARY = 24


@dataclass
class Shard:
    """One rank at one step. ``at`` holds the positions of the valid tokens; logits and tokens are theirs, in that order."""

    rank: int
    step: int
    cu: Any
    packs: Any
    mask: Any
    train: Any
    rollout: Any
    at: Any
    logits: Any
    noise: Any
    token: Any
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def sequences(self) -> list[Any]:
        """Indices into ``at`` of each sequence with a valid token."""
        segment = np.searchsorted(self.cu, self.at, side="right") - 1
        edges = np.flatnonzero(np.diff(segment)) + 1
        return [x for x in np.split(np.arange(len(self.at)), edges) if len(x)]

    def set(self, side: str, index: Any, values: Any) -> None:
        """Overwrite valid tokens of a side."""
        getattr(self, side)[self.at[index]] = values

    def get(self, side: str) -> Any:
        """Values of a side at the valid tokens."""
        return getattr(self, side)[self.at]


@dataclass
class Dump:
    """Shards by step and rank, and the random numbers of the dump."""

    shards: list[Shard]
    rng: Any

    @property
    def ranks(self) -> list[int]:
        return sorted({s.rank for s in self.shards})

    @property
    def steps(self) -> list[int]:
        return sorted({s.step for s in self.shards})


def log_softmax(logits: Any) -> Any:
    """Row-wise log-softmax in float64."""
    x = logits.astype(np.float64)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def pick(rows: Any, token: Any) -> Any:
    """The sampled token's entry of each row."""
    return rows[np.arange(len(token)), token]


def sample(rng: Any, log_p: Any) -> Any:
    """A token of each row, drawn from exp(log_p)."""
    return (log_p + rng.gumbel(size=log_p.shape)).argmax(axis=1)


def logits_like_text(rng: Any, n: int, sharpness: float = 1.0) -> Any:
    """float32 [n, VOCABULARY] peaked and flat rows mixed: about a half of the tokens are nearly certain, as in text."""
    scale = np.exp(rng.normal(sharpness, 0.8, n)).astype(np.float32)
    return rng.standard_normal((n, VOCABULARY), np.float32) * scale[:, None]


def trainer_noise(rng: Any, shape: Any, kind: str) -> Any:
    """Noise on the trainer's logits: ``bf16``, ``int8``, ``off-policy`` (weights of another step), ``heavy`` (Student-t) or ``none``."""
    if kind == "none":
        return np.zeros(shape, np.float32)
    if kind == "heavy":
        return (0.01 * rng.standard_t(2.5, shape)).astype(np.float32)
    return rng.standard_normal(shape, np.float32) * {"bf16": 0.012, "int8": 0.06, "off-policy": 0.3}[kind]


def healthy(
    rng: Any,
    *,
    ranks: int = 2,
    steps: int = 2,
    sequences: int = 16,
    length: tuple[int, int] = (20, 300),
    prompt: tuple[int, int] = (2, 30),
    noise: str = "bf16",
    tools: bool = False,
    store: str = "f32",
    sharpness: float = 1.0,
) -> Dump:
    """A healthy dump; ``sequences`` a shard. ``store`` rounds the rollout side to bf16."""
    shards = []
    for step in range(1, steps + 1):
        for rank in range(ranks):
            lengths, mask = [], []
            for _ in range(sequences):
                p, n = int(rng.integers(*prompt)), int(rng.integers(length[0], length[1] + 1))
                row = np.r_[np.zeros(p, bool), np.ones(n, bool)]
                if tools and n > 20:
                    a = p + int(rng.integers(5, n - 10))
                    row[a : a + int(rng.integers(2, 9))] = False
                lengths.append(len(row))
                mask.append(row)
            lengths.append(int(rng.integers(1, 40)))  # the pad tail
            mask.append(np.zeros(lengths[-1], bool))
            m = np.concatenate(mask)
            cu = np.concatenate([[0], np.cumsum(lengths)])
            half = int(cu[len(lengths) // 2])
            at = np.flatnonzero(m)
            logits = logits_like_text(rng, len(at), sharpness)
            log_p = log_softmax(logits)
            token = sample(rng, log_p)
            jitter = trainer_noise(rng, logits.shape, noise)
            train, rollout = np.full(len(m), -7.0), np.zeros(len(m))
            rollout[at] = pick(log_p, token)
            train[at] = pick(log_softmax(logits + jitter), token)
            if store == "bf16":
                rollout = bf16(rollout)
            shards.append(
                Shard(rank, step, cu, np.array([0, half, len(m)]), m, train, rollout, at, logits, jitter, token)
            )
    return Dump(shards, rng)


def bf16(x: Any) -> Any:
    """Round to the nearest bfloat16, as float64."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def tensors(shard: Shard) -> dict[str, Any]:
    """The shard in the dump format."""
    import torch

    out = {
        "train_logprobs": torch.from_numpy(shard.train.astype(np.float32)),
        "rollout_logprobs": torch.from_numpy(shard.rollout.astype(np.float32)),
        "response_mask": torch.from_numpy(shard.mask.copy()),
        "cu_seqlens": torch.from_numpy(shard.cu.astype(np.int64)),
        "cu_packs": torch.from_numpy(shard.packs.astype(np.int64)),
    }
    for name, column in shard.extra.items():
        out[name] = torch.from_numpy(np.asarray(column))
    return out
