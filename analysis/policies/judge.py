"""One policy over one gathered unit: which tokens and sequences it takes out, and the sums of the weights that it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout_is.analysis.batch import Floats, Ints
from rollout_is.analysis.pareto import tail_length
from rollout_is.analysis.policies.gather import Gathered
from rollout_is.analysis.policies.rules import Policy, Rule
from rollout_is.analysis.policies.survivors import Level, Survivors

Bools = NDArray[np.bool_]
HELD = 300.0  # an unbounded weight is summed as at most e^300: beyond, its square would leave float64


@dataclass
class Tally:
    """Counts and sums of one policy over one unit. Integers add exactly; floats are added in unit order.

    Attributes:
        counts: name -> whole number (see ``_count``).
        sums: name -> float sum.
        low, high: extremes of the applied token weights over n.
        row_low, row_high: extremes of the sequences' mean applied weights.
        levels: the applied weights as one per surviving sequence, where they make one.
        by_rule: for each rule, (tokens, sequences) that it alone rejects.
        lows, highs: further extremes by name (a full plan only).
        top: log of the largest mean applied weights of sequences; ``cut`` says how many more there were below them.
        cut: sequences whose value is not in ``top``.
    """

    counts: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    low: float = np.inf
    high: float = -np.inf
    row_low: float = np.inf
    row_high: float = -np.inf
    lows: dict[str, float] = field(default_factory=dict)
    highs: dict[str, float] = field(default_factory=dict)
    levels: dict[str, Level] = field(default_factory=dict)
    by_rule: tuple[tuple[int, int], ...] = ()
    top: Floats = field(default_factory=lambda: np.zeros(0))
    cut: int = 0


def judge(policy: Policy, unit: Gathered, bounds: tuple[float, float] | None = None) -> Tally:
    """Apply a policy to a unit.

    Args:
        policy: what to apply.
        unit: gathered under a plan that holds the policy (and the bounds).
        bounds: weights outside are counted, and the survivors' mismatch is summed; None is neither.

    Masked-out tokens leave n; zeroed ones stay in it with weight 0. A sequence is rejected when none of its tokens keeps a weight.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return _Case(policy, unit, bounds).tally()


class _Case:
    def __init__(self, policy: Policy, unit: Gathered, bounds: tuple[float, float] | None) -> None:
        self.policy, self.unit, self.bounds = policy, unit, bounds
        self.real = unit.n > 0
        token_fails = {"mask": np.zeros(unit.od.size, dtype=bool), "zero": np.zeros(unit.od.size, dtype=bool)}
        row_fails = {"mask": np.zeros(unit.n.size, dtype=bool), "zero": np.zeros(unit.n.size, dtype=bool)}
        by_rule = []
        for rule in policy.rules:
            if rule.scope == "token":
                fails = self._token_fails(rule)
                token_fails[rule.action] |= fails
                touched = np.unique(unit.at[fails]).size
                by_rule.append((int(fails.sum()), int(touched)))
            else:
                fails = self._row_fails(rule) & self.real
                row_fails[rule.action] |= fails
                by_rule.append((int(unit.n[fails].sum()), int(fails.sum())))
        self.by_rule = tuple(by_rule)
        # by sequence, then by single token; masking wins over zeroing
        self.row_masked = row_fails["mask"]
        self.row_zeroed = row_fails["zero"] & ~self.row_masked
        gone = self.row_masked[unit.at]
        self.out_masked = token_fails["mask"] | gone
        self.out_zeroed = (token_fails["zero"] | self.row_zeroed[unit.at]) & ~self.out_masked

    def _token_values(self, rule: Rule) -> Floats:
        if rule.statistic == "token.dprob":
            return self.unit.odp
        d = self.unit.od if rule.safety is None else self.unit.od.clip(-rule.safety, rule.safety)
        kind = rule.statistic.partition(".")[2]
        return d if not kind else _K[kind](d)

    def _token_fails(self, rule: Rule) -> Bools:
        return _outside(rule, self._token_values(rule), self.unit.advantage[self.unit.at])

    def _row_fails(self, rule: Rule) -> Bools:
        unit = self.unit
        if rule.veto:
            hit = np.zeros(unit.n.size, dtype=bool)
            hit[unit.at[self._token_fails(rule)]] = True
            return hit
        return _outside(rule, self._row_values(rule), unit.advantage)

    def _row_values(self, rule: Rule) -> Floats:
        """The tested value of each sequence; ordinary tokens are inside any safety bound, the others are cut to it."""
        unit = self.unit
        scope, kind = rule.statistic, "d"
        if "." in rule.statistic:
            scope, kind = rule.statistic.split(".")
        hold = np.inf if rule.safety is None else rule.safety
        if scope == "max":
            ends = np.stack([unit.min_d, unit.max_d]).clip(-hold, hold)
            return np.asarray(_K[kind](ends).max(0), dtype=np.float64)
        ordinary = {"d": unit.d, "k1": -unit.d, "k2": unit.d2 / 2, "k3": unit.e - unit.d, "mult": unit.mult}[kind]
        d = unit.od.clip(-hold, hold)
        others = d if kind == "d" else _K[kind](d)
        total = ordinary + np.bincount(unit.at, weights=others, minlength=unit.n.size)
        return total / np.maximum(unit.n, 1) if scope in ("mean", "geometric") else total

    def tally(self) -> Tally:
        unit, weight = self.unit, self.policy.weight
        s, at = unit.n.size, unit.at
        alone_masked, alone_zeroed = self.out_masked & ~self.row_masked[at], self.out_zeroed & ~self.row_zeroed[at]
        masked = np.where(self.row_masked, unit.n, np.bincount(at[alone_masked], minlength=s))
        zeroed = np.where(
            self.row_masked, 0, np.where(self.row_zeroed, unit.n - masked, np.bincount(at[alone_zeroed], minlength=s))
        )
        stays = unit.n - masked  # what is left in n
        alive = stays - zeroed  # what keeps a weight
        counted = self.real & (stays > 0)
        if weight.level == "token":
            ready = self._token_weights(stays)
        else:
            ready = self._row_weights(stays, alive)
        sums, before = ready
        kept_k1, kept_k3, lost_k1, lost_k3 = self._divergences()
        # mean applied weight of each sequence over what is left of it in n
        rows = np.where(alive > 0, sums["row"], 0.0)[counted].clip(min=0.0)
        logs = np.log(rows)
        keep = min(logs.size, 2 * tail_length(logs.size) + 64)
        top = np.sort(logs)[logs.size - keep :][::-1].copy() if keep else np.zeros(0)
        live = alive > 0
        out_on = ~self.out_masked & ~self.out_zeroed
        full = Survivors.of(unit, ~self.row_masked & ~self.row_zeroed, out_on, alive) if self.bounds else None
        levels, outside = {}, {}
        if self.bounds:
            levels = {k: Level.of(x[live], self.bounds) for k, x in self._level_logs(alive, out_on).items()}
            outside = {
                **self._outside(sums, alive, zeroed, out_on),
                "rows_high": int((rows > self.bounds[1]).sum()),
                "rows_low": int((rows < self.bounds[0]).sum()),
            }
        return Tally(
            counts={
                "segments": unit.segments,
                "positions": unit.positions,
                "unjudged": unit.unjudged,
                "sequences": int(self.real.sum()),
                "tokens": int(unit.n.sum()),
                "tokens_masked": int(masked.sum()),
                "tokens_zeroed": int(zeroed.sum()),
                "tokens_changed": int(before["changed"]),
                "sequences_masked": int((self.real & (stays == 0)).sum()),
                "sequences_zeroed": int((counted & (alive == 0)).sum()),
                "sequences_touched": int((self.real & (alive < unit.n)).sum()),
                "sequences_changed": int(before["rows_changed"]),
                "held": int(before["held"]),
                **outside,
            },
            sums={
                "e": float(sums["e"][counted].sum()),
                "e2": float(sums["e2"][counted].sum()),
                "raw": float(before["raw"]),
                "moved": float(before["moved"]),
                "norm_token": float(before["norm_token"]),
                "norm_row": float(before["norm_row"]),
                "row_e": float((rows - 1.0).sum()),
                "row_e2": float(np.square(rows - 1.0).sum()),
                "kept_k1": kept_k1,
                "kept_k3": kept_k3,
                "lost_k1": lost_k1,
                "lost_k3": lost_k3,
                **(full.sums if full else {}),
            },
            lows=full.lows if full else {},
            highs=full.highs if full else {},
            levels=levels,
            low=0.0 if zeroed.any() else float(sums["low"][live].min(initial=np.inf)),
            high=float(sums["high"][live].max(initial=-np.inf)) if live.any() else (0.0 if zeroed.any() else -np.inf),
            row_low=float(rows.min(initial=np.inf)),
            row_high=float(rows.max(initial=-np.inf)),
            by_rule=self.by_rule,
            top=top,
            cut=logs.size - keep,
        )

    def _level_logs(self, alive: Ints, out_on: Bools) -> dict[str, Floats]:
        """One applied log-weight a sequence: the product and the geometric mean of token weights, or the sequence's own weight."""
        weight, unit = self.policy.weight, self.unit
        hold = np.inf if weight.safety is None else weight.safety
        low, high = (-np.inf if b is None else float(np.log(b)) for b in (weight.lower, weight.upper))
        high = np.inf if weight.upper is None else high
        if weight.level in ("sequence", "geometric"):
            return {weight.level: self._row_values(Rule(weight.level, "mask")).clip(-hold, hold).clip(low, high)}
        if weight.level == "none":
            return dict.fromkeys(("sequence", "geometric"), np.zeros(unit.n.size))
        logs = unit.od[out_on].clip(-hold, hold).clip(low, high)
        product = unit.d + np.bincount(unit.at[out_on], weights=logs, minlength=unit.n.size)
        return {"sequence": product, "geometric": product / np.maximum(alive, 1)}

    def _outside(self, sums: dict[str, Floats], alive: Ints, zeroed: Ints, out_on: Bools) -> dict[str, int]:
        """Tokens of n whose applied weight lies outside the bounds; a zeroed one lies below."""
        assert self.bounds is not None
        low, high = self.bounds
        below = int(zeroed.sum()) if low > 0 else 0
        weight = self.policy.weight
        if weight.level != "token":
            w = sums["high"]
            return {"over": int(alive[w > high].sum()), "under": below + int(alive[w < low].sum())}
        hold = HELD if weight.safety is None else min(HELD, weight.safety)
        w = _cut(np.exp(self.unit.od[out_on].clip(-hold, hold)), weight.lower, weight.upper)
        return {"over": int((w > high).sum()), "under": below + int((w < low).sum())}

    def _token_weights(self, stays: Ints) -> tuple[dict[str, Floats], dict[str, float]]:
        unit, weight = self.unit, self.policy.weight
        s, at = unit.n.size, unit.at
        hold = min(HELD, HELD if weight.safety is None else weight.safety)
        raw = np.exp(unit.od.clip(-hold, hold))
        cut = _cut(raw, weight.lower, weight.upper)
        on = ~self.out_masked & ~self.out_zeroed
        alone_zeroed = self.out_zeroed & ~self.row_zeroed[at]
        rows_on = ~self.row_masked & ~self.row_zeroed
        out = np.where(on, cut - 1.0, np.where(alone_zeroed, -1.0, 0.0))
        e = np.where(rows_on, unit.e, 0.0) + np.bincount(at, weights=out, minlength=s)
        e2 = np.where(rows_on, unit.e2, 0.0) + np.bincount(at, weights=out * out, minlength=s)
        e, e2 = (np.where(self.row_zeroed, f * stays, x) for f, x in ((-1.0, e), (1.0, e2)))
        low, high = np.exp(unit.low), np.exp(unit.high)
        np.minimum.at(low, at[on], cut[on])
        np.maximum.at(high, at[on], cut[on])
        raw_rows = unit.ordinary + unit.e  # the ordinary tokens' ratios
        applied = np.where(self.out_zeroed | self.out_masked, 0.0, cut)
        changed = on & (cut != raw)
        everyone = np.where(self.out_zeroed, 0.0, cut)  # what normalisation sees: masked tokens too
        rows_all = np.where(self.row_zeroed, 0.0, raw_rows) + np.bincount(at, weights=everyone, minlength=s)
        row = 1.0 + e / np.maximum(stays, 1)
        return {"e": e, "e2": e2, "low": low, "high": high, "row": row}, {
            "raw": raw_rows.sum() + raw.sum(),
            "moved": raw_rows[~rows_on].sum() + np.abs(applied - raw).sum(),
            "changed": changed.sum(),
            "rows_changed": np.unique(at[changed]).size,
            "norm_token": rows_all.sum(),
            "norm_row": (rows_all[self.real] / unit.n[self.real]).sum(),
            "held": int((np.abs(unit.od) > HELD).sum()) if weight.upper is None else 0,
        }

    def _row_weights(self, stays: Ints, alive: Ints) -> tuple[dict[str, Floats], dict[str, float]]:
        unit, weight = self.unit, self.policy.weight
        logs = np.zeros(unit.n.size)
        if weight.level != "none":
            logs = self._row_values(Rule(weight.level, "mask"))
        hold = HELD if weight.safety is None else min(HELD, weight.safety)
        raw = np.exp(logs.clip(-hold, hold))
        cut = _cut(raw, weight.lower, weight.upper)
        zeroed = stays - alive
        e = alive * (cut - 1.0) - zeroed
        e2 = alive * np.square(cut - 1.0) + zeroed
        changed = (cut != raw) & (alive > 0)
        zero_before_mask = np.bincount(unit.at[self.out_zeroed & ~self.row_zeroed[unit.at]], minlength=unit.n.size)
        normal = cut * np.where(self.row_zeroed, 0, unit.n - zero_before_mask)
        row = cut * alive / np.maximum(stays, 1)
        return {"e": e, "e2": e2, "low": cut, "high": cut, "row": row}, {
            "raw": (unit.n * raw).sum(),
            "moved": (alive * np.abs(cut - raw) + (unit.n - alive) * raw).sum(),
            "changed": alive[changed].sum(),
            "rows_changed": changed.sum(),
            "norm_token": normal.sum(),
            "norm_row": (normal[self.real] / unit.n[self.real]).sum(),
            "held": int((np.abs(logs[self.real]) > HELD).sum()) if weight.upper is None else 0,
        }

    def _divergences(self) -> tuple[float, float, float, float]:
        """Sums of k1 and k3 over the tokens that keep a weight, and over those that do not."""
        unit = self.unit
        lost = self.row_masked | self.row_zeroed
        k3 = (unit.e - unit.d).clip(min=0.0)
        out_lost = self.out_masked | self.out_zeroed
        d = unit.od
        with np.errstate(over="ignore"):
            other = np.expm1(d) - d
        return (
            float(-unit.d[~lost].sum() - d[~out_lost].sum()),
            float(k3[~lost].sum() + other[~out_lost].sum()),
            float(-unit.d[lost].sum() - d[out_lost].sum()),
            float(k3[lost].sum() + other[out_lost].sum()),
        )


_K: dict[str, Callable[[Floats], Floats]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: np.expm1(d) - d,
    "mult": lambda d: np.exp(np.abs(d)),
}


def _cut(x: Floats, lower: float | None, upper: float | None) -> Floats:
    if lower is not None:
        x = np.maximum(x, lower)
    return x if upper is None else np.minimum(x, upper)


def _outside(rule: Rule, x: Floats, advantage: Floats) -> Bools:
    low, high = rule.log_bounds()
    below, above = (x < low, x > high) if rule.inclusive else (x <= low, x >= high)
    if rule.advantage == "sign":
        return np.where(advantage > 0, above, below)
    return (below | above) & (advantage < 0) if rule.advantage == "negative" else below | above
