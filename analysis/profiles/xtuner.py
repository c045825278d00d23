"""xtuner's rollout_is metrics (b934f462) and the same before the fix that stopped counting padding (e93fe729)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_is.analysis.profiles import core
from rollout_is.analysis.profiles.rows import Pack, Result, Rows, Settings, make_rows

DEFAULTS: Settings = {
    "rollout_is_level": "token",
    "rollout_is_mode": "truncate",
    "rollout_is_threshold": None,
    "rollout_is_mask_threshold": None,
    "rollout_is_veto_threshold": None,
    "metrics": None,
}
PREFIX = "rollout_is/mismatch/"
_ROW_KEYS = ("mean", "std", "max", "min", "max_deviation", "fraction_high", "fraction_low")


def run(packs: Sequence[Pack], settings: Settings, *, fixed: bool = True) -> Result:
    """One step: metrics per pack, then the unweighted mean of the packs (extremes by name).

    Args:
        fixed: False counts padding segments in ``rollout_is_seq_*`` and ``veto_fraction``, and packs without a response token in
            the mean over packs: the numbers before the fix.
    """
    metrics: dict[str, float] = {}
    per_pack: list[dict[str, float]] = [{} for _ in packs]
    weights = keep = None
    if settings["metrics"] in (None, "mismatch"):
        for out, pack in zip(per_pack, packs, strict=True):
            out.update(_mismatch(pack))
        valid = [bool(out["mismatch/valid"]) for out in per_pack]
        metrics |= _merge([{k: v for k, v in out.items() if k != "mismatch/valid"} for out in per_pack], valid)
        mask = torch.cat([p.mask for p in packs])
        for name in ("train", "rollout"):
            logs = torch.cat([getattr(p, name) for p in packs])
            count = int(mask.sum())
            metrics[f"entropy/{name}"] = float(-core.token_sum(logs, mask) / count) if count else 0.0
    if settings["metrics"] in (None, "rollout_is") and settings["rollout_is_threshold"]:
        done = [_importance(pack, settings, fixed) for pack in packs]
        found = [values for values, _, _ in done]
        valid = [bool(pack.mask.any()) or not fixed for pack in packs]
        metrics |= _merge(found, valid)
        for out, values, pack in zip(per_pack, found, packs, strict=True):
            out.update(values)
            if fixed:
                out[PREFIX + "valid"] = float(pack.mask.any())
        weights, keep = torch.cat([w for _, w, _ in done]), torch.cat([k for _, _, k in done])
    return Result(metrics, tuple(per_pack), weights, keep)


def _mismatch(pack: Pack) -> dict[str, float]:
    rows = make_rows([pack], whole_packs=True)  # the "sequence" of these metrics is the pack
    values = core.ppl_family(rows) | {"logprob_abs_diff": float(core.token_mean(rows.d.abs(), rows.m))}
    out = {f"mismatch/mismatch_{key}": value for key, value in values.items()}
    return out | {"mismatch/valid": float(rows.m.any())}


def _importance(pack: Pack, settings: Settings, fixed: bool) -> tuple[dict[str, float], Tensor, Tensor]:
    hi, lo = settings["rollout_is_threshold"]
    level, mode = settings["rollout_is_level"], settings["rollout_is_mode"]
    rows = make_rows([pack], pads=True)
    logs = core.level_logs(rows, level)
    w = core.safe_exp(logs).expand_as(rows.d)
    values = _weight_metrics(rows, logs, w, level, lo, hi)

    counted = rows.valid if fixed else torch.ones_like(rows.valid)
    means = core.row_mean(w, rows.m)[counted]
    family = core.row_family(means, lo, hi) if means.numel() else dict.fromkeys((f"seq_{k}" for k in _ROW_KEYS), 0.0)
    values |= family

    keep = rows.m
    if mode in ("mask", "both"):
        mask_hi, mask_lo = settings["rollout_is_mask_threshold"] or (hi, lo)
        passed = (w >= mask_lo) & (w <= mask_hi)
        values["masked_fraction"] = float(core.token_mean((~passed).float(), rows.m))
        rejected = (~passed & rows.m).any(-1) if level == "token" else ~passed[:, 0]
        values["seq_masked_fraction"] = float(rejected.float().mean())
        keep = keep & passed
    values["veto_fraction"] = values["catastrophic_token_fraction"] = 0.0
    if settings["rollout_is_veto_threshold"]:
        veto_hi, veto_lo = settings["rollout_is_veto_threshold"]
        bad = ((rows.d < core.log(veto_lo)) | (rows.d > core.log(veto_hi))) & rows.m
        values["catastrophic_token_fraction"] = float(core.token_mean(bad.float(), rows.m))
        vetoed = bad.any(-1)
        values["veto_fraction"] = float(vetoed[counted].float().mean()) if counted.any() else 0.0
        keep = keep & ~vetoed[:, None]
    applied = w.clamp(lo, hi) if mode in ("truncate", "both") else w
    named = {f"{PREFIX}rollout_is_{key}": value for key, value in values.items()}
    return named, rows.packed(torch.where(rows.m, applied, 0.0)), rows.packed(keep)


def _weight_metrics(rows: Rows, logs: Tensor, w: Tensor, level: str, lo: float, hi: float) -> dict[str, float]:
    m, bounded = rows.m, w.clamp(lo, hi)
    if level == "token":
        high, low = core.token_mean((w > hi).float(), m), core.token_mean((w < lo).float(), m)
        largest = torch.where(m, w, -torch.inf).max()
        smallest = torch.where(m, w, torch.inf).min()
    else:  # extremes and the sequence-level shares run over every row, padding included (log-ratio 0)
        above, below = (logs > core.log(hi)).float(), (logs < core.log(lo)).float()
        if level == "sequence":
            high, low = above.mean(), below.mean()
        else:
            high, low = core.token_mean(above.expand_as(m), m), core.token_mean(below.expand_as(m), m)
        largest, smallest = logs.max().clamp(max=core.SAFE).exp(), logs.min().exp()
    return {
        "mean": float(core.token_mean(w, m)),
        "max": float(largest),
        "min": float(smallest),
        "ratio_fraction_high": float(high),
        "ratio_fraction_low": float(low),
        "std": core.population_std(bounded, m),
        "eff_sample_size": float(core.eff_sample_size(bounded, m)),
    }


def _merge(packs: list[dict[str, float]], valid: list[bool]) -> dict[str, float]:
    """Over packs and ranks: the name decides (max, min), everything else is the unweighted mean of the valid packs."""
    count = sum(valid)
    out: dict[str, float] = {}
    for key in packs[0] if packs else ():
        values = [pack[key] for pack, ok in zip(packs, valid, strict=True) if ok]
        if not count:
            out[key] = 0.0
        elif "max" in key:
            out[key] = max(values)
        elif "min" in key:
            out[key] = min(values)
        else:
            out[key] = sum(values) / count
    return out
