"""``ShardInfo`` for foreign files, and the notes that travel in its metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_is.dumps.notes import Note, Severity
from rollout_is.dumps.shard import ShardInfo

if TYPE_CHECKING:
    from rollout_is.dumps.foreign.format import Format, Source
    from rollout_is.dumps.foreign.packed import Packed

NOTES_KEY = "notes"
PARTS_KEY = "parts"
DROPPED_KEY = "dropped"
COLUMNS_KEY = "columns"


def stat_of(path: Path) -> tuple[int, int]:
    """Size in bytes and time of change in ns of a file."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def notes_metadata(notes: Iterable[Note]) -> dict[str, str]:
    """Notes as one metadata string, empty without notes; ``notes_of`` is the way back.

    >>> notes_of(notes_metadata([Note("a", "info", "", "b")]))
    (Note(code='a', severity='info', metric='', message='b'),)
    """
    listed = [[note.code, note.severity, note.metric, note.message] for note in notes]
    return {NOTES_KEY: json.dumps(listed)} if listed else {}


def dropped_metadata(keys: Iterable[str], used: Iterable[str]) -> dict[str, str]:
    """What a file holds beyond the columns that are read, as one metadata string."""
    left = sorted(set(keys) - set(used))
    return {DROPPED_KEY: json.dumps(left)} if left else {}


def notes_of(metadata: Mapping[str, str]) -> tuple[Note, ...]:
    """The notes that a foreign format left in a shard's metadata."""
    severities: dict[str, Severity] = {"info": "info", "notice": "notice", "warning": "warning", "error": "error"}
    try:
        listed = json.loads(metadata.get(NOTES_KEY, "[]"))
        return tuple(Note(code, severities[severity], metric, message) for code, severity, metric, message in listed)
    except (ValueError, TypeError, KeyError):  # a native dump may use the key for something of its own
        return ()


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def info_from(form: Format, source: Source, packed: Packed) -> ShardInfo:
    """The ``ShardInfo`` of a file that was read whole."""
    from rollout_is.dumps.foreign.packed import dtype_name

    size, mtime = stat_of(source.path)
    notes = [*source.remarks, *packed.notes]
    metadata = {"trainer": form.trainer, "train_policy": form.train_policy} | packed.metadata | notes_metadata(notes)
    if len(source.parts) > 1:
        metadata[PARTS_KEY] = json.dumps([str(part) for part in source.parts])
    if source.columns:
        metadata[COLUMNS_KEY] = json.dumps(dict(source.columns))
    if packed.dropped:
        metadata[DROPPED_KEY] = json.dumps(packed.dropped)
    columns = packed.columns | packed.segments
    return ShardInfo(
        path=str(source.path),
        name=source.path.name,
        format=form.name,
        step=source.step if source.step is not None else _whole(packed.metadata.get("step")),
        rank=source.rank if source.rank is not None else _whole(packed.metadata.get("rank")),
        world_size=None,
        layout=packed.layout,
        positions=packed.positions,
        segments=int(packed.offsets.numel()) - 1,
        columns=packed.names,
        dtypes={role: dtype_name(column) for role, column in columns.items()}
        | {role: "I64" for role in ("offsets", "packs") if role in packed.names},
        metadata={key: value for key, value in metadata.items() if value},
        size=size,
        mtime_ns=mtime,
    )
