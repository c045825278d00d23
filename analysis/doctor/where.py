"""Where it sits: one rank, from a step on, at one length, in a share of the sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rollout_is.analysis.doctor.spread import CATASTROPHIC, Spread
from rollout_is.analysis.doctor.state import magnitude_bin, quantile
from rollout_is.analysis.doctor.verdict import Draft, Scene, Scope, percent, plural, sig
from rollout_is.analysis.doctor.worst import Worst

TIMES = 3.0  # healthy setups differ by up to 10x between recipes, parts of one run by far less
SURE = 6.0  # standard errors
MIN_SEQUENCES = 8
MATTERS = 0.02  # mean |d| below which nothing is worth a rank's name (healthy bf16 engines sit at .009 to .018)


def _mean(s: Spread) -> float:
    return float(s.absolute[0]) / max(1, int(s.tokens[0]))


def _error(s: Spread) -> float:
    """Standard error of the mean of sequence means."""
    n = int(s.sequences[0])
    if n < 2:
        return math.inf
    mean = float(s.means[0]) / n
    return math.sqrt(max(float(s.squares[0]) / n - mean * mean, 0.0) / (n - 1))


def _stands_out(s: Spread, rest: Spread) -> bool:
    """Whether the sequences of s are worse than those of the rest, in the mean and in the median, beyond chance."""
    if int(s.sequences[0]) < MIN_SEQUENCES or int(rest.sequences[0]) < MIN_SEQUENCES:
        return False
    mine, theirs = (float(x.means[0]) / int(x.sequences[0]) for x in (s, rest))
    z = (mine - theirs) / max(math.hypot(_error(s), _error(rest)), 1e-12)
    median = quantile(s.histogram, 0.5)
    return (
        mine > MATTERS and mine > TIMES * theirs and z > SURE and median > TIMES / 1.2 * quantile(rest.histogram, 0.5)
    )


def ranks(scene: Scene) -> list[Draft]:
    """``where.rank``: some ranks far worse than the rest."""
    cells = {r: scene.pooled(Spread, ranks=[r]) for r in scene.ranks}
    cells = {r: s for r, s in cells.items() if float(s.absolute[0]) > 0}  # beside a copied rank every other looks bad
    if len(cells) < 2:
        return []
    order = sorted(cells, key=lambda r: (-_mean(cells[r]), r))
    bad: list[int] = []
    for r in order[: len(order) - 1 if len(order) == 2 else len(order) // 2]:
        rest = scene.pooled(Spread, ranks=[x for x in order if x not in (*bad, r)])
        if not _stands_out(cells[r], rest):
            break
        bad.append(r)
    if not bad:
        return []
    good = [x for x in order if x not in bad]
    median = float(np.median([_mean(cells[r]) for r in good]))
    part = scene.pooled(Spread, ranks=bad)
    ratio = _mean(part) / max(median, 1e-12)
    total = _mean(scene.pooled(Spread))
    scope = Scope(tuple(sorted(bad)))
    names = f"rank {bad[0]} is" if len(bad) == 1 else f"ranks {', '.join(map(str, sorted(bad)))} are"
    return [
        Draft(
            "where.rank",
            "error" if ratio >= 5 else "warning",
            f"{names} {sig(ratio)}x the median of the others (mean |d| {sig(_mean(part))} against {sig(median)}; pooled "
            f"{sig(total)}): one engine or its weights are bad",
            ratio,
            "mean |d| of the rank over the median of the other ranks",
            scope,
            tokens=int(part.tokens[0]),
            token_share=int(part.tokens[0]) / max(1, int(scene.pooled(Spread).tokens[0])),
            sequences=int(part.sequences[0]),
            places=Worst.of(scene, scope),
            alternatives=(
                "another task or prompt set on that rank",
                "a shift or fill on that rank alone (then named above)",
            ),
            figures={"mean_abs_d_by_rank": {str(r): _mean(cells[r]) for r in order}, "pooled_mean_abs_d": total},
            source="NeMo#2180, vime#66: one engine of many is bad; 3x and 6 standard errors from docs/doctor.md",
            next="rollout-is analyze DUMP --by rank; rollout-is explain where.rank",
        )
    ]


def steps(scene: Scene) -> list[Draft]:
    """``where.step``: mean |d| jumps at a step and stays up."""
    names = scene.steps
    cells = {s: scene.pooled(Spread, steps=[s]) for s in names}
    means = np.array([_mean(cells[s]) for s in names])
    best: tuple[float, int] | None = None
    for i in range(1, len(names)):
        low, high = float(np.median(means[:i])), float(np.median(means[i:]))
        apart = float(means[i:].min()) / max(float(means[:i].max()), 1e-12)
        if apart > 1.5 and (best is None or high / max(low, 1e-12) * apart > best[0]):
            best = (high / max(low, 1e-12) * apart, i)
    if best is None:
        return _lone_steps(scene, names, cells)
    i = best[1]
    before, after = scene.pooled(Spread, steps=names[:i]), scene.pooled(Spread, steps=names[i:])
    if not _stands_out(after, before):
        return _lone_steps(scene, names, cells)
    ratio = _mean(after) / max(_mean(before), 1e-12)
    scope = Scope((), tuple(names[i:]))
    return [
        Draft(
            "where.step",
            "error",
            f"change point at step {names[i]}: mean |d| {sig(_mean(before))} before, {sig(_mean(after))} from there on "
            f"({sig(ratio)}x): rollout weights not updated any more?",
            ratio,
            "mean |d| from the step on over that before",
            scope,
            tokens=int(after.tokens[0]),
            token_share=int(after.tokens[0]) / max(1, int(scene.pooled(Spread).tokens[0])),
            sequences=int(after.sequences[0]),
            places=Worst.of(scene, scope),
            alternatives=(
                "a larger learning rate or more off-policy steps from there on",
                "a changed sampling setting at that step",
            ),
            figures={"step": names[i], "mean_abs_d_by_step": {str(s): _mean(cells[s]) for s in names[:64]}},
            source="trl#5312 (|d| .010 -> .201 with sleep mode), slime#1695, #2224",
            next="rollout-is analyze DUMP --by step; compare the weights' version on both sides; rollout-is explain where.step",
        )
    ]


def _lone_steps(scene: Scene, names: list[int], cells: dict[int, Spread]) -> list[Draft]:
    """Single steps far above all others."""
    if len(names) < 3:
        return []
    bad: list[int] = []
    for s in sorted(names, key=lambda s: -_mean(cells[s]))[: max(1, len(names) // 4)]:
        if not _stands_out(cells[s], scene.pooled(Spread, steps=[x for x in names if x not in (*bad, s)])):
            break
        bad.append(s)
    if not bad:
        return []
    scope = Scope((), tuple(sorted(bad)))
    part, rest = scene.pooled(Spread, steps=bad), scene.pooled(Spread, steps=[s for s in names if s not in bad])
    ratio = _mean(part) / max(_mean(rest), 1e-12)
    return [
        Draft(
            "where.step",
            "warning",
            f"mean |d| is {sig(ratio)}x that of the other steps{scope.words(scene)} ({sig(_mean(part))} against "
            f"{sig(_mean(rest))}) and comes back: a transient fault",
            ratio,
            "mean |d| of the steps over that of the others",
            scope,
            tokens=int(part.tokens[0]),
            token_share=int(part.tokens[0]) / max(1, int(scene.pooled(Spread).tokens[0])),
            sequences=int(part.sequences[0]),
            places=Worst.of(scene, scope),
            alternatives=("a weight update that raced generation",),
            figures={"mean_abs_d_by_step": {str(s): _mean(cells[s]) for s in names[:64]}},
            source="NeMo#2180, #1885",
            next="rollout-is analyze DUMP --by step; rollout-is explain where.step",
        )
    ]


def sequences(scene: Scene) -> list[Draft]:
    """``where.sequences``: a share of catastrophic sequences among good ones."""
    s = scene.pooled(Spread)
    n = int(s.sequences[0])
    median = quantile(s.histogram, 0.5)
    worst = max(CATASTROPHIC, 10 * median)
    limit, bulk = (int(magnitude_bin(np.array([x]))[0]) for x in (worst, 4 * median))
    bad = int(s.histogram[limit:].sum())
    if bad < 3 or n < MIN_SEQUENCES or bad > 0.4 * n or not int(s.bad[0]):
        return []
    between = int(s.histogram[bulk + 1 : limit].sum())
    if between > 0.3 * bad:  # a tail, not a second hump
        return []
    part = [r for r in scene.ranks if int(scene.pooled(Spread, ranks=[r]).bad[0])]
    scope = Scope(tuple(part) if 0 < len(part) < len(scene.ranks) else ())
    rows = [row for row in s.worst["all"].rows if row["mean_abs_d"] > worst]
    if not rows:
        return []
    share = bad / n
    good_length = (int(s.tokens[0]) - int(s.bad_length[0])) / max(1, n - int(s.bad[0]))
    bad_length = int(s.bad_length[0]) / int(s.bad[0])
    pure = [g for g in s.groups.values() if int(g[1]) == int(g[0])]
    grouped = sum(int(g[1]) for g in pure)
    several = sum(int(g[0]) for g in pure) > len(pure)
    by_prompt = s.groups and several and grouped >= 0.8 * bad
    message = (
        f"{bad} of {n} sequences ({percent(share)}) are catastrophic (every token off by a factor above 1.5 on average) among good "
        f"ones: two humps, median sequence |d| {sig(median)}, worst {sig(rows[0]['mean_abs_d'])}{scope.words(scene)}"
    )
    if by_prompt:
        message += f"; deterministic per prompt: all members of {plural(len(pure), 'group')}"
    if bad_length > 2 * good_length:
        message += f"; long ones ({sig(bad_length)} tokens against {sig(good_length)})"
    places: Any = s.places.get("bad")
    return [
        Draft(
            "where.sequences",
            "error",
            message,
            rows[-1]["mean_abs_d"] / max(median, 1e-9),
            "mean |d| of the listed sequences over the median sequence",
            scope,
            tokens=int(s.bad_length[0]),
            token_share=int(s.bad_length[0]) / max(1, int(s.tokens[0])),
            sequences=bad,
            places=places.rows if places is not None else [],
            alternatives=("rows of another task in the same dump", "lengths near the engine's limit, draft heads"),
            figures={
                "share_of_sequences": share,
                "median_sequence_abs_d": median,
                "mean_length_bad": bad_length,
                "mean_length_good": good_length,
                "worst_sequences": rows,
            },
            source="NeMo#2100, #2141: 15 to 20 % of sequences, decode against prefill of one engine 322x, prefill against trainer 1.03",
            next="re-score the listed sequences by prefill and dump it as logprobs.prefill; rollout-is explain where.sequences",
        )
    ]


def lengths(scene: Scene) -> list[Draft]:
    """``where.length``: mean |d| of long (or short) sequences far above the others'."""
    s = scene.pooled(Spread)
    rows = [(i, float(n), float(x), float(q)) for i, (n, x, q) in enumerate(s.by_length.tolist()) if n >= MIN_SEQUENCES]
    if len(rows) < 2:
        return []

    def stats(part: list[tuple[int, float, float, float]]) -> tuple[float, float]:
        n, total, square = (math.fsum(row[k] for row in part) for k in (1, 2, 3))
        mean = total / n
        return mean, math.sqrt(max(square / n - mean * mean, 0.0) / (n - 1))

    best: tuple[float, int] | None = None
    for i in range(1, len(rows)):
        (low, e1), (high, e2) = stats(rows[:i]), stats(rows[i:])
        z = (high - low) / max(math.hypot(e1, e2), 1e-12)
        if high > max(MATTERS, TIMES * low) and z > SURE and (best is None or high / low > best[0]):
            best = (high / low, i)
    if best is None:
        return []
    ratio, i = best
    edge = 1 << rows[i][0]
    (low, _), (high, _) = stats(rows[:i]), stats(rows[i:])
    n = int(sum(row[1] for row in rows[i:]))
    return [
        Draft(
            "where.length",
            "warning",
            f"sequences of {edge} valid tokens and more are {sig(ratio)}x worse (mean |d| {sig(high)} against {sig(low)}, "
            f"{plural(n, 'sequence')})",
            ratio,
            "mean |d| of long sequences over that of short ones",
            tokens=None,
            token_share=n / max(1, int(s.sequences[0])),
            sequences=n,
            places=Worst.of(scene, Scope()),
            alternatives=("growth with position (then where.position says so)", "low confidence in long responses"),
            figures={
                "mean_abs_d_by_length": {f"{1 << r[0]}..{(2 << r[0]) - 1}": r[2] / r[1] for r in rows},
            },
            source="Precision-RL#10, Megatron-LM#76: the gap rises with response length; vllm#38711 near max length",
            next="rollout-is analyze DUMP --by length; rollout-is explain where.length",
        )
    ]
