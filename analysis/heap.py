"""The process's memory: what lies there already is left alone, what is free goes back."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def settled_heap() -> Iterator[None]:
    """Keep the garbage collector off what is there already, modules above all: it would go through them again and again.

    Processes that are forked meanwhile share those pages for good.
    """
    if gc.get_freeze_count():  # the caller's own choice
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back() -> None:
    """Return free pages to the system, where the C library can (glibc).

    Every unit needs some megabytes for a moment and leaves some kilobytes for good; between the latter the former stay free
    but resident, megabytes a unit.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return None
