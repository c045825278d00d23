"""The steps that a user asked for: ``100:200`` with both ends in, ``100,105``, open ends. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout_is.dumps.errors import DumpError, UsageError
from rollout_is.dumps.notes import Note
from rollout_is.dumps.text import listing, shown

_END = 2**63


@dataclass(frozen=True)
class Steps:
    """Closed ranges of steps; no range at all is every step.

    >>> [step for step in range(10) if Steps.parse("1:3,7,9:").holds(step)]
    [1, 2, 3, 7, 9]
    """

    ranges: tuple[tuple[int, int], ...] = ()
    text: str = ""

    @staticmethod
    def parse(text: str | None) -> Steps:
        """Raises UsageError for anything but whole numbers, colons and commas, and for reversed ends."""
        if text is None:
            return Steps()
        ranges = []
        for part in text.split(","):
            first, colon, last = (end.strip() for end in part.partition(":"))
            ends_are_numbers = all(
                end == "" or (end.isascii() and end.isdigit() and len(end) < 19) for end in (first, last)
            )
            if not ends_are_numbers or not (first or colon):
                raise UsageError(
                    f"--steps {shown(text)}",
                    f"expected FIRST:LAST or STEP,STEP, found {shown(part)!r}",
                    "steps are whole numbers >= 0",
                    "write --steps 100:200 (both ends in), --steps 100,105 or --steps 100:",
                    code="steps-syntax",
                )
            low = int(first or 0)
            high = int(last or _END) if colon else low
            if low > high:
                raise UsageError(
                    f"--steps {shown(text)}",
                    f"expected the first step below the last, found {low} and {high}",
                    "the ends are reversed",
                    f"write --steps {high}:{low}",
                    code="steps-syntax",
                )
            ranges.append((low, high))
        return Steps(tuple(ranges), text)

    @property
    def everything(self) -> bool:
        """True when no step was asked for."""
        return not self.ranges

    def holds(self, step: int) -> bool:
        """Whether the step was asked for."""
        return not self.ranges or any(low <= step <= high for low, high in self.ranges)

    def nothing_left(self, others: Iterable[int], root: str) -> DumpError:
        """The error for a range that holds no shard."""
        there = sorted(set(others))
        found = f"steps {there[0]} to {there[-1]}" if there else "shards whose step is unknown"
        return DumpError(
            root,
            f"expected shards with --steps {self.text}, found only {found}",
            "",
            "rollout-is inspect lists the steps",
            code="steps-empty",
        )

    def notes(self, present: set[int | None], unknown: list[str]) -> list[Note]:
        """Steps named one by one that the dump does not hold, and shards that no range can place."""
        notes = []
        absent = [str(low) for low, high in self.ranges if low == high and low not in present]
        if absent:
            notes.append(Note("steps-absent", "warning", "", f"steps asked for and not in the dump: {listing(absent)}"))
        if unknown:
            message = f"{len(unknown)} shards left out by --steps, as their step is unknown: {listing(unknown)}"
            notes.append(Note("steps-unknown", "warning", "", message))
        return notes
