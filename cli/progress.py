"""A progress bar on stderr: only on a terminal, only past the first second, gone at the end."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rollout_is.cli.output import secondary_rank

PATIENCE = 1.0
_EVERY = 0.1


class Progress:
    """Callable as ``progress(done, total)``, in positions; a context manager that wipes its line.

    Args:
        enabled: False never shows anything (``-q``).

    >>> with Progress(enabled=False) as progress:
    ...     progress(1, 2)
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled and not secondary_rank() and _is_tty()
        self._started = time.monotonic()
        self._last = 0.0
        self._width = 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._enabled or now - self._started < PATIENCE or now - self._last < _EVERY:
            return
        self._last = now
        share = min(done / total, 1.0) if total else 0.0
        left = (now - self._started) * (1 - share) / share if share > 0 else 0.0
        text = f"{share:4.0%} of {_amount(total)} positions, {left:.0f} s left"
        self._width = max(self._width, len(text))
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()


def _amount(n: int) -> str:
    return f"{n:,}" if n < 10_000_000 else f"{n / 1e6:,.0f} million"


def _is_tty() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
