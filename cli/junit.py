"""The outcome of a check as JUnit XML: one testcase a limit, so that a CI shows limits as it shows tests."""

from __future__ import annotations

from xml.etree import ElementTree

from rollout_is.analysis.gate.evaluate import Outcome, Verdict


def to_junit(verdict: Verdict, name: str = "rollout-is check") -> str:
    """JUnit XML text.

    Args:
        verdict: what was checked.
        name: of the test suite.

    Returns:
        one ``testcase`` a limit: a broken one holds a ``failure``, one that could not be evaluated an ``error``, a broken warning
        a ``system-out`` (a ``failure`` under ``--strict``).
    """
    failing = [outcome for outcome in verdict.outcomes if verdict.counts(outcome)]
    suite = ElementTree.Element(
        "testsuite",
        name=name,
        tests=str(len(verdict.outcomes)),
        failures=str(sum(outcome.status == "fail" for outcome in failing)),
        errors=str(sum(outcome.status == "error" for outcome in failing)),
        skipped="0",
        time="0",
    )
    for outcome in verdict.outcomes:
        _testcase(suite, outcome, verdict)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return "<?xml version='1.0' encoding='utf-8'?>\n" + ElementTree.tostring(root, encoding="unicode") + "\n"


def _testcase(suite: ElementTree.Element, outcome: Outcome, verdict: Verdict) -> None:
    limit = outcome.limit
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_clean(limit.statistic),
        name=_clean(limit.describe()),
        file=_clean(limit.origin.place),
        time="0",
    )
    if limit.origin.line is not None:
        case.set("line", str(limit.origin.line))
    if outcome.status == "pass":
        return
    detail = "\n".join(line for line in (outcome.message, limit.reason, f"limit from {limit.origin}") if line)
    if verdict.counts(outcome):
        kind = "failure" if outcome.status == "fail" else "error"
        element = ElementTree.SubElement(case, kind, message=_clean(outcome.message), type=kind)
    else:
        element = ElementTree.SubElement(case, "system-out")
        detail = f"warning: {detail}"
    element.text = _clean(detail)


def _clean(text: str) -> str:
    """Characters that XML 1.0 cannot hold, as their escapes."""
    return "".join(
        c
        if c in "\t\n\r" or "\x20" <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff"
        else f"\\u{ord(c):04x}"
        for c in text
    )
