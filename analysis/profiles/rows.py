"""The shape in which trainers see a step: packs of a rank, and the padded [rows, width] batch made of their samples.

Everything is float32, as in the trainers: a profile reproduces what was logged, rounding and overflow included.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Values that trainers put into the rollout log-probs of padding; a segment made of one of them alone is padding.
FILLS = (0.0, 1.0, -9999.0, -1e10)


@dataclass(frozen=True)
class Pack:
    """One micro-batch of one rank.

    Attributes:
        train, rollout: float32 [T] log-probs.
        mask: bool [T], True = response token.
        offsets: int64 [S+1] segment boundaries; positions past the last are padding.
        is_pad: bool [S], segments that are padding.
        rank: which rank trained on it.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    offsets: Tensor
    is_pad: Tensor
    rank: int = 0


@dataclass(frozen=True)
class Rows:
    """Samples right-padded to one width.

    Attributes:
        t, r: float32 [B, L] train and rollout log-probs, 0 beyond a sample.
        m: bool [B, L] response tokens.
        d: float32 [B, L] log-ratio t - r, 0 where ``m`` is False (so that nothing under the mask can leak).
        n: int64 [B] response tokens of each row.
        index: int64 [B, L] position in the concatenated packs, -1 beyond a sample.
        positions: how many positions the concatenated packs have.
    """

    t: Tensor
    r: Tensor
    m: Tensor
    d: Tensor
    n: Tensor
    index: Tensor
    positions: int

    @property
    def valid(self) -> Tensor:
        """bool [B]: rows with a response token."""
        return self.n > 0

    def packed(self, values: Tensor) -> Tensor:
        """[B, L] (or [B, 1]) back to the packed [T] of the input; 0 (False) at positions of no row."""
        out = torch.zeros(self.positions, dtype=values.dtype)
        inside = self.index >= 0
        out[self.index[inside]] = values.expand_as(self.index)[inside]
        return out


def packs_of(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_packs: Tensor | None = None,
    segment_is_pad: Tensor | None = None,
    rank: int = 0,
) -> list[Pack]:
    """Cut one rank's tensors into its packs.

    Args:
        train_logprobs, rollout_logprobs: [T] log-probs, any float dtype.
        response_mask: [T], nonzero = response token.
        cu_seqlens: [S+1] segment boundaries.
        cu_packs: [P+1] token offsets of the packs, each a segment boundary; None is one pack.
        segment_is_pad: [S]; None marks the segments whose mask is empty and whose rollout log-probs are one fill value.
        rank: which rank these tensors are of.

    Raises:
        ValueError: a pack boundary lies inside a segment.

    >>> t = torch.tensor([-1.0, -2.0, -3.0])
    >>> [len(p.train) for p in packs_of(t, t, t != 0, torch.tensor([0, 1, 3]), cu_packs=torch.tensor([0, 1, 3]))]
    [1, 2]
    """
    train, rollout = train_logprobs.reshape(-1).float(), rollout_logprobs.reshape(-1).float()
    mask, offsets = response_mask.reshape(-1) != 0, cu_seqlens.reshape(-1).long()
    is_pad = _pad_like(rollout, mask, offsets) if segment_is_pad is None else segment_is_pad.reshape(-1) != 0
    cuts = [0, train.numel()] if cu_packs is None else [int(c) for c in cu_packs]
    cuts[-1] = max(cuts[-1], train.numel())  # a tail beyond the last boundary belongs to the last pack
    packs = []
    for start, stop in itertools.pairwise(cuts):
        first, last = torch.searchsorted(offsets, torch.tensor([start, stop])).tolist()
        if last > 0 and last == offsets.numel():
            last -= 1
        if int(offsets[first]) != start:
            raise ValueError(
                f"expected pack boundary {start} to be a segment boundary, found it inside segment {first - 1}"
            )
        packs.append(
            Pack(
                train[start:stop],
                rollout[start:stop],
                mask[start:stop],
                offsets[first : last + 1] - start,
                is_pad[first:last],
                rank,
            )
        )
    return packs


def _pad_like(rollout: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    out = torch.zeros(len(ends) - 1, dtype=torch.bool)
    filled = torch.cat([mask.new_zeros(1, dtype=torch.long), mask.long().cumsum(0)])[offsets]
    for i in torch.nonzero(filled[1:] == filled[:-1]).flatten().tolist():
        piece = rollout[ends[i] : ends[i + 1]]
        if piece.numel():
            same = bool((piece == piece[0]).all() or piece.isnan().all())
            out[i] = same and (float(piece[0]) in FILLS or not bool(piece[0].isfinite()))
    return out


def make_rows(packs: Sequence[Pack], *, pads: bool = False, whole_packs: bool = False) -> Rows:
    """The padded batch of some packs, in their order.

    Args:
        packs: the packs; positions of the result count through all of them.
        pads: padding segments are rows too.
        whole_packs: a row is a pack, not a sample.

    Zero-length segments are no rows. No sample at all gives [0, 0].
    """
    train, rollout, mask = (torch.cat([getattr(p, name) for p in packs]) for name in ("train", "rollout", "mask"))
    starts, lengths, base = [], [], 0
    for pack in packs:
        if whole_packs:
            starts.append(torch.tensor([base]))
            lengths.append(torch.tensor([pack.train.numel()]))
        else:
            size = pack.offsets.diff()
            kept = (size > 0) & (torch.ones_like(pack.is_pad) if pads else ~pack.is_pad)
            starts.append(pack.offsets[:-1][kept] + base)
            lengths.append(size[kept])
        base += pack.train.numel()
    start, length = torch.cat(starts), torch.cat(lengths)
    column = torch.arange(int(length.max()) if length.numel() else 0)
    inside = column < length[:, None]
    index = torch.where(inside, start[:, None] + column, -1)
    at = index.clamp(min=0)
    m = mask[at] & inside
    t, r = train[at].masked_fill(~inside, 0.0), rollout[at].masked_fill(~inside, 0.0)
    d = torch.where(m, t - r, 0.0)
    return Rows(t, r, m, d, m.sum(-1), index, base)


def by_rank(packs: Sequence[Pack]) -> dict[int, list[Pack]]:
    """The packs of each rank, ranks in order of appearance."""
    out: dict[int, list[Pack]] = {}
    for pack in packs:
        out.setdefault(pack.rank, []).append(pack)
    return out


def has_sample(pack: Pack) -> bool:
    """Whether a pack holds anything but padding: those that hold none are never built by most trainers."""
    return bool(((pack.offsets.diff() > 0) & ~pack.is_pad).any())


@dataclass(frozen=True)
class Result:
    """What a trainer would have logged and applied at one step.

    Attributes:
        metrics: logged name -> value; non-finite values are what the trainer logged.
        per_pack: the same before the trainer's own reduction, one a pack, where it logs per pack; else empty.
        weights: float32 [T] multipliers of the policy loss, packs concatenated; None when no correction is on.
        keep: bool [T] response mask after rejection; None when the trainer does not change its mask.
        error: how the trainer fails on this input; then there are no metrics.
    """

    metrics: dict[str, float]
    per_pack: tuple[dict[str, float], ...] = ()
    weights: Tensor | None = None
    keep: Tensor | None = None
    error: str | None = None


Settings = dict[str, Any]
