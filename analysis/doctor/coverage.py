"""What the foundation notes already (missing ranks, masks with values, coarse storage), as findings in the doctor's one list."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_is.analysis.doctor.verdict import SEVERITIES
from rollout_is.analysis.summary import Finding
from rollout_is.dumps.notes import Note

# Notes that a fingerprint judges by itself, with more evidence; the note would say it twice.
JUDGED = (
    "nonfinite-valid",
    "both-zero",
    "all-zero-side",
    "constant-value",
    "identical-sides",
    "positive-logprobs",
    "dtype-resolution",
)


def from_notes(notes: Sequence[Note]) -> list[Finding]:
    """Findings ``coverage.CODE`` from notes at notice and above.

    >>> from_notes([Note("mask-values", "notice", "mask", "mask has values {0, 1, 2}")])[0].id
    'coverage.mask-values'
    """
    out = []
    for note in notes:
        if note.severity == "info" or note.code in JUDGED:
            continue
        evidence = {"metric": note.metric, "explains": [], "places": []}
        out.append(
            Finding(
                f"coverage.{note.code}",
                note.severity,
                note.message,
                evidence,
                "any at all",
                f"rollout-is explain {note.code}",
            )
        )
    return out


def ranked(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Worst severity first; inside one the given order stays."""
    return tuple(sorted(findings, key=lambda f: -SEVERITIES.index(f.severity)))
