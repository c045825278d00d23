"""Two histograms of the log-ratio, one above the other on one axis, small enough for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout_is.cli.render.table import Column, Table, cell

if TYPE_CHECKING:
    from rollout_is.analysis.compare.overlay import Overlay

_MARKS, _ASCII_MARKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_TICKS = ((-10.0, "-10"), (-1.0, "-1"), (-0.1, "-.1"), (0.0, "0"), (0.1, ".1"), (1.0, "1"), (10.0, "10"))


def overlay_table(a: str, b: str, overlay: Overlay, unicode: bool = True) -> Table:
    """The histograms as a table of two lines and an axis: the height of a bar is the log of the share of tokens."""
    shares = [[count / max(1, sum(counts)) for count in counts] for counts in (overlay.a, overlay.b)]
    top = max(map(max, shares))
    rows = (
        (cell(a), cell(bars(shares[0], top, unicode))),
        (cell(b), cell(bars(shares[1], top, unicode))),
        (cell(""), cell(axis(overlay))),
    )
    columns = (Column("", "left"), Column("", "left"))
    remark = (
        "one bar a quarter decade, |log-ratio| < 0.0001 in the middle; heights go with the root of the share of tokens"
    )
    return Table("histogram of train - rollout log-prob", columns, rows, (remark,))


def bars(shares: Sequence[float], top: float, unicode: bool = True) -> str:
    """One character a bin; a blank where there is no token, the lowest mark for any share above 0.

    Args:
        shares: of the tokens, one a bin.
        top: the share that gets the highest mark.
        unicode: block characters, else ASCII.

    >>> bars((0.0, 0.01, 0.5, 0.49), 0.5)
    ' ▂██'
    """
    marks = _MARKS if unicode else _ASCII_MARKS
    heights = [math.ceil(len(marks) * math.sqrt(share / top)) if top else 0 for share in shares]
    return "".join(marks[height - 1] if height else " " for height in heights).rstrip() or " "


def axis(overlay: Overlay) -> str:
    """Labels under their edges; one that would touch its neighbour is left out."""
    line = [" "] * (len(overlay.edges) + 1)
    taken = -1
    for value, text in _TICKS:
        near = min(range(len(overlay.edges)), key=lambda i: abs(overlay.edges[i] - value))
        place = len(overlay.edges) // 2 if value == 0 else near + (value > 0)
        start = max(0, min(place - len(text) // 2, len(line) - len(text)))
        if start > taken:
            line[start : start + len(text)] = text
            taken = start + len(text)
    return "".join(line).rstrip()
