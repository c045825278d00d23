"""From the tensors that a header names to a ``ShardInfo``: roles, layout, lengths, all checked. No torch, no data read.

Required columns that do not fit are an error. An optional column that does not fit is left out with a note, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from rollout_is.dumps.aliases import FACTORS
from rollout_is.dumps.columns import CONTENT, Roles, resolve
from rollout_is.dumps.dtypes import allowed
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.notes import Note
from rollout_is.dumps.place import Place
from rollout_is.dumps.shard import SEGMENT_ROLES, ShardInfo
from rollout_is.dumps.text import listing, shown

FORMAT = "rollout-is/1"
LAYOUTS = ("packed", "rectangular")
_BOUNDS = ("offsets", "lengths", "packs", "pack_lengths")
# why bounds of this many axes are refused, and what to do
_BOUNDS_SHAPES = {
    0: ("a single number was dumped, such as the count or the longest", "dump the bounds of every sequence, [S+1]"),
    1: ("the tensor is empty, though there are tokens", "dump [0] for no sequence"),
    2: ("offsets of several packs were stacked", "concatenate them, each shifted by the tokens before it"),
}
Shape = tuple[int, ...]


def describe(
    tensors: Mapping[str, tuple[str, Shape]],
    metadata: Mapping[str, str],
    *,
    path: str,
    name: str,
    place: Place,
    columns: Mapping[str, str] | None = None,
    format: str = FORMAT,
    size: int = 0,
    mtime_ns: int = 0,
) -> tuple[ShardInfo, tuple[Note, ...]]:
    """What one shard holds, judged by dtypes and shapes alone.

    Args:
        tensors: name -> (safetensors dtype name, shape).
        metadata: the header's strings.
        path, name: the file, and how a user sees it.
        place: its step, rank and world size.
        columns: the user's choices, as ``check_columns`` gives them.
        format, size, mtime_ns: passed on to the ``ShardInfo``.

    Returns:
        The shard, and notes on what was left out of it.

    Raises:
        DumpError: a required column is missing, ambiguous, of the wrong dtype, shape or length.
    """
    layout = metadata.get("layout")
    if layout is not None and layout not in LAYOUTS:
        raise DumpError(
            f"{name}: metadata layout",
            f"expected packed or rectangular, found {shown(layout)!r}",
            fix="write one of the two, or leave it out",
            code="metadata-layout",
        )
    if not tensors:
        note = Note("shard-without-tensors", "notice", name, f"{name} holds no tensor; counted as an empty shard")
        info = ShardInfo(
            path,
            name,
            format,
            place.step,
            place.rank,
            place.world_size,
            layout or "packed",
            0,
            0,
            {},
            {},
            dict(metadata),
            size,
            mtime_ns,
        )
        return info, (note,)
    roles = resolve(frozenset(tensors), columns or {}, name)
    shard = _Shard(name, tensors, roles, layout)
    shard.check_required()
    kept, notes = shard.optional_columns()
    dtypes = {role: tensors[tensor][0] for role, tensor in kept.items()}
    if "labels" in kept:
        dtypes["mask"] = "BOOL"  # what is served, whatever the labels are stored in
    info = ShardInfo(
        path,
        name,
        format,
        place.step,
        place.rank,
        place.world_size,
        shard.layout,
        shard.positions,
        shard.segments,
        kept,
        dtypes,
        dict(metadata),
        size,
        mtime_ns,
    )
    return info, (*roles.notes, *notes, *_unused(tensors, shard.used))


class _Shard:
    """The checks of one shard, in the order in which a user should hear of them."""

    def __init__(self, name: str, tensors: Mapping[str, tuple[str, Shape]], roles: Roles, layout: str | None) -> None:
        self.name = name
        self.tensors = tensors
        self.columns = dict(roles.columns)
        self.missing = roles.missing
        self.asked = layout
        self.layout = layout or "packed"
        self.positions = 0
        self.segments = 0
        self.notes: list[Note] = []
        self.used = frozenset(roles.columns.values())

    def fail(self, tensor: str, problem: str, why: str, fix: str, code: str) -> NoReturn:
        raise DumpError(f"{self.name}: {shown(tensor)}", problem, why, fix, code=code)

    def shape(self, role: str) -> Shape:
        return self.tensors[self.columns[role]][1]

    def count(self, role: str) -> int:
        total = 1
        for dim in self.shape(role):
            total *= dim
        return total

    def check_required(self) -> None:
        for role in self.missing:
            self._missing(role, f"found {listing(sorted(self.tensors), 20)}")
        for role in ("train", "rollout", "mask"):
            if self.count(role) == 0 and any(self.count(other) for other in ("train", "rollout", "mask")):
                self._missing(role, f"found {self.columns[role]} with 0 elements")
        for role in ("train", "rollout", "mask", "labels", *_BOUNDS):
            if role in self.columns and not (role == "mask" and "labels" in self.columns):
                self._check_dtype(role)
        for role in ("train", "rollout", "mask"):
            self._check_rank(role)
        self._find_layout()
        self._check_lengths()

    def _missing(self, role: str, found: str) -> NoReturn:
        raise DumpError(
            self.name,
            f"{CONTENT[role]} missing: expected a tensor {_canonical(role)} or a known alias, {found}",
            "the hook left it out, or it has a name that is not known here"
            if role == "mask"
            else "the engine did not return them, or the hook dropped the column on one path",
            f"dump it, or name it with --column {role}=NAME",
            code="column-missing",
        )

    def _check_dtype(self, role: str) -> None:
        dtype = self.tensors[self.columns[role]][0]
        if dtype not in allowed(role):
            self.fail(
                self.columns[role],
                f"expected {role} in one of {', '.join(sorted(allowed(role)))}, found {dtype}",
                "log-probs in 8 bits hold no mismatch that could be measured"
                if dtype.startswith("F8")
                else "another tensor was meant",
                "dump it in float32" if dtype.startswith("F8") else f"name the right one with --column {role}=NAME",
                "dtype-unsupported",
            )

    def _check_rank(self, role: str) -> None:
        shape = self.shape(role)
        if len(shape) not in (1, 2):
            self.fail(
                self.columns[role],
                f"expected [T], [1, T] or [B, L], found {list(shape)}",
                ("a trailing or leading axis was kept" if 1 in shape else "several batches were stacked")
                if shape
                else "a mean or another single value was dumped in place of one for each token",
                "reshape it to [T]" if shape else "dump the values before they are averaged, as [T]",
                "shape-rank",
            )

    def _find_layout(self) -> None:
        """Packed or rectangular: never a guess where the two would give other sequences."""
        shape = self.shape("train")
        rows = shape[0] if len(shape) == 2 else 1
        bounded = "offsets" in self.columns
        if self.asked == "rectangular":
            if len(shape) != 2:
                self.fail(
                    self.columns["train"],
                    f"expected [B, L] (metadata layout: rectangular), found {list(shape)}",
                    "the columns were flattened",
                    "reshape to [B, L], or drop the layout key and add cu_seqlens",
                    "shape-layout",
                )
            self._drop_bounds()
        elif rows > 1 and self.asked is None:
            if bounded and not ("lengths" in self.columns and self.count("lengths") == rows):
                self.fail(
                    self.columns["offsets"],
                    f"expected either rows of [B, L] or {self.columns['offsets']} to bound the sequences, found {list(shape)} and both",
                    "it could be rows of packs, or padded rows with the offsets of the unpadded tokens",
                    "set the metadata key layout to packed or to rectangular",
                    "layout-ambiguous",
                )
            self.layout = "rectangular"
            self._drop_bounds()
        elif not bounded:
            self.fail(
                "cu_seqlens",
                f"cu_seqlens missing: expected the sequence bounds of {list(shape)}, found neither offsets nor lengths among "
                + listing(sorted(self.tensors), 20),
                "without bounds one long row would be taken for one sequence",
                "dump cu_seqlens int32 [S+1], or set the metadata key layout to rectangular if a row is a sequence",
                "column-missing",
            )
        self.positions = self.count("train")
        if self.layout == "rectangular":
            self.segments = shape[0]
        else:
            self.segments = self._bounds("lengths", 0) if "lengths" in self.columns else self._bounds("offsets", 1)
            self._check_packs()

    def _drop_bounds(self) -> None:
        """Rows are the sequences: bounds beside them (often the unpadded lengths) are not used."""
        dropped = sorted({self.columns.pop(role) for role in _BOUNDS if role in self.columns})
        if dropped:
            message = f"{listing(dropped)} not used: the rows of {list(self.shape('train'))} are the sequences"
            self.notes.append(Note("bounds-not-used", "info", "", message))

    def _bounds(self, role: str, extra: int) -> int:
        shape = self.shape(role)
        if len(shape) == 2 and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != 1 or (shape[0] < extra and self.positions):
            self.fail(
                self.columns[role],
                f"expected [{'S+1' if extra else 'S'}], found {list(self.shape(role))}",
                *_BOUNDS_SHAPES.get(len(shape), _BOUNDS_SHAPES[2]),
                "shape-offsets",
            )
        return max(shape[0] - extra, 0)

    def _check_packs(self) -> None:
        if "pack_lengths" in self.columns:
            self._bounds("pack_lengths", 0)
        elif "packs" in self.columns:
            self._bounds("packs", 1)

    def _check_lengths(self) -> None:
        """train, rollout and mask describe the same positions."""
        shapes = {role: _flat(self.shape(role), self.layout) for role in ("train", "rollout", "mask")}
        if len(set(shapes.values())) == 1:
            return
        counts = {role: self.count(role) for role in shapes}
        named = ", ".join(f"{self.columns[role]} {list(self.shape(role))}" for role in shapes)
        others = [
            f"{tensor} {list(self.tensors[tensor][1])}"
            for role, tensor in sorted(self.columns.items())
            if role.startswith("logprobs.")
        ]
        if len(set(counts.values())) == 1:
            self.fail(
                self.columns["rollout"],
                f"expected one shape, found {named}",
                "one side was flattened or transposed",
                "dump all three in the same shape",
                "shape-differs",
            )
        # The odd one out is the column whose length the fewest share.
        values = list(counts.values())
        odd = min(counts, key=lambda role: (values.count(counts[role]), role != "rollout"))
        rest = next(role for role in counts if counts[role] != counts[odd])
        surplus = counts[odd] - counts[rest]
        how = f"{abs(surplus):,} {'more' if surplus > 0 else 'fewer'} than {self.columns[rest]}"
        problem = f"expected equal lengths, found {named}: {self.columns[odd]} has {how}"
        per_sequence = self.segments and abs(surplus) == self.segments
        if per_sequence:
            problem += f", which equals the number of sequences ({self.segments:,})"
        if others:
            problem += f"; for comparison {', '.join(others)}"
        why = (
            "one value per sequence too many or too few: first or last token, or length - 1 log-probs"
            if per_sequence
            else "one side was padded, cut or re-tokenised"
        )
        self.fail(
            self.columns[odd], problem, why, "score the same tokens on both sides and dump again", "length-differs"
        )

    def optional_columns(self) -> tuple[dict[str, str], list[Note]]:
        """The columns that fit, and a note for each that does not."""
        core = ("train", "rollout", "mask", "labels", *_BOUNDS)
        kept = {role: self.columns[role] for role in core if role in self.columns}
        notes = self.notes
        for role in self.columns:
            if role in kept:
                continue
            problem = self._misfit(role)
            if problem is None:
                kept[role] = self.columns[role]
            else:
                notes.append(Note("column-refused", "warning", role, f"{self.columns[role]} left out: {problem}"))
        return kept, notes

    def _misfit(self, role: str) -> str | None:
        dtype, shape = self.tensors[self.columns[role]]
        if dtype not in allowed(role):
            return f"dtype {dtype} cannot be {role}"
        if role in SEGMENT_ROLES:
            flat = shape[1:] if len(shape) == 2 and shape[0] == 1 else shape
            return (
                None if flat == (self.segments,) else f"expected [{self.segments}] (one a segment), found {list(shape)}"
            )
        if _flat(shape, self.layout) == _flat(self.shape("train"), self.layout):
            return None
        surplus = self.count(role) - self.positions
        problem = f"expected {list(self.shape('train'))}, found {list(shape)}"
        if surplus:
            problem += f": {abs(surplus):,} {'more' if surplus > 0 else 'fewer'} than tokens"
        if surplus and abs(surplus) == self.segments:
            problem += f", which equals the number of sequences ({self.segments:,})"
        return problem


def _unused(tensors: Mapping[str, tuple[str, Shape]], used: frozenset[str]) -> list[Note]:
    """Tensors that play no role are said: a misspelt column would otherwise vanish without a word."""
    rest = sorted(set(tensors) - used - set(FACTORS))
    if not rest:
        return []
    return [
        Note("tensors-unused", "info", "", f"tensors that play no role: {listing(rest)}; --column ROLE=NAME gives one")
    ]


def _canonical(role: str) -> str:
    return {"train": "train_logprobs", "rollout": "rollout_logprobs", "mask": "response_mask"}[role]


def _flat(shape: Shape, layout: str) -> Shape:
    """[1, T] is [T], unless rows count."""
    return shape[1:] if len(shape) == 2 and shape[0] == 1 and layout == "packed" else shape
