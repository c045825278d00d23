"""Options that several commands share: one spelling, one help text, one parser each."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollout_is.analysis.settings import GROUPINGS, Settings
from rollout_is.dumps.errors import UsageError


class Format(StrEnum):
    """How a result is written."""

    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"


class Color(StrEnum):
    """When colour is used."""

    auto = "auto"
    always = "always"
    never = "never"


class Duplicates(StrEnum):
    """What to do with two shards for one (step, rank)."""

    newest = "newest"
    all = "all"


Shards = Annotated[list[str], typer.Argument(metavar="DUMP", help="folders, files or globs of shards")]
Dump = Annotated[list[str], typer.Argument(metavar="DUMP", help="folders, files or globs of shards, or a saved JSON")]
FormatOption = Annotated[Format, typer.Option("--format", "-f", help="how the result is written")]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="write here instead of stdout")]
Force = Annotated[bool, typer.Option("--force", help="overwrite the file of -o")]
ColorOption = Annotated[Color, typer.Option("--color", help="NO_COLOR and FORCE_COLOR are honoured under auto")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="nothing on stderr but errors")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="say on stderr what was read and how long it took")]

Lower = Annotated[float | None, typer.Option("--lower", help="lower bound on weights [default: 1/upper]")]
Upper = Annotated[float, typer.Option("--upper", help="upper bound on weights")]
VetoLower = Annotated[float | None, typer.Option("--veto-lower", help="a token ratio below this is catastrophic")]
VetoUpper = Annotated[float | None, typer.Option("--veto-upper", help="a token ratio above this is catastrophic")]
Steps = Annotated[str | None, typer.Option("--steps", metavar="A:B|A,B", help="only these steps, both ends in")]
Mask = Annotated[str, typer.Option("--mask", metavar="NAME", help="response_mask, or NAME of a mask.NAME column")]
Logprobs = Annotated[
    str | None,
    typer.Option(
        "--logprobs", metavar="A,B", help="scoring passes to compare: train, rollout or NAME of logprobs.NAME"
    ),
]
Columns = Annotated[
    list[str] | None, typer.Option("--column", metavar="ROLE=NAME", help="the tensor that plays a role (repeatable)")
]
AllowPartial = Annotated[bool, typer.Option("--allow-partial", help="go on past bad shards and missing ranks")]
DuplicatesOption = Annotated[
    Duplicates | None, typer.Option("--duplicates", help="settle two shards for one (step, rank)")
]
By = Annotated[list[str] | None, typer.Option("--by", help=f"a table for each of {' '.join(GROUPINGS)} (repeatable)")]
Top = Annotated[int, typer.Option("--top", min=0, metavar="K", help="list the K worst sequences and tokens")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, metavar="N", help="processes [default: the cores given to us]")
]
# torchrun reads every option before it passes it on and finds --local ambiguous (--local-addr, ...): --own-shards goes through.
Local = Annotated[
    bool, typer.Option("--own-shards", "--local", help="under torchrun: every node holds only its own shards")
]
Only = Annotated[str | None, typer.Option("--only", metavar="weights", help="leave out the mismatch family (faster)")]


def settings_from(
    *,
    lower: float | None = None,
    upper: float = 2.0,
    veto_lower: float | None = None,
    veto_upper: float | None = None,
    mask: str = "response_mask",
    logprobs: str | None = None,
    by: Sequence[str] | None = None,
    top: int = 0,
    only: str | None = None,
    device: str = "cpu",
) -> Settings:
    """Settings from option values.

    Raises:
        UsageError: bounds reversed or not positive, an unknown grouping, ``--only`` or ``--logprobs`` not understood.

    >>> settings_from(by=["step,rank"], logprobs="train,train_again").rollout
    'train_again'
    """
    train, rollout = "train", "rollout"
    if logprobs is not None:
        sides = [side.strip() for side in logprobs.split(",")]
        if len(sides) != 2 or not all(sides) or sides[0] == sides[1]:
            raise UsageError(
                f"--logprobs {logprobs}",
                f"expected two different names A,B, found {logprobs!r}",
                "two scoring passes are compared: the first plays train, the second rollout",
                "such as --logprobs train,rollout or --logprobs train,train_again",
            )
        train, rollout = (side.removeprefix("logprobs.") for side in sides)
    if only not in (None, "weights"):
        raise UsageError(f"--only {only}", f"expected weights, found {only!r}", fix="--only weights, or leave it out")
    return Settings(
        lower=lower,
        upper=upper,
        veto_lower=veto_lower,
        veto_upper=veto_upper,
        mask=mask.removeprefix("mask."),
        train=train,
        rollout=rollout,
        by=tuple(dict.fromkeys(split_names(by))),
        top=top,
        only=only,
        device=device,
    )


def split_names(values: Sequence[str] | None) -> list[str]:
    """Names from a repeatable option that also takes commas.

    >>> split_names(["step,rank", "length"])
    ['step', 'rank', 'length']
    """
    return [name.strip() for value in values or () for name in value.split(",") if name.strip()]


def choices(option: str, values: Sequence[str] | None, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names chosen from ``allowed``, in the order of ``allowed``; none given is all of them.

    >>> choices("--view", ["masked,padded"], ("unmasked", "padded", "masked"))
    ('padded', 'masked')
    """
    names = split_names(values)
    for name in names:
        if name not in allowed:
            raise UsageError(f"{option} {name}", f"expected one of {', '.join(allowed)}, found {name!r}")
    return tuple(name for name in allowed if not names or name in names)


def parse_columns(values: Sequence[str] | None) -> dict[str, str]:
    """``role=name`` pairs as a mapping role -> tensor name.

    >>> parse_columns(["train=old_log_probs"])
    {'train': 'old_log_probs'}
    """
    columns: dict[str, str] = {}
    for value in values or ():
        role, equals, name = value.partition("=")
        if not equals or not role.strip() or not name.strip():
            raise UsageError(
                f"--column {value}",
                f"expected ROLE=NAME, found {value!r}",
                "the role comes first, the name of the tensor second",
                "such as --column train=old_log_probs",
            )
        if columns.setdefault(role.strip(), name.strip()) != name.strip():
            raise UsageError(
                f"--column {value}", f"expected one tensor for {role}, found {columns[role.strip()]} and {name}"
            )
    return columns
