"""Numbered footnotes of a whole report: each text once, in the order of first use."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_is.analysis.summary import Statistic
from rollout_is.cli.render.numbers import NULL, shown
from rollout_is.cli.render.table import Cell, cell
from rollout_is.dumps.notes import Note

SEVERITIES: Mapping[str, int] = {"error": 0, "warning": 1, "notice": 2, "info": 3}
MOST_OF_ONE_CODE = 10


class Footnotes:
    """Collects footnotes while tables are built.

    >>> notes = Footnotes()
    >>> notes.mark("veto is off"), notes.mark("one sequence"), notes.mark("veto is off")
    ('[1]', '[2]', '[1]')
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        """The mark of this text, as it is shown behind a cell."""
        return f"[{self._numbers.setdefault(text, len(self._numbers) + 1)}]"

    def statistic(self, statistic: Statistic | None) -> Cell:
        """A statistic as a cell: its value, its log, or a dash with the mark of the reason."""
        text = shown(statistic)
        if statistic is None:
            return cell(NULL + self.mark("not in this report"), None, "dim")
        if text == NULL:
            return Cell(NULL + self.mark(statistic.why or "no reason given"), None, "dim")
        return Cell(text, statistic.value)

    def lines(self) -> list[str]:
        """``[1] text`` for all of them."""
        return [f"[{number}] {text}" for text, number in self._numbers.items()]


def note_lines(notes: tuple[Note, ...], most: int = MOST_OF_ONE_CODE) -> list[tuple[str, str]]:
    """Notes as (severity, sentence), worst first, each sentence once, at most ``most`` of one code, the rest counted.

    >>> note_lines((Note("a", "info", "", "x"), Note("b", "warning", "shard 1", "y")))
    [('warning', 'y (shard 1)'), ('info', 'x')]
    """
    out: list[tuple[str, str]] = []
    seen: dict[str, int] = {}
    for note in sorted(dict.fromkeys(notes), key=lambda n: SEVERITIES.get(n.severity, 9)):
        seen[note.code] = seen.get(note.code, 0) + 1
        if seen[note.code] <= most:
            place = f" ({note.metric})" if note.metric and note.metric not in note.message else ""
            out.append((note.severity, note.message + place))
    out += [("info", f"... and {n - most} more of {code}") for code, n in seen.items() if n > most]
    return out
