"""On which line of a TOML file a key stands: tomllib reads values only, and a limit must name its line."""

from __future__ import annotations

import re

Path = tuple[str, ...]

_PART = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*""")


def key_lines(text: str) -> dict[Path, int]:
    """The line (from 1) of every key path and table header that starts a line.

    Args:
        text: valid TOML (tomllib has read it before).

    Returns:
        path -> line of its first appearance. Keys inside an inline table share the line of the outermost key; a table that
        starts a line inside an array has its own, under its number (``("limits", "a.b.c", "0")``).

    >>> key_lines('[limits]\\n"masked.token.rollout_is_mean" = { min = 0.9 }\\n')[("limits", "masked.token.rollout_is_mean")]
    2
    """
    lines: dict[Path, int] = {}
    header: Path = ()
    inside: str | None = None  # the delimiter of a multi-line string that is open
    array: Path = ()  # the array of tables that is open
    items = 0
    for number, line in enumerate(text.split("\n"), 1):
        if inside is not None:
            if line.count(inside) % 2 == 1:
                inside = None
            continue
        stripped = line.strip()
        if array and stripped.startswith(("{", "]")):
            if stripped.startswith("]"):
                array = ()
            else:
                lines[(*array, str(items))] = number
                items += 1
            continue
        if stripped.startswith("["):
            parts, rest = _dotted(stripped.lstrip("["))
            if parts and rest.startswith("]") and "=" not in rest.split("#")[0]:
                header = parts
                lines.setdefault(header, number)
                continue
        parts, rest = _dotted(stripped)
        if parts and rest.startswith("="):
            for depth in range(1, len(parts) + 1):
                lines.setdefault(header + parts[:depth], number)
            if rest[1:].split("#")[0].strip() == "[":
                array, items = header + parts, 0
            for quotes in ('"""', "'''"):
                if rest.count(quotes) % 2 == 1:
                    inside = quotes
    return lines


def _dotted(text: str) -> tuple[Path, str]:
    """Leading dotted key of a line and what follows it; () when there is none."""
    parts: list[str] = []
    position = 0
    while match := _PART.match(text, position):
        basic, literal, bare = match.groups()
        parts.append(basic.replace('\\"', '"') if basic is not None else literal if literal is not None else bare)
        position = match.end()
        if not text.startswith(".", position):
            break
        position += 1
    return tuple(parts), text[position:]
