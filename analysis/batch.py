"""What flows from the dump to the states: work units, blocks of a unit, and the table of its sequences.

A unit is a run of whole segments of one shard, bounded in positions and in segments, cut by the shard's own content
and never by the number of workers. It is read in blocks that fit the cache. A ``Consumer`` sees every block once
and the finished per-sequence table of every unit once, gives one picklable partial a unit, and is combined at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.dumps.shard import OpenShard, ShardInfo

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, order=True)
class UnitId:
    """Place of a unit in the dump: shard number in canonical order, then unit number inside it."""

    shard: int
    unit: int


@dataclass(frozen=True)
class Unit:
    """Positions [start, stop) of a shard, segments [first, last) of it.

    A segment longer than a unit is cut at fixed offsets: then ``fragment`` is True, ``last == first + 1`` and the
    per-sequence sums of this unit are part of that segment's.
    """

    id: UnitId
    start: int
    stop: int
    first: int
    last: int
    fragment: bool = False


@dataclass
class Block:
    """One block of a unit, in the natural order and with the valid tokens selected. Buffers are reused: copy to keep.

    Attributes:
        start: absolute position of the block's first position in the shard.
        raw_train, raw_rollout: [n] stored dtype, every position, natural order.
        mask: bool [n], True = valid.
        train, rollout, d, e: float64 [v]: the valid tokens with finite t, r and d, in natural order;
            d = train - rollout, e = expm1(d).
        find_positions: gives the first so many of ``positions``, None being all; called on first use, since most consumers
            need them of few blocks.
        starts: int64 [k] first index (into the [v] arrays) of each piece, a piece being the tokens of one sequence.
        sequence: int64 [k] the sequence of each piece, counted from the unit's first segment.
    """

    start: int
    raw_train: Tensor
    raw_rollout: Tensor
    mask: NDArray[np.bool_]
    train: Tensor
    rollout: Tensor
    d: Tensor
    e: Tensor
    starts: Ints
    sequence: Ints
    find_positions: Callable[[int | None], Ints]

    @cached_property
    def positions(self) -> Ints:
        """int64 [v] index of each valid token inside the block."""
        return self.find_positions(None)

    def head(self, tokens: int) -> Block:
        """The block up to its first so many valid tokens, as if it were cut there."""
        if tokens >= len(self.d):
            return self
        positions = self.find_positions(tokens + 1)
        stop = int(positions[tokens])
        pieces = int(self.starts.searchsorted(tokens))
        t, r, d, e = (x[:tokens] for x in (self.train, self.rollout, self.d, self.e))
        return Block(
            self.start, self.raw_train[:stop], self.raw_rollout[:stop], self.mask[:stop],
            t, r, d, e, self.starts[:pieces], self.sequence[:pieces], lambda count: positions[: tokens if count is None else min(count, tokens)],
        )  # fmt: skip

    def tail(self, tokens: int) -> Block:
        """What ``head`` leaves."""
        first = int(self.positions[tokens])
        piece = int(self.starts.searchsorted(tokens, side="right"))
        starts = np.append(0, self.starts[piece:] - tokens)
        t, r, d, e = (x[tokens:] for x in (self.train, self.rollout, self.d, self.e))
        return Block(
            self.start + first, self.raw_train[first:], self.raw_rollout[first:], self.mask[first:],
            t, r, d, e, starts, self.sequence[piece - 1 :], lambda count: self.positions[tokens:][:count] - first,
        )  # fmt: skip


@dataclass(frozen=True)
class SequenceTable:
    """Per-segment sums over the valid, finite tokens of one finished unit; index = segment - unit.first.

    Attributes:
        first: the unit's first segment in the shard.
        length: int64 [s] positions of the segment.
        n: int64 [s] valid finite tokens (n_i).
        valid: int64 [s] valid tokens, non-finite ones included.
        sum_d, sum_abs, sum_d2, sum_e, sum_train: float64 [s].
        min_d, max_d: float64 [s]; +inf and -inf where there is no token.
        nonfinite: int64 [s] valid tokens left out because t, r or d is not finite.
    """

    first: int
    length: Ints
    n: Ints
    valid: Ints
    sum_d: Floats
    sum_abs: Floats
    sum_d2: Floats
    sum_e: Floats
    sum_train: Floats
    min_d: Floats
    max_d: Floats
    nonfinite: Ints


class Consumer(Protocol):
    """Extra statistics that ride along the one pass (policies, doctor, audits).

    One instance lives in each worker; it must be picklable before the first unit. ``finish`` runs once, on rank 0, with all
    partials in unit order; it must not depend on how units were spread over workers.
    """

    name: str

    def begin(self, unit: Unit, shard: OpenShard) -> None: ...

    def block(self, block: Block) -> None: ...

    def end(self, table: SequenceTable) -> Any: ...

    def finish(self, partials: list[tuple[Unit, ShardInfo, Any]]) -> Any: ...


def watches(consumer: Consumer) -> bool:
    """Whether a consumer wants more blocks of the unit: one that has seen enough says so by an attribute ``satisfied``."""
    return not getattr(consumer, "satisfied", False)


def enough(consumers: Iterable[Consumer]) -> float:
    """How many of a block's valid tokens they want at most: one that wants only the first says so by an attribute ``enough``."""
    return max((getattr(c, "enough", math.inf) for c in consumers), default=0)


def wants(consumer: Consumer, unit: Unit) -> bool:
    """Whether a consumer is to see a unit: one that samples says so by a method ``wants(unit)``, the others see all."""
    own = getattr(consumer, "wants", None)
    return own is None or bool(own(unit))
