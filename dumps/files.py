"""Finding the shard files under a folder, a file or a glob. No torch; no file is opened."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.text import shown

SUFFIX = ".safetensors"
_MARKERS = frozenset({"STABLE", "_SUCCESS", "DONE", "COMPLETE"})
_TEMPORARY = (".tmp", ".temp", ".part", ".partial", ".incomplete")
Paths = str | Path | Sequence[str | Path]


@dataclass
class Found:
    """What stands under the paths.

    Attributes:
        files: (path, name as shown, folder that holds the dump) of each shard file, in the order of names.
        foreign: paths given (or matched) that hold no shard of ours: for the readers of foreign formats.
        problems: folders and links that could not be followed.
        temporary: how many unfinished files were passed over.
        passed_over: files of other kinds that a pattern matched beside shards.
        marked, unmarked: folders of shards with and without a marker of completeness, which some trainers leave.
    """

    files: list[tuple[str, str, str]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    problems: list[DumpError] = field(default_factory=list)
    temporary: int = 0
    passed_over: list[str] = field(default_factory=list)
    marked: list[str] = field(default_factory=list)
    unmarked: list[str] = field(default_factory=list)


def as_list(paths: Paths) -> list[str]:
    """One path or many, as strings."""
    if isinstance(paths, str | Path):
        return [os.fspath(paths)]
    return [os.fspath(path) for path in paths]


def find_files(paths: Paths) -> Found:
    """All shard files under the paths: folders at any depth, files, globs.

    Hidden files and folders and temporary names (``.tmp``, ``.part``, ...) are passed over, unless named outright.

    Raises:
        DumpError: a path that does not exist, or a glob that matches nothing.
    """
    given = as_list(paths)
    if not given:
        raise DumpError("paths", "expected at least one path, found none", code="path-missing")
    found = Found()
    others: list[str] = []
    seen_folders: set[tuple[int, int]] = set()
    for path in given:
        for match, is_glob in _expand(path):
            base = "" if len(given) == 1 and not is_glob else match
            if os.path.isdir(match):
                before = len(found.files) + len(found.problems)
                for file, relative in _walk(match, seen_folders, found):
                    name = os.path.join(base, relative) if base else relative
                    found.files.append((file, shown(name, 400), os.path.abspath(match)))
                if len(found.files) + len(found.problems) == before:
                    found.foreign.append(match)
            elif match.endswith(SUFFIX):
                name = base or os.path.basename(match)
                found.files.append((match, shown(name, 400), os.path.dirname(os.path.abspath(match))))
            elif is_glob:
                others.append(match)
            else:
                found.foreign.append(match)
    # A pattern that matches shards and other things (notes, JSON) means the shards, as a folder does.
    if found.files or found.problems:
        found.passed_over = others
    else:
        found.foreign += others
    found.files.sort(key=lambda file: file[1])
    return found


def _expand(path: str) -> list[tuple[str, bool]]:
    if os.path.lexists(path):
        return [(path, False)]
    if "\0" not in path and glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True))
        if matches:
            return [(match, True) for match in matches if not _is_temporary(os.path.basename(match))]
        raise DumpError(
            shown(path, 400),
            "expected files, but the pattern matches nothing",
            fix="check the pattern, and quote it",
            code="path-missing",
        )
    raise DumpError(
        shown(path, 400) or "''",
        "expected a folder, a file or a glob, found nothing of that name",
        "the path is misspelt, or the disk is not mounted",
        "check the path",
        code="path-missing",
    )


def _is_temporary(name: str) -> bool:
    return name.startswith(".") or name.endswith(_TEMPORARY) or ".tmp." in name or f"{SUFFIX}.tmp" in name


def _walk(folder: str, seen: set[tuple[int, int]], found: Found) -> Iterator[tuple[str, str]]:
    """(path, path inside the folder) of the shard files; each folder once, so links in a circle end."""
    stack = [("", folder)]
    while stack:
        relative, here = stack.pop()
        try:
            status = os.stat(here)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(here) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            found.problems.append(
                DumpError(
                    shown(here, 400),
                    f"expected a readable folder, found one that cannot be listed: {error.strerror or error}",
                    "it belongs to another user" if isinstance(error, PermissionError) else "",
                    "chmod +rx the folder, or run as its owner" if isinstance(error, PermissionError) else "",
                    code="folder-unreadable",
                )
            )
            continue
        names = {entry.name for entry in listed}
        if any(name.endswith(SUFFIX) for name in names):
            (found.unmarked if names.isdisjoint(_MARKERS) else found.marked).append(relative or ".")
        for entry in reversed(listed):
            inside = f"{relative}/{entry.name}" if relative else entry.name
            if _is_temporary(entry.name):
                found.temporary += SUFFIX in entry.name
            elif _is_folder(entry):
                stack.append((inside, entry.path))
            elif entry.name.endswith(SUFFIX):
                yield entry.path, inside


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: not a folder; opening it as a file says so
        return False
