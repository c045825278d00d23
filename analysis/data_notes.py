"""Notes on the data: what a reader of the figures must know, each said once with its evidence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from rollout_is.analysis.observe import Observations, Side
from rollout_is.analysis.partial import Coverage
from rollout_is.analysis.rejected import rejected_notes
from rollout_is.analysis.retokenized import retokenized_notes
from rollout_is.analysis.select import MORE_VALUES
from rollout_is.dumps.notes import Note, Severity
from rollout_is.dumps.shard import ShardInfo

Say = Callable[[str, Severity, str, str], None]  # code, severity, metric, message
POSITIVE_TOLERANCE = 1e-6  # a log-softmax in float32 may round to just above 0
_MANTISSA = {"BF16": 8, "F16": 11}
_ORDER = {"error": 0, "warning": 1, "notice": 2, "info": 3}


def data_notes(
    observed: Observations, coverage: Coverage, shards: Mapping[int, ShardInfo], mean_abs: float | None, mask: str
) -> list[Note]:
    """Notes from what the engine noticed.

    Args:
        observed: joined observations of all units.
        coverage: of the whole dump.
        shards: all that were read, by their numbers in the scan: some may have been left out.
        mean_abs: the masked ``mismatch_logprob_abs_diff``, to set the resolution against; None when unknown.
        mask: name of the mask used.
    """
    notes: list[Note] = []

    def note(code: str, severity: Severity, metric: str, message: str) -> None:
        notes.append(Note(code, severity, metric, message))

    if coverage.valid == 0:
        note("no-valid-tokens", "error", mask, f"no valid tokens: {mask} is 0 at all {coverage.positions:,} positions")
    if coverage.content:
        note(
            "fully-masked-content", "notice", mask,
            f"{coverage.content:,} of {coverage.segments:,} segments are fully masked but hold content "
            "(filtered or rejected before the dump?)",
        )  # fmt: skip
    if coverage.padlike:
        note(
            "fully-masked-pad-like", "info", mask,
            f"{coverage.padlike:,} of {coverage.segments:,} segments are fully masked and pad-like (one fill value)",
        )  # fmt: skip
    if observed.nonfinite_valid:
        where = ", ".join(_place(shards, p) for p in observed.nonfinite_places[:3])
        note(
            "nonfinite-valid", "error", "coverage.nonfinite_valid_tokens",
            f"{observed.nonfinite_valid:,} valid tokens have a non-finite log-prob (first: {where}); "
            "they are left out of every mean, and their sequences of the product level",
        )  # fmt: skip
    if observed.nonfinite_masked:
        note(
            "nonfinite-masked", "info", mask, f"non-finite under mask: {observed.nonfinite_masked:,} positions, without effect"
        )  # fmt: skip
    _sides(observed, note)
    if observed.valid and observed.identical == observed.valid and observed.both_zero < observed.valid:
        note(
            "identical-sides", "notice", "mismatch_identical_fraction",
            "100 % of valid tokens are bit-identical on both sides; was the trainer pass skipped, or one side copied?",
        )  # fmt: skip
    if observed.mask_values:
        others = sorted(v for v in observed.mask_values if v != MORE_VALUES)
        more = ", ..." if len(others) > 10 or MORE_VALUES in observed.mask_values else ""
        values = ", ".join(f"{v:g}" for v in others[:10]) + more
        note(
            "mask-values", "notice", mask,
            f"mask has values besides 0 and 1: {values}, treated as on/off ({sum(observed.mask_values.values()):,} "
            "positions are neither 0 nor 1)",
        )  # fmt: skip
    for role, differs in sorted(observed.mask_differs.items()):
        if not differs:
            note(
                "masks-identical", "notice", role,
                f"{role} is identical to {mask} at every position: before and after it are the same figures",
            )  # fmt: skip
    infos = list(shards.values())
    _in_some_shards(infos, note)
    if observed.pad_valid:
        note(
            "pad-with-valid-tokens", "warning", "segment_is_pad",
            f"{_share(observed.pad_valid, observed.valid)} of valid tokens lie in segments that segment_is_pad calls padding: "
            "they are counted as sequences; the mask or the flags are wrong",
        )  # fmt: skip
    notes += retokenized_notes(observed.retokenized, shards)
    notes += rejected_notes(observed.rejected, mask, coverage.segments)
    _resolution(observed, infos, mean_abs, note)
    if observed.masked_fill:
        top = sorted(observed.masked_fill.items(), key=lambda kv: (-kv[1], kv[0]))[:5]
        values = ", ".join(value for value, _ in top)
        note("mask-fill-values", "info", "rollout", f"observed fill values under the mask: {values}")
    return notes


def _in_some_shards(shards: Sequence[ShardInfo], note: Say) -> None:
    """Optional columns that only some of the shards have: figures then rest on two kinds of shards."""
    told = {"group_ids": "standard errors are clustered by group in them and by sequence in the others"}
    roles = {role for info in shards for role in info.columns if role in told or role.startswith("mask.")}
    for role in sorted(roles):
        having = sum(role in info.columns for info in shards)
        if having < len(shards):
            said = told.get(role, "what is said of it counts those shards alone")
            note("column-in-some-shards", "notice", role, f"{role} is in {having:,} of {len(shards):,} shards: {said}")


def _place(shards: Mapping[int, ShardInfo], place: tuple[int, int, float, float]) -> str:
    shard, position, train, rollout = place
    return f"{shards[shard].name} position {position}: train {train:g}, rollout {rollout:g}"


def _sides(observed: Observations, note: Say) -> None:
    valid = observed.valid
    if valid and observed.both_zero == valid:
        note(
            "both-zero", "error", "train, rollout",
            "all log-probs are zero on both sides at every valid token: this is not agreement, the data is missing",
        )  # fmt: skip
        return
    if observed.both_zero > 0.5 * valid:
        note(
            "both-zero", "warning", "train, rollout",
            f"both sides are exactly 0 at {_share(observed.both_zero, valid)} of valid tokens",
        )  # fmt: skip
    for name, side in (("train", observed.train), ("rollout", observed.rollout)):
        if side.positive:
            severe = side.positive_max > POSITIVE_TOLERANCE
            note(
                "positive-logprobs", "warning" if severe else "info", name,
                f"{name} log-probs are positive at {_share(side.positive, valid)} of valid tokens, up to "
                f"{side.positive_max:.3g}; kept as they are",
            )  # fmt: skip
        if side.zeros == valid and valid:
            note(
                "all-zero-side", "error", name,
                f"every valid {name} log-prob is exactly 0: a placeholder, not a log-prob",
            )  # fmt: skip
        elif side.zeros_disagreeing > max(1, 0.001 * valid):
            note(
                "constant-value", "warning", name,
                f"{name} is exactly 0 where the other side is not near 0 at {_share(side.zeros_disagreeing, valid)} of "
                f"valid tokens ({side.zeros:,} are 0 in all): placeholders, or prompt inside the mask?",
            )  # fmt: skip
        _constants(name, side, note)


def _constants(name: str, side: Side, note: Say) -> None:
    """A value other than 0 that is seen again and again: a fill, unless it lies where rounding makes values meet."""
    if side.sampled < 16:
        return
    for value, count in side.repeated.most_common(3):
        share = count / side.sampled
        known = value in (1.0, -9999.0, -1e10, -9984.0)
        if abs(value) > 1e-2 and (share > 0.2 or (known and share > 0.01)):
            note(
                "constant-value", "warning", name,
                f"{name} is exactly {value:g} at {100 * share:.3g} % of {side.sampled:,} sampled valid tokens: a placeholder?",
            )  # fmt: skip


def _resolution(observed: Observations, shards: Sequence[ShardInfo], mean_abs: float | None, note: Say) -> None:
    for role, side in (("train", observed.train), ("rollout", observed.rollout)):
        stored = Counter(s.dtypes.get(role, "") for s in shards)
        for dtype in sorted(set(stored) & set(_MANTISSA)):
            if not side.magnitude:
                continue
            middle = median(side.magnitude)
            if middle <= 0:
                continue
            step = 2.0 ** (math.floor(math.log2(middle)) + 1 - _MANTISSA[dtype])
            against = "" if mean_abs is None else f" (measured mean |d| {mean_abs:.3g})"
            coarse = mean_abs is not None and step > mean_abs
            note(
                "dtype-resolution", "warning" if coarse else "notice", role,
                f"{role} dtype {dtype}: resolution at median |log-prob| {middle:.3g} is {step:.3g}{against}; "
                "differences below it are not meaningful",
            )  # fmt: skip


def _share(count: int, total: int) -> str:
    share = 100.0 * count / total if total else 0.0
    return f"{share:.3g} % ({count:,})"


def ranked(notes: Sequence[Note]) -> tuple[Note, ...]:
    """Errors first, each note once, in an order that depends on nothing but the notes."""
    return tuple(sorted(set(notes), key=lambda n: (_ORDER[n.severity], n.code, n.metric, n.message)))
