"""A path on the command line as a summary: a saved JSON is read (no torch), anything else is analysed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_is.analysis.compare.runs import Side
from rollout_is.analysis.compare.saved import is_saved, read_saved
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary
from rollout_is.cli.progress import Progress
from rollout_is.dumps.errors import UsageError

if TYPE_CHECKING:
    from rollout_is.analysis.batch import Consumer
    from rollout_is.analysis.compare.sequences import SequenceSums


@dataclass(frozen=True)
class Loaded:
    """A summary and, of a dump, what a comparison makes of its tokens."""

    summary: Summary
    sequences: SequenceSums | None = None
    histogram: tuple[int, ...] | None = None

    def side(self, label: str) -> Side:
        """As a side of a comparison."""
        return Side(label, self.summary, None if self.sequences is None else self.sequences.clusters)


@dataclass
class Loader:
    """How dumps are read for one command; saved summaries are read as they are.

    Attributes:
        columns, steps, allow_partial, duplicates, workers: as for ``analyze``.
        quiet: no progress bar.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    steps: str | None = None
    allow_partial: bool = False
    duplicates: str | None = None
    workers: int | None = None
    quiet: bool = False

    def summary(self, paths: str | Sequence[str], settings: Settings, doctor: bool = False) -> Summary:
        """The summary of what the user named.

        Args:
            paths: one saved JSON, or the folders, files and globs of one dump.
            settings: for a dump; a saved summary carries its own.
            doctor: of a dump, also what the doctor finds on the same pass, for limits on ``findings.ID``.

        Raises:
            DumpError: a file cannot be read.
            UsageError: options that change the figures are given for a saved summary.
        """
        listed = [paths] if isinstance(paths, str) else list(paths)
        if len(listed) == 1 and is_saved(listed[0]):
            if replace(settings, by=(), device="cpu") != Settings() or self.columns or self.steps:
                raise _cannot_change(listed[0])
            return read_saved(listed[0])
        if not doctor:
            return self._analyze(listed, settings, ())

        from rollout_is.analysis.gate.examine import examined

        return examined(lambda consumers: self._analyze(listed, settings, consumers))

    def with_sequences(self, path: str, settings: Settings) -> Loaded:
        """The summary and, of a dump, its per-sequence sums for a paired test and its histogram."""
        if is_saved(path):
            return Loaded(self.summary(path, settings))

        from rollout_is.analysis.compare.overlay import RatioHistogram
        from rollout_is.analysis.compare.sequences import SequenceConsumer

        sequences, histogram = SequenceConsumer(settings), RatioHistogram()
        summary = self._analyze([path], settings, (sequences, histogram))
        extra = dict(summary.extra)
        table, counts = extra.pop(sequences.name), extra.pop(histogram.name)
        return Loaded(replace(summary, extra=extra), table, counts)

    def _analyze(self, paths: list[str], settings: Settings, consumers: Sequence[Consumer]) -> Summary:
        from rollout_is.analysis.pipeline import analyze  # imports torch

        with Progress(enabled=not self.quiet) as progress:
            summary = analyze(
                paths,
                settings=settings,
                columns=dict(self.columns),
                steps=self.steps,
                allow_partial=self.allow_partial,
                duplicates=self.duplicates,
                workers=self.workers,
                progress=progress,
                consumers=consumers,
                diagnose=False,
            )
        assert summary is not None, "only ranks of torchrun have no summary, and these commands do not run under it"
        return summary


def _cannot_change(path: str) -> UsageError:
    return UsageError(
        path,
        "expected a dump for options that change the figures, found a saved summary",
        "a saved summary holds figures, not tokens: bounds, masks, columns and steps were fixed when it was made",
        "analyze the dump again with these options, or leave them out",
        code="saved-settings",
    )


def label_of(spec: str) -> tuple[str, str]:
    """(label, path) of ``label=path``, or a label made of the path's last part.

    >>> label_of("main=runs/a.json"), label_of("runs/after/"), label_of("b.json")
    (('main', 'runs/a.json'), ('after', 'runs/after/'), ('b', 'b.json'))
    """
    label, equals, path = spec.partition("=")
    if equals and label and "/" not in label and not Path(spec).exists():
        return label, path
    return Path(spec).name.removesuffix(".json") or spec, spec
