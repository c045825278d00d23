"""The formulas that trainers share, in float32 and in their own order of operations: means under a mask, levels, the ppl family."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollout_is.analysis.profiles.rows import Rows

SAFE = 20.0  # bound on a log-ratio before exp in xtuner, verl and slime's mis.py: e^20 = 4.85e8


def token_sum(x: Tensor, m: Tensor) -> Tensor:
    """Sum over the selected tokens."""
    return torch.where(m, x, 0.0).sum()


def token_mean(x: Tensor, m: Tensor) -> Tensor:
    """Mean over the selected tokens; 0 when there is none (the trainers' epsilon of 1e-8 in the denominator)."""
    return token_sum(x, m) / (m.sum() + 1e-8)


def row_sum(x: Tensor, m: Tensor) -> Tensor:
    """[B] sums over the selected tokens of each row."""
    return torch.where(m, x, 0.0).sum(-1)


def row_mean(x: Tensor, m: Tensor) -> Tensor:
    """[B] means over the selected tokens of each row; 0 for a row without one."""
    return row_sum(x, m) / (m.sum(-1) + 1e-8)


def safe_exp(x: Tensor, bound: float = SAFE) -> Tensor:
    """exp with its argument held in +-bound."""
    return x.clamp(-bound, bound).exp()


def log(x: float) -> float:
    """ln, -inf at 0 (a lower bound of 0 is off)."""
    return math.log(x) if x > 0 else -math.inf


def level_logs(rows: Rows, level: str) -> Tensor:
    """Log-ratio of a level: token [B, L]; sequence (sum) and geometric (mean) [B, 1]."""
    if level == "token":
        return rows.d
    if level == "sequence":
        return row_sum(rows.d, rows.m)[:, None]
    return row_mean(rows.d, rows.m)[:, None]


def population_std(x: Tensor, m: Tensor) -> float:
    """sqrt(mean(x^2) - mean(x)^2) in float32, which loses small deviations; 0 for at most one token."""
    if int(m.sum()) <= 1:
        return 0.0
    variance = token_mean(x.square(), m) - token_mean(x, m).square()
    return float(variance.clamp(min=0.0).sqrt())


def sample_std(x: Tensor) -> float:
    """Standard deviation with ddof 1; 0 for at most one value."""
    return float(x.std()) if x.numel() > 1 else 0.0


def eff_sample_size(x: Tensor, m: Tensor) -> Tensor:
    """1 / mean((w / mean w)^2): a fraction in (0, 1]; inf when there is no token."""
    return 1.0 / token_mean((x / (token_mean(x, m) + 1e-8)).square(), m)


def ppl_family(rows: Rows) -> dict[str, float]:
    """Perplexities, k1, k3 and their differences, a row without tokens counting as perplexity 1 and difference 0.

    k3 and ppl_ratio are not bounded: one token far off makes them inf.
    """
    mean_t, mean_r = row_mean(rows.t, rows.m), row_mean(rows.r, rows.m)
    diff = mean_r - mean_t
    return {
        "training_ppl": float((-mean_t).exp().mean()),
        "training_log_ppl": float((-mean_t).mean()),
        "kl": float(token_mean(-rows.d, rows.m)),
        "k3_kl": float(token_mean(rows.d.exp() - rows.d - 1, rows.m)),
        "rollout_ppl": float((-mean_r).exp().mean()),
        "rollout_log_ppl": float((-mean_r).mean()),
        "log_ppl_diff": float(diff.mean()),
        "log_ppl_abs_diff": float(diff.abs().mean()),
        "log_ppl_diff_max": float(diff.max()),
        "log_ppl_diff_min": float(diff.min()),
        "ppl_ratio": float(diff.exp().mean()),
    }


def chi2(rows: Rows) -> dict[str, float]:
    """chi2_token over tokens, chi2_seq over rows of the product, log-ratios held in +-20."""
    product = row_sum(rows.d, rows.m).clamp(-SAFE, SAFE)
    return {
        "chi2_token": float(token_mean(safe_exp(rows.d).square(), rows.m) - 1.0),
        "chi2_seq": float((2.0 * product).exp().mean() - 1.0),
    }


def row_family(x: Tensor, lo: float, hi: float, high_low: Tensor | None = None) -> dict[str, float]:
    """The ``seq_*`` family over per-row values [V]; fractions over ``high_low`` where it differs from x. V >= 1."""
    judged = x if high_low is None else high_low
    return {
        "seq_mean": float(x.mean()),
        "seq_std": sample_std(x),
        "seq_max": float(x.max()),
        "seq_min": float(x.min()),
        "seq_max_deviation": float((x - 1.0).abs().max()),
        "seq_fraction_high": float((judged > hi).float().mean()),
        "seq_fraction_low": float((judged < lo).float().mean()),
    }
