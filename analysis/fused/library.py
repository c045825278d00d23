"""The compiled loops over the tokens of a block and the sequences of a unit, where the install built them: found, checked, described.

They are the fast way through what ``sums.Sums.add`` and ``rows.py`` do by numpy, and no more than that: without a C compiler at install time, on
another device, or with ROLLOUT_IS_KERNEL=numpy, everything is computed without it. Which of them ran stands in the report.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout_is.dumps.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE = "ROLLOUT_IS_KERNEL"
LIBRARY = Path(__file__).with_name("_block.so")
ORDER = ("numpy", "fused-plain", "fused-avx2", "fused-avx512")  # slowest first; a processor has all up to its best
# Number of a type of stored log-probs in block.h, by the name of torch's dtype.
TYPES = {"torch.float32": 0, "torch.float64": 1, "torch.bfloat16": 2, "torch.float16": 3}

_address, _int, _short, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double


class Side(ctypes.Structure):
    """``struct side``: log-probs of one side that are not below 0."""

    _fields_ = [(name, _int) for name in ("positive", "zeros", "disagreeing")]


class Block(ctypes.Structure):
    """``struct block``, field by field."""

    _fields_ = [
        *((name, _address) for name in ("train", "rollout", "run_start", "run_stop")),
        *((name, _int) for name in ("runs", "skip", "tokens")),
        ("starts", _address),
        ("pieces", _int),
        *((name, _short) for name in ("train_type", "rollout_type", "mismatch", "moments")),
        *((name, _float) for name in ("shift", "e_shift", "shift_p", "shift_q")),
        *(
            (name, _float)
            for name in ("log_lower", "log_upper", "extreme", "veto_lower", "veto_upper", "nearest", "cold")
        ),
        ("columns", _address),
        ("stride", _int),
        ("checksum", _address),
        ("bins", _address),
        ("keep", _int),
        *((name, _address) for name in ("keep_train", "keep_rollout", "keep_d", "keep_e")),
        ("train_side", Side),
        ("rollout_side", Side),
        ("both_zero", _int),
        ("zeros", _int),
        ("negative_zeros", _int),
        *((name, _float) for name in ("train_low", "train_high", "rollout_low", "rollout_high")),
        *((name, _float) for name in ("p", "p2", "q", "q2", "cross", "largest_difference")),
    ]


class Level(ctypes.Structure):
    """``struct weights``."""

    _fields_ = [
        *((name, _float) for name in ("sum", "square", "mean", "m2", "low", "high")),
        ("above", _int),
        ("below", _int),
    ]


class Sequences(ctypes.Structure):
    """``struct sequences``, field by field."""

    _fields_ = [
        ("sums", _address),
        ("stride", _int),
        ("low", _address),
        ("high", _address),
        ("count", _int),
        ("group", _address),
        ("mismatch", _short),
        *((name, _float) for name in ("shift", "e_shift", "log_lower", "log_upper", "lower", "upper")),
        *((name, _address) for name in ("product", "geometric", "product_bins", "geometric_bins", "by_group")),
        ("measured", _int),
        ("vetoed", _int),
        ("totals", _float * 17),
        ("lowest", _float),
        ("highest", _float),
        ("level", Level * 6),
        ("figures", _float * 10),
        ("less_low", _float),
        ("less_high", _float),
        ("sizes", _float),
        *((name, _float * 23) for name in ("centre", "squares", "cross")),
    ]


def address(array: Any) -> int:
    """Where the memory of a numpy array begins."""
    out: int = array.__array_interface__["data"][0]
    return out


class Compiled(NamedTuple):
    """The functions of one level; each takes a pointer, and returns 1 for what it does not handle."""

    block: Callable[[Any], int]  # to a Block
    sequences: Callable[[Any], int]  # to Sequences


def kernel() -> tuple[str, Compiled | None]:
    """The name of what sums blocks here, and the functions where they are compiled.

    Raises:
        UsageError: ROLLOUT_IS_KERNEL asks for what is not there.
    """
    found = _load(LIBRARY)
    wanted = os.environ.get(VARIABLE) or found[-1][0]
    for name, compiled in found:
        if name == wanted:
            return name, compiled
    raise UsageError(
        f"{VARIABLE}={wanted}",
        f"expected one of {', '.join(name for name, _ in found)}, which this install and this processor have, found {wanted}",
        "a misspelt name, or a processor without those instructions"
        if len(found) > 1
        else "the compiled kernels are built when rollout-is is installed, where a C compiler is there",
        f"unset {VARIABLE}" + ("" if len(found) > 1 else ", or install again with a C compiler on PATH"),
    )


def names() -> list[str]:
    """The kernels that can run here, slowest first; ``numpy`` always can."""
    return [name for name, _ in _load(LIBRARY)]


def common(of_ranks: list[str]) -> str:
    """The fastest kernel that the rank with the slowest one has too: sums in other orders have other last bits.

    >>> common(["fused-avx512", "fused-avx2"])
    'fused-avx2'
    """
    return min(of_ranks, key=ORDER.index)


def _sources() -> bytes:
    """Digest of the C files beside this one, which an install carries too; as hatch_build.py takes it."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest().encode()


@contextmanager
def only(name: str) -> Iterator[None]:
    """That kernel and no other while it lasts, in this process and in its workers."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@cache
def _load(path: Path) -> list[tuple[str, Compiled | None]]:
    found: list[tuple[str, Compiled | None]] = [("numpy", None)]
    try:
        library = ctypes.CDLL(str(path))
        # A library of other sources would read the structure wrongly, or put sums where others are looked for.
        library.rollout_is_sources.restype = ctypes.c_char_p
        if (
            library.rollout_is_layout() != ctypes.sizeof(Block) + ctypes.sizeof(Sequences)
            or library.rollout_is_sources() != _sources()
        ):
            return found
        best = library.rollout_is_level()
        for name in ORDER[1 : best + 1]:
            level = name.removeprefix("fused-")
            block, sequences = library[f"rollout_is_block_{level}"], library[f"rollout_is_sequences_{level}"]
            block.argtypes, sequences.argtypes = [ctypes.POINTER(Block)], [ctypes.POINTER(Sequences)]
            found.append((name, Compiled(block, sequences)))
    except (OSError, AttributeError):
        return found[:1]
    return found
