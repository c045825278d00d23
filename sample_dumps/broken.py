"""broken/: one folder for each bad input. A healthy shard of rank 0 stands beside the bad one, to be reported in spite of it."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from shardfile import f32, layout, offsets, pack, shard_path, write

LENGTHS = [10, 14, 9, 15]
META = {"format": "rollout-is/1", "layout": "packed", "step": "1", "world_size": "2", "run": "broken"}
Columns = dict[str, torch.Tensor]


def healthy(rank: int) -> Columns:
    """48 positions in four sequences, the first four positions of each a prompt."""
    rng = np.random.default_rng([20265, rank])
    rollout = -rng.standard_exponential(sum(LENGTHS))
    places = np.concatenate([np.arange(n) for n in LENGTHS])
    return {
        "train_logprobs": f32(rollout + 0.02 * rng.standard_normal(len(rollout))),
        "rollout_logprobs": f32(rollout),
        "response_mask": torch.from_numpy(places >= 4),
        "cu_seqlens": offsets(LENGTHS),
    }


def bad_file(folder: Path, content: bytes) -> None:
    write(shard_path(folder, 1, 0), healthy(0), META | {"rank": "0"})
    shard_path(folder, 1, 1).write_bytes(content)


def bad_columns(folder: Path, change: Callable[[Columns], object]) -> None:
    columns = healthy(1)
    change(columns)
    bad_file(folder, pack(*layout(columns, META | {"rank": "1"})))


def replaced(name: str, tensor: torch.Tensor) -> Callable[[Columns], object]:
    return lambda columns: columns.update({name: tensor})


def element(name: str, index: int, value: float, dtype: torch.dtype) -> Callable[[Columns], object]:
    """Cast a column and set one element of it."""

    def change(columns: Columns) -> None:
        columns[name] = columns[name].to(dtype)
        columns[name][index] = value

    return change


def files(folder: Path) -> None:
    """Faults of the file as a whole."""
    whole = pack(*layout(healthy(1), META | {"rank": "1"}))
    header_size = 8 + struct.unpack("<Q", whole[:8])[0]
    bad_file(folder / "empty", b"")
    bad_file(folder / "truncated", whole[:-40])
    bad_file(folder / "overlong", whole + bytes(12))
    bad_file(folder / "still_being_written", whole[: header_size // 2])
    bad_file(folder / "zeros", bytes(len(whole)))
    bad_file(folder / "text", b"step,rank,train_logprob,rollout_logprob\n1,0,-0.25,-0.26\n")
    bad_file(folder / "pickle", pickle.dumps({"train_logprobs": [-0.25], "rollout_logprobs": [-0.26]}, protocol=4))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1048576\n"
    bad_file(folder / "lfs_pointer", pointer.encode())
    bad_file(folder / "header_too_large", struct.pack("<Q", 126_000_000) + b'{"t0":{"dtype":"F32"' + bytes(200))
    bad_file(folder / "header_not_json", pack("{'train_logprobs': None}", bytes(64)))

    header, body = layout(healthy(1), META | {"rank": "1"})
    text = json.dumps(header)
    twice = text[:-1] + ', "train_logprobs": ' + json.dumps(header["train_logprobs"]) + "}"
    bad_file(folder / "repeated_tensor", pack(twice, body))
    # Log-probs of one byte each: the column is written as uint8, then the header calls it FP8.
    header, body = layout(healthy(1) | {"rollout_logprobs": torch.full((48,), 180, dtype=torch.uint8)}, META)
    bad_file(folder / "float8", pack(json.dumps(header).replace('"U8"', '"F8_E4M3"'), body))


def columns(folder: Path) -> None:
    """Faults of one column."""
    good = healthy(1)
    total = sum(LENGTHS)
    bad_columns(folder / "wrong_rank", replaced("train_logprobs", good["train_logprobs"].reshape(2, 4, 6)))
    # Log-probs of a model that does not score the first token of each sequence: short by one a sequence.
    bad_columns(
        folder / "lengths_differ", replaced("rollout_logprobs", good["rollout_logprobs"][: total - len(LENGTHS)])
    )
    bad_columns(folder / "mask_negative", element("response_mask", 11, -1, torch.int32))
    bad_columns(folder / "mask_nan", element("response_mask", 11, float("nan"), torch.float32))
    bad_columns(folder / "offsets_not_from_0", replaced("cu_seqlens", offsets(LENGTHS)[1:]))
    bad_columns(folder / "offsets_decreasing", replaced("cu_seqlens", torch.tensor([0, 24, 10, 33, 48])))
    wrapped = torch.tensor([0, 2**31 - 8, 2**31 + 8, 2**31 + 40]).to(torch.int32)
    bad_columns(folder / "offsets_wrapped", replaced("cu_seqlens", wrapped))
    bad_columns(folder / "offsets_past_end", replaced("cu_seqlens", offsets([10, 14, 9, 20])))
    bad_columns(folder / "offsets_are_lengths", replaced("cu_seqlens", torch.tensor(LENGTHS, dtype=torch.int32)))
    bad_columns(folder / "offsets_float", replaced("cu_seqlens", offsets(LENGTHS).float()))
    bad_columns(folder / "packs_off_boundary", replaced("cu_packs", torch.tensor([0, 17, 48])))

    def flat_without_offsets(c: Columns) -> None:
        del c["cu_seqlens"]
        for name in list(c):
            c[name] = c[name][None]

    bad_columns(folder / "no_offsets", flat_without_offsets)

    def two_names(c: Columns) -> None:
        c["old_log_probs"] = c.pop("train_logprobs")
        c["prev_logprobs"] = c["old_log_probs"] - 0.1

    bad_columns(folder / "two_candidates", two_names)
    bad_columns(folder / "tensor_missing", lambda c: c.pop("rollout_logprobs"))
    for rank in range(2):
        column = {k: v for k, v in healthy(rank).items() if k != "rollout_logprobs"}
        write(shard_path(folder / "tensor_missing_everywhere", 1, rank), column, META | {"rank": str(rank)})


def sets(folder: Path) -> None:
    """Faults of the set of shards."""
    write(shard_path(folder / "rank_missing", 1, 0), healthy(0), META | {"rank": "0"})
    for attempt, seed in (("first_try", 1), ("second_try", 2)):
        write(shard_path(folder / "duplicate_rank", 1, 0), healthy(0), META | {"rank": "0"})
        path = folder / "duplicate_rank" / attempt / "step_00000001" / "rank_00001.safetensors"
        write(path, healthy(seed), META | {"rank": "1"})
    write(shard_path(folder / "rank_outside_world", 1, 0), healthy(0), META | {"rank": "2"})
    empty = folder / "no_shards"
    empty.mkdir(parents=True)
    (empty / "notes.txt").write_text("The dump that stood here was moved.\n")


def broken(root: Path) -> None:
    folder = root / "broken"
    files(folder)
    columns(folder)
    sets(folder)
