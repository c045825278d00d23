"""Which tensor of a shard plays which role. No torch.

A role is settled by ``--column role=name``, else by the one known name that the shard holds. Two known names for a required
role are an error that lists both, even when one of them is canonical: ``train_logprobs`` beside ``old_log_probs`` are two
scoring passes, and which one is meant decides every figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from rollout_is.dumps import aliases
from rollout_is.dumps.errors import DumpError, UsageError
from rollout_is.dumps.notes import Note
from rollout_is.dumps.text import listing

# How errors name the content of a required role.
CONTENT = {"train": "train log-probs", "rollout": "rollout log-probs", "mask": "mask", "offsets": "cu_seqlens"}
_SETTABLE = (*aliases.REQUIRED, "labels", "offsets", "lengths", "packs", "pack_lengths", *aliases.OPTIONAL)

Candidates = Callable[[tuple[str, ...]], list[str]]
Trouble = tuple[str, str, str, str]  # problem, why, fix, code


@dataclass(frozen=True)
class Roles:
    """Role -> tensor name of one set of tensors.

    ``labels``, ``lengths`` and ``pack_lengths`` stand beside ``mask``, ``offsets`` and ``packs`` when those are derived from
    them. ``missing`` names the required roles that nothing plays (``offsets`` is required later, by the layout).
    """

    columns: Mapping[str, str]
    missing: tuple[str, ...]
    notes: tuple[Note, ...]


def check_columns(columns: Mapping[str, str] | None) -> dict[str, str]:
    """Normalise ``{"cu_seqlens": "my_bounds"}`` to ``{"offsets": "my_bounds"}``.

    Raises:
        UsageError: a role that does not exist.

    >>> check_columns({"train_logprobs": "old_log_probs"})
    {'train': 'old_log_probs'}
    """
    found: dict[str, str] = {}
    for given, tensor in (columns or {}).items():
        role = aliases.ROLE_NAMES.get(given, given)
        open_ended = role.startswith(("mask.", "logprobs.")) and not role.endswith(".")
        if role not in _SETTABLE and not open_ended:
            raise UsageError(
                f"--column {given}={tensor}",
                f"expected a role, found {given!r}",
                f"roles are {', '.join(_SETTABLE)}, mask.NAME, logprobs.NAME",
                "write role=tensor, such as --column train=old_log_probs",
                code="column-role-unknown",
            )
        if not isinstance(tensor, str) or not tensor:
            raise UsageError(
                f"--column {given}=", "expected the name of a tensor, found nothing", code="column-role-unknown"
            )
        if role in found:
            raise UsageError(
                f"--column {given}={tensor}",
                f"expected one tensor, found {found[role]!r} and {tensor!r}",
                code="column-role-twice",
            )
        found[role] = tensor
    return found


def resolve(names: frozenset[str], columns: Mapping[str, str], where: str) -> Roles:
    """The roles of the tensors ``names`` under the user's choices ``columns`` (as ``check_columns`` gives them).

    Raises:
        DumpError: a chosen tensor is absent, or a required role has two candidates.

    >>> resolve(frozenset({"old_log_probs", "rollout_log_probs", "labels", "cu_seqlens"}), {}, "x").columns["train"]
    'old_log_probs'
    """
    result = _resolve(names, tuple(sorted(columns.items())))
    if isinstance(result, Roles):
        return result
    problem, why, fix, code = result
    raise DumpError(where, problem, why, fix, code=code)


# Thousands of shards hold the same names: the rules run once for each set of them.
@lru_cache(maxsize=256)
def _resolve(names: frozenset[str], chosen: tuple[tuple[str, str], ...]) -> Roles | Trouble:
    columns = dict(chosen)
    for role, tensor in chosen:
        if tensor not in names:
            return (
                f"expected a tensor {tensor!r} for --column {role}={tensor}, found {listing(sorted(names), 20, 'no tensor at all')}",
                "the name is misspelt, or this shard was written by another hook",
                "name one of the tensors above",
                "column-not-found",
            )
    taken = set(columns.values())
    notes: list[Note] = []

    def candidates(known: tuple[str, ...]) -> list[str]:
        return [name for name in known if name in names and name not in taken]

    for role, known in aliases.REQUIRED.items():
        if role in columns or (role == "mask" and "labels" in columns):
            continue
        found = candidates(known)
        if len(found) > 1:
            return _two(role, CONTENT[role], found)
        if found:
            columns[role] = found[0]
    trouble = (
        _derive(columns, "mask", "labels", aliases.LABELS, candidates)
        or _offsets(columns, "offsets", "lengths", aliases.OFFSETS, aliases.LENGTHS, candidates)
        or _offsets(columns, "packs", "pack_lengths", aliases.PACKS, aliases.PACK_LENGTHS, candidates)
    )
    if trouble:
        return trouble
    for role, known in aliases.OPTIONAL.items():
        found = [] if role in columns else candidates(known)
        if len(found) == 1:
            columns[role] = found[0]
        elif found:
            message = (
                f"{role} left out: {' and '.join(found)} could both be it; settle it with --column {role}={found[0]}"
            )
            notes.append(Note("column-ambiguous", "notice", role, message))
    for name in sorted(names - taken):
        if name.startswith(("mask.", "logprobs.")) and not name.endswith(".") and name not in columns.values():
            columns.setdefault(name, name)
    for name in candidates(aliases.FACTORS):
        if name not in columns.values():
            message = f"{name} is in the dump and is not applied; multiply it into the mask if the trainer does"
            notes.append(Note("mask-factor-not-applied", "warning", name, message))
    missing = tuple(role for role in aliases.REQUIRED if role not in columns)
    return Roles(columns, missing, tuple(notes))


def _derive(
    columns: dict[str, str], role: str, source: str, known: tuple[str, ...], candidates: Candidates
) -> Trouble | None:
    """Let labels play the mask where there is no mask."""
    if source not in columns:
        if columns.get(role) in known:  # --column mask=labels
            columns[source] = columns[role]
        elif role not in columns:
            found = candidates(known)
            if len(found) > 1:
                return _two(source, f"{CONTENT[role]} (no mask, but labels)", found)
            if found:
                columns[source] = found[0]
    if source in columns:
        columns[role] = columns[source]
    return None


def _offsets(
    columns: dict[str, str],
    role: str,
    source: str,
    known: tuple[str, ...],
    lengths: tuple[str, ...],
    candidates: Candidates,
) -> Trouble | None:
    """Offsets under their own names, else lengths under theirs."""
    if role in columns and columns[role] in lengths:  # --column offsets=response_lens
        columns[source] = columns[role]
    if role not in columns and source not in columns:
        for target, names in ((role, known), (source, lengths)):
            found = candidates(names)
            if len(found) > 1:
                return _two(target, "sequence bounds" if role == "offsets" else "pack bounds", found)
            if found:
                columns[target] = found[0]
                break
    if source in columns:
        columns[role] = columns[source]
    return None


def _two(role: str, content: str, found: list[str]) -> Trouble:
    return (
        f"expected one tensor for the {content}, found {len(found)}: {', '.join(found)}",
        "the trainer keeps several of them, and they are not the same thing",
        f"choose one: --column {role}={found[0]}",
        "column-ambiguous",
    )
