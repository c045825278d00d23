"""The sections of the ``corrected`` view that only a full pass knows: levels, shares outside the bounds, the survivors' mismatch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rollout_is.analysis.pareto import pareto_k, tail_length
from rollout_is.analysis.policies.survivors import PLAIN, Level
from rollout_is.analysis.summary import Statistic

if TYPE_CHECKING:
    from rollout_is.analysis.policies.judge import Tally


def full_view(tally: Tally, figures: dict[str, Statistic], gone: str) -> dict[str, dict[str, Statistic]]:
    """Statistics beside those of the weights themselves.

    Args:
        tally: combined over the units.
        figures: the policy's figures, for how many tokens and sequences are left in n.
        gone: why there is nothing, where nothing is left.
    """
    counts = tally.counts
    n, rows = counts["tokens"] - counts["tokens_masked"], counts["sequences"] - counts["sequences_masked"]
    out = {
        "token": {
            "rollout_is_ratio_fraction_high": _share(counts["over"], n, gone),
            "rollout_is_ratio_fraction_low": _share(counts["under"], n, gone),
        },
        "per_sequence": {
            "rollout_is_seq_fraction_high": _share(counts["rows_high"], rows, gone),
            "rollout_is_seq_fraction_low": _share(counts["rows_low"], rows, gone),
        },
        "mismatch": _mismatch(tally, counts["tokens"] - counts["tokens_masked"] - counts["tokens_zeroed"], gone),
    }
    return out | {name: _level(level, gone) for name, level in tally.levels.items()}


def _share(part: int, whole: int, gone: str) -> Statistic:
    return Statistic(part / whole, whole) if whole else Statistic(None, 0, why=gone)


def _level(level: Level, gone: str) -> dict[str, Statistic]:
    """Importance-weight statistics of one weight a sequence."""
    n = level.n
    names = (
        "mean",
        "std",
        "min",
        "max",
        "eff_sample_size",
        "ratio_fraction_high",
        "ratio_fraction_low",
        "max_weight_share",
    )
    if not n:
        none = Statistic(None, 0, why=gone)
        return {f"rollout_is_{name}": none for name in names} | {"pareto_k": none}
    plain = level.high < PLAIN and n + level.e > 0
    log_mean = level.high + math.log(level.first / n)
    ratio = level.second / level.first
    if plain:
        mean = 1 + level.e / n
        deviation = math.sqrt(max(level.e2 / n - (level.e / n) ** 2, 0.0))
        std = _weight(deviation, math.log(deviation) if deviation > 0 else -math.inf, n)
        first = _weight(mean, log_mean, n)
    else:
        first = _from_log(log_mean, n)
        spread = level.second / n - (level.first / n) ** 2
        std = _from_log(level.high + 0.5 * math.log(spread), n) if spread > 0 else Statistic(0.0, n)
    found = {
        "mean": first,
        "std": std,
        "min": _from_log(level.low, n),
        "max": _from_log(level.high, n),
        "eff_sample_size": Statistic(min(level.first / (n * ratio), 1.0), n),
        "ratio_fraction_high": _share(level.over, n, gone),
        "ratio_fraction_low": _share(level.under, n, gone),
        "max_weight_share": Statistic(1.0 / level.first, n),
    }
    out = {f"rollout_is_{name}": found[name] for name in names}
    if level.top.size < min(n, tail_length(n) + 1):
        out["pareto_k"] = Statistic(None, n, why="the tail sits in few units")
    else:
        out["pareto_k"] = pareto_k(level.top, n, smallest=level.low)
    return out


def _weight(value: float, log_value: float, n: int) -> Statistic:
    return Statistic(value, n, log_value=log_value if math.isfinite(log_value) else None, has_log=True)


def _from_log(log_value: float, n: int) -> Statistic:
    """exp of a log; null with the log standing where float64 cannot hold it."""
    if not math.isfinite(log_value):
        return Statistic(0.0, n) if log_value < 0 else Statistic(None, n, why="overflow")
    if log_value > 709.0:
        return Statistic(None, n, why="overflow", log_value=log_value, has_log=True)
    if log_value < -745.0:
        return Statistic(None, n, why="underflow", log_value=log_value, has_log=True)
    return _weight(math.exp(log_value), log_value, n)


def _mismatch(tally: Tally, n: int, gone: str) -> dict[str, Statistic]:
    sums, rows = tally.sums, int(tally.sums["rows"])

    def mean(value: float, over: int) -> Statistic:
        if not over:
            return Statistic(None, 0, why=gone)
        return Statistic(value / over, over) if math.isfinite(value) else Statistic(None, over, why="overflow")

    def known(value: float, over: int) -> Statistic:
        return Statistic(value, over) if over else Statistic(None, 0, why=gone)

    spread = max(sums["d2"] / n - (sums["d"] / n) ** 2, 0.0) if n else 0.0
    return {
        "mismatch_kl": mean(-sums["d"], n),
        "mismatch_k2_kl": mean(sums["d2"] / 2, n),
        "mismatch_k3_kl": mean(sums["kept_k3"], n),
        "mismatch_logprob_abs_diff": mean(sums["abs"], n),
        "mismatch_logprob_diff_std": known(math.sqrt(spread), n),
        "mismatch_logprob_abs_diff_max": known(tally.highs["abs"], n),
        "mismatch_prob_abs_diff": mean(sums["dp"], n),
        "mismatch_prob_abs_diff_max": known(tally.highs["dp"], n),
        "mismatch_mult_prob_error": mean(sums["mult"], n),
        "mismatch_extreme_fraction": mean(sums["extreme"], n),
        "mismatch_training_log_ppl": mean(sums["log_ppl"], rows),
        "mismatch_rollout_log_ppl": mean(sums["rollout_log_ppl"], rows),
        "mismatch_training_ppl": mean(sums["ppl"], rows),
        "mismatch_rollout_ppl": mean(sums["rollout_ppl"], rows),
        "mismatch_log_ppl_diff": mean(sums["diff"], rows),
        "mismatch_log_ppl_abs_diff": mean(sums["abs_diff"], rows),
        "mismatch_log_ppl_diff_max": known(tally.highs["diff"], rows),
        "mismatch_log_ppl_diff_min": known(tally.lows["diff"], rows),
        "mismatch_ppl_ratio": mean(sums["ratio"], rows),
        "mismatch_chi2_token": mean(2 * sums["raw_e"] + sums["raw_e2"], n),
        "mismatch_chi2_seq": mean(sums["chi2_seq"], rows),
        "mismatch_chi2_geometric": mean(sums["chi2_geometric"], rows),
    }
