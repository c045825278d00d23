"""A path on the command line as a summary: a saved JSON is read (no torch), anything else is analysed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_is.analysis.compare.saved import is_saved, read_saved
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary
from rollout_is.cli.progress import Progress


def load_summary(
    paths: Sequence[str],
    settings: Settings,
    *,
    columns: Mapping[str, str] | None = None,
    steps: str | None = None,
    allow_partial: bool = False,
    duplicates: str | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> Summary:
    """The summary of what the user named.

    Args:
        paths: one saved JSON, or the folders, files and globs of one dump.
        settings: for a dump; a saved summary carries its own.
        columns, steps, allow_partial, duplicates, workers: as for ``analyze``.
        quiet: no progress bar.

    Raises:
        DumpError: a file cannot be read.
    """
    if len(paths) == 1 and is_saved(paths[0]):
        return read_saved(paths[0])

    from rollout_is.analysis.pipeline import analyze  # imports torch

    with Progress(enabled=not quiet) as progress:
        summary = analyze(
            list(paths),
            settings=settings,
            columns=dict(columns or {}),
            steps=steps,
            allow_partial=allow_partial,
            duplicates=duplicates,
            workers=workers,
            progress=progress,
        )
    assert summary is not None, "only ranks of torchrun have no summary, and these commands do not run under it"
    return summary


def label_of(spec: str) -> tuple[str, str]:
    """(label, path) of ``label=path``, or a label made of the path's last part.

    >>> label_of("main=runs/a.json"), label_of("runs/after/")
    (('main', 'runs/a.json'), ('after', 'runs/after/'))
    """
    label, equals, path = spec.partition("=")
    if equals and label and "/" not in label and not Path(spec).exists():
        return label, path
    return Path(spec).name or spec, spec
