"""Findings of the doctor as text, Markdown and CSV: the sentence first, then what it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_is.analysis.summary import Finding
from rollout_is.cli.render.coverage import spans
from rollout_is.cli.render.markup import escape, rows_to_csv
from rollout_is.cli.render.numbers import count
from rollout_is.cli.render.table import Style
from rollout_is.cli.render.terminal import Terminal
from rollout_is.cli.render.text import printable, wrap

STYLES: dict[str, Style] = {"error": "bad", "warning": "warn", "notice": "bold"}
_INDENT = 12


def text(findings: Sequence[Finding], coverage: Mapping[str, Any], terminal: Terminal) -> str:
    """All findings, worst first; one line when there is none at notice or above."""
    told = faults(findings)
    lines = [headline(told, coverage, terminal)]
    for number, finding in enumerate(told, start=1):
        lines += ["", *_block(number, finding, terminal)]
    for finding in findings:
        if finding not in told:
            remark = printable(f"{finding.severity}: {finding.message} [{finding.id}]")
            lines += ["", *wrap(remark, terminal.width, indent="   ", first="")]
    return "".join(f"{terminal.plain(line)}\n" for line in lines)


def faults(findings: Sequence[Finding]) -> list[Finding]:
    """What counts as a fault: not information, and not a mere notice on what the dump holds."""
    return [
        f for f in findings if f.severity != "info" and not (f.severity == "notice" and f.id.startswith("coverage."))
    ]


def headline(told: Sequence[Finding], coverage: Mapping[str, Any], terminal: Terminal) -> str:
    """The verdict in one line."""
    valid = coverage.get("valid_tokens", 0)
    scope = f"{count(valid)} valid tokens of {count(coverage.get('sequences', 0))} sequences"
    if not valid:
        return terminal.paint("nothing to examine: no valid tokens", "bad")
    if not told:
        return terminal.paint(f"ok: no fault found in {scope}", "good")
    n = len(told)
    return terminal.paint(f"{n} {'finding' if n == 1 else 'findings'} in {scope}, worst first", "bold")


def facts(finding: Finding) -> list[tuple[str, str]]:
    """(label, text) pairs of what a finding rests on, in print order."""
    evidence = finding.evidence
    out: list[tuple[str, str]] = []
    touched = _touched(evidence)
    if touched:
        out.append(("touches", touched))
    if evidence.get("strength") is not None:
        out.append(("strength", f"{evidence['strength']:.3g}: {evidence['strength_is']}"))
    out += [("at", _place(place)) for place in evidence.get("places", ())[:3]]
    out += [("explains", f"{x['id']}: {x['message']}") for x in evidence.get("explains", ())]
    if evidence.get("alternatives"):
        out.append(("or else", "; ".join(evidence["alternatives"])))
    if finding.source:
        out.append(("source", finding.source))
    return out


def _block(number: int, finding: Finding, terminal: Terminal) -> list[str]:
    label = f"{number}. {finding.severity}: "
    body = wrap(f"{label}{printable(finding.message)} [{finding.id}]", terminal.width, indent="   ", first="")
    body[0] = terminal.paint(body[0][: len(label) - 1], STYLES.get(finding.severity, "")) + body[0][len(label) - 1 :]
    for name, value in facts(finding):
        rows = wrap(printable(value), terminal.width, indent=" " * (3 + _INDENT), first=" " * (3 + _INDENT))
        rows[0] = "   " + terminal.paint(name.ljust(_INDENT), "dim") + rows[0][3 + _INDENT :]
        body += rows
    if finding.next:
        body.append("   " + terminal.paint("next".ljust(_INDENT), "dim") + printable(finding.next))
    return body


def _touched(evidence: Mapping[str, Any]) -> str:
    parts = []
    if evidence.get("tokens") is not None:
        share = evidence.get("token_share")
        parts.append(
            f"{count(evidence['tokens'])} tokens" + (f" ({100 * share:.3g} % of those looked at)" if share else "")
        )
    if evidence.get("sequences") is not None:
        parts.append(f"{count(evidence['sequences'])} sequences")
    for name in ("ranks", "steps"):
        if evidence.get(name):
            parts.append(f"{name if len(evidence[name]) > 1 else name[:-1]} {spans(evidence[name])}")
    return ", ".join(parts)


def _place(place: Mapping[str, Any]) -> str:
    rows = " | ".join(
        f"{'>' if position == place['position'] else ''}{position}: {_short(t)} {_short(r)}"
        for position, t, r in place["neighbours"]
    )
    return (
        f"{place['shard']} sequence {place['sequence']} position {place['position']} (position: train rollout) {rows}"
    )


def _short(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.4g}"


def markdown(findings: Sequence[Finding], coverage: Mapping[str, Any]) -> str:
    """A section for each finding."""
    lines = [f"# Doctor: {headline(faults(findings), coverage, Terminal())}", ""]
    for number, finding in enumerate(findings, start=1):
        lines += [f"## {number}. {finding.severity}: `{finding.id}`", "", escape(finding.message), ""]
        lines += [f"- {name}: {escape(value)}" for name, value in facts(finding)]
        lines += [f"- next: `{finding.next}`", ""] if finding.next else [""]
    return "\n".join(lines)


def csv(findings: Sequence[Finding]) -> str:
    """One row a finding."""
    header = ["id", "severity", "message", "strength", "tokens", "sequences", "explains", "source", "next"]
    rows: list[list[float | int | str | None]] = []
    for f in findings:
        e = f.evidence
        explains = " ".join(x["id"] for x in e.get("explains", ()))
        rows.append(
            [
                f.id,
                f.severity,
                f.message,
                e.get("strength"),
                e.get("tokens"),
                e.get("sequences"),
                explains,
                f.source,
                f.next,
            ]
        )
    return rows_to_csv(header, rows)
