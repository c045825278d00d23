"""How names and values that came from a file are shown: printable, one line, bounded."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any


def shown(text: str, limit: int = 80) -> str:
    """``text`` with control characters and broken Unicode escaped, cut to ``limit`` characters.

    >>> shown("a" + chr(27) + "[2J")
    'a\\\\x1b[2J'
    """
    safe = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."


def show(value: Any) -> str:
    """A short representation of any value, however large it is."""
    return shown(reprlib.repr(value))


def listing(names: Sequence[str], limit: int = 10, empty: str = "none") -> str:
    """Names in the order given, at most ``limit`` of them, the rest counted.

    >>> listing(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    if not names:
        return empty
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + more
