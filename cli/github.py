"""The outcome of a check for GitHub Actions: annotations (workflow commands), failures first, and the step summary."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rollout_is.analysis.gate.evaluate import Outcome, Verdict
from rollout_is.dumps.errors import UsageError

# GitHub shows ten errors and ten warnings a step and drops the rest without a word.
MOST = 10
_SUMMARY_LIMIT = 1024 * 1024  # bytes a step may write


def workflow_commands(verdict: Verdict) -> str:
    """Workflow commands, one a line: errors first, then warnings; beyond ten of a kind the last one counts the rest."""
    errors = [outcome for outcome in verdict.by_urgency() if verdict.counts(outcome)]
    warnings = [o for o in verdict.by_urgency() if o.status != "pass" and not verdict.counts(o)]
    lines = []
    for kind, outcomes in (("error", errors), ("warning", warnings)):
        shown = outcomes if len(outcomes) <= MOST else outcomes[: MOST - 1]
        lines += [_annotation(kind, outcome) for outcome in shown]
        if len(outcomes) > len(shown):
            left = len(outcomes) - len(shown)
            lines.append(
                f"::{kind} title=rollout-is::{escape_data(f'and {left} more limits; the step summary lists them all')}"
            )
    if not verdict.outcomes:
        lines.append("::error title=rollout-is::no limit was checked")
    return "".join(f"{line}\n" for line in lines)


def _annotation(kind: str, outcome: Outcome) -> str:
    limit = outcome.limit
    properties = {"title": f"rollout-is: {limit.statistic}"}
    if limit.origin.line is not None:
        properties = {"file": limit.origin.place, "line": str(limit.origin.line), **properties}
    message = outcome.message if not limit.reason else f"{outcome.message}\n{limit.reason}"
    listed = ",".join(f"{key}={escape_property(value)}" for key, value in properties.items())
    return f"::{kind} {listed}::{escape_data(message)}"


def escape_data(text: str) -> str:
    """The message of a workflow command.

    >>> escape_data("50 %\\nof steps")
    '50 %25%0Aof steps'
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """A property of a workflow command: colons and commas would end it.

    >>> escape_property("rollout-is: a,b")
    'rollout-is%3A a%2Cb'
    """
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def write_step_summary(markdown: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Append Markdown to the step summary.

    Args:
        markdown: the table.
        environ: the environment; None is that of the process.

    Returns:
        the path written to; None when the job has none (not on GitHub).

    Raises:
        UsageError: the file that GITHUB_STEP_SUMMARY names cannot be written.
    """
    path = (os.environ if environ is None else environ).get("GITHUB_STEP_SUMMARY")
    if not path:
        return None
    if len(markdown.encode()) > _SUMMARY_LIMIT:  # failures come first, so the head is what matters
        markdown = (
            markdown.encode()[: _SUMMARY_LIMIT - 64].decode(errors="ignore").rpartition("\n")[0] + "\n\n(cut off)\n"
        )
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(markdown)
    except OSError as error:
        raise UsageError(
            f"GITHUB_STEP_SUMMARY={path}",
            f"expected a file to append to, found: {error.strerror}",
            "the variable is set by GitHub Actions; here it points somewhere else",
            "unset GITHUB_STEP_SUMMARY, or leave --github out",
            code="step-summary",
        ) from None
    return path
