"""Further scoring passes (``logprobs.NAME``): which of three is the odd one out, and whether one is a copy of another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout_is.analysis.batch import Ints
from rollout_is.analysis.doctor.state import State, counts, table
from rollout_is.analysis.doctor.verdict import Draft, Scene, Scope, percent, sig
from rollout_is.analysis.doctor.window import Window
from rollout_is.analysis.doctor.worst import Worst

PREFIX = "logprobs."
MIN_TOKENS = 32
MATTERS = 0.03  # nats of mean |d| that need an explanation
CLOSE = 0.5  # r is closer to another pass when it leaves this much of the distance to t
AGREE = 0.2  # two passes agree against the third


@dataclass
class Passes(State):
    """By name: float64 [6] tokens, equal to t, equal to r, sum |x - t|, sum |x - r|, sum |t - r|."""

    rows: dict[str, object] = table()
    missing: Ints = counts(1)

    def look(self, window: Window) -> None:
        """Take in a window."""
        for name, x in window.columns.items():
            if not name.startswith(PREFIX):
                continue
            ok = np.isfinite(x)
            self.missing[0] += int(np.count_nonzero(~ok))
            t, r, y = window.t[ok], window.r[ok], x[ok]
            row = np.array(
                [
                    len(y),
                    np.count_nonzero(y == t),
                    np.count_nonzero(y == r),
                    np.abs(y - t).sum(),
                    np.abs(y - r).sum(),
                    np.abs(t - r).sum(),
                ],
                np.float64,
            )
            old = self.rows.get(name)
            self.rows[name] = row if old is None else np.asarray(old) + row


def judge(scene: Scene) -> list[Draft]:
    """``copies.train_pass``, ``copies.rollout_pass``, ``copies.closer_to_ref``, ``passes.odd_one_out``."""
    drafts: list[Draft] = []
    for name, raw in sorted(scene.pooled(Passes).rows.items()):
        n, eq_t, eq_r, xt, xr, tr = (float(v) for v in np.asarray(raw))
        if n < MIN_TOKENS:
            continue
        xt, xr, tr = xt / n, xr / n, tr / n
        short = name.removeprefix(PREFIX)
        is_ref = short.startswith("ref")
        figures: dict[str, object] = {
            "pass": name,
            "mean_abs_train_rollout": tr,
            "mean_abs_train_pass": xt,
            "mean_abs_rollout_pass": xr,
        }
        distances = f"mean |d| train-rollout {sig(tr)}, train-{short} {sig(xt)}, rollout-{short} {sig(xr)}"

        def draft(id: str, severity: str, message: str, strength: float, words: str, other: str) -> Draft:
            return Draft(
                id,
                severity,
                message,
                strength,
                words,
                tokens=int(n),  # noqa: B023  # called in this turn of the loop
                token_share=1.0,
                places=Worst.of(scene, Scope()),
                alternatives=(other,),
                figures=figures,  # noqa: B023
                source="slime#1695, #2224 (rollout matched the reference), eval-protocol#457, NeMo#2141 (three-way comparison)",
                next=f"rollout-is compare DUMP --logprobs train,{short}; rollout-is explain {id}",  # noqa: B023
            )

        if eq_t == n and tr > 0:
            drafts.append(
                draft(
                    "copies.train_pass",
                    "notice",
                    f"train log-probs equal {name} bit for bit ({percent(1.0)} of tokens): one pass recorded under two names, or a "
                    f"pass that was reused ({distances})",
                    1.0,
                    "share of tokens that are bit-identical",
                    "a deterministic trainer that scored twice with the same weights",
                )
            )
        if is_ref and tr > MATTERS and xr < CLOSE * tr and xr < CLOSE * xt:
            drafts.append(
                draft(
                    "copies.closer_to_ref",
                    "error",
                    f"rollout is closer to {short} (|d| {sig(xr)}) than to train ({sig(tr)}): the engine samples from the reference "
                    "weights, not from the trained ones",
                    tr / max(xr, 1e-6),
                    "distance of rollout to train over that to the reference",
                    "a first step, when all three are the same model",
                )
            )
        elif eq_r == n and tr > 0:
            drafts.append(
                draft(
                    "copies.rollout_pass",
                    "notice",
                    f"rollout log-probs equal {name} bit for bit: one pass recorded under two names ({distances})",
                    1.0,
                    "share of tokens that are bit-identical",
                    "an engine that is bitwise consistent between decode and prefill",
                )
            )
        elif not is_ref and tr > MATTERS and xt < AGREE * tr and eq_t < n:
            drafts.append(
                draft(
                    "passes.odd_one_out",
                    "warning",
                    f"the rollout column is the odd one out: train and {short} agree, rollout differs from both ({distances}; noise "
                    f"floor {sig(xt)})",
                    tr / max(xt, 1e-9),
                    "distance of the odd one over the noise floor",
                    "a pass that was scored by the trainer, if the engine is right and the trainer wrong",
                )
            )
        elif not is_ref and tr > MATTERS and xr < AGREE * tr:
            drafts.append(
                draft(
                    "passes.odd_one_out",
                    "warning",
                    f"the train column is the odd one out: rollout and {short} agree, train differs from both ({distances})",
                    tr / max(xr, 1e-9),
                    "distance of the odd one over the noise floor",
                    "both engine passes stale in the same way",
                )
            )
    return drafts
