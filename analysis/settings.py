"""What an analysis is asked to do, as data: it goes into every report, and two reports are comparable only if it agrees."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_is.dumps.errors import UsageError

GROUPINGS = ("step", "rank", "shard", "pack", "position", "length", "probability", "version", "group")
# Groupings that split sequences: statistics of sequences are null under them.
TOKEN_GROUPINGS = ("position", "probability", "version")


@dataclass(frozen=True)
class Settings:
    """Bounds and choices of one analysis.

    Attributes:
        lower, upper: bounds on weights for the high/low fractions; ``lower`` None means 1 / upper.
        veto_lower, veto_upper: catastrophic-token bounds on the token ratio; None is off.
        mask: name of the mask: ``response_mask`` or NAME of a ``mask.NAME`` column.
        train, rollout: which scoring passes are compared: ``train``, ``rollout`` or NAME of ``logprobs.NAME``.
        by: groupings, each one of GROUPINGS.
        top: how many worst sequences and tokens to keep; 0 for none.
        only: ``weights`` leaves out the mismatch family (the probability exponentials are the dear part); None is all.
        device: torch device string.

    >>> Settings(upper=2.0).bounds
    (0.5, 2.0)
    """

    lower: float | None = None
    upper: float = 2.0
    veto_lower: float | None = None
    veto_upper: float | None = None
    mask: str = "response_mask"
    train: str = "train"
    rollout: str = "rollout"
    by: tuple[str, ...] = ()
    top: int = 0
    only: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        lower, upper = self.bounds
        for name, bound in (
            ("upper", upper),  # first: a lower bound that is not given follows from it
            ("lower", lower),
            ("veto-lower", self.veto_lower),
            ("veto-upper", self.veto_upper),
        ):
            if bound is not None and not (0 < bound < float("inf")):
                raise UsageError(
                    f"--{name} {bound}",
                    f"expected a finite bound > 0, found {bound}",
                    "bounds are on weights, and weights are positive",
                    "give a positive number, such as 0.5",
                )
        if not lower < upper and self.lower is None:
            raise UsageError(
                f"--upper {upper}",
                f"expected an upper bound above 1, found {upper}",
                f"the lower bound that is not given is 1/upper, here {lower:g}",
                "give --upper above 1, or --lower too",
            )
        if not lower < upper:
            equal = lower == upper
            raise UsageError(
                f"--lower {lower} --upper {upper}",
                f"expected lower < upper, found lower {lower} and upper {upper}",
                "the bounds are equal" if equal else "the bounds are reversed",
                "give a lower bound below the upper one" if equal else "swap them",
            )
        if self.veto_lower is not None and self.veto_upper is not None and not self.veto_lower < self.veto_upper:
            raise UsageError(
                f"--veto-lower {self.veto_lower} --veto-upper {self.veto_upper}",
                f"expected veto-lower < veto-upper, found {self.veto_lower} and {self.veto_upper}",
                "the bounds are reversed",
                "swap them",
            )
        for by in self.by:
            if by not in GROUPINGS:
                raise UsageError(f"--by {by}", f"expected one of {', '.join(GROUPINGS)}, found {by!r}")

    @property
    def bounds(self) -> tuple[float, float]:
        """(lower, upper) with the default of lower filled in."""
        return (1.0 / self.upper if self.lower is None and self.upper else (self.lower or 0.0)), self.upper
