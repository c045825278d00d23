"""The vocabulary of corrections: a weight that multiplies the loss, and rules that take tokens or sequences out of it.

Levels: ``token``, ``sequence`` (product of the ratios), ``geometric`` (their geometric mean). Statistics that a rule can test, besides
the levels: ``token.K``, ``sum.K``, ``mean.K``, ``max.K`` for K in k1, k2, k3 (nats, not ratios), ``mean.mult`` = mean of exp|d| over
the sequence, and ``token.dprob`` = exp(t) - exp(r). No torch here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rollout_is.dumps.errors import UsageError

LEVELS = ("token", "sequence", "geometric")
STATISTICS = (
    *LEVELS,
    *(f"{scope}.{k}" for scope in ("token", "sum", "mean", "max") for k in ("k1", "k2", "k3")),
    "mean.mult",
    "token.dprob",
)


@dataclass(frozen=True)
class Weight:
    """What multiplies the loss of a surviving token.

    Attributes:
        level: ``none`` (weight 1), ``token``, ``sequence`` or ``geometric``: exp of that level's log-ratio.
        lower, upper: the weight is cut to them; None leaves that end open.
        safety: bound on |log-ratio| before exp; None is none.
        normalize: ``token``: divide by the mean weight over the eligible tokens of a step; ``sequence``: over its sequences.
    """

    level: str = "none"
    lower: float | None = None
    upper: float | None = None
    safety: float | None = None
    normalize: str | None = None

    def words(self) -> str:
        """The weight in words."""
        if self.level == "none":
            return "weight 1 (no importance weight)"
        name = {
            "token": "token ratio",
            "sequence": "product of the sequence's ratios",
            "geometric": "geometric mean ratio",
        }
        text = f"weight = {name[self.level]}"
        if self.lower is not None and self.upper is not None:
            text += f", clipped to [{self.lower:g}, {self.upper:g}]"
        elif self.upper is not None:
            text += f", truncated at {self.upper:g}"
        elif self.lower is not None:
            text += f", raised to at least {self.lower:g}"
        else:
            text += ", unbounded"
        if self.safety is not None:
            text += f" (log-ratio held in +-{self.safety:g})"
        if self.normalize:
            text += f", then divided by its mean over the step's {self.normalize}s"
        return text


@dataclass(frozen=True)
class Rule:
    """One test that a token or its sequence has to pass.

    Attributes:
        statistic: one of STATISTICS. Levels are compared as ratios, the others in nats.
        action: ``mask`` (what fails leaves the mask and every denominator) or ``zero`` (it stays in n with weight 0).
        lower, upper: what survives lies between them; None is open.
        inclusive: whether a value on a bound survives.
        veto: a token that fails takes its whole sequence along.
        advantage: ``negative`` tests only tokens whose advantage is < 0; ``sign`` tests the upper bound where it is > 0 and the lower one
            elsewhere.
        safety: bound on |d| of each token before the statistic is formed.
    """

    statistic: str
    action: str
    lower: float | None = None
    upper: float | None = None
    inclusive: bool = True
    veto: bool = False
    advantage: str | None = None
    safety: float | None = None

    @property
    def scope(self) -> str:
        """``token`` or ``sequence``: what one decision is about."""
        token = self.statistic == "token" or self.statistic.startswith("token.")
        return "token" if token and not self.veto else "sequence"

    @property
    def is_ratio(self) -> bool:
        """Whether the bounds are on a ratio (a level) and not in nats."""
        return self.statistic in LEVELS

    def log_bounds(self) -> tuple[float, float]:
        """Bounds in log-ratio (for levels) or as they stand (else); open ends are infinite."""
        low = -math.inf if self.lower is None else (_ln(self.lower) if self.is_ratio else self.lower)
        high = math.inf if self.upper is None else (_ln(self.upper) if self.is_ratio else self.upper)
        return low, high

    def words(self) -> str:
        """The rule in words."""
        tested = {
            "token": "token ratio",
            "sequence": "product of the sequence's ratios",
            "geometric": "geometric mean ratio of the sequence",
            "mean.mult": "mean of exp|d| over the sequence",
            "token.dprob": "p_train - p_rollout of the token",
        }.get(self.statistic)
        if tested is None:
            scope, kind = self.statistic.split(".")
            over = {"token": "of the token", "sum": "summed over the sequence", "mean": "averaged over the sequence"}
            tested = f"{kind} {over.get(scope, 'of the sequence (largest token)')}"
        span = _span(self.lower, self.upper, self.inclusive)
        done = "the sequence" if self.scope == "sequence" else "the token"
        how = f"{done} is masked out (leaves n)" if self.action == "mask" else f"{done} gets weight 0 (stays in n)"
        text = f"unless the {tested} lies {span}, {how}"
        if self.veto:
            text = f"any token whose ratio is not {span} vetoes its sequence: it is {'masked out' if self.action == 'mask' else 'zeroed'}"
        if self.advantage == "negative":
            text += "; only where the advantage is < 0"
        elif self.advantage == "sign":
            text += "; upper bound where the advantage is > 0, lower bound elsewhere"
        return text


@dataclass(frozen=True)
class Policy:
    """A correction: the weight and the rules, all of which must pass.

    Attributes:
        name: preset name or the spec text.
        weight: the multiplier of surviving tokens.
        rules: tested on the dump as it stands, none on what another left over; all must pass.
        note: the oddity of the framework that it reproduces, for a reader.
    """

    name: str
    weight: Weight = Weight()
    rules: tuple[Rule, ...] = ()
    note: str = ""

    @property
    def needs_advantages(self) -> bool:
        return any(rule.advantage for rule in self.rules)

    @property
    def denominators(self) -> str:
        """What rejection does to n: ``kept in n``, ``leaves n``, ``both`` or ``none rejected``."""
        actions = {rule.action for rule in self.rules}
        if not actions:
            return "none rejected"
        return "both" if len(actions) > 1 else ("leaves n" if actions == {"mask"} else "stays in n as 0")

    def words(self) -> list[str]:
        """The policy in words: the weight first, then each rule."""
        return [self.weight.words(), *(rule.words() for rule in self.rules)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "weight": asdict(self.weight),
            "rules": [asdict(rule) for rule in self.rules],
            "words": self.words(),
            "note": self.note,
        }


def check_bounds(where: str, lower: float | None, upper: float | None, *, ratio: bool) -> None:
    """Refuse bounds that cannot be meant.

    Raises:
        UsageError: a ratio bound <= 0, a bound that is not finite, or lower >= upper; both values are in the message.
    """
    for name, value in (("lower", lower), ("upper", upper)):
        if value is None:
            continue
        if not math.isfinite(value) or (ratio and value <= 0):
            wanted = "a finite ratio > 0" if ratio else "a finite number"
            raise UsageError(
                f"{where}: {name}={value:g}",
                f"expected {wanted}, found {value:g}",
                "bounds on ratios are compared in log space" if ratio else "",
                f"leave {name} out to switch that side off",
                code="policy-bounds",
            )
    if lower is not None and upper is not None and not lower < upper:
        raise UsageError(
            f"{where}: lower={lower:g}, upper={upper:g}",
            f"expected lower < upper, found lower {lower:g} and upper {upper:g}",
            "the bounds are reversed (some trainers take the upper bound first)",
            f"lower={upper:g},upper={lower:g}",
            code="policy-bounds",
        )


def _ln(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _span(lower: float | None, upper: float | None, inclusive: bool) -> str:
    if lower is not None and upper is not None:
        return f"in [{lower:g}, {upper:g}]" if inclusive else f"in ({lower:g}, {upper:g})"
    if upper is not None:
        return f"at most {upper:g}" if inclusive else f"below {upper:g}"
    return f"at least {lower:g}" if inclusive else f"above {lower:g}"
