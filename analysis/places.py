"""The worst tokens and sequences as rows for a table: where they are, what both sides say, and their neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_is.analysis.worst import WorstSequences, WorstTokens

if TYPE_CHECKING:
    from rollout_is.dumps.shard import OpenShard, ShardInfo

NEIGHBOURS = 2  # on each side


def describe_worst(
    tokens: WorstTokens,
    sequences: WorstSequences,
    shards: Mapping[int, ShardInfo],
    opener: Callable[[ShardInfo], OpenShard],
    readable: set[int],
) -> dict[str, Any]:
    """``{"tokens": [...], "sequences": [...]}``, worst first, as plain JSON data.

    A token: shard, step, rank, sequence (segment number in the shard), position (inside the segment), index (in the
    shard), token_id, sequence_id, train_logprob, rollout_logprob, log_ratio, neighbours. What is not finite is null, and so
    is what only a shard outside ``readable`` (one that another node holds) could tell.
    """
    needed = sorted({e[1] for e in tokens.entries} | {e[1] for e in sequences.entries})
    token_rows: dict[int, dict[str, Any]] = {}
    sequence_rows: dict[int, dict[str, Any]] = {}
    for number in needed:
        info = shards[number]
        if number not in readable:
            token_rows |= {i: _far_token(e, info) for i, e in enumerate(tokens.entries) if e[1] == number}
            sequence_rows |= {
                i: _sequence(e, info, None, None) for i, e in enumerate(sequences.entries) if e[1] == number
            }
            continue
        with opener(info) as shard:
            offsets = shard.offsets().numpy()
            ids = shard.segment_column("sequence_ids")
            for rank, entry in enumerate(tokens.entries):
                if entry[1] == number:
                    token_rows[rank] = _token(entry, info, shard, offsets, ids)
            for rank, row in enumerate(sequences.entries):
                if row[1] == number:
                    sequence_rows[rank] = _sequence(row, info, offsets, ids)
    return {
        "tokens": [token_rows[i] for i in sorted(token_rows)],
        "sequences": [sequence_rows[i] for i in sorted(sequence_rows)],
    }


def _place(info: ShardInfo, segment: int, ids: Any) -> dict[str, Any]:
    out = {"shard": info.name, "step": info.step, "rank": info.rank, "sequence": segment}
    if ids is not None:
        out["sequence_id"] = ids[segment].item()
    return out


def _far_token(entry: Any, info: ShardInfo) -> dict[str, Any]:
    """A token of a shard that cannot be opened here: what the pass itself kept of it."""
    _, _, segment, position, train, rollout = entry
    return _place(info, segment, None) | {
        "position": None,
        "index": position,
        "train_logprob": _finite(train),
        "rollout_logprob": _finite(rollout),
        "log_ratio": _finite(train - rollout),
        "neighbours": [],
    }


def _token(entry: Any, info: ShardInfo, shard: OpenShard, offsets: Any, ids: Any) -> dict[str, Any]:
    _, _, segment, position, train, rollout = entry
    start, stop = int(offsets[segment]), int(offsets[segment + 1])
    out = _place(info, segment, ids)
    out["position"] = position - start
    out["index"] = position
    dumped = "token_ids" in info.columns
    if dumped:
        out["token_id"] = int(shard.read("token_ids", position, position + 1)[0])
    out["train_logprob"] = _finite(train)
    out["rollout_logprob"] = _finite(rollout)
    out["log_ratio"] = _finite(train - rollout)
    low, high = max(start, position - NEIGHBOURS), min(stop, position + NEIGHBOURS + 1)
    t = shard.read("train", low, high).double().tolist()
    r = shard.read("rollout", low, high).double().tolist()
    token_ids = shard.read("token_ids", low, high).tolist() if dumped else [None] * (high - low)
    out["neighbours"] = [
        {
            "position": low + i - start,
            "token_id": token_ids[i],
            "train_logprob": _finite(t[i]),
            "rollout_logprob": _finite(r[i]),
        }
        for i in range(high - low)
        if low + i != position
    ]
    return out


def _sequence(entry: Any, info: ShardInfo, offsets: Any, ids: Any) -> dict[str, Any]:
    _, _, segment, n, total, mean_abs, nonfinite = entry
    out = _place(info, segment, ids)
    out["length"] = None if offsets is None else int(offsets[segment + 1] - offsets[segment])
    out["valid_tokens"] = n + nonfinite
    out["mean_abs_log_ratio"] = _finite(mean_abs) if n else None
    out["log_ratio"] = _finite(total) if not nonfinite else None
    out["geometric_log_ratio"] = _finite(total / n) if n else None
    out["nonfinite_tokens"] = nonfinite
    return out


def _finite(x: float) -> float | None:
    return float(np.float64(x)) if math.isfinite(x) else None
