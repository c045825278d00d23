"""``rollout-is convert``: dumps of other formats (or of ours, under other names) written as ``rollout-is/1``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollout_is.cli import options as o
from rollout_is.cli.output import remark, write_result
from rollout_is.cli.progress import Progress
from rollout_is.cli.render.numbers import count


class Dtype(StrEnum):
    """What log-probs are written as."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


Source = Annotated[list[str], typer.Argument(metavar="SRC...", help="folders, files or globs of any known format")]
Target = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="folder for the shards")]


def command(
    source: Source,
    output: Target,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="dtype of log-probs [default: the source's]")] = None,
    steps: o.Steps = None,
    column: o.Columns = None,
    allow_partial: o.AllowPartial = False,
    duplicates: o.DuplicatesOption = None,
    force: Annotated[bool, typer.Option("--force", help="replace shards that exist")] = False,
    quiet: o.Quiet = False,
) -> int:
    """Write a dump of another trainer as rollout-is/1: one source file to one shard, each whole or not at all.

    Exit code 3 when the source cannot be read.
    """
    columns = o.parse_columns(column)
    from rollout_is.dumps.convert import convert

    with Progress(enabled=not quiet) as progress:
        found = convert(
            source,
            output,
            columns=columns,
            steps=steps,
            allow_partial=allow_partial,
            duplicates=None if duplicates is None else duplicates.value,
            dtype=None if dtype is None else dtype.value,
            force=force,
            progress=progress,
        )
    lines = []
    for shard in found.shards:
        lines.append(
            f"{shard.source.name} ({shard.source.format}) -> {shard.path}: {count(shard.valid_tokens)} valid of "
            f"{count(shard.source.positions)} positions, {count(shard.source.segments)} segments, "
            f"{count(shard.source.size)} -> {count(shard.size)} bytes"
        )
    kept: dict[str, list[str]] = {}
    for shard in found.shards:
        said = ", ".join(f"{name} = {origin} ({dtype_})" for name, (origin, dtype_) in sorted(shard.tensors.items()))
        kept.setdefault(said, []).append(shard.source.name)
    for said, names in kept.items():
        lines.append(f"kept{'' if len(kept) == 1 else f' of {names[0]} and {len(names) - 1} more'}: {said}")
    dropped = sorted({name for shard in found.shards for name in shard.dropped})
    lines.append(f"dropped: {', '.join(dropped) or 'nothing'}")
    rounded = sum(shard.rounded for shard in found.shards)
    if dtype is not None:
        lines.append(f"rounded: {count(rounded)} log-probs that {dtype.value} cannot hold exactly")
    write_result("".join(f"{line}\n" for line in lines))
    if not quiet:
        for note in found.scan.notes:
            remark(f"{note.severity}: {note.message}")
    return 0
