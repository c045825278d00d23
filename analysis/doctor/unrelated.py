"""Alignment: no correlation at any lag, so the two columns are not the same quantity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.batch import Floats
from rollout_is.analysis.doctor.lag import LAGS, REACH
from rollout_is.analysis.doctor.state import State, inner, totals
from rollout_is.analysis.doctor.verdict import Draft, Scene, find_scope, sig
from rollout_is.analysis.doctor.window import Window
from rollout_is.analysis.doctor.worst import Worst

MIN_TOKENS = 300
WEAK = 0.3  # the weakest healthy correlation reported is 0.87 (fp8, verl#7519)
APART = 0.2  # nats of mean |d|; below it both sides are near constant
SPREAD = 0.1  # each side must vary


@dataclass
class Unrelated(State):
    """Cross moments by lag, over tokens that are no placeholders: rows n, r, t, r^2, t^2, rt for each of LAGS."""

    moments: Floats = totals(len(LAGS), 6)
    absolute: Floats = totals(1)

    def look(self, window: Window) -> None:
        """Take in a window; nothing to do where the sides agree anyway."""
        if window.n <= 2 * REACH:
            return
        self.absolute[0] += float(window.abs_d.sum())
        if float(window.abs_d.mean()) < APART / 4:
            self.moments[REACH] += _row(window.t, window.r)
            return
        for i, lag in enumerate(LAGS):
            k = abs(lag)
            t, r = (window.t[: window.n - k], window.r[k:]) if lag > 0 else (window.t[k:], window.r[: window.n - k])
            same = window.piece[k:] == window.piece[: window.n - k] if k else slice(None)
            self.moments[i] += _row(t[same], r[same])


def _row(t: Floats, r: Floats) -> Floats:
    return np.array(
        [len(t), r.sum(), t.sum(), inner(r, r), inner(t, t), inner(r, t)],
        np.float64,
    )


def _correlations(s: Unrelated) -> list[float]:
    out = []
    for n, r, t, rr, tt, rt in s.moments.tolist():
        n = max(n, 1.0)
        vr, vt = rr / n - (r / n) ** 2, tt / n - (t / n) ** 2
        out.append((rt / n - r * t / n / n) / np.sqrt(vr * vt) if vr > SPREAD**2 and vt > SPREAD**2 else 1.0)
    return [float(x) for x in out]


def _fires(s: Unrelated) -> bool:
    n = float(s.moments[REACH, 0])
    return n >= MIN_TOKENS and float(s.absolute[0]) > APART * n and max(abs(x) for x in _correlations(s)) < WEAK


def judge(scene: Scene) -> list[Draft]:
    """``alignment.unrelated``."""
    found = find_scope(scene, Unrelated, _fires)
    if found is None:
        return []
    s, scope = found
    by_lag = _correlations(s)
    at, n = by_lag[REACH], int(s.moments[REACH, 0])
    figures: dict[str, Any] = {"correlation_by_lag": {f"{k:+d}": x for k, x in zip(LAGS, by_lag, strict=True)}}
    return [
        Draft(
            "alignment.unrelated",
            "error",
            f"no correlation at any lag (lag 0: {sig(at)}, at most {sig(max(by_lag, key=abs))} within +-{REACH}): the two columns are "
            f"not the same quantity{scope.words(scene)}",
            WEAK / max(abs(at), 1e-3),
            "least correlation put up with over the correlation found",
            scope,
            tokens=n,
            token_share=1.0,
            places=Worst.of(scene, scope),
            alternatives=(
                "tokens scored by logits that had already seen them (same-position scoring)",
                "rows of the two sides in another order",
                "an offset beyond 3",
            ),
            figures=figures,
            source="maxtext#2103: each token scored at its own position; healthy correlation is above .87 (verl#7519)",
            next="join both sides by sequence id and compare token ids; rollout-is explain alignment.unrelated",
        )
    ]
