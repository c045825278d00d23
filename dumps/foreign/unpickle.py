"""Plain pickles, read into an inert tree: names on an allow-list become ``Node`` objects, every other name is refused.

Nothing that a pickle names is ever imported or called. A name on the list becomes a fresh empty class of ours that only
records how it was called; the format then reads the tree. So even an allowed name has no behaviour at all.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any, Self

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign.opcodes import outline


class Node:
    """A call that a pickle asked for, recorded and not made.

    Attributes:
        name: what would have been called, ``module.name``.
        args: with which arguments.
        state: what would have been passed to ``__setstate__``, else None.
        entries: what would have been set as items.
    """

    name = ""
    args: tuple[Any, ...]
    state: Any
    entries: dict[Any, Any]

    def __new__(cls, *args: Any) -> Self:
        node = object.__new__(cls)
        node.args = args
        node.state = None
        node.entries = {}
        return node

    def __init__(self, *args: Any) -> None:  # takes what __new__ recorded
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, where: str, allowed: frozenset[str], storage: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(file)
        self._where = where
        self._allowed = allowed
        self._storage = storage
        self._classes: dict[str, type[Node]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._allowed:
            raise refusal(self._where, full)
        return self._classes.setdefault(full, type("Recorded", (Node,), {"name": full}))

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise refusal(self._where, "a persistent id")
        return self._storage(pid)


def refusal(where: str, name: str) -> DumpError:
    """The error for a file that needs a name which is not on the allow-list."""
    return DumpError(
        where,
        f"expected only tensors and plain values, found the name {name}",
        "unpickling it would run code or need a class that this tool does not know; nothing was run",
        "save only tensors (torch.save of a dict of tensors) or write with rollout_is.DumpWriter",
        code="pickle-refused",
    )


def load(data: bytes, where: str, allowed: Iterable[str], *, storage: Callable[[Any], Any] | None = None) -> Any:
    """Read one plain pickle into plain values and ``Node`` objects.

    Args:
        data: the bytes of the pickle.
        where: file (and place in it) for messages.
        allowed: full names that may appear, ``module.name``.
        storage: turns a persistent id (a tensor storage in a torch file) into a value; None refuses them.
    Returns:
        dicts, lists, tuples, strings, numbers, bytes and ``Node`` objects.
    Raises:
        DumpError: a name that is not allowed (the message says which), or a damaged pickle.

    >>> import os, pickle
    >>> load(pickle.dumps({"a": (1, 2.5)}), "x.pkl", ())
    {'a': (1, 2.5)}
    >>> load(pickle.dumps(os.listdir), "x.pkl", ())
    Traceback (most recent call last):
    ...
    rollout_is.dumps.errors.DumpError: ...listdir...
    """
    permitted = frozenset(allowed)
    seen = outline(data)
    for name in seen.names:
        if name not in permitted:
            raise refusal(where, name)
    if seen.problem or not seen.complete:
        raise _damaged(where, seen.problem or "the pickle has no end")
    try:
        return _Unpickler(io.BytesIO(data), where, permitted, storage).load()
    except DumpError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged pickle may raise anything
        raise _damaged(where, f"{type(error).__name__}: {error}") from None


def _damaged(where: str, found: str) -> DumpError:
    return DumpError(
        where,
        f"expected a whole pickle, found: {found[:200]}",
        "the file was cut off, is still being written, or was made to break readers",
        "dump it again, or leave it out",
        code="pickle-damaged",
    )
