"""From paths to the shards of a dump, by headers only. No torch, no data read.

Every problem is met before anything is decided: one bad shard never hides the others. Without ``allow_partial`` they are
raised together; with it, what can be read goes on and ``Scan.problems`` says what is left out.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_is.dumps import coverage
from rollout_is.dumps.columns import check_columns
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.files import Found, Paths, as_list, find_files
from rollout_is.dumps.header import header_of, open_regular
from rollout_is.dumps.layout import FORMAT, describe
from rollout_is.dumps.notes import Note
from rollout_is.dumps.place import Place, path_place, place_of
from rollout_is.dumps.shard import ShardInfo
from rollout_is.dumps.steps import Steps
from rollout_is.dumps.text import listing, shown

SHOWN = 10  # offenders that a message names; the rest are counted


@dataclass(frozen=True)
class Scan:
    """The shards of a dump in canonical order, and what is to be said of them.

    Attributes:
        shards: by step, then rank, then name.
        problems: what ``allow_partial`` left out, one error a shard.
        notes: remarks on the dump as a whole.
        root: how the dump is called in reports: the paths as given.
    """

    shards: tuple[ShardInfo, ...]
    problems: tuple[DumpError, ...]
    notes: tuple[Note, ...]
    root: str


def scan(
    paths: Paths,
    *,
    columns: Mapping[str, str] | None = None,
    steps: str | None = None,
    allow_partial: bool = False,
    duplicates: str | None = None,
) -> Scan:
    """Find and describe the shards of a dump.

    Args:
        paths: folder (any depth), file, glob, or a sequence of them.
        columns: role -> tensor name, where the known names do not settle it.
        steps: ``100:200`` (both ends in), ``100,105``, ``:200``; None is all.
        allow_partial: go on without bad shards and missing ranks (missing ranks beside a single file are only noted).
        duplicates: ``newest`` or ``all`` of several shards for one (step, rank); None refuses them.

    Returns:
        The scan; it holds at least one shard.

    Raises:
        DumpError: nothing to read, or something that cannot be read (every bad shard is listed, ten by name).
        UsageError: a role, step range or ``duplicates`` that does not exist.
    """
    chosen = check_columns(columns)
    wanted = Steps.parse(steps)
    coverage.check_duplicates_choice(duplicates)
    root = ", ".join(sorted(shown(path, 400) for path in as_list(paths)))  # in whatever order they came
    found = find_files(paths)
    headers = _Headers(chosen, wanted)
    headers.read(found)
    if not (headers.shards or headers.problems or headers.filtered or headers.unknown_steps):
        raise _nothing(root, found)
    if not allow_partial and headers.problems:
        raise together(headers.problems, len(headers.shards) + len(headers.problems), root)
    shards, notes = coverage.settle_duplicates(headers.shards, duplicates)
    if not shards:
        if headers.problems:
            raise together(headers.problems, len(headers.problems), root)
        raise wanted.nothing_left(headers.filtered, root)
    shards = sorted(shards, key=lambda shard: shard.sort_key)
    one_file = len(as_list(paths)) == 1 and os.path.isfile(as_list(paths)[0])  # who names one shard means one shard
    notes += coverage.missing_ranks(shards, headers.bad_places, root, allow_partial or one_file)
    notes += coverage.context_parallel(shards, allow_partial, root)
    notes += coverage.missing_steps(shards)
    notes += wanted.notes({shard.step for shard in shards}, headers.unknown_steps)
    notes += _column_notes(headers.column_notes, len(shards))
    if headers.same:
        message = f"{listing(headers.same)}: reached a second time through another path or link; counted once"
        notes.append(Note("same-file-twice", "info", "", message))
    if found.temporary:
        message = (
            f"{found.temporary} hidden or temporary file{'s' * (found.temporary > 1)} passed over: still being written?"
        )
        notes.append(Note("temporary-files", "info", "", message))
    if found.passed_over:
        others = [os.path.basename(path) for path in sorted(found.passed_over)]  # the end of a long path is what tells
        message = f"files of another kind beside the shards, passed over: {listing(others, SHOWN)}"
        notes.append(Note("files-passed-over", "info", "", message))
    if found.marked and found.unmarked:
        message = f"folders without the marker of completeness that others have: {listing(sorted(found.unmarked), SHOWN)}; still being written?"
        notes.append(Note("folders-unmarked", "warning", "", message))
    if headers.problems:
        total = len(headers.problems) + len(shards)
        names = listing([problem.where for problem in headers.problems], SHOWN)
        message = (
            f"{len(headers.problems)} of {total} shards left out ({100 * len(headers.problems) / total:.3g} %): {names}"
        )
        notes.append(Note("shards-left-out", "warning", "", message))
    return Scan(tuple(shards), tuple(headers.problems), tuple(notes), root)


def all_problems(
    paths: Paths, *, columns: Mapping[str, str] | None = None, steps: str | None = None
) -> list[DumpError]:
    """Every bad shard under the paths, each with its own error, however many there are.

    Raises:
        DumpError: a path that does not exist.
        UsageError: a role or step range that does not exist.
    """
    headers = _Headers(check_columns(columns), Steps.parse(steps))
    headers.read(find_files(paths))
    return headers.problems


class _Headers:
    """Reads the header of each file once, and collects what is good, bad, or not asked for."""

    def __init__(self, columns: dict[str, str], wanted: Steps) -> None:
        self.columns = columns
        self.wanted = wanted
        self.shards: list[ShardInfo] = []
        self.problems: list[DumpError] = []
        self.bad_places: list[Place] = []
        self.filtered: list[int] = []  # steps outside the range asked for
        self.unknown_steps: list[str] = []  # shards without a step while a range is asked for
        self.same: list[str] = []
        self.column_notes: list[tuple[str, Note]] = []
        self._seen: set[tuple[int, int]] = set()

    def read(self, found: Found) -> None:
        for problem in found.problems:
            self.problems.append(problem)
        for path, name, parent in found.files:
            self._file(path, name, parent)
        for path in found.foreign:
            self._foreign(path)

    def _file(self, path: str, name: str, parent: str) -> None:
        try:
            fd = open_regular(path, name)
            try:
                status = os.fstat(fd)
                key = (status.st_dev, status.st_ino)
                if key in self._seen:
                    self.same.append(name)
                    return
                self._seen.add(key)
                header = header_of(fd, name)
            finally:
                os.close(fd)
            place = place_of(name, header.metadata, parent)
            if not self._is_wanted(place, name):
                return
            _check_format(header.metadata, name)
            tensors = {tensor: (entry.dtype, entry.shape) for tensor, entry in header.tensors.items()}
            info, notes = describe(
                tensors,
                header.metadata,
                path=path,
                name=name,
                place=place,
                columns=self.columns,
                size=header.size,
                mtime_ns=header.mtime_ns,
            )
            if "source_format" in header.metadata:  # converted: what its source had to say still holds
                notes += _foreign_module("infos").notes_of(header.metadata)
            if "source_format" in header.metadata:  # converted: what its source had to say still holds
                notes += _foreign_module("infos").notes_of(header.metadata)
        except DumpError as problem:
            place = path_place(name)
            if place.step is not None and not self.wanted.holds(place.step):
                self.filtered.append(place.step)
                return
            self.problems.append(problem)
            self.bad_places.append(place)
        else:
            self._add(info, notes)

    def _is_wanted(self, place: Place, name: str) -> bool:
        if self.wanted.everything:
            return True
        if place.step is None:
            self.unknown_steps.append(name)
            return False
        if not self.wanted.holds(place.step):
            self.filtered.append(place.step)
            return False
        return True

    def _add(self, info: ShardInfo, notes: tuple[Note, ...]) -> None:
        self.shards.append(info)
        self.column_notes += [(info.name, note) for note in notes]

    def _foreign(self, path: str) -> None:
        """Files of other formats, read by the modules beside the registry; then a shard of ours under another name."""
        try:
            shards = _foreign_module("registry").find(path, self.columns)
        except DumpError as problem:
            self.problems.append(problem)
            self.bad_places.append(path_place(path))
            return
        if shards:
            for info in shards:
                if self._is_wanted(Place(info.step, info.rank, info.world_size), info.name):
                    self._add(info, _foreign_module("infos").notes_of(info.metadata))
        elif not os.path.isdir(path):
            self._file(path, shown(os.path.basename(path), 400), os.path.dirname(os.path.abspath(path)))


def _foreign_module(name: str) -> Any:
    """A module of the foreign readers; they import torch or pyarrow only for the files that need it."""
    return importlib.import_module(f"rollout_is.dumps.foreign.{name}")


def _check_format(metadata: Mapping[str, str], name: str) -> None:
    given = metadata.get("format", FORMAT)
    if given.startswith("rollout-is/") and given != FORMAT:
        raise DumpError(
            f"{name}: metadata format",
            f"expected {FORMAT}, found {shown(given)}",
            "the dump was written by a newer version",
            "upgrade rollout-is",
            code="format-version",
        )


def _nothing(root: str, found: Found) -> DumpError:
    extra = f" ({found.temporary} temporary or hidden ones passed over)" if found.temporary else ""
    return DumpError(
        root,
        f"expected *.safetensors shards, found none{extra}",
        "the run has not dumped yet, or the dump is elsewhere",
        "give the folder that DumpWriter wrote to",
        code="no-shards",
    )


def together(problems: list[DumpError], total: int, root: str) -> DumpError:
    """All bad shards in one error; one alone is itself, with the way round it."""
    if len(problems) == 1:
        return _beside_others(problems[0]) if total > 1 else problems[0]
    codes = {problem.code for problem in problems}
    code = codes.pop() if len(codes) == 1 else "shards-bad"
    lines = [f"{problem.where}: {problem.problem}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"and {len(problems) - SHOWN} more")
    share = f"{len(problems)} of {total} shards"
    head = f"expected every shard to be readable, found {share} that are not"
    words, fixes = {problem.problem for problem in problems}, {problem.fix for problem in problems}
    fix = "mend or remove them, or pass --allow-partial to report on the rest"
    if code == "column-missing" and all(" missing: " in word for word in words):
        missing = {problem.problem.partition(" missing")[0] for problem in problems}
        head = f"{' and '.join(sorted(missing))} missing in {share} ({100 * len(problems) / total:.3g} %)"
        for index, problem in enumerate(problems[:SHOWN]):  # what is missing stands in the head: say what is there
            found = problem.problem.rpartition(", found ")[2]
            lines[index] = f"{problem.where}: found {found}"
    elif len(words) == 1:  # the same everywhere: said once, then where
        head = f"{words.pop()} ({share})"
        lines = [problem.where for problem in problems[:SHOWN]] + lines[SHOWN:]
        if len(fixes) == 1 and len(problems) == total:  # no part is left to report on
            fix = fixes.pop() or fix
    whys = {problem.why for problem in problems}
    return DumpError(
        root,
        head + ":\n    " + "\n    ".join(lines),
        whys.pop() if len(whys) == 1 else "",
        fix,
        code=code,
    )


def _beside_others(problem: DumpError) -> DumpError:
    partial = "--allow-partial reports on the other shards"
    fix = f"{problem.fix}; {partial}" if problem.fix else partial
    return DumpError(problem.where, problem.problem, problem.why, fix, code=problem.code)


def _column_notes(found: list[tuple[str, Note]], total: int) -> list[Note]:
    """One note for the same remark on many shards."""
    groups: dict[tuple[str, str], list[tuple[str, Note]]] = {}
    for name, note in found:
        key = "" if note.code == "shard-without-tensors" else note.metric
        groups.setdefault((note.code, key), []).append((name, note))
    notes = []
    for (code, metric), members in groups.items():
        name, note = members[0]
        if code == "shard-without-tensors":
            names = [member for member, _ in members]
            message = f"{len(names)} of {total} shards hold no tensor, counted as empty: {listing(names, SHOWN)}"
        else:
            message = f"{note.message} (in {len(members)} of {total} shards, first {name})"
        notes.append(Note(code, note.severity, metric, message))
    return notes
