"""Alignment: which lag of the rollout log-probs fits the train log-probs best, chunk by chunk inside each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.doctor.state import State, count, counts, places, totals
from rollout_is.analysis.doctor.verdict import Draft, Scene, find_scope, percent, plural, sig
from rollout_is.analysis.doctor.window import Bools, Window

REACH = 3
LAGS = tuple(range(-REACH, REACH + 1))
ZERO = REACH  # index of lag 0
MIN_OVERLAP = 12  # tokens that a chunk must compare before its lag counts
FIT = 0.4  # a lag fits when it leaves this much of mean |d| at lag 0 ...
CLEAR = 0.6  # ... and this much of what the next best lag leaves
TELLING = 0.05  # only tokens on which the lags differ by more than engine noise vote
VOTES = 0.8  # share of those tokens that have to agree
MIN_TOKENS = 48


def distances(window: Window, lag: int) -> Floats:
    """float64 [v] |t[i] - r[i + lag]|, 0 where i + lag is outside the token's own piece."""
    out = np.zeros(window.n)
    if lag == 0:
        return window.abs_d
    k = abs(lag)
    if k >= window.n:
        return out
    if lag > 0:
        np.subtract(window.t[:-k], window.r[k:], out=out[:-k])
    else:
        np.subtract(window.t[k:], window.r[:-k], out=out[k:])
    np.abs(out, out=out)
    for j in range(k):  # the last k (first k) tokens of every piece have no partner
        edge = window.stops - 1 - j if lag > 0 else window.starts + j
        out[edge[(edge >= window.starts) & (edge < window.stops)]] = 0.0
    return out


def overlaps(window: Window, lag: int) -> Ints:
    """int64 [c] how many tokens of each chunk have a partner at that lag."""
    low, high = window.starts[window.chunk_piece], window.stops[window.chunk_piece]
    if lag > 0:
        high = high - lag
    else:
        low = low - lag
    out: Ints = np.maximum(np.minimum(window.chunk_stops, high) - np.maximum(window.chunk_starts, low), 0)
    return out


@dataclass
class Lag(State):
    """Best lags of chunks (CHUNK tokens of one sequence).

    Attributes:
        chunks, tokens: by lag -3..3: chunks (their tokens) that this lag fits clearly; at 0 all the others.
        distance, compared: sum and number of |t[i] - r[i+lag]| over all chunks.
        shifted_distance, shifted_compared: the same over chunks with a clear lag other than 0.
        sequences: pieces by the lag of most of their shifted chunks; at 0 those with none.
        inside: pieces whose first chunk fits at 0 and a later one at another lag.
    """

    chunks: Ints = counts(len(LAGS))
    tokens: Ints = counts(len(LAGS))
    distance: Floats = totals(len(LAGS))
    compared: Ints = counts(len(LAGS))
    shifted_distance: Floats = totals(len(LAGS))
    shifted_compared: Ints = counts(len(LAGS))
    sequences: Ints = counts(len(LAGS))
    inside: int = count()
    places: list[dict[str, Any]] = places()

    def look(self, window: Window) -> Bools:
        """Take in a window; returns bool [v], the tokens in chunks that are shifted."""
        size = window.chunk_stops - window.chunk_starts
        at_zero = np.add.reduceat(window.abs_d, window.chunk_starts)
        if not (at_zero > TELLING * size).any():  # aligned to engine noise: no other lag can fit clearly better
            self.distance[ZERO] += at_zero.sum()
            self.compared[ZERO] += window.n
            self.chunks[ZERO] += len(size)
            self.tokens[ZERO] += window.n
            self.sequences[ZERO] += len(window.starts)
            return np.zeros(window.n, np.bool_)
        rows = [distances(window, lag) for lag in LAGS]
        sums = np.array([np.add.reduceat(row, window.chunk_starts) for row in rows])
        many = np.array([overlaps(window, lag) for lag in LAGS])
        best = clear_lags(window, rows, sums, many)
        self.distance += sums.sum(axis=1)
        self.compared += many.sum(axis=1)
        self.chunks += np.bincount(best, minlength=len(LAGS))
        self.tokens += np.bincount(best, weights=size, minlength=len(LAGS)).astype(np.int64)
        shifted = best != ZERO
        if not shifted.any():
            self.sequences[ZERO] += len(window.starts)
            return np.zeros(window.n, np.bool_)
        self.shifted_distance += sums[:, shifted].sum(axis=1)
        self.shifted_compared += many[:, shifted].sum(axis=1)
        self._pieces(window, best)
        for c in np.flatnonzero(shifted)[:3]:
            self.places.append(window.place(int(window.chunk_starts[c] + size[c] // 2)))
        self.places = self.places[:3]
        return np.repeat(shifted, size)

    def _pieces(self, window: Window, best: Ints) -> None:
        """Which lag each piece has, and whether it sets in inside the piece."""
        votes = np.zeros((len(window.starts), len(LAGS)), np.int64)
        np.add.at(votes, (window.chunk_piece, best), 1)
        votes[:, ZERO] = 0
        lag = np.where(votes.any(axis=1), votes.argmax(axis=1), ZERO)
        self.sequences += np.bincount(lag, minlength=len(LAGS))
        first = best[np.searchsorted(window.chunk_piece, np.arange(len(window.starts)))]
        self.inside += int(((lag != ZERO) & (first == ZERO) & window.begins).sum())


def clear_lags(window: Window, rows: list[Floats], sums: Floats, many: Ints) -> Ints:
    """int64 [c] index of the lag that clearly fits each chunk; ZERO where none but 0 does.

    A mean alone could be moved by one outlier that falls out of the overlap, so the tokens also vote.
    """
    enough = many >= MIN_OVERLAP
    mean = np.where(enough, sums / np.maximum(many, 1), np.inf)
    best: Ints = mean.argmin(axis=0).astype(np.int64)
    at = np.arange(len(best))
    others = mean.copy()
    others[best, at] = np.inf
    others[ZERO] = np.inf
    at_best, at_zero, next_best = mean[best, at], mean[ZERO], others.min(axis=0)
    with np.errstate(invalid="ignore"):  # chunks too short to judge are inf on either side
        clear = (best != ZERO) & (at_best < FIT * at_zero) & (at_zero > TELLING) & (at_best < CLEAR * next_best)
    for k in set(best[clear].tolist()):
        differ = np.abs(rows[k] - rows[ZERO]) > TELLING
        edge = _edge(window, LAGS[k])
        differ &= ~edge
        voters = np.add.reduceat(differ.astype(np.int64), window.chunk_starts)
        for_k = np.add.reduceat((differ & (rows[k] < rows[ZERO])).astype(np.int64), window.chunk_starts)
        clear &= (best != k) | ((for_k >= VOTES * voters) & (voters >= MIN_OVERLAP // 2))
    return np.where(clear, best, ZERO)


def _edge(window: Window, lag: int) -> Bools:
    """bool [v] tokens without a partner at that lag."""
    out = np.zeros(window.n, np.bool_)
    for j in range(abs(lag)):
        edge = window.stops - 1 - j if lag > 0 else window.starts + j
        out[edge[(edge >= window.starts) & (edge < window.stops)]] = True
    return out


def _fires(s: Lag) -> bool:
    tokens = int(s.tokens.sum() - s.tokens[ZERO])
    return tokens >= MIN_TOKENS and int(s.chunks.sum() - s.chunks[ZERO]) >= 1


def judge(scene: Scene) -> list[Draft]:
    """``alignment.lag``, ``alignment.lag_varies`` or ``alignment.lag_inside``."""
    return judge_kind(scene, Lag)


def judge_kind(scene: Scene, kind: type[Lag], among: int | None = None) -> list[Draft]:
    """The same for a kind of Lag.

    Args:
        among: the tokens that the share is taken of; None for those looked at.
    """
    found = find_scope(scene, kind, _fires)
    if found is None:
        return []
    s, scope = found
    shifted = s.chunks.copy()
    shifted[ZERO] = 0
    best = int(shifted.argmax())
    lag, chunks = LAGS[best], int(shifted.sum())
    tokens = int(s.tokens.sum() - s.tokens[ZERO])
    sequences = int(s.sequences.sum() - s.sequences[ZERO])
    share = tokens / (among or int(s.tokens.sum()))
    means = s.shifted_distance / np.maximum(s.shifted_compared, 1)
    ratio = float(means[ZERO] / max(float(means[best]), 1e-12))
    curve = {f"{k:+d}": float(m) for k, m in zip(LAGS, means, strict=True)}
    where = "everywhere" if share > 0.9 and not scope.ranks and not scope.steps else scope.words(scene).strip()
    touched = f"{percent(share)} of the tokens" + (
        " looked at" if among is None else f" ({plural(sequences, 'sequence')})"
    )
    touched += f", {where}" if where else ""
    common: dict[str, Any] = {
        "strength": ratio,
        "strength_words": "mean |d| at lag 0 over mean |d| at the best lag, in the shifted chunks",
        "scope": scope,
        "tokens": tokens,
        "token_share": share,
        "sequences": sequences,
        "places": s.places,
        "figures": {"lag": lag, "mean_abs_d_by_lag": curve, "sequences_by_lag": _by_lag(s.sequences)},
        "source": "prime-rl#1525, ms-swift#8427 (shift by one in one column); thresholds from planted faults, docs/doctor.md",
    }
    if s.inside * 2 >= sequences and s.inside > 0:
        return [
            Draft(
                "alignment.lag_inside",
                "error",
                f"train and rollout are aligned at the start of {plural(s.inside, 'sequence')}, then slip by {abs(lag)}: a token "
                f"was inserted or lost inside the response (re-tokenised history?); lag {lag:+d} fits {sig(ratio)}x better there, "
                f"on {touched}",
                alternatives=("decode and re-encode of the response text", "a stop or tool token on one side only"),
                next="compare the token ids of both sides at the first place; rollout-is explain alignment.lag_inside",
                **common,
            )
        ]
    if int(shifted.max()) < 0.9 * chunks:
        return [
            Draft(
                "alignment.lag_varies",
                "error",
                f"the best lag differs between sequences ({_lag_words(s.sequences)}): rollout log-probs have a surplus or deficit "
                f"that differs by sequence; on {touched}",
                alternatives=(
                    "rows of different surplus",
                    "packing that drops one value a sequence (see alignment.growing)",
                ),
                next="dump the length of every column per sequence; rollout-is explain alignment.lag_varies",
                **common,
            )
        ]
    meaning = "position i of train matches position " + (f"i+{lag}" if lag > 0 else f"i-{-lag}") + " of rollout"
    return [
        Draft(
            "alignment.lag",
            "error",
            f"shift by {_number(abs(lag))} suspected, lag {lag:+d} fits {sig(ratio)}x better (mean |d| {sig(float(means[ZERO]))} -> "
            f"{sig(float(means[best]))}; {meaning}), on {touched}",
            alternatives=(
                "one side scores the next token, the other the current one",
                "a BOS or prompt token counted on one side",
            ),
            next="shift one column by " + str(abs(lag)) + " inside each sequence and analyze again; "
            "rollout-is explain alignment.lag",
            **common,
        )
    ]


def _number(n: int) -> str:
    return ("one", "two", "three")[n - 1]


def _by_lag(sequences: Ints) -> dict[str, int]:
    return {f"{k:+d}": int(n) for k, n in zip(LAGS, sequences, strict=True) if n}


def _lag_words(sequences: Ints) -> str:
    return ", ".join(f"{k}: {n}" for k, n in _by_lag(sequences).items())
