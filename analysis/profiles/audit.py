"""What is wrong with a logged number: which variant of the trainer's formula reproduces it, and what it should have been."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout_is.analysis.profiles.differs import close, find, statistic
from rollout_is.analysis.profiles.registry import Profile
from rollout_is.analysis.profiles.report import KEY, number
from rollout_is.analysis.summary import Finding, Summary, Views
from rollout_is.dumps.errors import UsageError
from rollout_is.dumps.notes import Note

PADS = "padding rows counted"
# Variants to try for each profile, the plain one apart: (what a number that matches it is, profile, settings that differ).
_VARIANTS: dict[str, tuple[tuple[str, str, dict[str, Any]], ...]] = {
    "xtuner": ((f"{PADS} (xtuner before the fix)", "xtuner-before-1788", {}),),
    "xtuner-before-1788": (("padding rows left out (xtuner after the fix)", "xtuner", {}),),
    "verl": (
        (f"{PADS}", "verl", {"rows": "all"}),
        ("raw weights (verl of January 2026)", "verl-2026-01", {}),
        (f"raw weights (verl of January 2026), {PADS}", "verl-2026-01", {"rows": "all"}),
    ),
    "verl-2026-01": (
        (f"{PADS}", "verl-2026-01", {"rows": "all"}),
        ("applied weights (verl of August 2026)", "verl", {}),
        (f"applied weights (verl of August 2026), {PADS}", "verl", {"rows": "all"}),
    ),
    "slime": (
        ("tokens averaged instead of samples", "slime", {"calculate_per_token_loss": True}),
        ("samples averaged instead of tokens", "slime", {"calculate_per_token_loss": False}),
    ),
    "nemo-rl": (
        ("micro-batches as packed sequences", "nemo-rl", {"layout": "packed_loop"}),
        ("micro-batches as dense rows", "nemo-rl", {"layout": "dense"}),
        ("fully masked samples counted", "nemo-rl", {"fully_masked_sample_mask": 1}),
    ),
    "trl": (),
}
_BY_SEQUENCE = re.compile(r"^(per_sequence|sequence|geometric|veto)\b|ppl|chi2_(seq|geometric)")
_VIEWS = {
    "masked": "the exact value over valid tokens and sequences",
    "padded": f"{PADS} (exact, all packs pooled)",
    "unmasked": "mask ignored (exact, every position)",
}


def variants(profile: Profile) -> list[tuple[str, Profile]]:
    """(label, profile) pairs to run for an audit; the profile itself first, with an empty label."""
    out = [("", profile)]
    for label, name, changed in _VARIANTS[profile.name]:
        settings = profile.settings | changed
        if name != profile.name or settings != profile.settings:
            out.append((label, Profile(name, settings)))
    return out


def with_audit(summary: Summary, profile: Profile) -> Summary:
    """The summary with ``extra["audit"]``: one entry a step and logged name.

    Args:
        summary: of an analysis by step that ran ``ProfileConsumer(variants(profile), logged=True)``.
        profile: the trainer's profile, with its settings.

    Raises:
        UsageError: the trainer logged nothing that the profile knows.
    """
    data = summary.extra[KEY]
    entries = []
    unknown: list[str] = []
    for step, logged in data["logged"].items():
        runs = data["steps"][step]
        views = _views_of(summary, step)
        for given, value in logged.items():
            name = _resolve(given, {n for run in runs.values() for n in run["metrics"]})
            if name is None:
                unknown.append(given)
                continue
            entries.append(_entry(step, given, name, value, runs, views, profile))
    if not entries:
        names = ", ".join(sorted(set(unknown))[:8])
        raise UsageError(
            f"--as {profile.name} --audit",
            f"expected trainer_metrics under names that {profile.name} logs, found {names}",
            "another trainer wrote this dump, or the setting that makes it log them is missing",
            f"name its own profile or settings, for example --as {profile.name}:{_hint(profile)}",
            code="audit-names",
        )
    notes = list(summary.notes)
    if unknown:
        names = ", ".join(sorted(set(unknown))[:8])
        notes.append(
            Note(
                "audit-unknown",
                "notice",
                "trainer_metrics",
                f"not metrics of {profile.name} under these settings: {names}",
            )
        )
    extra = {**summary.extra, "audit": {"name": profile.name, "settings": profile.settings, "entries": entries}}
    found = (*summary.findings, *_findings(entries, profile))
    return replace(summary, extra=extra, notes=tuple(dict.fromkeys(notes)), findings=found)


def _findings(entries: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """One finding for the numbers that count padding rows, one for those that nothing reproduces."""
    padded = [e for e in entries if e["reproduced_by"] and PADS in e["reproduced_by"][0]]
    lost = [e for e in entries if not e["reproduced_by"]]
    out = []
    for code, wrong, what in (
        ("audit.padding-rows", padded, "count padding rows"),
        ("audit.not-reproduced", lost, f"are reproduced by no variant of {profile.name}"),
    ):
        if wrong:
            far = max(wrong, key=lambda e: abs((e["logged"] or 0.0) - e["ours"]) if e["ours"] is not None else -1.0)
            out.append(
                Finding(
                    code,
                    "warning",
                    f"{len(wrong)} of {len(entries)} numbers that the trainer logged {what}: {far['verdict']}",
                    {"metrics": sorted({e["metric"] for e in wrong})},
                    f"recomputed as {profile.name}",
                    f"rollout-is explain {code}",
                )
            )
    return out


def _hint(profile: Profile) -> str:
    hints = {
        "xtuner": "rollout_is_threshold=[5.0,0.5]",
        "verl": "rollout_is=token",
        "slime": "use_tis=true,custom_tis_function_path=mis",
    }
    return next((text for name, text in hints.items() if profile.name.startswith(name)), "@settings.json")


def _views_of(summary: Summary, step: str) -> Views:
    group = summary.groups.get("step", {}).get(step)
    return group.views if group is not None else summary.views


def _resolve(given: str, known: set[str]) -> str | None:
    """The profile's name for a logged one: the same, or the only one with the same last part."""
    if given in known:
        return given
    tails = [name for name in sorted(known) if name.rsplit("/", 1)[-1] == given.rsplit("/", 1)[-1]]
    return tails[0] if len(tails) == 1 else None


def _entry(
    step: str, given: str, name: str, value: float, runs: Mapping[str, Any], views: Views, profile: Profile
) -> dict[str, Any]:
    matches, others = [], {}
    for label, run in runs.items():
        found = run["metrics"].get(name)
        if found is None:
            continue
        if same(value, found, name):
            matches.append(label)
        else:
            others[label or f"{profile.name} as it stands"] = number(found)[0]
    known = find(profile.name, profile.settings, name)
    exact: float | None = None
    if known is not None:
        for view in _VIEWS:
            held = statistic(views, view, known[0])
            if held is None or held.value is None:
                continue
            if view == "masked":
                exact = held.value
            if same(value, held.value, name) and not (view != "masked" and matches):
                matches.append(view)
    logged, word = number(value)
    return {
        "step": step or None,
        "metric": given,
        "logged": logged,
        "logged_word": word,
        "reproduced_by": [_VIEWS.get(m, m) or profile.name for m in matches],
        "others": others,
        "ours": exact,
        "statistic": None if known is None else f"masked.{known[0]}",
        "verdict": _verdict(given, value, matches, exact, known, profile, others),
    }


def same(logged: float, found: float, name: str) -> bool:
    """Equal within float32 and within the digits that were logged (three or more of them)."""
    if close(logged, found, name):
        return True
    text = repr(logged)
    digits = text.replace("-", "").replace(".", "").lstrip("0")
    if "e" in text or "." not in text or not 3 <= len(digits) <= 6:
        return False
    return abs(logged - found) <= 0.5 * 10.0 ** -len(text.split(".")[1])


def _verdict(
    given: str,
    value: float,
    matches: list[str],
    exact: float | None,
    known: tuple[str, str] | None,
    profile: Profile,
    others: Mapping[str, float | None],
) -> str:
    shown = f"logged {given} {value:.6g}"
    over = "sequences" if known and _BY_SEQUENCE.search(known[0]) else "tokens"
    truth = "" if exact is None else f"; over valid {over} it is {exact:.4g}"
    if not matches:
        near = min(
            ((abs(v - value), label, v) for label, v in others.items() if v is not None and math.isfinite(value)),
            default=None,
        )
        nearest = f"; nearest: {near[1]} {near[2]:.6g}" if near else ""
        return f"{shown} is reproduced by none of them{nearest}{truth}"
    if "masked" in matches:
        return f"{shown} = the exact value over valid {over}"
    if "" in matches:
        differs = exact is not None and not close(value, exact, given)
        why = f" ({known[1]})" if known and known[1] and differs else ""
        return f"{shown} = {profile.name} as it stands{why}{truth if differs else ''}"
    label = _VIEWS.get(matches[0], matches[0])
    return f"{shown} = {label}{truth}"
