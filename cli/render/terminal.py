"""What the place that a result goes to can show: width, colour, characters."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from rollout_is.cli.render.table import Style

DESIGN_WIDTH, NARROWEST, WIDEST = 100, 40, 200
_CODES: dict[Style, str] = {"dim": "2", "bold": "1", "good": "32", "warn": "33", "bad": "31"}
_UNICODE_PROBE = "─█▁→±…"
_TO_ASCII = str.maketrans({"─": "-", "→": "->", "±": "+-", "…": "~", "·": "|", "≥": ">=", "≤": "<="})


@dataclass(frozen=True)
class Terminal:
    """Width in columns, whether colour is used, whether more than ASCII can be shown.

    >>> Terminal(100, color=False, unicode=True).paint("0.9", "bad")
    '0.9'
    """

    width: int = DESIGN_WIDTH
    color: bool = False
    unicode: bool = True

    def paint(self, text: str, style: Style) -> str:
        """The text in a style; what it says must be readable without."""
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if self.color and style and text else text

    def plain(self, text: str) -> str:
        """The text in characters that can be shown: ours as ASCII, a user's (file names) escaped."""
        if self.unicode:
            return text
        return text.translate(_TO_ASCII).encode("ascii", "backslashreplace").decode("ascii")


def detect(stream: IO[str], color: str = "auto", environ: Mapping[str, str] | None = None) -> Terminal:
    """Look at a stream and the environment.

    Args:
        stream: where the result goes.
        color: ``auto``, ``always`` or ``never``; under ``auto`` NO_COLOR, FORCE_COLOR and TERM=dumb count, then the tty.
        environ: the environment; None is that of the process.
    """
    env = os.environ if environ is None else environ
    tty = _is_tty(stream)
    return Terminal(_width(tty, env), _color(tty, color, env), _unicode(stream))


def for_file() -> Terminal:
    """What a file shows: the design width (or COLUMNS), no colour, all characters."""
    return Terminal(_width(False, os.environ), color=False, unicode=True)


def _is_tty(stream: IO[str]) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _width(tty: bool, env: Mapping[str, str]) -> int:
    text = env.get("COLUMNS", "")
    if text.isdecimal() and int(text) > 0:
        width = int(text)
    elif tty:
        width = shutil.get_terminal_size((DESIGN_WIDTH, 24)).columns
    else:
        width = DESIGN_WIDTH
    return max(NARROWEST, min(width, WIDEST))


def _color(tty: bool, choice: str, env: Mapping[str, str]) -> bool:
    if choice != "auto":
        return choice == "always"
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR"):
        return env["FORCE_COLOR"] != "0"
    return tty and env.get("TERM") != "dumb"


def _unicode(stream: IO[str]) -> bool:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        _UNICODE_PROBE.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
