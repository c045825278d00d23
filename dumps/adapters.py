"""From what a trainer holds where it computes mismatch to the columns that ``DumpWriter.write`` takes.

Every helper takes tensors on any device, copies nothing off it and returns ``{column: tensor}``; pass the result on with
``writer.write(step=step, **columns)`` or collect micro-batches with ``StepDump``. Optional columns go by their names in the
format: ``token_ids=...``, ``advantages=...``, ``**{"mask.pre_rejection": ...}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout_is.dumps.errors import UsageError
from rollout_is.dumps.shard import SEGMENT_ROLES

if TYPE_CHECKING:
    from torch import Tensor

    Columns = dict[str, Tensor]

IGNORED_LABEL = -100


def mask_from_labels(labels: Tensor, ignored: int = IGNORED_LABEL) -> Tensor:
    """The mask that labels stand for: True where a token is trained on.

    Args:
        labels: int [...], ``ignored`` where the position does not count.
        ignored: the label that means so.
    Returns:
        bool [...].

    >>> import torch
    >>> mask_from_labels(torch.tensor([[-100, 5, -100]]))
    tensor([[False,  True, False]])
    """
    return labels != ignored


def padded(
    train: Tensor, rollout: Tensor, mask: Tensor, *, lengths: Tensor | Sequence[int] | None = None, **columns: Tensor
) -> Columns:
    """Columns from padded [B, L] tensors (verl's driver, NeMo-RL, TRL).

    Args:
        train, rollout: float [B, L], log-probs of the same tokens.
        mask: bool, int or float [B, L].
        lengths: [B] tokens of each row from its left edge; given, the padding after them is not written.
        **columns: [B, L] or [B] columns of the format.
    Returns:
        rectangular columns, or packed ones when ``lengths`` is given.
    Raises:
        UsageError: shapes that differ, or a length beyond L.

    >>> import torch
    >>> lp = torch.full((2, 3), -1.0)
    >>> mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    >>> padded(lp, lp, mask, lengths=[3, 1])["cu_seqlens"]
    tensor([0, 3, 4])
    """
    import torch

    given = _given(train, rollout, mask, columns)
    if train.dim() != 2:
        raise _usage("padded", f"expected [B, L], found {tuple(train.shape)}")
    if lengths is None:
        return given
    sizes = torch.as_tensor(lengths, dtype=torch.int64, device=train.device)
    if sizes.shape != (train.shape[0],) or bool((sizes < 0).any()) or bool((sizes > train.shape[1]).any()):
        raise _usage("padded", f"expected {train.shape[0]} lengths of 0 to {train.shape[1]}, found {sizes.tolist()}")
    inside = torch.arange(train.shape[1], device=train.device) < sizes[:, None]
    if bool((mask.to(train.device) != 0)[~inside].any()):
        raise _usage("padded", "expected only masked positions after the lengths, found valid ones")
    flat = {
        name: column if name in SEGMENT_ROLES else column[inside.to(column.device)] for name, column in given.items()
    }
    return flat | {"cu_seqlens": _offsets(sizes)}


def responses(
    train: Sequence[Tensor], rollout: Sequence[Tensor], mask: Sequence[Tensor], **columns: Sequence[Tensor] | Tensor
) -> Columns:
    """Columns from lists of 1-D response tensors (slime, miles).

    Args:
        train, rollout: B tensors, float [R_i].
        mask: B tensors, bool, int or float [R_i].
        **columns: lists of B tensors [R_i], or [B] tensors for columns of sequences.
    Raises:
        UsageError: lists or responses of different lengths.

    >>> import torch
    >>> one, two = torch.tensor([-1.0]), torch.tensor([-1.0, -2.0])
    >>> responses([one, two], [one, two], [one < 0, two < 0])["cu_seqlens"]
    tensor([0, 1, 3])
    """
    import torch

    sizes = [int(response.numel()) for response in train]
    if not sizes:
        raise _usage("responses", "expected at least one response, found none")
    joined: Columns = {}
    named = {"train_logprobs": train, "rollout_logprobs": rollout, "response_mask": mask, **columns}
    for name, values in named.items():
        if isinstance(values, torch.Tensor):
            joined[name] = values
            continue
        found = [int(value.numel()) for value in values]
        if found != sizes:
            raise _usage("responses", f"expected lengths {sizes[:8]} of {name} as of train, found {found[:8]}")
        joined[name] = torch.cat([value.reshape(-1) for value in values])
    return joined | {"cu_seqlens": _offsets(torch.tensor(sizes))}


def packed(
    train: Tensor,
    rollout: Tensor,
    *,
    mask: Tensor | None = None,
    labels: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_lens: Tensor | Sequence[int] | None = None,
    num_padding: int = 0,
    **columns: Tensor,
) -> Columns:
    """Columns from one pack, [1, T] or [T] (xtuner, AReaL, prime-rl, PipelineRL).

    Args:
        train, rollout: float, log-probs of the same tokens.
        mask: bool, int or float; or ``labels`` with -100 instead.
        cu_seqlens: int32 or int64 [S+1]; or ``seq_lens`` [S] instead. Positions past the last are a pad segment.
        num_padding: tokens at the end that are padding; segments that lie in them are marked as pad.
        **columns: columns of the format.
    Raises:
        UsageError: neither or both of a pair, or shapes that differ.

    >>> import torch
    >>> lp = torch.full((1, 4), -1.0)
    >>> found = packed(lp, lp, labels=torch.tensor([[7, 8, -100, -100]]), cu_seqlens=torch.tensor([0, 2]), num_padding=2)
    >>> found["cu_seqlens"].tolist(), found["segment_is_pad"].tolist(), found["response_mask"].tolist()
    ([0, 2, 4], [False, True], [True, True, False, False])
    """
    import torch

    if (mask is None) == (labels is None):
        raise _usage("packed", "expected mask or labels, found both or neither")
    if (cu_seqlens is None) == (seq_lens is None):
        raise _usage("packed", "expected cu_seqlens or seq_lens, found both or neither")
    if mask is None:
        assert labels is not None
        mask = mask_from_labels(labels)
    given = _given(train, rollout, mask, columns)
    flat = {name: column if name in SEGMENT_ROLES else column.reshape(-1) for name, column in given.items()}
    total = int(flat["train_logprobs"].numel())
    if cu_seqlens is not None:
        bounds = cu_seqlens.detach().reshape(-1).to(torch.int64).cpu()
    else:
        bounds = _offsets(torch.as_tensor(seq_lens, dtype=torch.int64).reshape(-1).cpu())
    if bounds.numel() == 0 or int(bounds[-1]) > total:
        raise _usage("packed", f"expected bounds inside {total} positions, found {bounds[-1:].tolist()}")
    tail = total - int(bounds[-1])
    if tail:
        bounds = torch.cat([bounds, torch.tensor([total])])
    pads = bounds[:-1] >= total - max(num_padding, tail)
    if "segment_is_pad" not in flat:
        flat["segment_is_pad"] = pads
    return flat | {"cu_seqlens": bounds}


def join_parts(parts: Sequence[Tensor]) -> Tensor:
    """One pack out of the contiguous parts of its sequence-parallel ranks.

    Args:
        parts: [1, T / n] or [T / n] each, in rank order, as an all-gather gives them.
    Returns:
        [1, T] or [T], for ``packed`` with the bounds of the whole pack.
    Raises:
        UsageError: no part, or parts of different shapes.

    >>> import torch
    >>> join_parts([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])])
    tensor([[1., 2., 3., 4.]])
    """
    import torch

    if not parts or len({tuple(part.shape) for part in parts}) != 1:
        raise _usage("join_parts", f"expected parts of one shape, found {[tuple(part.shape) for part in parts]}")
    return torch.cat(list(parts), dim=-1)


def join_packs(packs: Sequence[Columns]) -> Columns:
    """One shard's columns out of the micro-batches of a step; each stays a pack of its own.

    Args:
        packs: columns as the other helpers give them, packed or rectangular.
    Returns:
        packed columns with ``cu_seqlens`` and ``cu_packs``; optional columns that not every pack has are left out.
    Raises:
        UsageError: no pack.
    """
    import torch

    if not packs:
        raise _usage("join_packs", "expected at least one pack, found none")
    flat = [_as_packed(pack) for pack in packs]
    names = [name for name in flat[0] if name != "cu_seqlens" and all(name in pack for pack in flat)]
    joined = {name: torch.cat([pack[name] for pack in flat]) for name in names}
    bounds, edges = [torch.zeros(1, dtype=torch.int64)], [0]
    for pack in flat:
        bounds.append(pack["cu_seqlens"][1:] + edges[-1])
        edges.append(edges[-1] + int(pack["train_logprobs"].numel()))
    return joined | {"cu_seqlens": torch.cat(bounds), "cu_packs": torch.tensor(edges)}


def _as_packed(pack: Columns) -> Columns:
    import torch

    if "cu_seqlens" in pack:
        bounds, total = pack["cu_seqlens"].to(torch.int64).cpu(), int(pack["train_logprobs"].numel())
        if int(bounds[-1]) < total:  # a pad tail would else become part of the next pack's first sequence
            raise _usage(
                "join_packs", f"expected bounds up to {total}, found {int(bounds[-1])}; packed() closes the tail"
            )
        return pack | {"cu_seqlens": bounds}
    rows, length = pack["train_logprobs"].shape
    flat = {name: column if name in SEGMENT_ROLES else column.reshape(-1) for name, column in pack.items()}
    return flat | {"cu_seqlens": torch.arange(rows + 1) * length}


def _given(train: Tensor, rollout: Tensor, mask: Tensor, columns: dict[str, Tensor]) -> Columns:
    """Names and equal shapes; columns of sequences are [B] or [S] and are not compared."""
    given = {"train_logprobs": train, "rollout_logprobs": rollout, "response_mask": mask, **columns}
    for name, column in given.items():
        if name not in SEGMENT_ROLES and column.shape != train.shape:
            raise _usage("columns", f"expected {name} {tuple(train.shape)} as train, found {tuple(column.shape)}")
    return {name: column.detach() for name, column in given.items()}


def _offsets(lengths: Tensor) -> Tensor:
    import torch

    bounds = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    bounds[1:] = lengths.cumsum(0)
    return bounds


def _usage(where: str, problem: str) -> UsageError:
    return UsageError(
        f"adapters.{where}", problem, "the helper and the shapes do not go together", code="adapter-usage"
    )
