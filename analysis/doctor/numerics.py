"""Numerics and what the metadata says: positive log-probs, the resolution of coarse storage, settings that differ by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.doctor.state import MAGNITUDES, State, counts, largest, magnitudes, places, quantile, totals
from rollout_is.analysis.doctor.verdict import Draft, Scene, percent, plural, sig
from rollout_is.analysis.doctor.window import Window

MOSTLY = 0.5  # share of tokens above 0 from which the column is another quantity, not one badly rounded
TOLERANCE = 1e-6  # above 0 by less is rounding of log-softmax
BITS = {"BF16": 8, "F16": 11}  # significand, hidden bit included
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs_mode")
SIDES = ("train", "rollout")


@dataclass
class Positive(State):
    """Valid tokens with a log-prob above 0: int64 [2] of the train and the rollout side; those above TOLERANCE; the largest."""

    above: Ints = counts(2)
    beyond: Ints = counts(2)
    seen: Ints = counts(1)
    top_train: float = largest()
    top_rollout: float = largest()
    places: list[dict[str, Any]] = places()

    def look(self, window: Window) -> None:
        """Take in every block."""
        self.seen[0] += window.n
        for side, x in enumerate((window.t, window.r)):
            top = float(x.max()) if window.n else -math.inf
            if top <= 0:
                continue
            self.above[side] += int(np.count_nonzero(x > 0))
            beyond = np.flatnonzero(x > TOLERANCE)
            self.beyond[side] += len(beyond)
            if side == 0:
                self.top_train = max(self.top_train, top)
            else:
                self.top_rollout = max(self.top_rollout, top)
            for i in beyond[: 3 - len(self.places)]:
                self.places.append(window.place(int(i)))


@dataclass
class Resolution(State):
    """Histogram of |r| and of |t|, and the mean of |d|, for the rounding step of coarse storage."""

    train: Ints = counts(MAGNITUDES)
    rollout: Ints = counts(MAGNITUDES)
    absolute: Floats = totals(1)

    def look(self, window: Window) -> None:
        """Take in a window of a shard that stores a side coarsely."""
        self.train += magnitudes(window.t)
        self.rollout += magnitudes(window.r)
        self.absolute[0] += float(window.abs_d.sum())


def judge_positive(scene: Scene) -> list[Draft]:
    """``numerics.positive``."""
    s = scene.pooled(Positive)
    if not s.above.any():
        return []
    drafts = []
    for side, name in enumerate(SIDES):
        n, beyond = int(s.above[side]), int(s.beyond[side])
        if not beyond:  # rounding of log-softmax; the notes on the data count it
            continue
        top = (s.top_train, s.top_rollout)[side]
        share = n / max(1, int(s.seen[0]))
        drafts.append(
            Draft(
                "numerics.positive",
                "error" if share > MOSTLY else "warning",
                f"{plural(n, 'valid token')} ({percent(share)}) with a positive {name} log-prob, up to {sig(top)}; kept as they are"
                + (": probabilities or negative log-likelihoods, not log-probs?" if share > MOSTLY else ""),
                top / TOLERANCE,
                "largest value over the tolerance",
                tokens=n,
                token_share=share,
                places=s.places,
                alternatives=("probabilities or negative log-likelihoods instead of log-probs",),
                figures={"largest": top, "beyond_tolerance": beyond},
                source="maxtext#5231 (+.03 to +.125 from an unfused subtraction), metaseq#87",
                next="compute log-softmax in float32, fused; rollout-is explain numerics.positive",
            )
        )
    return drafts


def judge_resolution(scene: Scene) -> list[Draft]:
    """``numerics.resolution``: what bf16 or f16 storage of one side cannot show."""
    drafts = []
    s = scene.pooled(Resolution)
    for role, histogram in (("train", s.train), ("rollout", s.rollout)):
        kinds = {info.dtypes.get(role, "") for _, info, _ in scene.parts}
        coarse = sorted(kinds & set(BITS))
        n = int(histogram.sum())
        if not coarse or not n:
            continue
        median = quantile(histogram, 0.5)
        step = 2.0 ** (math.floor(math.log2(median)) + 1 - BITS[coarse[0]]) if median > 0 else 0.0
        mean = float(s.absolute[0]) / n
        drafts.append(
            Draft(
                "numerics.resolution",
                "info",
                f"{role} dtype {coarse[0]}: resolution at median |log-prob| {sig(median)} is {sig(step)}; differences below it are not "
                f"meaningful (mean |d| {sig(mean)})",
                step / max(mean, 1e-12),
                "rounding step at the median over mean |d|",
                tokens=n,
                token_share=0.0,
                figures={"median_abs_logprob": median, "resolution": step, "mean_abs_d": mean},
                source="slime#245, prime-rl#568, maxtext#5231: bf16 steps by .03125 near -5",
                next="store log-probs in float32; rollout-is explain numerics.resolution",
            )
        )
    return drafts


def judge_metadata(scene: Scene) -> list[Draft]:
    """``scale.metadata``: the dump's own metadata names different sampling settings for the two sides."""
    found: dict[str, tuple[str, str]] = {}
    shards = 0
    for _, info, _ in scene.parts:
        for key in SETTINGS:
            values = {side: info.metadata.get(f"{side}_{key}") for side in SIDES}
            if key == "temperature":
                values["rollout"] = values["rollout"] or info.metadata.get("sampling_temperature")
            train, rollout = values["train"], values["rollout"]
            if train is not None and rollout is not None and not _same(train, rollout):
                shards += key not in found
                found.setdefault(key, (train, rollout))
    if not found:
        return []
    words = ", ".join(
        f"{key} {train} on the train side, {rollout} on the rollout side" for key, (train, rollout) in found.items()
    )
    zero = any(_number(v) == 0.0 for v in found.get("temperature", ()))
    return [
        Draft(
            "scale.metadata",
            "notice",
            f"the metadata says that the two sides differ: {words}"
            + ("; temperature 0 is greedy, and dividing by it gives infinities" if zero else ""),
            float(len(found)),
            "settings that differ",
            token_share=1.0,
            alternatives=("metadata written by hand",),
            figures={key: list(pair) for key, pair in found.items()},
            source="slime#2297, #2197, miles#1190: scoring paths hard-wired to temperature 0",
            next="score both sides under the sampling settings; rollout-is explain scale.metadata",
        )
    ]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _same(a: str, b: str) -> bool:
    x, y = _number(a), _number(b)
    return a == b if x is None or y is None else x == y
