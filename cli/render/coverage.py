"""The header of a report: what was read, how much of it counts, which columns played which role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_is.analysis.summary import Summary
from rollout_is.cli.render.numbers import NULL, count, percent

_ROLES = ("train", "rollout", "mask", "offsets", "packs")


def coverage_lines(summary: Summary) -> list[tuple[str, str]]:
    """The header as (label, text) pairs."""
    c = summary.coverage
    positions, valid = c.get("positions", 0), c.get("valid_tokens", 0)
    masked, content = c.get("fully_masked", 0), c.get("fully_masked_with_content", 0)
    lines = [
        ("dump", _dump(summary)),
        (
            "positions",
            f"{count(positions)}, of which valid tokens {count(valid)}"
            + (f" ({percent(valid, positions)})" if positions else ""),
        ),
        (
            "segments",
            (
                f"{count(c.get('segments', 0))}: {count(c.get('sequences', 0))} sequences, {count(masked)} fully masked "
                f"({count(masked - content)} pad-like, {count(content)} with content), "
                f"{count(c.get('zero_length', 0))} zero-length"
            ),
        ),
    ]
    if c.get("outside_positions"):
        lines.append(("outside", f"{count(c['outside_positions'])} positions past the last boundary, all masked"))
    if c.get("shards_left_out"):
        n = c["shards_left_out"]
        lines.append(("left out", f"{count(n)} shard{'s' if n != 1 else ''} that cannot be read"))
    if c.get("nonfinite_valid_tokens"):
        lines.append(
            ("non-finite", f"{count(c['nonfinite_valid_tokens'])} valid tokens, left out of the token statistics")
        )
    used = _columns(summary)
    if used:
        lines.append(("columns", used))
    train, rollout = summary.settings.get("train", "train"), summary.settings.get("rollout", "rollout")
    if (train, rollout) != ("train", "rollout"):
        lines.append(("passes", f"{train} in the place of train, {rollout} in the place of rollout"))
    lines.append(("mask", _mask(summary)))
    return lines


def spans(numbers: object) -> str:
    """Whole numbers as ranges; a plain count stays a count.

    >>> spans([1, 2, 3, 7]), spans(4), spans([])
    ('1-3, 7', '4', '-')
    """
    if not isinstance(numbers, list | tuple):
        return NULL if numbers is None else str(numbers)
    values = sorted({n for n in numbers if isinstance(n, int)})
    out: list[str] = []
    start = 0
    for i, value in enumerate(values):
        if i + 1 == len(values) or values[i + 1] != value + 1:
            out.append(str(value) if values[start] == value else f"{values[start]}-{value}")
            start = i + 1
    if len(out) > 6:
        out = [*out[:5], "...", out[-1]]
    return ", ".join(out) or NULL


def _dump(summary: Summary) -> str:
    c = summary.coverage
    parts = [str(summary.source.get("path", "tensors"))]
    shards = c.get("shards", 0)
    parts.append(f"{count(shards)} shard{'s' if shards != 1 else ''}")
    for label in ("steps", "ranks"):
        held = summary.source.get(label)
        parts.append(f"{label} {spans(held)}" if held else f"{label} unknown")
    parts += [str(fmt) for fmt in summary.source.get("formats", ())]
    return ", ".join(parts)


def _columns(summary: Summary) -> str:
    used: Any = summary.source.get("columns") or {}
    dtypes: Any = summary.source.get("dtypes") or {}
    if not isinstance(used, Mapping):
        return ""
    roles = [r for r in _ROLES if r in used] + [r for r in used if r not in _ROLES]
    out = []
    for role in roles:
        dtype = dtypes.get(role) if isinstance(dtypes, Mapping) else None
        name = _join(used[role])
        if role == "mask" and summary.settings.get("mask", "response_mask") != "response_mask":
            role = "response_mask"  # what is used in its place has a line of its own
        out.append((role if name == role else f"{role} = {name}") + (f" ({_join(dtype)})" if dtype else ""))
    return ", ".join(out)


def _join(value: object) -> str:
    return " | ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _mask(summary: Summary) -> str:
    s = summary.settings
    lower, upper = s.get("lower"), s.get("upper")
    text = str(s.get("mask", "response_mask"))
    if lower is not None and upper is not None:
        text += f"; bounds {lower:.4g} to {upper:.4g}"
    veto = [f"{side} {s[key]:.4g}" for side, key in (("below", "veto_lower"), ("above", "veto_upper")) if s.get(key)]
    if veto:
        text += f"; veto {' and '.join(veto)}"
    return text
