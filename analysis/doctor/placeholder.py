"""Placeholders: one value that stands where a log-prob should, told from honest repeats by what the other side says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.doctor.state import State, counts, places, table
from rollout_is.analysis.doctor.verdict import Draft, Scene, Scope, percent, plural, sig
from rollout_is.analysis.doctor.window import Bools, Window

SIDES = ("rollout", "train")
FILLS = (0.0, 1.0, -1.0, -100.0, -9999.0, -1e4, -1e9, -1e10)
APART = 1.0  # nats: a 0.0 is contradicted where the other side is further off; engines' honest 0.0 is not
APART_OTHER = 0.5  # nats, for other values: bf16 repeats values honestly, near the other side
MIN_FAKE = 3
FAKE_SHARE = 0.02  # contradicted share of the tokens with 0.0, which engines return honestly
FAKE_SHARE_OTHER = 0.3  # for other values
LIFT = 3.0  # a fill is contradicted more often than other tokens are; garbage on the other side contradicts all alike
EXCESS = 1.5  # or 0.0 stands more often on its side than on the other, where honest zeros are as frequent
COMMON = 0.02  # or another value makes up this share of the tokens; coarse storage repeats none that often
REPEATS = 8  # equal values in a sample of 512 that make a value suspicious
LONG_RUN = 4  # tokens: a run this long inside a sequence looks like a span, a shorter one like a stray
WHERE = ("whole", "start", "last", "tail", "span", "stray")
PLACE_WORDS = {
    "whole": "over whole sequences",
    "start": "in one block at the start of each sequence → prompt included?",
    "last": "at the last valid token of sequences: was it never scored?",
    "tail": "from a position on, to the end of the sequence: cut off, or length differs?",
    "span": "in runs inside the sequence: tool or observation spans left in the mask?",
    "stray": "at single tokens here and there: missing values filled in?",
}


@dataclass
class Fill(State):
    """One value on one side.

    Attributes:
        equal, fake: tokens that have it; those of them where the other side is APART.
        there: tokens where the other side has that value.
        by_place: int64 [len(WHERE)] tokens of runs that hold a fake, by where the run lies.
        sequences: pieces with such a run.
    """

    equal: Ints = counts(1)
    fake: Ints = counts(1)
    there: Ints = counts(1)
    by_place: Ints = counts(len(WHERE))
    sequences: Ints = counts(1)
    places: list[dict[str, Any]] = places()


@dataclass
class Placeholder(State):
    """Fills by (side, value), and how many tokens were looked at.

    Attributes:
        fills: (side, value) -> Fill.
        seen: tokens of the blocks in which some fill was looked for; apart: those with |d| > APART and > APART_OTHER.
    """

    fills: dict[tuple[int, float], Fill] = table()
    seen: Ints = counts(1)
    apart: Ints = counts(2)

    def look(self, window: Window, sampled: bool) -> Bools:
        """Take in a window; returns bool [v], the tokens that are placeholders.

        Args:
            sampled: look for unknown constants too; else 0.0 alone is looked for.
        """
        bad = np.zeros(window.n, np.bool_)
        self.seen[0] += window.n
        self.apart += [int(np.count_nonzero(window.abs_d > limit)) for limit in (APART, APART_OTHER)]
        for side, (x, other) in enumerate(((window.r, window.t), (window.t, window.r))):
            for value in candidates(x) if sampled else (0.0,):
                equal = x == value
                n = int(np.count_nonzero(equal))
                if n:
                    bad |= self._fill(window, side, value, equal, other)
        return bad

    def _fill(self, window: Window, side: int, value: float, equal: Bools, other: Floats) -> Bools:
        fill = self.fills.setdefault((side, value), Fill())
        fake = equal & (np.abs(other - value) > (APART if value == 0.0 else APART_OTHER))
        if value != 0.0:  # where the other side is a fill itself, it contradicts nothing
            fake &= other != 0.0
        fill.there[0] += int(np.count_nonzero(other == value))
        fill.equal[0] += int(np.count_nonzero(equal))
        n_fake = int(np.count_nonzero(fake))
        fill.fake[0] += n_fake
        if n_fake == 0:
            return fake
        index = np.flatnonzero(equal)
        piece = window.piece[index]
        new = np.ones(len(index), np.bool_)
        new[1:] = (np.diff(index) > 1) | (np.diff(piece) > 0)
        first = np.flatnonzero(new)
        run_fake = np.add.reduceat(fake[index].astype(np.int64), first)
        length = np.diff(np.append(first, len(index)))
        low, p = index[first], piece[first]
        high = low + length
        at_start = window.begins[p] & (low == window.starts[p])
        at_end = window.ends[p] & (high == window.stops[p])
        kind = np.select(
            [at_start & at_end, at_start, at_end & (length == 1), at_end, length >= LONG_RUN], [0, 1, 2, 3, 4], 5
        )
        bogus = run_fake > 0
        fill.by_place += np.bincount(kind[bogus], weights=length[bogus], minlength=len(WHERE)).astype(np.int64)
        fill.sequences[0] += len(np.unique(p[bogus]))
        for i in np.flatnonzero(fake)[: 3 - len(fill.places)]:
            fill.places.append(window.place(int(i)))
        out = np.zeros(window.n, np.bool_)
        out[index[np.repeat(bogus, length)]] = True
        # with several fakes about, that value cannot be trusted anywhere in the block
        return equal if n_fake >= MIN_FAKE and _convicted(value, fill, self) else out


def candidates(x: Floats) -> list[float]:
    """Values that may be fills: the known ones that occur, and those that a sample repeats."""
    sample = np.sort(x[:: max(1, len(x) // 512)])
    same = np.flatnonzero(np.diff(np.append(sample, np.inf)) != 0)
    run = np.diff(np.append(-1, same))
    often = sample[same[run >= REPEATS]].tolist()
    low, high = float(x.min()), float(x.max())
    known = [v for v in FILLS if low <= v <= high and (v in (0.0, low, high) or v in sample)]
    return list(dict.fromkeys([*known, *(float(v) for v in often)]))[:16]


def _convicted(value: float, fill: Fill, whole: Placeholder) -> bool:
    """Whether the value is a fill: contradicted often, and not only as often as any token is."""
    equal, fake, there = int(fill.equal[0]), int(fill.fake[0]), int(fill.there[0])
    if fake < MIN_FAKE or fake < (FAKE_SHARE if value == 0.0 else FAKE_SHARE_OTHER) * equal:
        return False
    seen, apart = int(whole.seen[0]), int(whole.apart[0 if value == 0.0 else 1])
    expected = equal * max(apart - fake, 0) / max(seen - equal, 1)
    lifted = fake > LIFT * expected and fake > expected + 4 * expected**0.5 + MIN_FAKE - 1
    frequent = equal > EXCESS * there + MIN_FAKE if value == 0.0 else abs(value) > APART / 20 and equal > COMMON * seen
    return lifted or frequent


def judge(scene: Scene) -> list[Draft]:
    """``placeholder.all``, ``placeholder.PLACE`` for each value that is one, of either side."""
    pool = scene.pooled(Placeholder)
    drafts = []
    for (side, value), fill in sorted(pool.fills.items()):
        if not _convicted(value, fill, pool):
            continue
        key = (side, value)
        ranks = tuple(r for r in scene.ranks if _has(scene.pooled(Placeholder, ranks=[r]), key))
        steps = tuple(s for s in scene.steps if _has(scene.pooled(Placeholder, steps=[s]), key))
        scope = Scope(
            ranks if 0 < len(ranks) < len(scene.ranks) else (), steps if 0 < len(steps) < len(scene.steps) else ()
        )
        part = scene.pooled(Placeholder, ranks=scope.ranks, steps=scope.steps)
        drafts.append(_draft(scene, part, part.fills[key], side, value, scope))
    return drafts


def _has(s: Placeholder, key: tuple[int, float]) -> bool:
    fill = s.fills.get(key)
    return fill is not None and int(fill.fake[0]) > 0


def _draft(scene: Scene, s: Placeholder, fill: Fill, side: int, value: float, scope: Scope) -> Draft:
    seen = int(s.seen[0])
    everything = int(fill.equal[0]) >= 0.999 * seen
    tokens = int(fill.equal[0]) if everything else int(fill.by_place.sum())
    share = min(1.0, tokens / max(seen, 1))
    name, other = SIDES[side], SIDES[1 - side]
    kind = WHERE[int(fill.by_place.argmax())]
    shown = "exactly 0" if value == 0.0 else f"the constant {value:g}"
    fake = int(fill.fake[0])
    if everything:
        id = "placeholder.all"
        message = (
            f"every valid {name} log-prob is {shown}{scope.words(scene)} while the {other} side varies: the "
            f"{('engine', 'trainer')[side]}'s values never arrived"
        )
    else:
        id = f"placeholder.{kind}"
        message = (
            f"{name[0]} is {shown} at {percent(share)} of valid tokens{scope.words(scene)}, {PLACE_WORDS[kind]} "
            f"({plural(int(fill.sequences[0]), 'sequence')}; the {other} side is over {sig(APART)} nat away at {fake} of them)"
        )
    return Draft(
        id,
        "error",
        message,
        fake / max(1.0, FAKE_SHARE * int(fill.equal[0])),
        "tokens where the other side contradicts the value, over what is put up with",
        scope,
        tokens=tokens,
        token_share=share,
        sequences=int(fill.sequences[0]),
        places=fill.places,
        alternatives=("a certain token that the other side finds unlikely (then it is one token, not many)",),
        figures={
            "side": name,
            "value": value,
            "tokens_with_value": int(fill.equal[0]),
            "contradicted": fake,
            "by_place": {k: int(n) for k, n in zip(WHERE, fill.by_place, strict=True) if n},
        },
        source="SkyRL#354, miles#2476 (zeros at tool tokens), llama.cpp#27972 (everything 0.0), verl#2543 (wrong mask)",
        next=f"check how the {name} column is filled where no log-prob came back; rollout-is explain {id}",
    )
