"""One dict of a hook file: which of its tensors play which role, and its sequences as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout_is.dumps import aliases
from rollout_is.dumps.columns import Roles, resolve
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign.packed import Packed, Rows, vector
from rollout_is.dumps.foreign.rectangles import rectangular
from rollout_is.dumps.offsets import check_offsets, lengths_to_offsets

if TYPE_CHECKING:
    from torch import Tensor

# A second mask, one value a row or a token, that the trainer multiplies into the first.
_TOKEN_ROLES = ("train", "rollout", "mask", "token_ids", "advantages", "entropy", "policy_version", "logprobs.ref")


def roles_of(item: Mapping[str, Any], where: str, columns: Mapping[str, str]) -> Roles:
    """Roles of the tensors and lists of a dict, by the names that trainers use.

    Raises:
        DumpError: a required role that no name plays, or that two names could play.
    """
    names = frozenset(
        key
        for key, value in item.items()
        if isinstance(key, str) and (hasattr(value, "dim") or isinstance(value, list | tuple))
    )
    roles = resolve(_settle_bounds(item, names, columns), columns, where)
    if roles.missing:
        raise DumpError(
            where,
            f"expected {' and '.join(roles.missing)} under a known name, found {', '.join(sorted(names)) or 'no tensor'}",
            "the hook saved other columns, or under names of its own",
            "save train_logprobs, rollout_logprobs and response_mask (or labels with -100)",
            code="column-missing",
        )
    return roles


def _settle_bounds(item: Mapping[str, Any], names: frozenset[str], columns: Mapping[str, str]) -> frozenset[str]:
    """Leave out the bounds that do not describe the log-probs: of rows none does, of a pack those that end at its end."""
    known = [columns["train"]] if "train" in columns else aliases.REQUIRED["train"]
    train = next((item[name] for name in known if name in names), None)
    bounds = names & {*aliases.OFFSETS, *aliases.LENGTHS} - set(columns.values())
    if train is None or len(bounds) == 0:
        return names
    if not _is_dense(train) or (train.dim() == 2 and train.shape[0] > 1):
        return names - bounds
    ends = {name: _end(item[name], name in aliases.LENGTHS) for name in bounds}
    fitting = {name for name, end in ends.items() if end == train.numel()}
    return names - bounds | fitting if len(bounds) > 1 and fitting else names


def _end(value: Any, lengths: bool) -> float:
    numbers = value.flatten().tolist() if hasattr(value, "dim") else value
    if not numbers or not all(isinstance(one, int | float) for one in numbers):
        return -1
    return float(sum(numbers) if lengths else numbers[-1])


def _is_dense(value: Any) -> bool:
    return hasattr(value, "dim") and not value.is_nested


def is_rectangle(item: Mapping[str, Any], where: str, columns: Mapping[str, str]) -> bool:
    """Whether the train log-probs are one dense [B, L] with B > 1."""
    train = item[roles_of(item, where, columns).columns["train"]]
    return _is_dense(train) and train.dim() == 2 and train.shape[0] > 1


def read_rectangle(item: Mapping[str, Any], where: str, chosen: Mapping[str, str]) -> Packed:
    """The dict as a rectangular shard: a row is a segment."""
    from rollout_is.dumps.foreign.formats.verl import group_ids

    roles = roles_of(item, where, chosen)
    columns, names = _columns(item, roles), dict(roles.columns)
    names.pop("labels", None)
    rows = int(columns["train"].shape[0])
    columns["mask"] = _with_factors(item, columns["mask"], rows, where, names)
    if "responses" in item and _is_dense(item["responses"]):
        columns["token_ids"], names["token_ids"] = item["responses"], "responses"
    segments: dict[str, Tensor] = {}
    for role in ("rewards", "sequence_ids", "group_ids", "prompt_lens", "segment_is_pad"):
        if role in roles.columns:
            segments[role] = vector(item[roles.columns[role]], f"{where}: {roles.columns[role]}", role)
    if isinstance(item.get("uid"), list | tuple):
        groups = group_ids(list(item["uid"]))
        if groups is not None:
            segments["group_ids"], names["group_ids"] = groups, "uid"
    return rectangular(where, columns, segments, names)


def _columns(item: Mapping[str, Any], roles: Roles) -> dict[str, Any]:
    """Token columns by role; labels as the mask that they stand for."""
    found = {
        role: item[name]
        for role, name in roles.columns.items()
        if role in _TOKEN_ROLES or role.startswith(("mask.", "logprobs."))
    }
    if "labels" in roles.columns:
        labels = item[roles.columns["labels"]]
        found["mask"] = [one != -100 for one in labels] if isinstance(labels, list | tuple) else labels != -100
    return found


def _with_factors(item: Mapping[str, Any], mask: Tensor, rows: int, where: str, names: dict[str, str]) -> Tensor:
    for factor in aliases.FACTORS:
        value = item.get(factor)
        if value is None or not hasattr(value, "dim"):
            continue
        keep = value != 0
        if keep.numel() == rows and mask.dim() == 2:
            keep = keep.reshape(rows, 1)
        elif keep.numel() == mask.numel():
            keep = keep.reshape(mask.shape)
        else:
            raise DumpError(
                f"{where}: {factor}",
                f"expected {rows} or {mask.numel()} values, found {keep.numel()}",
                code="wrong-shape",
            )
        mask = (mask != 0) & keep
        names["mask"] = f"{names['mask']} * {factor}"
    return mask


def add_item(rows: Rows, item: Mapping[str, Any], where: str, *, alone: bool, columns: Mapping[str, str]) -> None:
    """Append the sequences of one dict.

    Args:
        rows: what is gathered so far.
        item: a pack ([1, T] or [T] with bounds), a micro-batch [B, L], lists of 1-D tensors, or nested tensors.
        where: file and place in it.
        columns: the user's choices of tensors for roles.
        alone: whether the file is this one dict; a 1-D response without bounds is a sequence only in a list of dicts.
    Raises:
        DumpError: bounds that are missing or do not fit, or lengths that differ.
    """
    roles = roles_of(item, where, columns)
    tokens = _columns(item, roles)
    train = tokens["train"]
    if isinstance(train, list | tuple) or not _is_dense(train):
        _add_rows(rows, item, tokens, roles, where)
    elif train.dim() == 2 and train.shape[0] > 1:
        packed = read_rectangle(item, where, columns)
        lengths = [int(train.shape[1])] * int(train.shape[0])
        rows.add_block(packed.columns, lengths, {role: column.tolist() for role, column in packed.segments.items()})
    else:
        _add_pack(rows, item, tokens, roles, where, alone)


def _add_rows(rows: Rows, item: Mapping[str, Any], columns: dict[str, Any], roles: Roles, where: str) -> None:
    lists = {
        role: value if isinstance(value, list | tuple) else list(value.unbind()) for role, value in columns.items()
    }
    count = len(lists["train"])
    for role in ("rollout", "mask"):
        if len(lists[role]) != count:
            raise DumpError(
                f"{where}: {roles.columns[role]}",
                f"expected {count} rows, found {len(lists[role])}",
                code="row-lengths-differ",
            )
    ids = item.get(roles.columns.get("sequence_ids", ""))
    numbered = isinstance(ids, list | tuple) and len(ids) == count and all(isinstance(one, int) for one in ids)
    for index in range(count):
        row = {role: values[index] for role, values in lists.items() if len(values) == count}
        length = len(row["train"])
        # Optional columns of prompt and response beside log-probs of the response cannot be aligned safely: left out.
        row = {
            r: v
            for r, v in row.items()
            if r in ("train", "rollout", "mask") or (hasattr(v, "__len__") and len(v) == length)
        }
        rows.add(row, {"sequence_ids": ids[index]} if numbered and ids is not None else None)


def _add_pack(
    rows: Rows, item: Mapping[str, Any], columns: dict[str, Any], roles: Roles, where: str, alone: bool
) -> None:
    flat = {role: vector(value, f"{where}: {roles.columns.get(role, role)}", role) for role, value in columns.items()}
    total = int(flat["train"].numel())
    flat["mask"] = _with_factors(item, flat["mask"], -1, where, {"mask": ""})
    for role in [role for role, column in flat.items() if column.numel() != total]:
        if role in ("train", "rollout", "mask"):
            name = roles.columns.get(role, role)
            raise DumpError(
                f"{where}: {name}",
                f"expected {total} positions as in {roles.columns['train']}, found {flat[role].numel()}",
                "one column is over all ranks and another is a part of it, or they are of different batches",
                "dump all columns at one place",
                code="row-lengths-differ",
            )
        del flat[role]
    bounds = _bounds(item, roles, where, total, alone, columns["train"].dim())
    lengths = (bounds[1:] - bounds[:-1]).tolist()
    pads = [False] * len(lengths)
    tail = total - int(bounds[-1])
    if tail:
        if bool((flat["mask"][int(bounds[-1]) :] != 0).any()):
            raise DumpError(
                f"{where}: {roles.columns.get('offsets', 'bounds')}",
                f"expected only masked positions past {int(bounds[-1])}, found valid ones among the last {tail}",
                "the bounds are of another batch, or the last sequence is missing",
                "dump the bounds together with the log-probs",
                code="valid-past-end",
            )
        lengths.append(tail)
        pads.append(True)
    padding = item.get("num_padding")
    if isinstance(padding, int) and not isinstance(padding, bool) and padding > 0:
        ends = bounds[1:].tolist() + [total] * (len(pads) - (bounds.numel() - 1))
        starts = [end - length for end, length in zip(ends, lengths, strict=True)]
        pads = [pad or start >= total - padding for pad, start in zip(pads, starts, strict=True)]
    rows.add_block(flat, lengths, {"segment_is_pad": pads})


def _bounds(item: Mapping[str, Any], roles: Roles, where: str, total: int, alone: bool, dims: int) -> Tensor:
    import torch

    name = roles.columns.get("lengths") or roles.columns.get("offsets")
    if name is None:
        if not alone and dims == 1:
            return torch.tensor([0, total])
        raise DumpError(
            where,
            f"expected cu_seqlens or lengths beside [{'1, ' * (dims == 2)}{total}] log-probs, found neither",
            "a pack without bounds cannot be told from one long sequence",
            "save cu_seqlens (offsets) or the lengths of the sequences with it",
            code="bounds-missing",
        )
    value = vector(item[name], f"{where}: {name}", "offsets")
    if "lengths" in roles.columns:
        return lengths_to_offsets(value, total, f"{where}: {name}")
    if value.numel() and int(value[-1]) > total and total and int(value[-1]) % total == 0:
        raise DumpError(
            f"{where}: {name}",
            f"expected bounds inside {total} positions, found {int(value[-1])}",
            f"this is one of {int(value[-1]) // total} sequence-parallel parts; the bounds are of the whole pack",
            "give the folder with the files of every rank, or gather before dumping",
            code="sequence-parallel-part",
        )
    return check_offsets(value, total, f"{where}: {name}")
