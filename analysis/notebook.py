"""Write the Summary: source, coverage, notes and findings around the figures."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollout_is.analysis.assemble import Assembled
from rollout_is.analysis.data_notes import data_notes, ranked
from rollout_is.analysis.duplicates import Duplicates
from rollout_is.analysis.findings import shell_path
from rollout_is.analysis.fused.library import kernel
from rollout_is.analysis.glance import verdict
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary
from rollout_is.dumps.errors import RolloutIsError
from rollout_is.dumps.notes import Note
from rollout_is.dumps.shard import ShardInfo

if TYPE_CHECKING:
    from rollout_is.dumps.scan import Scan

SHOWN = 10
TELLING = 4  # valid tokens from which on a copy is no accident


def write(
    scanned: Scan, shards: Mapping[int, ShardInfo], plan: Any, assembled: Assembled, found: Duplicates,
    left_out: Sequence[RolloutIsError], settings: Settings, worst: Mapping[str, Any], extra: Mapping[str, Any],
    runtime: Mapping[str, Any],
) -> Summary:  # fmt: skip
    """Everything found, as one Summary. Nothing in it but ``runtime`` depends on how the work was spread."""
    infos = [shards[k] for k in sorted(shards)]
    views = assembled.views
    mismatch = views["masked"].get("mismatch", {})
    mean_abs = mismatch["mismatch_logprob_abs_diff"].value if mismatch else None
    notes = [*scanned.notes]
    notes += data_notes(assembled.observations, assembled.coverage, shards, mean_abs, settings.mask)
    notes += _plan_notes(plan, left_out, infos, settings)
    notes += _duplicate_notes(found, plan.shards)
    notes += _view_notes(views, assembled)
    rest = dict(extra)
    summary = Summary(
        source=_source(scanned, infos) | plan.asked,
        coverage=_coverage(assembled, plan, shards, left_out, scanned),
        settings=_settings(settings),
        views=views,
        groups=assembled.groups,
        worst=worst,
        notes=ranked(notes),
        extra=extra,
        runtime={
            **runtime,
            "kernel": kernel()[0] if settings.device == "cpu" else "torch",
            "host": platform.node(),
            "python": platform.python_version(),
        },
    )
    seen = rest.pop("glance", ())
    return replace(summary, extra=rest, findings=verdict(summary, seen, shell_path(summary)))


def _source(scanned: Scan, infos: Sequence[ShardInfo]) -> dict[str, Any]:
    columns: dict[str, Counter[str]] = {}
    dtypes: dict[str, Counter[str]] = {}
    metadata: dict[str, set[str]] = {}
    for info in infos:
        for role, name in info.columns.items():
            columns.setdefault(role, Counter())[name] += 1
        for role, name in info.dtypes.items():
            dtypes.setdefault(role, Counter())[name] += 1
        for key, value in info.metadata.items():
            if key not in ("step", "rank", "trainer_metrics"):
                metadata.setdefault(key, set()).add(value)
    return {
        "path": scanned.root,
        "formats": sorted({i.format for i in infos}),
        "layouts": sorted({i.layout for i in infos}),
        "columns": {role: sorted(names) for role, names in sorted(columns.items())},
        "dtypes": {role: sorted(names) for role, names in sorted(dtypes.items())},
        "metadata": {key: sorted(values)[:SHOWN] for key, values in sorted(metadata.items())},
        "steps": _ranges([i.step for i in infos]),
        "ranks": _ranges([i.rank for i in infos]),
    }


def _ranges(values: Sequence[int | None]) -> list[int]:
    """The distinct known values; the first and last thousand of very many."""
    known = sorted({v for v in values if v is not None})
    return known if len(known) <= 2000 else known[:1000] + known[-1000:]


def _coverage(
    assembled: Assembled, plan: Any, shards: Mapping[int, ShardInfo], left_out: Sequence[RolloutIsError], scanned: Scan
) -> dict[str, Any]:
    c = assembled.coverage
    infos = shards.values()
    outside = sum(count for number, count in plan.outside.items() if number in shards)
    return {
        "positions": c.positions + outside,
        "valid_tokens": c.valid,
        "segments": c.segments + c.zero_length,
        "sequences": c.sequences,
        "fully_masked": c.padlike + c.content,
        "fully_masked_with_content": c.content,
        "fully_masked_pad_like": c.padlike,
        "zero_length": c.zero_length,
        "outside_positions": outside,
        "shards": len(infos),
        "shards_with_valid_tokens": assembled.contributing,
        "shards_left_out": len(left_out) + len(scanned.problems),
        "steps": len({i.step for i in infos if i.step is not None}),
        "ranks": len({i.rank for i in infos if i.rank is not None}),
        "nonfinite_valid_tokens": assembled.observations.nonfinite_valid,
        "clusters": assembled.clusters,
    }


def _settings(settings: Settings) -> dict[str, Any]:
    lower, upper = settings.bounds
    return {
        "lower": lower,
        "upper": upper,
        "veto_lower": settings.veto_lower,
        "veto_upper": settings.veto_upper,
        "mask": settings.mask,
        "train": settings.train,
        "rollout": settings.rollout,
        "by": list(settings.by),
        "top": settings.top,
        "only": settings.only,
        "device": settings.device.split(":")[0],
    }


def _plan_notes(
    plan: Any, left_out: Sequence[RolloutIsError], infos: Sequence[ShardInfo], settings: Settings
) -> list[Note]:
    notes = []
    outside = sum(plan.outside.values())
    empty = [plan.empty[number] for number in sorted(plan.empty)]
    if outside:
        notes.append(
            Note(
                "outside-tokens",
                "info",
                "cu_seqlens",
                f"{outside:,} tokens outside every sequence (past the last boundary), all masked",
            )
        )
    for name in empty[:SHOWN]:
        notes.append(Note("empty-shard", "info", name, f"{name}: 0 sequences, 0 tokens"))
    if len(empty) > SHOWN:
        notes.append(Note("empty-shard", "info", "", f"and {len(empty) - SHOWN} more empty shards"))
    for error in left_out[:SHOWN]:
        notes.append(Note("shard-left-out", "warning", error.where, f"left out: {error.where}: {error.problem}"))
    if len(left_out) > SHOWN:
        notes.append(Note("shard-left-out", "warning", "", f"and {len(left_out) - SHOWN} more shards left out"))
    rejection = any(r.startswith("mask.") and r != f"mask.{settings.mask}" for i in infos for r in i.columns)
    if not rejection and settings.mask == "response_mask":
        notes.append(
            Note(
                "no-pre-rejection-mask",
                "info",
                "response_mask",
                "pre-rejection mask not present: if the trainer rejected tokens before the dump, their figures are gone",
            )
        )
    return notes


def _duplicate_notes(found: Duplicates, shards: Mapping[int, ShardInfo]) -> list[Note]:
    if not found.copies:
        return []
    notes = []
    count = len(found.copies)
    places = ", ".join(
        f"{shards[a].name} sequence {b} = {shards[c].name} sequence {d}"
        for (a, b), (c, d) in list(zip(found.copies, found.originals, strict=True))[:3]
    )
    more = f"; {found.unchecked:,} more candidates not compared" if found.unchecked else ""
    share = f" (1 in {found.thinning} sequences looked at)" if found.thinning > 1 else ""
    word = "sequence" if count == 1 else "sequences"
    notes.append(
        Note(
            "duplicate-sequences",
            # Answers of a token or three are alike by themselves.
            "warning" if found.longest >= TELLING else "notice",
            "coverage.sequences",
            f"{count:,} exact duplicate {word} ({places}){more}{share}; without_duplicates has the figures without",
        )
    )
    pairs = Counter((a, c) for (a, _), (c, _) in zip(found.copies, found.originals, strict=True) if a != c)
    for (a, c), copies in sorted(pairs.items()):
        if copies >= max(2, shards[a].segments // 2):
            notes.append(
                Note(
                    "duplicate-shards",
                    "warning",
                    shards[a].name,
                    f"{shards[a].name} repeats {copies:,} of its {shards[a].segments:,} segments from {shards[c].name}: "
                    "the same shard twice?",
                )
            )
    return notes


def _view_notes(views: Mapping[str, Any], assembled: Assembled) -> list[Note]:
    c = assembled.coverage
    if c.valid and c.valid == c.positions and not assembled.observations.nonfinite_masked:
        return [
            Note(
                "masks-identical",
                "notice",
                "response_mask",
                "the mask is on at every position: after-mask figures are identical to before-mask figures",
            )
        ]
    return []
