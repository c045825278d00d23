"""The first lines of a report: one when all is well, else at most five findings, worst first."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_is.analysis.summary import Finding, Summary
from rollout_is.cli.render.footnotes import SEVERITIES
from rollout_is.cli.render.numbers import count
from rollout_is.cli.render.table import Style
from rollout_is.cli.render.terminal import Terminal
from rollout_is.cli.render.text import printable, wrap

MOST = 5
_STYLES: dict[str, Style] = {"error": "bad", "warning": "warn", "notice": "bold"}
_PADDING = "padding."


def verdict(summary: Summary, terminal: Terminal) -> str:
    """The verdict as text. Notices do not spoil it: the pad artefact has its own line below the header."""
    serious = [f for f in ranked(summary.findings) if f.severity in ("error", "warning")]
    if not serious:
        c = summary.coverage
        line = (
            f"ok: nothing wrong found in {count(c.get('valid_tokens', 0))} valid tokens "
            f"of {count(c.get('sequences', 0))} sequences"
        )
        body = wrap(line, terminal.width, indent="  ", first="")
        return "".join(f"{terminal.plain(terminal.paint(part, 'good'))}\n" for part in body)
    lines: list[str] = []
    for number, finding in enumerate(serious[:MOST], start=1):
        label = f"{number}. {finding.severity}: "
        body = wrap(label + finding.message, terminal.width, indent="   ", first="")
        style = _STYLES.get(finding.severity, "")
        body[0] = terminal.paint(body[0][: len(label) - 1], style) + body[0][len(label) - 1 :]
        lines += body
        if finding.source:
            lines += [terminal.paint(x, "dim") for x in wrap(f"threshold: {finding.source}", terminal.width, "   ")]
        if finding.next:
            # a command is one line to copy, however long
            lines.append(f"   next: {printable(finding.next)}")
    if len(serious) > MOST:
        lines.append(f"   and {len(serious) - MOST} more (--format json lists them all)")
    return "".join(f"{terminal.plain(line)}\n" for line in lines)


def pad_artefact(summary: Summary, terminal: Terminal) -> str:
    """What counting padding would do to the figures, in words; empty when there is none."""
    lines: list[str] = []
    for finding in summary.findings:
        if finding.id.startswith(_PADDING):
            label = "padding: "
            body = wrap(label + finding.message, terminal.width, indent="   ", first="")
            body[0] = terminal.paint(label, "bold") + body[0][len(label) :]
            lines += body
    return "".join(f"{terminal.plain(line)}\n" for line in lines)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Worst first, the given order kept inside one severity."""
    return sorted(findings, key=lambda f: SEVERITIES.get(f.severity, 9))
