"""Hook files of sequence-parallel ranks: contiguous parts of each [1, T] pack, joined when the bounds prove it.

Proof: the bounds end at k times the positions of a part, and exactly k files of consecutive ranks of one step hold the same
bounds in every pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_is.dumps import aliases
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import torchfile
from rollout_is.dumps.foreign.format import Harvest, Source, remark, step_and_rank
from rollout_is.dumps.foreign.sniff import Sniffed

if TYPE_CHECKING:
    from pathlib import Path

_OFFSETS = frozenset(aliases.OFFSETS)


@dataclass(frozen=True)
class _Part:
    path: Path
    step: int | None
    rank: int | None
    bounds: tuple[tuple[int, ...], ...]
    size: int  # parts of a whole: 1 for a file that is whole


def join_sources(files: Sequence[Sniffed]) -> Harvest:
    """A source for each whole file, and one for each proven set of sequence-parallel parts."""
    found = Harvest()
    parts: dict[tuple[object, ...], list[_Part]] = {}
    for file in files:
        part = _look(file)
        if part.size <= 1:
            found.sources.append(Source(part.path, (part.path,), part.step, part.rank))
        else:
            parts.setdefault((str(part.path.parent), part.step, part.bounds, part.size), []).append(part)
    for members in parts.values():
        members.sort(key=lambda part: (part.rank is None, part.rank or 0, part.path.name))
        ranks = [part.rank for part in members]
        size = members[0].size
        first = ranks[0]
        if len(members) != size or first is None or ranks != list(range(first, first + size)):
            found.problems.append(
                DumpError(
                    ", ".join(part.path.name for part in members),
                    f"expected {size} sequence-parallel parts of consecutive ranks, found {len(members)} (ranks {ranks})",
                    "files of ranks are missing, or the rank is not in the file name",
                    "name the files rollout_STEP_rankRANK.pt and give the folder with all of them",
                    code="sequence-parallel-part",
                )
            )
            continue
        names = ", ".join(part.path.name for part in members)
        joined = remark("parts-joined", f"{size} sequence-parallel parts joined: {names}")
        found.sources.append(Source(members[0].path, tuple(p.path for p in members), members[0].step, first, (joined,)))
    if found.problems:
        raise found.problems[0]
    return found


def _look(file: Sniffed) -> _Part:
    step, rank = step_and_rank(file.path)
    whole = _Part(file.path, step, rank, (), 1)
    if not file.keys & _OFFSETS:
        return whole
    content = torchfile.load(file.path, file.path.name)
    items = [content] if isinstance(content, Mapping) else content if isinstance(content, list) else []
    bounds, sizes = [], set[int]()
    for item in items:
        if not isinstance(item, Mapping):
            return whole
        name = next((name for name in aliases.OFFSETS if hasattr(item.get(name), "dim")), None)
        train = next((item[name] for name in aliases.REQUIRED["train"] if hasattr(item.get(name), "dim")), None)
        if name is None or train is None or train.is_nested or not train.numel() or not item[name].numel():
            return whole
        ends = tuple(int(value) for value in item[name].flatten().tolist())
        bounds.append(ends)
        sizes.add(ends[-1] // train.numel() if ends[-1] % train.numel() == 0 else 1)
    if len(sizes) != 1 or sizes == {0}:
        return whole
    return _Part(file.path, step, rank, tuple(bounds), sizes.pop())


def join_parts(parts: list[list[Mapping[str, Any]]], where: str) -> list[dict[str, Any]]:
    """The packs of all parts, tensors that are split concatenated, bounds taken once, ``num_padding`` added up.

    Raises:
        DumpError: parts with different packs or columns.
    """
    import torch

    joined = []
    for number, items in enumerate(zip(*parts, strict=True)):
        pack: dict[str, Any] = {}
        for key, value in items[0].items():
            values = [item.get(key) for item in items]
            if key in _OFFSETS or key in aliases.LENGTHS:
                pack[key] = value
            elif key == "num_padding" and all(isinstance(one, int) for one in values):
                pack[key] = sum(values)
            elif all(isinstance(one, torch.Tensor) for one in values):
                if len({tuple(one.shape) for one in values}) != 1:
                    raise DumpError(
                        f"{where}[{number}]: {key}",
                        "expected parts of one shape, found several",
                        code="row-lengths-differ",
                    )
                pack[key] = torch.cat(values, dim=-1)
            else:
                pack[key] = value
        joined.append(pack)
    return joined
