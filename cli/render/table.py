"""A table as data: what every rendering (text, Markdown, CSV) is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Style = Literal["", "dim", "bold", "good", "warn", "bad"]


@dataclass(frozen=True)
class Cell:
    """One cell: the text of a table, the full-precision value of CSV, a colour that repeats what the text says.

    >>> cell("0.991", 0.99115).value
    0.99115
    """

    text: str
    value: float | int | str | None = None
    style: Style = ""


def cell(text: str, value: float | str | None = None, style: Style = "") -> Cell:
    """Short for Cell; without a value the text is the value."""
    return Cell(text, text if value is None else value, style)


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        header: its name.
        align: ``right`` for numbers.
        group: a name above neighbouring columns; empty for none.
        drop: 0 stays at any width; the highest goes first when the terminal is too narrow.
        wrap: free text that may be broken over lines; it takes what width is left.
    """

    header: str
    align: Literal["left", "right"] = "right"
    group: str = ""
    drop: int = 0
    wrap: bool = False


@dataclass(frozen=True)
class Table:
    """A titled table with remarks below it."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    remarks: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: expected {len(self.columns)} cells in a row, found {len(row)}")
