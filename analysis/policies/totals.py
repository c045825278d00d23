"""The figures of one policy over many units: tallies combined, then read as statistics with their reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_is.analysis.pareto import pareto_k, tail_length
from rollout_is.analysis.policies.judge import Tally
from rollout_is.analysis.policies.rules import Policy
from rollout_is.analysis.policies.survivors import Level
from rollout_is.analysis.policies.view import full_view
from rollout_is.analysis.summary import Statistic

RESOLVED = 1e-8  # mean square of the applied weights below which moments about 1 keep under half of float64's digits


@dataclass(frozen=True)
class Total:
    """What a policy does to a population of tokens.

    Attributes:
        counts: whole numbers (tokens, sequences, masked, zeroed, changed ...).
        figures: name -> statistic.
        full: section -> name -> statistic of the ``corrected`` view, where the plan was full.
        by_rule: for each rule its words, tokens and sequences that it alone rejects.
        tally: the combined sums, to combine again.
    """

    counts: dict[str, int]
    figures: dict[str, Statistic]
    by_rule: tuple[dict[str, Any], ...]
    tally: Tally
    full: dict[str, dict[str, Statistic]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "counts": self.counts,
            "figures": {name: statistic.to_dict() for name, statistic in self.figures.items()},
            "by_rule": list(self.by_rule),
            **(
                {"view": {k: {n: s.to_dict() for n, s in v.items()} for k, v in self.full.items()}} if self.full else {}
            ),
        }


def total_of(policy: Policy, tallies: Sequence[Tally], steps: Sequence[Total] = ()) -> Total:
    """Combine the tallies of a policy, in unit order.

    Args:
        policy: which policy they are of.
        tallies: one a unit.
        steps: the totals by step; a policy that normalises by step is combined from these.
    """
    normalized = policy.weight.normalize is not None
    tally = _combine([total.tally for total in steps]) if normalized and steps else _combine(tallies)
    if normalized and not steps:
        tally = _normalize(policy, tally)
    rules = tuple(
        {"rule": rule.words(), "action": rule.action, "tokens": tokens, "sequences": sequences}
        for rule, (tokens, sequences) in zip(policy.rules, tally.by_rule or ((0, 0),) * len(policy.rules), strict=True)
    )
    figures = _figures(policy, tally, rules)
    gone = next((s.why for s in (figures["kept_kl"],) if s.why), None) or "no valid tokens"
    return Total(tally.counts, figures, rules, tally, full_view(tally, figures, gone) if tally.highs else {})


def _combine(tallies: Sequence[Tally]) -> Tally:
    if not tallies:
        return Tally()
    first = tallies[0]
    return Tally(
        counts={name: sum(t.counts[name] for t in tallies) for name in first.counts},
        sums={name: math.fsum(t.sums[name] for t in tallies) for name in first.sums},
        low=min(t.low for t in tallies),
        high=max(t.high for t in tallies),
        row_low=min(t.row_low for t in tallies),
        row_high=max(t.row_high for t in tallies),
        lows={name: min(t.lows[name] for t in tallies) for name in first.lows},
        highs={name: max(t.highs[name] for t in tallies) for name in first.highs},
        levels={name: Level.join([t.levels[name] for t in tallies]) for name in first.levels},
        by_rule=tuple(
            (sum(a), sum(b))
            for a, b in (zip(*pairs, strict=True) for pairs in zip(*(t.by_rule for t in tallies), strict=True))
        ),
        top=_top(tallies),
        cut=sum(t.cut for t in tallies),
    )


def _top(tallies: Sequence[Tally]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The largest values of all, down to where a unit may hold a larger one that it did not keep."""
    values = np.sort(np.concatenate([t.top for t in tallies]))[::-1]
    complete = max((float(t.top[-1]) for t in tallies if t.cut and t.top.size), default=-math.inf)
    return values[values >= complete]


def _normalize(policy: Policy, tally: Tally) -> Tally:
    """Divide every weight by the step's mean."""
    counts, sums = tally.counts, dict(tally.sums)
    if not counts:
        return tally
    by_token = policy.weight.normalize == "token"
    over = counts["tokens"] if by_token else counts["sequences"]
    factor = sums["norm_token" if by_token else "norm_row"] / over if over else 0.0
    if not factor > 0:
        return tally
    for e, e2, n in (
        ("e", "e2", counts["tokens"] - counts["tokens_masked"]),
        ("row_e", "row_e2", counts["sequences"] - counts["sequences_masked"]),
    ):  # moments about 1 of w become those of w / factor
        s1, s2 = n + sums[e], n + 2 * sums[e] + sums[e2]
        sums[e] = s1 / factor - n
        sums[e2] = s2 / factor**2 - 2 * s1 / factor + n
    return Tally(
        counts,
        sums,
        tally.low / factor,
        tally.high / factor,
        tally.row_low / factor,
        tally.row_high / factor,
        tally.lows,
        tally.highs,
        {name: level.scaled(factor) for name, level in tally.levels.items()},
        tally.by_rule,
        tally.top - math.log(factor),
        tally.cut,
    )


def _figures(policy: Policy, tally: Tally, rules: Sequence[dict[str, Any]]) -> dict[str, Statistic]:
    counts, sums = tally.counts, tally.sums
    if not counts or not counts["tokens"]:
        return {name: Statistic(None, 0, why="no valid tokens") for name in _NAMES}
    tokens, sequences = counts["tokens"], counts["sequences"]
    lost = counts["tokens_masked"] + counts["tokens_zeroed"]
    lost_rows = counts["sequences_masked"] + counts["sequences_zeroed"]
    n, rows = tokens - counts["tokens_masked"], sequences - counts["sequences_masked"]
    alive = tokens - lost
    named = "; ".join(r["rule"] for r in rules if r["tokens"])
    gone = f"every token was rejected ({named})"
    s1, s2 = n + sums["e"], n + 2 * sums["e"] + sums["e2"]
    out = {
        "rejected_token_fraction": Statistic(lost / tokens, tokens),
        "rejected_token_fraction_of_all": Statistic(lost / counts["positions"], counts["positions"]),
        "rejected_sequence_fraction": Statistic(lost_rows / sequences, sequences),
        "rejected_sequence_fraction_of_all": Statistic(lost_rows / counts["segments"], counts["segments"]),
        "touched_sequence_fraction": Statistic(counts["sequences_touched"] / sequences, sequences),
        "changed_token_fraction": Statistic(counts["tokens_changed"] / tokens, tokens),
        "changed_token_fraction_of_all": Statistic(counts["tokens_changed"] / counts["positions"], counts["positions"]),
        "weight_moved_fraction": _real(sums["moved"] / sums["raw"] if sums["raw"] else None, tokens, "no weight"),
    }
    none = Statistic(None, 0, why="weights too small" if alive else gone)
    if not n or s1 <= 0:
        zero = Statistic(0.0, n) if n else none
        out |= {name: none for name in _NAMES if name not in out}
        out |= {
            "mean": zero,
            "min": zero,
            "max": zero,
            "seq_mean": zero if rows else none,
            "ess_kept": none if alive else Statistic(0.0, tokens),
        }
    else:
        variance = max(sums["e2"] / n - (sums["e"] / n) ** 2, 0.0)
        row_mean = 1 + sums["row_e"] / rows
        small = s2 < RESOLVED * n
        r1, r2 = rows + sums["row_e"], rows + 2 * sums["row_e"] + sums["row_e2"]
        row_variance = max(sums["row_e2"] / rows - (sums["row_e"] / rows) ** 2, 0.0)
        out |= {
            "mean": _real(s1 / n, n, "overflow"),
            "std": _real(math.sqrt(variance), n, "overflow"),
            "min": _real(tally.low, n, "overflow"),
            "max": _real(tally.high, n, "overflow"),
            "ess": _share(s1 * s1, n * s2, n, small),
            "ess_kept": _share(s1 * s1, tokens * s2, tokens, small),
            "max_weight_share": _share(tally.high, s1, n, small),
            "seq_mean": _real(row_mean, rows, "overflow"),
            "seq_std": _real(math.sqrt(row_variance * rows / (rows - 1)) if rows > 1 else None, rows, "one sequence"),
            "seq_min": _real(tally.row_low, rows, "overflow"),
            "seq_max": _real(tally.row_high, rows, "overflow"),
            "seq_max_deviation": _real(max(abs(tally.row_high - 1), abs(tally.row_low - 1)), rows, "overflow"),
            "seq_ess": _share(r1 * r1, rows * r2, rows, r2 < RESOLVED * rows),
            "seq_max_weight_share": _share(tally.row_high, r1, rows, r2 < RESOLVED * rows),
            "pareto_k": _shape(tally, rows),
        }
    out["kept_kl"] = _real(sums["kept_k1"] / alive if alive else None, alive, gone)
    out["kept_k3_kl"] = _real(sums["kept_k3"] / alive if alive else None, alive, gone)
    nothing = "no token was rejected"
    out["rejected_kl"] = _real(sums["lost_k1"] / lost if lost else None, lost, nothing)
    out["rejected_k3_kl"] = _real(sums["lost_k3"] / lost if lost else None, lost, nothing)
    return {name: out[name] for name in _NAMES}


def _share(part: float, whole: float, n: int, small: bool) -> Statistic:
    """A ratio of weight sums, at most 1; null where the weights are too small for sums that are kept as moments about 1."""
    if small:
        return Statistic(None, n, why="weights too small")
    return _real(min(part / whole, 1.0) if math.isfinite(whole) else math.inf, n, "overflow")


def _shape(tally: Tally, rows: int) -> Statistic:
    """k-hat of the sequences' mean applied weights."""
    if tally.top.size < min(rows, tail_length(rows) + 1):
        return Statistic(None, rows, why="the tail sits in few units")
    lowest = math.log(tally.row_low) if tally.row_low > 0 else -math.inf
    return pareto_k(tally.top, rows, smallest=lowest)


def _real(value: float | None, n: int, why: str) -> Statistic:
    if value is None:
        return Statistic(None, n, why=why)
    return Statistic(float(value), n) if math.isfinite(value) else Statistic(None, n, why="overflow")


_NAMES = (
    "rejected_token_fraction",
    "rejected_token_fraction_of_all",
    "rejected_sequence_fraction",
    "rejected_sequence_fraction_of_all",
    "touched_sequence_fraction",
    "changed_token_fraction",
    "changed_token_fraction_of_all",
    "weight_moved_fraction",
    "mean",
    "std",
    "min",
    "max",
    "ess",
    "ess_kept",
    "max_weight_share",
    "seq_mean",
    "seq_std",
    "seq_min",
    "seq_max",
    "seq_max_deviation",
    "seq_ess",
    "seq_max_weight_share",
    "pareto_k",
    "kept_kl",
    "kept_k3_kl",
    "rejected_kl",
    "rejected_k3_kl",
)
