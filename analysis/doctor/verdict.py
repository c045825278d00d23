"""From merged sums to findings: scopes (everywhere, some ranks, some steps) and the one shape of a finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from rollout_is.analysis.batch import Unit
from rollout_is.analysis.doctor.state import S, State, merged
from rollout_is.analysis.summary import Finding

if TYPE_CHECKING:
    from rollout_is.dumps.shard import ShardInfo

SEVERITIES = ("info", "notice", "warning", "error")
LISTED = 8  # ranks or steps named in a sentence


class Scene:
    """All that the units saw, in unit order, with the ways to pool it.

    Of each kind the sums by rank and by step are kept, so that asking every rank and every step walks over the units once.
    """

    def __init__(self, parts: Iterable[tuple[Unit, ShardInfo, dict[str, State]]]) -> None:
        self.parts = list(parts)
        self.ranks = sorted({info.rank for _, info, _ in self.parts if info.rank is not None})
        self.steps = sorted({info.step for _, info, _ in self.parts if info.step is not None})
        self._sums: dict[tuple[str, str, tuple[int, ...]], Any] = {}  # the kind is in the key

    def _by(self, kind: type[S], what: str, ranks: tuple[int, ...] = ()) -> dict[int | None, S]:
        """The sums of each rank or each step, perhaps over some ranks only."""
        key = (kind.__name__, what, ranks)
        if key not in self._sums:
            wanted = set(ranks)
            sums: dict[int | None, S] = {}
            for _, info, states in self.parts:
                part = states[kind.__name__]
                if isinstance(part, kind) and (not wanted or info.rank in wanted):
                    label = info.rank if what == "rank" else info.step
                    if label not in sums:
                        sums[label] = kind()
                    sums[label].merge(part)
            self._sums[key] = sums
        return cast("dict[int | None, S]", self._sums[key])

    def pooled(self, kind: type[S], ranks: Sequence[int] = (), steps: Sequence[int] = ()) -> S:
        """The sums of all units, or of those of some ranks and steps: to be read only."""
        if steps:
            sums = self._by(kind, "step", tuple(ranks))
            parts = [sums[s] for s in steps if s in sums]
        else:
            parts = [part for label, part in self._by(kind, "rank").items() if not ranks or label in ranks]
        return parts[0] if len(parts) == 1 else merged(kind, parts)


@dataclass(frozen=True)
class Scope:
    """Where something holds: empty tuples mean everywhere."""

    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    def words(self, scene: Scene) -> str:
        """ " on rank 5 (1 of 8)", " from step 3 on", "" when it is everywhere."""
        out = ""
        if self.ranks:
            out += f" on {_listed('rank', self.ranks)} ({len(self.ranks)} of {len(scene.ranks)} ranks)"
        if self.steps:
            tail = tuple(s for s in scene.steps if s >= self.steps[0])
            if tail == self.steps and len(tail) > 1:
                out += f" from step {self.steps[0]} on"
            else:
                out += f" at {_listed('step', self.steps)} ({len(self.steps)} of {len(scene.steps)} steps)"
        return out


def _listed(word: str, values: tuple[int, ...]) -> str:
    shown = ", ".join(str(v) for v in values[:LISTED])
    more = f" and {len(values) - LISTED} more" if len(values) > LISTED else ""
    return f"{word}{'s' if len(values) > 1 else ''} {shown}{more}"


def find_scope(scene: Scene, kind: type[S], fires: Callable[[S], bool]) -> tuple[S, Scope] | None:
    """The sums over the ranks and steps for which ``fires`` holds, and which they are; None when it holds nowhere.

    A fault of one rank is weak in the pool, so every rank and every step is asked by itself too.
    """
    ranks = [r for r in scene.ranks if fires(scene.pooled(kind, ranks=[r]))]
    steps = [s for s in scene.steps if fires(scene.pooled(kind, steps=[s]))]
    pool = scene.pooled(kind)
    everywhere = fires(pool)
    if not (everywhere or ranks or steps):
        return None
    some_ranks = tuple(ranks) if 0 < len(ranks) < len(scene.ranks) else ()
    if some_ranks:  # ask for the steps on those ranks only
        steps = [s for s in scene.steps if fires(scene.pooled(kind, ranks=some_ranks, steps=[s]))]
    some_steps = tuple(steps) if 0 < len(steps) < len(scene.steps) else ()
    part = scene.pooled(kind, ranks=some_ranks, steps=some_steps)
    if not fires(part):  # parts too small to judge alone: the pool stands
        return (pool, Scope()) if everywhere else None
    return part, Scope(some_ranks, some_steps)


@dataclass
class Draft:
    """A finding being made; ``finish`` turns it into the frozen one.

    Attributes:
        strength: the effect against its uncertainty or against the healthy value; ``strength_words`` says which.
        tokens, sequences: how many it touches (of the sampled ones where ``sampled``).
        alternatives: what else could explain it.
        explains: findings that are consequences of this one.
    """

    id: str
    severity: str
    message: str
    strength: float
    strength_words: str
    scope: Scope = field(default_factory=Scope)
    tokens: int | None = None
    token_share: float | None = None
    sequences: int | None = None
    places: list[dict[str, Any]] = field(default_factory=list)
    alternatives: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    next: str = ""
    explains: list[Draft] = field(default_factory=list)

    @property
    def rank_key(self) -> tuple[int, float, str]:
        """Sorts worst first."""
        return (-SEVERITIES.index(self.severity), -(self.token_share or 0.0), self.id)

    def finish(self, scene: Scene) -> Finding:
        """The frozen finding, its evidence as plain JSON data."""
        evidence: dict[str, Any] = {
            "strength": rounded(self.strength),
            "strength_is": self.strength_words,
            "tokens": self.tokens,
            "token_share": None if self.token_share is None else rounded(self.token_share),
            "sequences": self.sequences,
            "ranks": list(self.scope.ranks) or scene.ranks,
            "steps": list(self.scope.steps) or scene.steps,
            "places": self.places,
            "alternatives": list(self.alternatives),
            "figures": {k: rounded(v) if isinstance(v, float) else v for k, v in self.figures.items()},
            "explains": [{"id": d.id, "message": d.message} for d in self.explains],
        }
        return Finding(self.id, self.severity, self.message, evidence, self.source, self.next)


def rounded(x: float) -> float | None:
    """Six significant digits; None for what JSON cannot hold."""
    return float(f"{x:.6g}") if math.isfinite(x) else None


def sig(x: float) -> str:
    """Three significant digits for a sentence, without an exponent where a plain number reads better.

    >>> sig(0.01234), sig(70.31), sig(123456.0), sig(2e-7)
    ('0.0123', '70.3', '123000', '2e-07')
    """
    if x == 0 or not abs(x) < float("inf"):
        return str(x) if x else "0"
    text = f"{x:.3g}"
    return text if 1e-4 <= abs(x) < 1000 or abs(x) < 1e-4 or abs(x) >= 1e9 else f"{float(text):.0f}"


def percent(x: float) -> str:
    """A share in words: never 0 % for a few, never 100 % for almost all.

    >>> percent(0.1875), percent(1.0), percent(0.99999), percent(0.00001)
    ('18.8 %', '100 %', 'over 99.9 %', 'under 0.1 %')
    """
    if x in (0.0, 1.0):
        return f"{x:.0%}".replace("%", " %")
    if x > 0.999:
        return "over 99.9 %"
    return "under 0.1 %" if x < 0.001 else f"{100 * x:.3g} %"


def plural(n: int, word: str) -> str:
    """ "1 sequence", "2 sequences"."""
    return f"{n} {word}" + ("" if n == 1 else "s")
