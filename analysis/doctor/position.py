"""Where it sits inside the responses: by position, with the probability of the tokens held fixed, and by policy version."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.doctor.state import State, counts, places, table, totals
from rollout_is.analysis.doctor.verdict import Draft, Scene, Scope, percent, plural, sig
from rollout_is.analysis.doctor.window import PROBS, Window
from rollout_is.analysis.doctor.worst import Worst

PER_OCTAVE = 2
BINS = 48  # half octaves: up to 2^24 tokens
TIMES = 3.0
SURE = 6.0
MATTERS = 0.02
MIN_TOKENS = 64
MIN_SEQUENCES = 8
CAP = 0.5  # nats: a token counts up to this, so that one outlier among few tokens is no trend
FLOOR = 1e-12  # mean |d| below this is none
STEPLIKE = 0.6  # share of the whole rise that one step between neighbouring bins makes

_EDGES = np.unique(np.round(2.0 ** (np.arange(BINS) / PER_OCTAVE)).astype(np.int64))  # 1 2 3 4 6 8 11 16 ...
_TABLE = np.searchsorted(_EDGES, np.arange(1, 1 << 12), side="right")


def position_bin(index: Ints) -> Ints:
    """int64 [v] bin of each 0-based position: 0 is the first token, then half octaves.

    >>> position_bin(np.array([0, 1, 2, 3, 5, 4000, 10000])).tolist()
    [1, 2, 3, 4, 5, 23, 26]
    """
    out: Ints = _TABLE[np.minimum(index, len(_TABLE) - 1)]
    far = index >= len(_TABLE)
    if far.any():
        out = out.copy()
        out[far] = np.searchsorted(_EDGES, index[far] + 1, side="right")
    return out


def bin_start(b: int) -> int:
    """First 0-based position of a bin."""
    return int(_EDGES[b - 1]) - 1 if b > 0 else 0


@dataclass
class Position(State):
    """Sums of min(|d|, CAP) over clean tokens by position bin and probability bin.

    Attributes:
        n, absolute: [BINS, PROBS] tokens, sum of min(|d|, CAP).
        square: [BINS] sum of its square.
        sequences: [BINS] pieces that reach the bin.
        versions: policy version -> float64 [3] tokens, sum of |d|, sum of d^2.
        mixed: pieces with more than one policy version; pieces with a version at all.
    """

    n: Ints = counts(BINS, PROBS)
    absolute: Floats = totals(BINS, PROBS)
    square: Floats = totals(BINS)
    sequences: Ints = counts(BINS)
    versions: dict[int, Floats] = table()
    mixed: Ints = counts(2)
    mixed_places: list[dict[str, Any]] = places()

    def look(self, window: Window) -> None:
        """Take in clean tokens."""
        if window.n == 0:
            return
        where = position_bin(window.index)
        key = where * PROBS + window.probability
        shape = (BINS, PROBS)
        self.n += np.bincount(key, minlength=BINS * PROBS).reshape(shape)
        capped = np.minimum(window.abs_d, CAP)
        self.absolute += np.bincount(key, weights=capped, minlength=BINS * PROBS).reshape(shape)
        self.square += np.bincount(where, weights=capped * capped, minlength=BINS)
        lowest, highest = where[window.starts], where[window.stops - 1]
        reach = np.bincount(lowest, minlength=BINS + 1) - np.bincount(highest + 1, minlength=BINS + 1)[: BINS + 1]
        self.sequences += np.cumsum(reach)[:BINS]
        if "policy_version" in window.columns:
            self._versions(window, window.columns["policy_version"].astype(np.int64))

    def _versions(self, window: Window, version: Ints) -> None:
        names, which = np.unique(version, return_inverse=True)
        for k, x in enumerate((np.ones(window.n), window.abs_d, window.d * window.d)):
            sums = np.bincount(which, weights=x, minlength=len(names))
            for name, value in zip(names.tolist(), sums.tolist(), strict=True):
                row = self.versions.setdefault(name, np.zeros(3))
                row[k] += value
        low, high = np.minimum.reduceat(version, window.starts), np.maximum.reduceat(version, window.starts)
        several = np.flatnonzero(low != high)
        self.mixed += [len(several), len(low)]
        for p in several[: 3 - len(self.mixed_places)]:
            part = version[window.starts[p] : window.stops[p]]
            self.mixed_places.append(window.place(int(window.starts[p] + np.flatnonzero(part != part[0])[0])))


def _adjusted(s: Position) -> list[tuple[int, float, float, float, int]]:
    """(bin, mean |d|, mean over what its probabilities predict, relative error, tokens) of bins with enough behind them."""
    tokens = s.n.sum(axis=1)
    by_prob = s.absolute.sum(axis=0) / np.maximum(s.n.sum(axis=0), 1)
    rows = []
    for b in range(BINS):
        n = int(tokens[b])
        if n < MIN_TOKENS or s.sequences[b] < MIN_SEQUENCES:
            continue
        mean = float(s.absolute[b].sum()) / n
        expected = float((s.n[b] * by_prob).sum()) / n
        spread = math.sqrt(max(float(s.square[b]) / n - mean * mean, 0.0))
        rows.append((b, mean, mean / max(expected, FLOOR), spread / math.sqrt(n) / max(mean, FLOOR), n))
    return rows


def judge(scene: Scene) -> list[Draft]:
    """``where.position``, ``where.confidence`` and ``where.version``."""
    s = scene.pooled(Position)
    return [*_by_version(scene, s), *_by_position(scene, s)]


def _split(rows: list[tuple[int, float, float, float, int]], which: int) -> tuple[float, int, float] | None:
    """(ratio late over early, index of the first late row, standard errors apart) of the split that is furthest from 1."""
    best: tuple[float, int, float] | None = None
    everything = sum(r[4] for r in rows)
    # the spread of all tokens stands for that of both parts: a short part with a heavy tail shows too little of its own
    spread = math.sqrt(sum((r[which] * r[3]) ** 2 * r[4] ** 2 for r in rows) / everything)
    for i in range(1, len(rows)):
        (n1, early), (n2, late) = (
            (n, sum(r[which] * r[4] for r in part) / n)
            for part in (rows[:i], rows[i:])
            for n in [sum(r[4] for r in part)]
        )
        z = abs(late - early) / max(spread * math.sqrt(1 / n1 + 1 / n2), 1e-12)
        ratio = max(late, FLOOR) / max(early, FLOOR)
        if best is None or abs(math.log(ratio)) > abs(math.log(best[0])):
            best = (ratio, i, z)
    return best


def _by_position(scene: Scene, s: Position) -> list[Draft]:
    rows = _adjusted(s)
    if len(rows) < 2:
        return []
    raw, held = _split(rows, 1), _split(rows, 2)
    assert raw is not None and held is not None
    worst = max(r[1] for r in rows)
    if worst < MATTERS or max(raw[0], 1 / raw[0]) < TIMES or raw[2] < SURE:
        return []
    curve = {str(bin_start(b)): mean for b, mean, *_ in rows}
    common: dict[str, Any] = {
        "tokens": int(s.n.sum()),
        "places": Worst.of(scene, Scope()),
        "figures": {
            "mean_abs_d_by_position": curve,
            "each_token_capped_at": CAP,
            "same_at_equal_probability": {str(bin_start(r[0])): r[2] for r in rows},
        },
        "next": "rollout-is analyze DUMP --by position,probability; rollout-is explain where.position",
    }
    ratio, i, z = raw
    held_ratio = held[0] if (held[0] > 1) == (ratio > 1) else 1.0
    if max(held_ratio, 1 / held_ratio) < 0.5 * max(ratio, 1 / ratio) and max(held_ratio, 1 / held_ratio) < TIMES:
        return [
            Draft(
                "where.confidence",
                "info",
                f"mean |d| changes {sig(max(ratio, 1 / ratio))}x along the response, but only {sig(max(held_ratio, 1 / held_ratio))}x at "
                "equal token probability: it follows low confidence, not position",
                max(ratio, 1 / ratio),
                "late over early mean |d|",
                token_share=0.0,
                alternatives=("a drift with position in tokens of low probability alone",),
                source="Precision-RL#10, prime-rl#1835: growth with length told from growth with low confidence",
                **common,
            )
        ]
    at = bin_start(rows[i][0])
    early = [r for r in rows[:i]]
    late = [r for r in rows[i:]]
    share = sum(r[4] for r in (late if ratio > 1 else early)) / sum(r[4] for r in rows)
    first, last = (sum(r[1] * r[4] for r in part) / sum(r[4] for r in part) for part in (early, late))
    times = f" ({sig(max(ratio, 1 / ratio))}x)" if min(first, last) > FLOOR else ""  # nothing is so many times 0
    rises = [math.log(max(b[1], FLOOR) / max(a[1], FLOOR)) for a, b in pairwise(rows)]
    span = math.log(worst / max(min(r[1] for r in rows), FLOOR))
    jump = max(abs(x) for x in rises) + sorted(abs(x) for x in rises)[-2:-1][0] if len(rises) > 1 else abs(rises[0])
    stepped = jump > STEPLIKE * span  # a step inside a bin shows as two neighbouring rises
    if ratio < 1:
        message = (
            f"the mismatch sits in the first tokens: mean |d| {sig(first)} before position {at}, {sig(last)} after"
            f"{times}, at equal token probability too: a stale prefix or prompt cache?"
        )
    elif stepped:
        message = (
            f"mean |d| steps up at about position {at} of the response: {sig(first)} before, {sig(last)} after{times}: "
            "another policy version or another engine path from there on?"
        )
    else:
        message = (
            f"mean |d| grows with position ({sig(curve[str(bin_start(rows[0][0]))])} -> {sig(rows[-1][1])}), at equal token probability "
            "too: it is length, not confidence (accumulated cache error, positions that differ?)"
        )
    return [
        Draft(
            "where.position",
            "warning",
            message,
            z,
            "difference of late and early mean |d| in its standard errors",
            token_share=share,
            alternatives=("later versions of the weights inside a response", "harder text further on"),
            source="prime-rl#1650 (prefix cache kept), labs-molt#124 (mixed versions), Megatron-LM#76 (grows with length)",
            **common,
        )
    ]


def _by_version(scene: Scene, s: Position) -> list[Draft]:
    if len(s.versions) < 2:
        return []
    rows = {
        v: (int(x[0]), float(x[1] / x[0]), float(x[2] / x[0]))
        for v, x in sorted(s.versions.items())
        if x[0] >= MIN_TOKENS
    }
    if len(rows) < 2:
        return []
    worst, best = max(rows, key=lambda v: rows[v][1]), min(rows, key=lambda v: rows[v][1])
    (n1, high, q1), (n2, low, q2) = rows[worst], rows[best]
    error = math.hypot(math.sqrt(max(q1 - high**2, 0) / n1), math.sqrt(max(q2 - low**2, 0) / n2))
    z = (high - low) / max(error, 1e-12)
    if high < max(MATTERS, TIMES * low) or z < SURE:
        return []
    times = f" ({sig(high / low)}x)" if low > FLOOR else ""  # nothing is so many times 0
    mixed, seen = (int(x) for x in s.mixed)
    inside = f"; {plural(mixed, 'sequence')} of {seen} hold several versions" if mixed else ""
    return [
        Draft(
            "where.version",
            "warning",
            f"mean |d| depends on the policy version: {sig(high)} at version {worst}, {sig(low)} at version {best}"
            f"{times}{inside}: the trainer scores tokens of other weights than those that sampled them",
            z,
            "difference of the two versions' mean |d| in its standard errors",
            tokens=n1,
            token_share=n1 / max(1, int(s.n.sum())),
            sequences=mixed or None,
            places=s.mixed_places or Worst.of(scene, Scope()),
            alternatives=("later positions, if versions change inside sequences",),
            figures={
                "mean_abs_d_by_version": {str(v): x[1] for v, x in rows.items()},
                "mixed_sequences": mixed,
                "mixed_share": percent(mixed / max(1, seen)),
            },
            source="labs-molt#124 (KL 1e-4 mixed, 1e-6 one step stale), xtuner#2003, prime-rl#2957",
            next="rollout-is analyze DUMP --by version; rollout-is explain where.version",
        )
    ]
