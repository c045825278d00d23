"""slime (624b824a): its mis.py helper, the built-in truncation and IcePop, and the reducer that averages samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_is.analysis.profiles import core
from rollout_is.analysis.profiles.rows import Pack, Result, Rows, Settings, has_sample, make_rows

DEFAULTS: Settings = {
    "get_mismatch_metrics": False,
    "use_tis": False,
    "custom_tis_function_path": None,
    "calculate_per_token_loss": False,
    "tis_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": None,
    "tis_upper_bound": 2.0,
    "tis_batch_normalize": False,
    "use_rs": False,
    "rs_level": "token",
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": None,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "samples_per_rollout": 1,
}


class _Step:
    """The reducer: each sample's masked sum over the tokens of its rollout, summed, divided by the rollouts (or the tokens)."""

    def __init__(self, batches: list[Rows], per_token: bool, per_rollout: int) -> None:
        self.batches, self.per_token = batches, per_token
        n = torch.cat([rows.n for rows in batches])
        self.samples = n.numel()
        rollout = torch.arange(self.samples) // per_rollout
        tokens = torch.zeros(self.samples, dtype=n.dtype).index_add(0, rollout, n)
        self.denominators = (tokens[rollout] if not per_token else torch.ones_like(n)).clamp(min=1).float()
        # per-token mode counts a fully masked sample as one token
        self.divisor = float(n.clamp(min=1).sum()) if per_token else float(int(rollout[-1]) + 1)

    def reduce(self, values: list[Tensor], masks: list[Tensor]) -> float:
        """The logged number of one metric from its [B, L] (or [B, 1]) values in each micro-batch."""
        sums = [(x.expand_as(m) * m).sum(-1) for x, m in zip(values, masks, strict=True)]
        return float((torch.cat(sums) / self.denominators).sum() / self.divisor)


def run(packs: Sequence[Pack], settings: Settings) -> Result:
    """One step over all ranks; micro-batches are the packs that hold a sample."""
    batches = [make_rows([pack]) for pack in packs]
    used = [rows for rows, pack in zip(batches, packs, strict=True) if has_sample(pack)]
    if not used:
        return Result({})
    step = _Step(used, settings["calculate_per_token_loss"], int(settings["samples_per_rollout"]))
    masks = [rows.m for rows in used]
    custom = settings["custom_tis_function_path"]
    if (
        settings["tis_batch_normalize"]
        and settings["use_tis"]
        and settings["tis_level"] == "geometric"
        and custom == "mis"
    ):
        return Result({}, error="ValueError: batch normalisation knows no geometric level")
    found: list[dict[str, Tensor]] = []
    weights: list[Tensor] = []
    keeps: list[Tensor] = []
    for rows in used:
        if custom == "mis":
            values, w, keep = _mis(rows, settings)
        elif settings["use_tis"]:
            values, w, keep = _built_in(rows, settings)
        else:
            values, w, keep = {}, torch.ones_like(rows.d), rows.m
        found.append(values)
        weights.append(w)
        keeps.append(keep)
    metrics = {f"train/{key}": step.reduce([values[key] for values in found], masks) for key in found[0]}
    metrics["train/train_rollout_logprob_abs_diff"] = step.reduce([_delta(rows).abs() for rows in used], keeps)
    if not settings["use_tis"]:
        return Result(metrics)
    done = iter(zip(used, weights, keeps, strict=True))
    packed_weights, packed_keep = [], []
    for rows, pack in zip(batches, packs, strict=True):
        if has_sample(pack):
            _, w, keep = next(done)
        else:
            w, keep = torch.zeros_like(rows.d), rows.m
        packed_weights.append(rows.packed(torch.where(rows.m, w, 0.0)))
        packed_keep.append(rows.packed(keep))
    return Result(metrics, weights=torch.cat(packed_weights), keep=torch.cat(packed_keep))


def _built_in(rows: Rows, settings: Settings) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Truncation to [tis_clip_low, tis_clip], or IcePop: zero outside. The ratio is not bounded before exp."""
    w = _delta(rows).exp()
    lo, hi = float(settings["tis_clip_low"]), float(settings["tis_clip"])
    icepop = settings["custom_tis_function_path"] == "icepop"
    applied = torch.where((w >= lo) & (w <= hi), w, 0.0) if icepop else w.clamp(lo, hi)
    return {"tis": w, "tis_clipfrac": (applied != w).float(), "tis_abs": (w - 1.0).abs()}, applied, rows.m


def _delta(rows: Rows) -> Tensor:
    """Log-ratios as they stand under the mask too: slime masks by multiplying, so an inf or NaN there reaches the metrics."""
    return rows.t - rows.r


def _mean(x: Tensor, m: Tensor) -> Tensor:
    """[B, 1] per-sample mean, 0 for a sample without tokens."""
    return ((x * m).sum(-1) / m.sum(-1).clamp(min=1))[:, None]


def _mis(rows: Rows, settings: Settings) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    m, d = rows.m, _delta(rows)
    mean_t, mean_r = _mean(rows.t, m), _mean(rows.r, m)
    product = (d * m).sum(-1)[:, None]
    values = {
        "mis_training_log_ppl": -mean_t,
        "mis_training_ppl": (-mean_t).exp(),
        "mis_rollout_log_ppl": -mean_r,
        "mis_rollout_ppl": (-mean_r).exp(),
        "mis_kl": -d,
        "mis_k3_kl": d.exp() - d - 1,
        "mis_log_ppl_diff": mean_r - mean_t,
        "mis_log_ppl_abs_diff": (mean_r - mean_t).abs(),
        "mis_ppl_ratio": (mean_r - mean_t).exp(),
        "mis_chi2_token": core.safe_exp(d).square() - 1.0,
        "mis_chi2_seq": (2.0 * product.clamp(-core.SAFE, core.SAFE)).exp() - 1.0,
    }
    if not settings["use_tis"]:
        return values, torch.ones_like(rows.d), m
    hi = float(settings["tis_upper_bound"])
    lo = float(settings["tis_lower_bound"] or 1.0 / hi)
    mode = settings["tis_mode"]
    w = _weight(rows, settings["tis_level"])
    keep = m
    values["mis_tis_weight_before_bound"] = w
    low, high = (w < lo).float(), (w > hi).float()
    if mode == "truncate":
        values["mis_tis_truncate_fraction"] = high
        w = w.clamp(0, hi)
    else:
        name = "clip" if mode == "clip" else "mask"
        values[f"mis_tis_{name}_fraction_low"], values[f"mis_tis_{name}_fraction_high"] = low, high
        if mode == "clip":
            w = w.clamp(lo, hi)
        else:
            keep = keep & (w >= lo) & (w <= hi)
    values["mis_tis_weight_after_bound"] = w
    if settings["use_rs"]:
        found, keep = _reject(rows, settings, keep, hi)
        values |= found
    values["mis_is_ratio_mean_after_tis_rs"] = w
    if settings["tis_batch_normalize"]:
        w, factor = _normalised(rows, w, keep, settings["tis_level"])
        values["mis_batch_norm_factor"] = factor.expand_as(w)
    values["mis_is_ratio_mean_final"] = w
    values["mis_is_ratio_min_final"] = torch.where(m, w, torch.inf).amin(-1, keepdim=True).nan_to_num(posinf=0.0)
    values["mis_is_ratio_max_final"] = torch.where(m, w, -torch.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    return values, w, keep


def _weight(rows: Rows, level: str) -> Tensor:
    d = _delta(rows)
    logs = {
        "token": lambda: d,
        "sequence": lambda: (d * rows.m).sum(-1)[:, None],
        "geometric": lambda: _mean(d, rows.m),
    }[level]()
    return core.safe_exp(logs).expand_as(rows.d)


def _reject(rows: Rows, settings: Settings, keep: Tensor, hi: float) -> tuple[dict[str, Tensor], Tensor]:
    hi = float(settings["rs_upper_bound"] or hi)  # each bound falls back on the truncation's, whatever the other is
    lo = float(settings["rs_lower_bound"] or settings["tis_lower_bound"] or 1.0 / hi)
    w = _weight(rows, settings["rs_level"])
    values = {"mis_rs_mask_fraction_low": (w < lo).float(), "mis_rs_mask_fraction_high": (w > hi).float()}
    keep = keep & (w >= lo) & (w <= hi)
    if settings["rs_veto_threshold"]:
        bad = (_delta(rows) < core.log(float(settings["rs_veto_threshold"]))) & rows.m
        vetoed = bad.any(-1, keepdim=True)
        values["mis_rs_catastrophic_token_fraction"] = bad.float()
        values["mis_rs_catastrophic_seq_fraction"] = vetoed.float()
        keep = keep & ~vetoed
    return values, keep


def _normalised(rows: Rows, w: Tensor, keep: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Divide by the mean weight of the micro-batch: over tokens, or over samples with a fully masked one as 0."""
    if level == "token":
        factor = (w * rows.m).sum() / rows.m.sum().clamp(min=1)
    else:
        factor = _mean(w, rows.m).mean()
    return w / factor, factor
