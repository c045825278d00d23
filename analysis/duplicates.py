"""Exact duplicate sequences: candidates by an order-free checksum of the raw bits, confirmed by comparing bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollout_is.analysis.batch import Ints

if TYPE_CHECKING:
    from rollout_is.dumps.shard import OpenShard, ShardInfo

ENTRIES = 1 << 21  # sequences remembered; beyond that a fixed share of all, chosen by their checksum
COMPARED = 4096  # candidate sequences whose bytes are compared


@dataclass
class DuplicateIndex:
    """Checksums of the sequences of a dump, bounded: past ENTRIES only those with ``hash % thinning == 0`` are kept."""

    thinning: int = 1
    parts: list[Ints] = field(default_factory=list)  # int64 [4, k]: shard, segment, valid tokens, checksum
    size: int = 0
    open_parts: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # fragments: [n, checksum]

    def add(self, shard: int, checksums: tuple[Ints, Ints, Ints], *, fragment: bool) -> None:
        """The sequences of one unit, or the part of one that a fragment holds."""
        segment, n, value = checksums
        if fragment:
            for s, count, x in zip(segment.tolist(), n.tolist(), value.tolist(), strict=True):
                entry = self.open_parts.setdefault((shard, s), [0, 0])
                entry[0] += count
                entry[1] = (entry[1] + x) & 0xFFFFFFFF
            return
        rows = np.stack([np.full(len(segment), shard, dtype=np.int64), segment, n, value])
        self.parts.append(rows[:, _hash(rows) % self.thinning == 0] if self.thinning > 1 else rows)
        self.size += self.parts[-1].shape[1]
        self._thin()

    def merge(self, other: DuplicateIndex) -> None:
        """Take in what another rank saw."""
        self.thinning = max(self.thinning, other.thinning)
        self.parts = [p[:, _hash(p) % self.thinning == 0] for p in self.parts + other.parts]
        self.size = sum(p.shape[1] for p in self.parts)
        for key, (n, value) in other.open_parts.items():
            entry = self.open_parts.setdefault(key, [0, 0])
            entry[0] += n
            entry[1] = (entry[1] + value) & 0xFFFFFFFF
        self._thin()

    def _thin(self) -> None:
        while self.size > ENTRIES:
            self.thinning *= 2
            self.parts = [p[:, _hash(p) % self.thinning == 0] for p in self.parts]
            self.size = sum(p.shape[1] for p in self.parts)

    def candidates(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """(valid tokens, places) of two and more (shard, segment) whose length and checksum agree, longest first."""
        rows = [*self.parts]
        if self.open_parts:
            keys = sorted(self.open_parts)
            rows.append(np.array([[s, g, *self.open_parts[s, g]] for s, g in keys], dtype=np.int64).T)
        if not rows:
            return []
        # Most often no two agree, and sorting something short shows it.
        ordered, order = _sorted(np.concatenate([_short(p) for p in rows]))
        again = np.flatnonzero(ordered[1:] == ordered[:-1])
        if not len(again):
            return []
        places = np.unique(np.concatenate([order[again], order[again + 1]]))
        ends = np.cumsum([p.shape[1] for p in rows])
        cuts = places.searchsorted(ends).tolist()
        table = np.concatenate(
            [p.take(places[a:b] - (end - p.shape[1]), axis=1) for p, (a, b), end in zip(rows, pairwise([0, *cuts]), ends, strict=True)],
            axis=1,
        )  # fmt: skip
        table = table[:, np.lexsort((table[1], table[0], table[3], table[2]))]
        same = (table[2, 1:] == table[2, :-1]) & (table[3, 1:] == table[3, :-1])
        out: list[tuple[int, list[tuple[int, int]]]] = []
        for i in np.flatnonzero(same):
            place, before = (int(table[0, i + 1]), int(table[1, i + 1])), (int(table[0, i]), int(table[1, i]))
            if out and out[-1][1][-1] == before:
                out[-1][1].append(place)
            else:
                out.append((int(table[2, i]), [before, place]))
        return out[::-1]


def _sorted(short: NDArray[np.int32]) -> tuple[NDArray[np.int32], Ints]:
    """The numbers in order, and where each stood; torch sorts whole numbers in a third of numpy's time."""
    import torch

    values, order = torch.sort(torch.from_numpy(short))
    return values.numpy(), order.numpy()


def _short(rows: Ints) -> NDArray[np.int32]:
    """int32 [k] of the valid tokens and the checksum: the same for the same, and seldom the same for others."""
    out: NDArray[np.int32] = (rows[3] ^ (rows[2] * 0x9E3779B1)).astype(np.int32)
    return out


def _hash(rows: Ints) -> Ints:
    """Spread of (n, checksum): the checksum's low bits alone may be all alike."""
    with np.errstate(over="ignore"):
        mixed = (rows[3] * np.int64(-7046029254386353131)) ^ (rows[2] * np.int64(-4417276706812531889))
    out: Ints = (mixed >> 33) & 0x3FFFFFFF
    return out


@dataclass(frozen=True)
class Duplicates:
    """What was found.

    Attributes:
        copies: (shard, segment) of every copy but the first of each set.
        originals: (shard, segment) of the first, aligned with ``copies``.
        unchecked: candidates whose bytes were not compared.
        thinning: one in how many sequences was looked at.
        longest: valid tokens of the longest copy.
    """

    copies: tuple[tuple[int, int], ...]
    originals: tuple[tuple[int, int], ...]
    unchecked: int
    thinning: int
    longest: int = 0


def confirm(
    index: DuplicateIndex, shards: Mapping[int, ShardInfo], opener: Callable[[ShardInfo], OpenShard]
) -> Duplicates:
    """Compare the bytes of the candidates: same tokens (where dumped), both log-probs and mask."""
    sets = index.candidates()
    wanted: list[tuple[int, int]] = []
    unchecked = 0
    for _, group in sets:
        near = [place for place in group if place[0] in shards]  # another node's shards cannot be read here
        unchecked += len(group) - len(near)
        group = near
        if len(wanted) + len(group) <= COMPARED:
            wanted += group
        else:
            unchecked += max(0, len(group) - 1)
    content = _contents(sorted(set(wanted)), shards, opener)
    copies: list[tuple[int, int]] = []
    originals: list[tuple[int, int]] = []
    longest = 0
    for n, group in sets:
        first: dict[bytes, tuple[int, int]] = {}
        for place in group:
            if place not in content:
                continue
            known = first.setdefault(content[place], place)
            if known != place:
                copies.append(place)
                originals.append(known)
                longest = max(longest, n)
    order = sorted(range(len(copies)), key=lambda i: copies[i])
    return Duplicates(
        tuple(copies[i] for i in order), tuple(originals[i] for i in order), unchecked, index.thinning, longest
    )


def _contents(
    places: list[tuple[int, int]], shards: Mapping[int, ShardInfo], opener: Callable[[ShardInfo], OpenShard]
) -> dict[tuple[int, int], bytes]:
    """A 32-byte digest of all the bytes of each sequence's valid positions."""
    import hashlib

    from rollout_is.analysis.select import bits_of, valid_of

    out: dict[tuple[int, int], bytes] = {}
    for number in sorted({shard for shard, _ in places}):
        info = shards[number]
        with opener(info) as shard:
            offsets = shard.offsets().numpy()
            for _, segment in (p for p in places if p[0] == number):
                digest = hashlib.sha256()
                for start in range(int(offsets[segment]), int(offsets[segment + 1]), 1 << 16):
                    stop = min(start + (1 << 16), int(offsets[segment + 1]))
                    valid, _ = valid_of(shard.read("mask", start, stop), info, start)
                    for role in ("train", "rollout", *(["token_ids"] if "token_ids" in info.columns else [])):
                        digest.update(np.ascontiguousarray(bits_of(shard.read(role, start, stop))[valid]).tobytes())
                out[number, segment] = digest.digest()
    return out
