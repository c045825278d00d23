"""A pickle read opcode by opcode and never executed: which globals it names, which strings it holds, what it would cost.

This names things for recognition and for error messages and refuses what only an attack would contain. It is not the
wall: that is the allow-list of ``unpickle`` and the ``weights_only`` loader of torch.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any

_UNICODE = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_MEMO_SET = frozenset({"BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"})
_MEMO_GET = frozenset({"BINGET", "LONG_BINGET", "GET"})
_LONGEST_KEY = 80
_LARGEST_KEY = 10_000
_MARK = -1


@dataclass
class Outline:
    """What a pickle names.

    Attributes:
        names: globals asked for, ``module.name``, in order of first appearance.
        strings: short strings (keys among them).
        opcodes: how many opcodes were read.
        complete: False when the limit or the end of the data came before the pickle's own end.
        problem: why the opcodes could not be read on, empty when they could.
        consumed: bytes up to and including the pickle's end.
    """

    names: dict[str, None] = field(default_factory=dict)
    strings: set[str] = field(default_factory=set)
    opcodes: int = 0
    complete: bool = False
    problem: str = ""
    consumed: int = 0


class _Sizes:
    """How many values each value on the stack would be if everything that it shares were written out.

    A thousand tuples that each hold the one before twice are small in memory and endless to hash: as a key of a dict they
    would keep a reader busy for ever. Nothing else that we do walks a value without a limit.
    """

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._memo: dict[int, int] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> str:
        """Follow one opcode; says what is wrong, or nothing."""
        kind, stack = opcode.name, self._stack
        if kind == "MARK":
            stack.append(_MARK)
            return ""
        if kind in _MEMO_SET:
            index = argument if isinstance(argument, int) else len(self._memo)
            self._memo[index] = stack[-1] if stack else 1
            return ""
        if kind in _MEMO_GET and isinstance(argument, int):
            stack.append(self._memo.get(argument, 1))
            return ""
        below, inside = self._pop(opcode)
        keys = inside[::2] if kind in ("SETITEMS", "DICT") else below[1:2] if kind == "SETITEM" else []
        keys = inside if kind in ("ADDITEMS", "FROZENSET") else keys
        if max(keys, default=0) > _LARGEST_KEY:
            return f"a key of more than {_LARGEST_KEY} values"
        size = min(1 + sum(size for size in (*below, *inside) if size > 0), _LARGEST_KEY + 1)
        stack.extend([size] * len(opcode.stack_after))
        return ""

    def _pop(self, opcode: pickletools.OpcodeInfo) -> tuple[list[int], list[int]]:
        stack, before = self._stack, opcode.stack_before
        inside: list[int] = []
        count = len(before)
        if pickletools.markobject in before:
            while stack and stack[-1] != _MARK:
                inside.append(stack.pop())
            if stack:
                stack.pop()
            count = before.index(pickletools.markobject)
        below = [stack.pop() for _ in range(min(count, len(stack)))]
        return below[::-1], inside[::-1]


def outline_all(data: bytes, count: int, *, limit: int | None = None) -> Outline:
    """The outline of several pickles one behind the other, as torch wrote them before zip files.

    Args:
        data: bytes that start with the first.
        count: how many; ``complete`` says that all were there.
        limit: as for ``outline``, for each of them.
    """
    joined = Outline()
    for _ in range(count):
        seen = outline(data[joined.consumed :], limit=limit)
        joined.names |= seen.names
        joined.strings |= seen.strings
        joined.opcodes += seen.opcodes
        joined.consumed += seen.consumed
        joined.complete, joined.problem = seen.complete, seen.problem
        if not seen.complete:
            break
    return joined


def outline(data: bytes, *, limit: int | None = None) -> Outline:
    """Walk the opcodes of a pickle without executing it.

    Args:
        data: bytes that start with the pickle.
        limit: stop after this many opcodes; None reads to the end.
    Returns:
        the globals and short strings in it.

    >>> import pickle, os
    >>> list(outline(pickle.dumps(os.getcwd, protocol=4)).names)[0].endswith(".getcwd")
    True
    """
    seen = Outline()
    sizes = _Sizes()
    memo: dict[int, str] = {}
    last: list[str] = ["?", "?"]  # the two newest pushes, where STACK_GLOBAL finds module and name
    try:
        for opcode, argument, position in pickletools.genops(data):
            seen.opcodes += 1
            kind = opcode.name
            seen.problem = sizes.step(opcode, argument)
            if seen.problem:
                return seen
            if kind in _UNICODE and isinstance(argument, str):
                last = [last[1], argument]
                if len(argument) <= _LONGEST_KEY:
                    seen.strings.add(argument)
            elif kind in _MEMO_SET:
                index = argument if isinstance(argument, int) else len(memo)
                if index > seen.opcodes:  # a memo index beyond the opcodes so far only serves to make the memo huge
                    seen.problem = f"memo index {index} after {seen.opcodes} opcodes"
                    return seen
                memo[index] = last[1]
            elif kind in _MEMO_GET and isinstance(argument, int):
                last = [last[1], memo.get(argument, "?")]
            elif kind in ("GLOBAL", "INST") and isinstance(argument, str):
                seen.names[argument.replace(" ", ".", 1)] = None
                last = [last[1], "?"]
            elif kind == "STACK_GLOBAL":
                seen.names[".".join(last)] = None
                last = [last[1], "?"]
            elif kind in ("EXT1", "EXT2", "EXT4"):
                seen.names[f"copyreg extension {argument}"] = None
            elif kind not in ("PROTO", "FRAME"):
                last = [last[1], "?"]
            if kind == "STOP":
                seen.complete = True
                seen.consumed = (position or 0) + 1
            if limit is not None and seen.opcodes >= limit:
                return seen
    except (ValueError, IndexError, OverflowError, MemoryError) as error:
        seen.problem = str(error) or type(error).__name__
    return seen
