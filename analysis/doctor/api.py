"""The doctor's front door: one pass over a dump, findings as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout_is.analysis.doctor import coverage
from rollout_is.analysis.doctor.consumer import Doctor
from rollout_is.analysis.doctor.verdict import SEVERITIES
from rollout_is.analysis.findings import shell_path
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Finding, Summary

SCHEMA = "rollout-is/doctor/1"


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found, and the figures of the same pass.

    Attributes:
        findings: worst first, consequences attached to their causes (``evidence["explains"]``).
        summary: the statistics, with the same findings in them.
    """

    findings: tuple[Finding, ...]
    summary: Summary

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """Findings of that severity and above."""
        return tuple(f for f in self.findings if SEVERITIES.index(f.severity) >= SEVERITIES.index(severity))

    def ids(self) -> tuple[str, ...]:
        """Every id that was found, attached consequences included: what a gate asks."""
        out: list[str] = []
        for finding in self.findings:
            out += [finding.id, *(x["id"] for x in finding.evidence.get("explains", ()))]
        return tuple(dict.fromkeys(out))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: findings, coverage, source, settings."""
        from dataclasses import asdict

        return {
            "schema": SCHEMA,
            "source": dict(self.summary.source),
            "coverage": dict(self.summary.coverage),
            "settings": dict(self.summary.settings),
            "findings": [asdict(f) for f in self.findings],
        }


def diagnosis(summary: Summary) -> Diagnosis:
    """The diagnosis in a summary whose pass had ``consumers=[Doctor()]``, joined with what the notes say."""
    dump = shell_path(summary)
    found = [Finding(**data) for data in summary.extra.get(Doctor.name, ())]
    found = [replace(f, next=f.next.replace("DUMP", dump)) for f in found]
    findings = coverage.ranked([*found, *coverage.from_notes(summary.notes)])
    extra = {key: value for key, value in summary.extra.items() if key != Doctor.name}
    return Diagnosis(findings, replace(summary, findings=findings, extra=extra))


def run(
    paths: str | Sequence[str],
    *,
    settings: Settings | None = None,
    columns: Mapping[str, str] | None = None,
    steps: str | None = None,
    allow_partial: bool = False,
    duplicates: str | None = None,
    workers: int | None = 1,
    local: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Read a dump once and say what is wrong with its log-probs.

    Args:
        paths: folders, files or globs of one dump.
        settings, columns, steps, allow_partial, duplicates, workers, local, progress: as for ``rollout_is.analyze``.

    Returns:
        The diagnosis, the same for any number of workers and on every rank.

    Raises:
        DumpError: a file cannot be read or is inconsistent.
        UsageError: settings that make no sense.
    """
    from rollout_is.analysis.pipeline import analyze

    summary = analyze(
        paths,
        settings=settings or Settings(),
        columns=columns,
        steps=steps,
        allow_partial=allow_partial,
        duplicates=duplicates,
        workers=workers,
        local=local,
        progress=progress,
        consumers=[Doctor()],
    )
    return diagnosis(summary)
