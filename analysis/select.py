"""Pick positions out of a stored column, bit for bit; read masks."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_is.analysis import units
from rollout_is.analysis.batch import Floats
from rollout_is.analysis.split import Picks
from rollout_is.dumps.errors import DumpError

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.dumps.shard import ShardInfo

MORE_VALUES = -1.0  # stands for further values of a mask where they are counted: no mask may hold it


class Picker:
    """Moves raw bits, so that no dtype and no bit pattern matters. Buffers are reused."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Any] = {}

    def pick(self, raw: Any, picks: Picks, slot: str) -> Any:
        """The picked elements of a chunk, as raw bits; the source itself where all of it is picked."""
        count = picks.count
        if count == len(raw):
            return raw
        key = (slot, raw.itemsize)
        if key not in self._buffers or len(self._buffers[key]) < count:
            self._buffers[key] = np.empty(max(count, units.CHUNK_POSITIONS), dtype=raw.dtype)
        out = self._buffers[key][:count]
        if picks.index is not None:
            np.take(raw, picks.index, out=out, mode="clip")
        else:
            np.concatenate(
                [raw[a:b] for a, b in zip(picks.starts.tolist(), picks.stops.tolist(), strict=True)], out=out
            )
        return out


class Masks:
    """Memory for the masks of a unit, used again for the next one: megabytes that come and go would leave holes everywhere."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def take(self, name: str, n: int) -> Any:
        """bool [n], holding anything."""
        if name not in self._buffers or len(self._buffers[name]) < n:
            self._buffers[name] = np.empty(n, dtype=bool)
        return self._buffers[name][:n]


class Stored:
    """The tokens of one population in one chunk.

    Args:
        train, rollout: [n] the chunk's columns as they are stored.
        picks: which of its positions.
    """

    def __init__(self, picker: Picker, picks: Picks, train: Tensor, rollout: Tensor) -> None:
        self._picker = picker
        self.picks = picks
        self.train = train
        self.rollout = rollout

    @cached_property
    def bits(self) -> tuple[Any, Any]:
        """Train and rollout log-probs of the tokens one after another, as raw bits; until the next chunk is picked."""
        train, rollout = (
            self._picker.pick(bits_of(column), self.picks, slot)
            for column, slot in ((self.train, "train"), (self.rollout, "rollout"))
        )
        return train, rollout

    def values(self, first: int, last: int) -> tuple[Floats, Floats]:
        """Both sides' log-probs of a few of the tokens, by rank, float64."""
        import torch

        at = torch.from_numpy(self.picks.some(first, min(last, self.picks.count)))
        train, rollout = (column[at].to(torch.float64).numpy() for column in (self.train, self.rollout))
        return train, rollout


def bits_of(source: Tensor) -> Any:
    """The tensor's memory as a numpy integer array of the same element size."""
    import torch

    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return source.view(views[source.element_size()]).numpy()


def fold32(raw: Any) -> Any:
    """int32 [n]: the raw bits of each element, 8-byte ones folded."""
    if raw.dtype == np.int64:
        return (raw ^ (raw >> 32)).astype(np.int32)
    return raw if raw.dtype == np.int32 else raw.astype(np.int32)


def valid_of(
    mask: Tensor, info: ShardInfo, start: int, role: str = "mask", *, out: Any = None
) -> tuple[Any, dict[float, int]]:
    """The mask of a block as bool [n], and the values in it other than 0 and 1 with their counts.

    Args:
        out: bool [n] memory for it.

    Raises:
        DumpError: a mask value is negative or not finite.
    """
    import torch

    if mask.dtype == torch.bool:
        return np.not_equal(mask.view(torch.uint8).numpy(), 0, out=out), {}
    values = (
        bits_of(mask)
        if mask.dtype == torch.uint8
        else mask.to(torch.float64).numpy()
        if mask.is_floating_point()
        else mask.numpy()
    )
    if not len(values):
        return values != 0, {}
    low, high = values.min(), values.max()
    if not (low >= 0 and high < np.inf):
        bad = int(np.flatnonzero(~((values >= 0) & (values < np.inf)))[0])
        raise DumpError(
            f"{info.name}: {info.columns.get(role, role)}[{start + bad}]",
            f"expected a mask value that is finite and >= 0, found {values[bad]}",
            "~mask on an integer mask gives -1 and -2; a padded mask may hold NaN",
            "store the mask as bool, or as 0 and 1",
            code="mask-value",
        )
    odd = high > 1 or (values.dtype.kind == "f" and bool(((values != 0) & (values != 1)).any()))
    return np.not_equal(values, 0, out=out), _others(values, high) if odd else {}


def _others(values: Any, high: Any) -> dict[float, int]:
    if values.dtype.kind != "f" and high <= 1:
        return {}
    unique, counts = np.unique(values[(values != 0) & (values != 1)], return_counts=True)
    found = {float(v): int(c) for v, c in zip(unique[:10], counts[:10], strict=True)}
    if len(unique) > 10:
        found[MORE_VALUES] = int(counts[10:].sum())
    return found
