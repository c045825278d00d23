"""What a foreign format is: one class in one file under ``formats/``; the registry finds it.

A format says which sniffed files are its own (by their content), turns them into sources (one source is one shard; a source
may join several files), and reads a source into packed columns. See ``docs/formats.md`` for how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign.sniff import Sniffed
from rollout_is.dumps.notes import Note

if TYPE_CHECKING:
    from rollout_is.dumps.foreign.packed import Packed
    from rollout_is.dumps.shard import OpenShard, ShardInfo


@dataclass(frozen=True)
class Source:
    """One shard to be: the file that gives it its name, and what is joined to it.

    Attributes:
        path: the file that stands for the shard.
        parts: every file that is read for it, ``path`` included, in joining order.
        step, rank: as far as names or content say.
        columns: the user's choices of tensors for roles, for formats that take any names.
        remarks: notes for the report (what was joined or left out and why).
    """

    path: Path
    parts: tuple[Path, ...]
    step: int | None = None
    rank: int | None = None
    remarks: tuple[Note, ...] = ()
    columns: tuple[tuple[str, str], ...] = ()


@dataclass
class Harvest:
    """What a format made of the files that are its own.

    Attributes:
        sources: the shards to be.
        remarks: notes about files that were left out.
        problems: errors to raise when nothing at all can be read.
    """

    sources: list[Source] = field(default_factory=list)
    remarks: list[Note] = field(default_factory=list)
    problems: list[DumpError] = field(default_factory=list)


class Format:
    """Base of all formats.

    Attributes:
        name: what the report calls it.
        priority: formats are asked in ascending order; the first that claims a file has it.
        yields_to: names of formats beside which its files are left out, because they hold the same tokens again.
        takes_columns: whether ``--column`` may name its tensors.
        train_policy: which policy the train log-probs are of: ``old``, ``current`` or empty when the file does not say.
    """

    name: ClassVar[str] = ""
    priority: ClassVar[int] = 50
    yields_to: ClassVar[tuple[str, ...]] = ()
    takes_columns: ClassVar[bool] = False
    train_policy: ClassVar[str] = ""
    trainer: ClassVar[str] = ""

    def claims(self, file: Sniffed) -> bool:
        """Whether the file is this format's, by its content."""
        raise NotImplementedError

    def harvest(self, files: Sequence[Sniffed]) -> Harvest:
        """Turn claimed files into sources. The default: each file is a shard, step and rank from its path."""
        return Harvest([Source(f.path, (f.path,), *step_and_rank(f.path)) for f in files])

    def read(self, source: Source) -> Packed:
        """Read a source into packed columns.

        Raises:
            DumpError: what is wrong with the file, and the way out.
        """
        raise NotImplementedError

    def info(self, source: Source) -> ShardInfo | None:
        """A cheap ``ShardInfo`` where the format can give one without reading the values; None: read and count."""
        return None

    def open(self, source: Source, info: ShardInfo) -> OpenShard | None:
        """A shard that streams from the file, where the format can; None: it is read into memory."""
        return None


def remark(code: str, message: str, about: str = "") -> Note:
    """A note on files: what was joined, dropped or left out."""
    return Note(code, "notice", about, message)


_STEP = re.compile(r"(?:global_step|rollout|step)[_\-]?(\d+)", re.IGNORECASE)
_RANK = re.compile(r"rank[_\-]?(\d+)", re.IGNORECASE)
_PAIR = re.compile(r"^(\d+)_(\d+)$")


def step_and_rank(path: Path) -> tuple[int | None, int | None]:
    """Step and rank as the file name, else its folder, writes them.

    >>> step_and_rank(Path("run/rollout_12_rank3.pt"))
    (12, 3)
    >>> step_and_rank(Path("train_data/7_0.pt"))
    (7, 0)
    >>> step_and_rank(Path("step_4/rank_1.jsonl"))
    (4, 1)
    """
    stem = path.stem
    pair = _PAIR.match(stem)
    if pair:
        return int(pair[1]), int(pair[2])
    if stem.isdigit():
        return int(stem), None
    step = _STEP.search(stem) or _STEP.search(path.parent.name)
    rank = _RANK.search(stem)
    return (int(step[1]) if step else None), (int(rank[1]) if rank else None)
