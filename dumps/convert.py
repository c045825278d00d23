"""Any dump that can be read, written again as ``rollout-is/1``: one source shard to one file, in blocks, whole or not at all.

What is written is what an open shard serves, in its stored dtype, so analysing the copy gives the bits of analysing the
source. Memory is bounded by a block: the columns are written side by side into their places in the file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rollout_is.dumps.dtypes import itemsize
from rollout_is.dumps.errors import DumpError, UsageError
from rollout_is.dumps.files import Paths
from rollout_is.dumps.layout import FORMAT
from rollout_is.dumps.scan import Scan, scan
from rollout_is.dumps.shard import SEGMENT_ROLES, ShardInfo

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.dumps.shard import OpenShard

# Roles -> names in the written file; other roles keep their own name.
_NAMES = {"train": "train_logprobs", "rollout": "rollout_logprobs", "mask": "response_mask"}
_BOUNDS = frozenset({"offsets", "packs", "lengths", "pack_lengths", "labels"})
_FLOATS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
_BLOCK = 1 << 18  # positions


@dataclass(frozen=True)
class Conversion:
    """One shard that was written.

    Attributes:
        source: the shard that was read.
        path: the file that was written.
        size: its bytes.
        tensors: name in the file -> (name in the source, dtype).
        valid_tokens: positions with a nonzero mask.
        rounded: log-probs that another dtype could not hold exactly.
        dropped: names in the source that the file does not carry.
    """

    source: ShardInfo
    path: Path
    size: int
    tensors: Mapping[str, tuple[str, str]]
    valid_tokens: int
    rounded: int
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class Conversions:
    """All shards of one call, and what the scan said about the dump."""

    shards: tuple[Conversion, ...]
    scan: Scan


def convert(
    paths: Paths,
    directory: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    steps: str | None = None,
    allow_partial: bool = False,
    duplicates: str | None = None,
    dtype: str | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Conversions:
    """Write a dump of any known format as safetensors shards of ``rollout-is/1``.

    Args:
        paths: what ``analyze`` takes: folder, file, glob, or several.
        directory: where the shards go; made when missing. A shard keeps its path inside the source.
        columns, steps, allow_partial, duplicates: as for the scan.
        dtype: ``float16``, ``bfloat16``, ``float32`` or ``float64`` for log-probs; None keeps what the source has.
        force: replace shards that exist.
        progress: called with positions done and in all.

    Returns:
        What was written, shard by shard, and what was left out.

    Raises:
        UsageError: an unknown dtype, or a target that exists.
        DumpError: the source cannot be read, or the disk refuses.
    """
    if dtype is not None and dtype not in _FLOATS:
        raise UsageError(
            f"--dtype {dtype}", f"expected one of {', '.join(_FLOATS)}, found {dtype!r}", code="dtype-unknown"
        )
    root = Path(directory)
    found = scan(paths, columns=columns, steps=steps, allow_partial=allow_partial, duplicates=duplicates)
    targets = _targets(found.shards, root)
    if not force:
        for target in targets:
            if target.exists():
                raise UsageError(
                    str(target),
                    "expected a new file, found one that exists",
                    "the dump was converted before",
                    "give another folder, or --force",
                    code="target-exists",
                )
    total = sum(info.positions for info in found.shards)
    written: list[Conversion] = []
    done = 0
    for info, target in zip(found.shards, targets, strict=True):

        def advance(positions: int, before: int = done) -> None:
            if progress is not None:
                progress(before + positions, total)

        written.append(_convert_shard(info, target, dtype, advance))
        done += info.positions
    return Conversions(tuple(written), found)


def _targets(shards: tuple[ShardInfo, ...], root: Path) -> list[Path]:
    """A path for each shard: its own with another suffix; with both suffixes where two would meet."""
    names = [PurePosixPath(info.name.lstrip("/")) for info in shards]
    names = [PurePosixPath(*(part for part in name.parts if part not in ("..", "."))) for name in names]
    plain = [name.with_suffix(".safetensors") for name in names]
    return [
        root / (short if plain.count(short) == 1 else name.with_name(name.name + ".safetensors"))
        for name, short in zip(names, plain, strict=True)
    ]


def _convert_shard(info: ShardInfo, target: Path, dtype: str | None, advance: Callable[[int], None]) -> Conversion:
    from rollout_is.dumps.reader import open_shard
    from rollout_is.dumps.serialize import _sync_folder

    if target.exists() and os.path.samefile(target, info.path):
        raise UsageError(
            str(target), "expected a target beside the source, found the source itself", code="target-exists"
        )
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_shard(info) as shard, open(temporary, "wb") as file:
            copy = _Copy(info, shard, dtype)
            copy.write(file.fileno(), advance)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise DumpError(
            str(target),
            f"expected to write the shard, found {error.strerror or error}",
            "the disk is full, the folder may not be written to, or a file stands in its place",
            "make room, or give another folder; shards written before are whole",
            code="dump-write-failed",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return Conversion(info, target, copy.size, copy.tensors, copy.valid, copy.rounded, copy.dropped)


class _Copy:
    """One shard on its way into one file."""

    def __init__(self, info: ShardInfo, shard: OpenShard, dtype: str | None) -> None:
        self._info = info
        self._shard = shard
        self.valid = 0
        self.rounded = 0
        self.dropped = tuple(json.loads(info.metadata.get("dropped", "[]")))
        self._small = self._small_tensors()
        self._long = {role: self._dtype(role, dtype) for role in info.columns if self._is_long(role)}
        shape = [info.positions]
        if info.layout == "rectangular" and info.segments:
            shape = [info.segments, info.positions // info.segments]
        entries = {
            _NAMES.get(role, role): (kept, shape, itemsize(kept) * info.positions) for role, kept in self._long.items()
        }
        for name, tensor in self._small.items():
            entries[name] = (_dtype_of(tensor), list(tensor.shape), tensor.numel() * tensor.element_size())
        self._header, self._starts, self.size = _header(entries, self._metadata())
        named = {_NAMES.get(role, role): (info.columns[role], kept) for role, kept in self._long.items()}
        bounds = {"cu_seqlens": "offsets", "cu_packs": "packs"}
        small = {n: (info.columns.get(bounds.get(n, n), n), _dtype_of(t)) for n, t in self._small.items()}
        self.tensors = named | small

    def _is_long(self, role: str) -> bool:
        return role not in _BOUNDS and role not in SEGMENT_ROLES

    def _dtype(self, role: str, wanted: str | None) -> str:
        if wanted is not None and (role in ("train", "rollout") or role.startswith("logprobs.")):
            return _FLOATS[wanted]
        return self._info.dtypes[role]

    def _small_tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self._info.layout != "rectangular":
            found["cu_seqlens"] = self._shard.offsets()
        packs = self._shard.pack_offsets()
        if packs is not None:
            found["cu_packs"] = packs
        for role in SEGMENT_ROLES:
            column = self._shard.segment_column(role) if role in self._info.columns else None
            if column is not None:
                found[role] = column.contiguous()
        return found

    def _metadata(self) -> dict[str, str]:
        info = self._info
        known = {"step": info.step, "rank": info.rank, "world_size": info.world_size}
        text = {key: value for key, value in info.metadata.items() if key not in ("parts", "dropped", "columns")}
        text |= {key: str(value) for key, value in known.items() if value is not None}
        text |= {"format": FORMAT, "layout": info.layout}
        if info.format != FORMAT:
            text |= {"source_format": info.format, "source": info.name}
        return text

    def write(self, fd: int, advance: Callable[[int], None]) -> None:
        """Header and small columns first, then every long column block by block into its place."""
        _put(fd, self._header, 0)
        for name, tensor in self._small.items():
            _put(fd, _raw(tensor), self._starts[name])
        for start in range(0, self._info.positions, _BLOCK):
            stop = min(start + _BLOCK, self._info.positions)
            for role, kept in self._long.items():
                block = self._shard.read(role, start, stop)
                if role == "mask" or role.startswith("mask."):
                    self._check_mask(role, block, start)
                block = self._convert(role, block, kept)
                _put(fd, _raw(block), self._starts[_NAMES.get(role, role)] + start * itemsize(kept))
            advance(stop)

    def _check_mask(self, role: str, block: Tensor, start: int) -> None:
        """A copy that every analysis would refuse is not made: masks are finite and >= 0, and 0 past the last boundary."""
        name = f"{self._info.name}: {self._info.columns[role]}"
        bad = ~((block >= 0) & (block < math.inf)) if block.is_floating_point() else block < 0
        if bool(bad.any()):
            at = int(bad.nonzero()[0, 0])
            raise DumpError(
                f"{name}[{start + at}]",
                f"expected a mask value that is finite and >= 0, found {block[at].item()}",
                "~mask on an integer mask gives -1 and -2; a padded mask may hold NaN",
                "store the mask as bool, or as 0 and 1",
                code="mask-value",
            )
        end = (
            int(self._small["cu_seqlens"][-1]) if role == "mask" and "cu_seqlens" in self._small else start + len(block)
        )
        outside = block[max(end - start, 0) :] != 0
        if bool(outside.any()):
            at = max(end, start) + int(outside.nonzero()[0, 0])
            raise DumpError(
                f"{name}[{at}]",
                f"expected every position past the last boundary ({end:,}) to be masked, found a valid one at {at:,}",
                "cu_seqlens ends before the data does: a sequence is missing from it",
                "give cu_seqlens its last boundary, or mask the padding",
                code="valid-outside",
            )

    def _convert(self, role: str, block: Tensor, kept: str) -> Tensor:
        from rollout_is.dumps.torch_dtypes import TORCH

        if role == "mask":
            self.valid += int((block != 0).sum())
        if block.dtype is TORCH[kept]:
            return block
        changed = block.to(TORCH[kept])
        if kept in _FLOATS.values():
            same = (changed.double() == block.double()) | block.isnan()
            self.rounded += int((~same).sum())
        return changed


def _header(
    entries: Mapping[str, tuple[str, list[int], int]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The file's header, where each tensor starts in the file, and the file's size; wide dtypes first, for alignment."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    at, places = 0, {}
    for name, (dtype, shape, size) in sorted(entries.items(), key=lambda item: (-itemsize(item[1][0]), item[0])):
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        places[name] = at
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + place for name, place in places.items()}, len(head) + at


def _dtype_of(tensor: Tensor) -> str:
    from rollout_is.dumps.torch_dtypes import NAMES

    return NAMES[tensor.dtype]


def _raw(tensor: Tensor) -> memoryview:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    raw: memoryview = (flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)).numpy().data
    return raw


def _put(fd: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)
