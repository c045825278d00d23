"""Finds the formats (every ``Format`` subclass under ``formats/``), asks them for a path, and opens what they found.

Native safetensors shards are not asked about here. A path that is nothing to any format costs a directory walk and the first
bytes of each file.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import formats as package
from rollout_is.dumps.foreign.answers import answer
from rollout_is.dumps.foreign.format import Format, Harvest, Source, remark
from rollout_is.dumps.foreign.infos import COLUMNS_KEY, PARTS_KEY, info_from
from rollout_is.dumps.foreign.sniff import Sniffed, sniff
from rollout_is.dumps.notes import Note
from rollout_is.dumps.shard import ShardInfo

if TYPE_CHECKING:
    from rollout_is.dumps.foreign.packed import Packed
    from rollout_is.dumps.shard import OpenShard

_SHOWN = 3
_CACHE_BYTES = 256 << 20  # parsed files kept between finding and opening; larger ones are read again


@cache
def known_formats() -> tuple[Format, ...]:
    """One instance of each format, in the order in which they are asked.

    >>> "nemo-rl/train_data" in [form.name for form in known_formats()]
    True
    """
    found: dict[str, Format] = {}
    for module in pkgutil.iter_modules(package.__path__):
        loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        for value in vars(loaded).values():
            if isinstance(value, type) and issubclass(value, Format) and value.name:
                found.setdefault(value.name, value())
    return tuple(sorted(found.values(), key=lambda form: (form.priority, form.name)))


def find(path: str | os.PathLike[str], columns: Mapping[str, str] | None = None) -> list[ShardInfo] | None:
    """The shards that a path holds in foreign formats, recognised by content.

    Args:
        path: file or folder (searched at any depth).
        columns: role -> tensor name, for formats that take any names (torch hooks); the others have their own.
    Returns:
        one ``ShardInfo`` a shard in canonical order; None when nothing in it is a format of ours.
    Raises:
        DumpError: recognised and of no use: rollout-only or text-only files (with what they lack and the shortest way to get
            it), unfinished steps, pickles that would run code, damaged files, several formats at once.
    """
    root = Path(path)
    files = [sniff(file) for file in _walk(root)]
    claimed: dict[str, list[Sniffed]] = {}
    unclaimed: list[Sniffed] = []
    for file in files:
        form = next((form for form in known_formats() if form.claims(file)), None)
        if form is None:
            unclaimed.append(file)
        else:
            claimed.setdefault(form.name, []).append(file)
    if not claimed:
        errors = [error for file in unclaimed if (error := answer(file, _shown(root, file.path))) is not None]
        if errors:
            raise errors[0]
        return None
    remarks = _superseded(claimed)
    if len(claimed) > 1:
        listing = "; ".join(f"{name}: {_names(root, found)}" for name, found in sorted(claimed.items()))
        raise DumpError(
            str(path),
            f"expected files of one format, found {len(claimed)}: {listing}",
            "two dumps of one run would count every token twice",
            "give one of these folders",
            code="several-formats",
        )
    (name, own), *_ = claimed.items()
    form = _by_name(name)
    harvest = form.harvest(own)
    remarks += harvest.remarks + _left_out(root, unclaimed)
    if not harvest.sources:
        raise _worst(harvest, root)
    harvest.sources[0] = replace(harvest.sources[0], remarks=harvest.sources[0].remarks + tuple(remarks))
    infos = []
    chosen = tuple(sorted((columns or {}).items())) if form.takes_columns else ()
    for found in harvest.sources:
        source = replace(found, columns=chosen)
        info = form.info(source) or info_from(form, source, _read(form, source))
        infos.append(replace(info, name=_shown(root, source.path)))
    return sorted(infos, key=lambda info: info.sort_key)


def open_shard(info: ShardInfo) -> OpenShard:
    """Open a shard that ``find`` gave, in this or in another process.

    Raises:
        DumpError: the file changed since the scan, or its values are not what the format promises.
    """
    from rollout_is.dumps.memory import MemoryShard

    form = _by_name(info.format)
    parts = tuple(Path(part) for part in json.loads(info.metadata.get(PARTS_KEY, "[]"))) or (Path(info.path),)
    chosen = tuple(json.loads(info.metadata.get(COLUMNS_KEY, "{}")).items())
    source = Source(Path(info.path), parts, info.step, info.rank, columns=chosen)
    stat = source.path.stat()
    if info.size and (stat.st_size, stat.st_mtime_ns) != (info.size, info.mtime_ns):
        raise DumpError(
            info.name,
            "expected the file as it was scanned, found that it changed",
            "the trainer is still writing this step",
            "wait until the step is written",
            code="file-changed",
        )
    streaming = form.open(source, info)
    if streaming is not None:
        return streaming
    packed = _read(form, source)
    tensors = {packed.names[role]: column for role, column in (packed.columns | packed.segments).items()}
    tensors[packed.names["offsets"]] = packed.offsets
    if packed.packs is not None:
        tensors[packed.names["packs"]] = packed.packs
    return MemoryShard(info, tensors)


def _by_name(name: str) -> Format:
    for form in known_formats():
        if form.name == name:
            return form
    raise DumpError(name, "expected a known format, found another", code="format-unknown")


def _walk(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            Path(folder, name) for name in sorted(files) if not name.startswith(".") and not name.endswith(".tmp")
        ]
    return [file for file in found if file.is_file()]


def _superseded(claimed: dict[str, list[Sniffed]]) -> list[Note]:
    """Drop the formats that only repeat what another one holds; says which."""
    remarks = []
    for form in known_formats():
        winners = [name for name in form.yields_to if name in claimed]
        if form.name in claimed and winners:
            count = len(claimed.pop(form.name))
            message = (
                f"{count} files are left out: {winners[0]} holds the same rollouts (name their folder to read them)"
            )
            remarks.append(remark("files-left-out", message, form.name))
    return remarks


def _left_out(root: Path, files: Sequence[Sniffed]) -> list[Note]:
    """Sentences about files of the folder that hold no pair of log-probs."""
    named: dict[str, list[str]] = {}
    for file in files:
        error = answer(file, _shown(root, file.path), count=False)
        if error is not None:
            named.setdefault(error.code, []).append(_shown(root, file.path))
    words = {"rollout-only": "hold no train log-probs", "text-only": "hold text only"}
    remarks = []
    for code, names in named.items():
        shown = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
        lacks = words.get(code, "could not be read")
        remarks.append(remark("files-left-out", f"{len(names)} files {lacks}, left out: {shown}", code))
    return remarks


def _worst(harvest: Harvest, root: Path) -> DumpError:
    if not harvest.problems:
        return DumpError(str(root), "expected shards, found none", code="no-shards")
    first = harvest.problems[0]
    if len(harvest.problems) > 1:
        first = DumpError(
            first.where,
            f"{first.problem} (and {len(harvest.problems) - 1} more files)",
            first.why,
            first.fix,
            code=first.code,
        )
    return first


def _shown(root: Path, path: Path) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()


def _names(root: Path, files: Sequence[Sniffed]) -> str:
    shown = ", ".join(_shown(root, file.path) for file in files[:_SHOWN])
    return shown + (f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else "")


_parsed: OrderedDict[tuple[object, ...], Packed] = OrderedDict()


def _read(form: Format, source: Source) -> Packed:
    """Read a source, from memory when it was just read: finding counts what opening serves."""
    stats = [part.stat() for part in source.parts]
    key = (
        form.name,
        source.columns,
        *((str(p), s.st_size, s.st_mtime_ns) for p, s in zip(source.parts, stats, strict=True)),
    )
    if key in _parsed:
        _parsed.move_to_end(key)
        return _parsed[key]
    packed = form.read(source)
    if packed.nbytes <= _CACHE_BYTES:
        _parsed[key] = packed
        while sum(kept.nbytes for kept in _parsed.values()) > _CACHE_BYTES:
            _parsed.popitem(last=False)
    return packed
