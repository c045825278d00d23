"""The tokens that the fingerprints look at: the valid, finite tokens of one block, cut into pieces and chunks.

Dear statistics are taken on a fixed sample of blocks (``takes_block``); which blocks those are depends on the shard's
content alone, never on the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.doctor.state import magnitude_bin

if TYPE_CHECKING:
    from rollout_is.dumps.shard import ShardInfo

CHUNK = 128  # tokens over which one lag is decided
SAMPLE = 32  # one position in so many is looked at closely, once the first tokens of a unit have been
SAMPLED = 1 << 16  # valid tokens that are looked at closely at a time
NEIGHBOURS = 2

PROB_EDGES = tuple(float(np.log(p)) for p in (1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99))
PROB_NAMES = (
    "< 1e-4",
    "1e-4 to 1e-3",
    "1e-3 to 0.01",
    "0.01 to 0.1",
    "0.1 to 0.5",
    "0.5 to 0.9",
    "0.9 to 0.99",
    "> 0.99",
)
PROBS = len(PROB_NAMES)

Bools = NDArray[np.bool_]


def takes_block(seen: int, taken: int) -> bool:
    """Whether the next block is sampled, after ``seen`` positions of the unit of which ``taken`` were.

    >>> [takes_block(0, 0), takes_block(100, 100), takes_block(3200, 100)]
    [True, False, True]
    """
    return taken * SAMPLE <= seen


def probability_bin(r: Floats) -> Ints:
    """int64 [v] which of PROB_NAMES exp(r) falls in.

    >>> probability_bin(np.log(np.array([1e-5, 0.3, 0.999]))).tolist()
    [0, 4, 7]
    """
    out = np.zeros(len(r), np.int64)
    for edge in PROB_EDGES:
        out += r >= edge
    return out


@dataclass
class Window:
    """Valid, finite tokens of one block, in natural order. v tokens in k pieces, a piece being one sequence's tokens.

    Attributes:
        shard: the shard they come from.
        t, r, d: float64 [v] train and rollout log-probs and t - r.
        where: int64 [v] position of each token, counted from ``base``, which is a position of the shard.
        starts: int64 [k] first token of each piece; the first is 0.
        segment: int64 [k] the piece's segment in the shard.
        offset: int64 [k] where that segment starts in the shard.
        begins, ends: bool [k] the piece holds its sequence's first / last valid token.
        before: int64 [k] valid tokens of the sequence ahead of the piece (of a fragment: positions).
        columns: further [v] columns (``policy_version``, ``logprobs.NAME``).
    """

    shard: ShardInfo
    t: Floats
    r: Floats
    d: Floats
    where: Ints
    starts: Ints
    segment: Ints
    offset: Ints
    begins: Bools
    ends: Bools
    before: Ints
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    base: int = 0

    @property
    def n(self) -> int:
        """Tokens in the window."""
        return len(self.t)

    @cached_property
    def stops(self) -> Ints:
        """int64 [k] one past the last token of each piece."""
        return np.append(self.starts[1:], self.n)

    @cached_property
    def size(self) -> Ints:
        """int64 [k] tokens of each piece."""
        return self.stops - self.starts

    @cached_property
    def abs_d(self) -> Floats:
        """float64 [v] |d|."""
        return np.abs(self.d)

    @cached_property
    def magnitude(self) -> NDArray[np.int32]:
        """int32 [v] histogram bin of |d|."""
        return magnitude_bin(self.d)

    @cached_property
    def probability(self) -> Ints:
        """int64 [v] bin of exp(r), an index of PROB_NAMES."""
        return probability_bin(self.r)

    @cached_property
    def piece(self) -> Ints:
        """int64 [v] the piece of each token."""
        return np.repeat(np.arange(len(self.starts)), self.size)

    @cached_property
    def index(self) -> Ints:
        """int64 [v] how many valid tokens of its sequence come before each token."""
        return np.arange(self.n) + np.repeat(self.before - self.starts, self.size)

    @cached_property
    def chunk_starts(self) -> Ints:
        """int64 [c] first token of each chunk: pieces cut every CHUNK tokens."""
        many = -(-self.size // CHUNK)
        first = np.cumsum(many) - many
        return np.repeat(self.starts - CHUNK * first, many) + CHUNK * np.arange(int(many.sum()))

    @cached_property
    def chunk_piece(self) -> Ints:
        """int64 [c] the piece of each chunk."""
        return np.repeat(np.arange(len(self.starts)), -(-self.size // CHUNK))

    @cached_property
    def chunk_stops(self) -> Ints:
        """int64 [c] one past the last token of each chunk."""
        return np.append(self.chunk_starts[1:], self.n)

    def place(self, i: int) -> dict[str, Any]:
        """Token i as evidence: where it is, both log-probs, and its neighbours inside the sequence."""
        p = int(np.searchsorted(self.starts, i, side="right")) - 1
        low, high = int(self.starts[p]), int(self.stops[p])
        home = int(self.offset[p]) - self.base
        rows = [j for j in range(i - NEIGHBOURS, i + NEIGHBOURS + 1) if low <= j < high]
        return place_dict(
            self.shard,
            int(self.segment[p]),
            int(self.where[i]) - home,
            int(self.where[i]) + self.base,
            float(self.t[i]),
            float(self.r[i]),
            [[int(self.where[j]) - home, plain(float(self.t[j])), plain(float(self.r[j]))] for j in rows],
        )


def place_dict(
    shard: ShardInfo, segment: int, position: int, index: int, t: float, r: float, neighbours: list[list[Any]]
) -> dict[str, Any]:
    """One place of evidence as plain JSON data; neighbours are rows [position, train, rollout]."""
    return {
        "shard": shard.name,
        "step": shard.step,
        "rank": shard.rank,
        "sequence": segment,
        "position": position,
        "index": index,
        "train": plain(t),
        "rollout": plain(r),
        "neighbours": neighbours,
    }


def plain(x: float) -> float | str:
    """A float for JSON: what is not finite becomes its name."""
    return x if np.isfinite(x) else str(x)


def select(window: Window, keep: Bools) -> Window:
    """The window without the tokens that are not kept. Pieces left empty go; first and last flags are kept only where
    that very token is."""
    at = np.flatnonzero(keep)
    if len(at) == window.n:
        return window
    piece = window.piece[at]
    used, starts = np.unique(piece, return_index=True)
    stops = np.append(starts[1:], len(at))
    first, last = window.starts[used], window.stops[used] - 1
    return Window(
        window.shard,
        window.t[at],
        window.r[at],
        window.d[at],
        window.where[at],
        starts.astype(np.int64),
        window.segment[used],
        window.offset[used],
        window.begins[used] & (at[starts] == first) if len(at) else window.begins[:0],
        window.ends[used] & (at[stops - 1] == last) if len(at) else window.ends[:0],
        window.before[used] + (at[starts] - first if len(at) else 0),
        {name: column[at] for name, column in window.columns.items()},
        window.base,
    )
