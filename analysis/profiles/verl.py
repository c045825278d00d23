"""verl's rollout_corr metrics: ``verl`` (1dda039b, applied weights) and ``verl-2026-01`` (b178a3cd, raw weights)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rollout_is.analysis.profiles import core
from rollout_is.analysis.profiles.rows import Pack, Result, Rows, Settings, by_rank, has_sample, make_rows

DEFAULTS: Settings = {
    "mode": "decoupled",
    "rows": "real",
    "metrics": None,
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}
PREFIX = "rollout_corr/"


def run(packs: Sequence[Pack], settings: Settings, *, raw: bool = False) -> Result:
    """One step. Decoupled: once over the whole batch; bypass: per micro-batch, then averaged, extremes included.

    Args:
        raw: statistics of the raw weights and of weights bounded to [1/hi, hi], as in January 2026.
    """
    if settings["mode"] == "bypass":
        return _bypass(packs, settings)
    rows = make_rows(packs, pads=settings["rows"] == "all")
    if not bool(rows.m.any()):
        return Result({}, error="ValueError: no response token in the batch")
    metrics: dict[str, float] = {}
    if settings["metrics"] in (None, "debug"):
        metrics |= _probabilities(rows)
    if settings["metrics"] == "debug":
        return Result(metrics)
    try:
        values, weights, keep = _corrections(rows, settings, raw)
    except ZeroDivisionError:
        return Result({}, error="ZeroDivisionError: every weight was zeroed, and 1 / mean(w^2) divides by zero")
    metrics |= {PREFIX + key: value for key, value in values.items()}
    return Result(metrics, weights=_packed(rows, weights), keep=None if keep is None else rows.packed(keep))


def _packed(rows: Rows, weights: Tensor | None) -> Tensor | None:
    return None if weights is None else rows.packed(torch.where(rows.m, weights, 0.0))


def _bypass(packs: Sequence[Pack], settings: Settings) -> Result:
    per_pack: list[dict[str, float]] = []
    weights: list[Tensor] = []
    keeps: list[Tensor] = []
    for pack in packs:
        rows = make_rows([pack])
        if not has_sample(pack):
            per_pack.append({})
            weights.append(torch.zeros(pack.train.numel()))
            keeps.append(torch.zeros(pack.train.numel(), dtype=torch.bool))
            continue
        if not bool(rows.m.any()):
            return Result({}, error="ValueError: a micro-batch without a response token")
        try:
            values, applied, keep = _corrections(rows, settings, raw=False)
        except ZeroDivisionError:
            return Result({}, error="ZeroDivisionError: every weight of a micro-batch was zeroed")
        per_pack.append({f"actor/{PREFIX}{key}": value for key, value in values.items()})
        weights.append(rows.packed(torch.where(rows.m, applied, 0.0) if applied is not None else rows.m.float()))
        keeps.append(rows.packed(rows.m if keep is None else keep))
    # mean over the data-parallel ranks for each micro-batch, then over micro-batches: extremes are averaged too
    ranks = [
        [values for pack, values in zip(packs, per_pack, strict=True) if pack.rank == r and values]
        for r in by_rank(packs)
    ]
    ranks = [rank for rank in ranks if rank]
    steps = [_mean(micro) for micro in zip(*ranks, strict=False)]
    return Result(
        _mean(steps),
        tuple(per_pack),
        torch.cat(weights) if settings["rollout_is"] else None,
        torch.cat(keeps) if settings["rollout_rs"] else None,
    )


def _mean(dicts: Iterable[dict[str, float]]) -> dict[str, float]:
    found = list(dicts)
    return {key: sum(d[key] for d in found) / len(found) for key in (found[0] if found else ())}


def _probabilities(rows: Rows) -> dict[str, float]:
    p, q = rows.t[rows.m].exp(), rows.r[rows.m].exp()
    diff = (p - q).abs()
    x, y = p - p.mean(), q - q.mean()
    pearson = (x * y).sum() / (x.square().sum().sqrt() * y.square().sum().sqrt())
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": float(diff.max()),
        "training/rollout_probs_diff_mean": float(diff.mean()),
        "training/rollout_probs_diff_std": float(diff.std()) if diff.numel() > 1 else torch.nan,
        "training/rollout_actor_probs_pearson_corr": float(pearson),
    }


def _corrections(rows: Rows, settings: Settings, raw: bool) -> tuple[dict[str, float], Tensor | None, Tensor | None]:
    values = core.ppl_family(rows) | core.chi2(rows)
    weights = keep = None
    if settings["rollout_is"]:
        found, weights = _importance(rows, settings, raw)
        values |= {f"rollout_is_{key}": value for key, value in found.items()}
    if settings["rollout_rs"]:
        found, keep = _rejection(rows, str(settings["rollout_rs"]), str(settings["rollout_rs_threshold"]))
        values |= {f"rollout_rs_{key}": value for key, value in found.items()}
    return values, weights, keep


def _importance(rows: Rows, settings: Settings, raw: bool) -> tuple[dict[str, float], Tensor]:
    level, threshold, m = settings["rollout_is"], settings["rollout_is_threshold"], rows.m
    icepop = isinstance(threshold, str) and "_" in threshold
    lo, hi = _bounds(str(threshold))
    logs = core.level_logs(rows, level)
    w = core.safe_exp(logs).expand_as(rows.d)
    applied = torch.where((w >= lo) & (w <= hi), w, 0.0) if icepop else w.clamp(max=hi)
    shown = w if raw else applied
    bounded = shown.clamp(lo if raw else 0.0, hi)
    if level == "token":
        high, low = core.token_mean((w > hi).float(), m), core.token_mean((w < lo).float(), m)
        largest, smallest = torch.where(m, shown, -torch.inf).max(), torch.where(m, shown, torch.inf).min()
    else:  # raw, in log space, over every row
        high, low = (logs > core.log(hi)).float().mean(), (logs < core.log(lo)).float().mean()
        largest, smallest = logs.max().clamp(max=core.SAFE).exp(), logs.min().exp()
    if float(core.token_mean(bounded, m)) == 0.0:
        raise ZeroDivisionError
    values = {
        "mean": float(core.token_mean(shown, m)),
        "ratio_fraction_high": float(high),
        "ratio_fraction_low": float(low),
        "max": float(largest),
        "min": float(smallest),
        "std": core.population_std(bounded, m),
        "eff_sample_size": float(core.eff_sample_size(bounded, m)),
    }
    means = core.row_mean(applied, m)
    values |= core.row_family(core.row_mean(shown, m), lo, hi, core.row_mean(w, m))
    if icepop:
        values["oob_ratio"] = float(core.token_mean(((w < lo) | (w > hi)).float(), m))
    if settings["rollout_is_batch_normalize"]:
        factor = core.token_mean(applied, m) if level == "token" else means[rows.valid].mean()
        usable = bool(factor > 1e-8)
        values["batch_norm_factor"] = float(factor) if usable else 1.0
        applied = applied / factor if usable else applied
    return values, applied


def _bounds(threshold: str) -> tuple[float, float]:
    """ "lo_hi", or one number hi with lo = 1/hi."""
    low, _, high = threshold.rpartition("_")
    hi = float(high)
    return (float(low) if low else 1.0 / hi), hi


def _rejection(rows: Rows, options: str, thresholds: str) -> tuple[dict[str, float], Tensor]:
    m = rows.m
    out: dict[str, float] = {}
    keep = m
    safe = torch.where(m, rows.d.clamp(-core.SAFE, core.SAFE), 0.0)
    for option, threshold in zip(options.split(","), thresholds.split(","), strict=True):
        scope, kind = option.rsplit("_", 1)
        token = {"k1": -safe, "k2": safe.square() / 2, "k3": safe.exp() - 1 - safe}[kind]
        if scope == "token":
            stat = token
        elif scope == "seq_sum":
            stat = core.row_sum(token, m)[:, None]
        elif scope == "seq_mean":
            stat = core.row_mean(token, m)[:, None]
        else:
            stat = torch.where(m, token, -torch.inf).max(-1).values[:, None]
            stat = torch.where(rows.valid[:, None], stat, 0.0)
        lo, hi = (core.log(b) for b in _bounds(threshold)) if kind == "k1" else (0.0, float(threshold))
        passed = (stat >= lo) & (stat <= hi) if kind == "k1" else stat <= hi
        passed = passed.expand_as(m)
        found = _rejection_metrics(rows, stat, lo, hi, kind == "k1", scope == "token")
        rejected = ~passed & m
        found["masked_fraction"] = float(core.token_mean(rejected.float(), m))
        found["seq_masked_fraction"] = float(rejected.any(-1)[rows.valid].float().mean())
        out |= {f"{option}_{key}": value for key, value in found.items()}
        keep = keep & passed
    rejected = m & ~keep
    out["masked_fraction"] = float(core.token_mean(rejected.float(), m))
    out["seq_masked_fraction"] = float(rejected.any(-1).float().mean())  # over every row, unlike the options' own
    return out, keep


def _rejection_metrics(
    rows: Rows, stat: Tensor, lo: float, hi: float, two_sided: bool, token: bool
) -> dict[str, float]:
    m, wide = rows.m, stat.expand_as(rows.m)
    chosen = stat[m] if token else stat[rows.valid]
    high, low = (wide > hi).float(), (wide < lo).float()
    means = core.row_mean(wide, m)[rows.valid]
    out = {
        "mean": float(core.token_mean(wide, m)),
        "max": float(chosen.max()),
        "min": float(chosen.min()),
        "fraction_high": float(core.token_mean(high, m) if token else (chosen > hi).float().mean()),
        "fraction_low": float(core.token_mean(low, m) if token else (chosen < lo).float().mean()) if two_sided else 0.0,
        "std": core.population_std(wide.clamp(lo, hi), m),
        "seq_mean": float(means.mean()),
        "seq_std": core.sample_std(means),
        "seq_max": float(means.max()),
        "seq_min": float(means.min()),
        "seq_max_deviation": float(means.abs().max()),
        "seq_fraction_high": float((means > hi).float().mean()),
    }
    if two_sided:
        out["seq_fraction_low"] = float((means < lo).float().mean())
    return out
