"""Saved summaries: tell one from a dump, read it, and say what is wrong with it. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout_is.analysis.summary import SCHEMA, Summary
from rollout_is.dumps.errors import DumpError

_LOOK = 4096  # bytes: the schema is the first key of what we write


def is_saved(path: str) -> bool:
    """Whether a path is a JSON file of ours (or means to be): ``.json`` with an object that names a ``rollout-is`` schema.

    A foreign trainer's JSON dump is not one.
    """
    file = Path(path)
    if not file.is_file() or file.suffix != ".json":
        return False
    try:
        with file.open("rb") as stream:
            head = stream.read(_LOOK).lstrip()
    except OSError:
        return False
    return not head or b'"rollout-is/' in head


def read_saved(path: str) -> Summary:
    """A summary from what ``analyze --format json`` or ``baseline -o`` wrote.

    Raises:
        DumpError: the file is missing, unreadable, not JSON, or another schema.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = (error.strerror or str(error)) if isinstance(error, OSError) else "bytes that are not UTF-8"
        raise DumpError(
            path,
            f"expected a saved summary, found: {found}",
            "the path is wrong, or the file is not a text file",
            f"rollout-is analyze DUMP --by step --format json -o {path}",
            code="saved-unreadable",
        ) from None
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as error:
        empty = not text.strip()
        raise DumpError(
            f"{path}:{error.lineno}",
            "expected JSON, found an empty file" if empty else f"expected JSON, found: {error.msg}",
            "the file was cut off or edited, or it is another file",
            "name what rollout-is analyze DUMP --by step --format json -o FILE (or rollout-is baseline) wrote",
            code="saved-not-json",
        ) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    try:
        if schema != SCHEMA:
            raise ValueError(f"schema {schema!r}")
        return Summary.from_dict(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = str(error) if schema != SCHEMA else f"{type(error).__name__}: {error}"
        raise DumpError(
            path,
            f"expected a summary of schema {SCHEMA!r}, found {found}",
            "another command or another version of rollout-is wrote it, it was edited, or it is another file",
            "name what rollout-is analyze DUMP --by step --format json -o FILE (or rollout-is baseline) wrote",
            code="saved-schema",
        ) from None
