"""TRL (f2cd5771): sampling metrics of the GRPO trainer, per rank, then averaged over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from rollout_is.analysis.profiles.rows import Pack, Result, Settings, by_rank, has_sample, make_rows

DEFAULTS: Settings = {
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": 3.0,
}


def run(packs: Sequence[Pack], settings: Settings) -> Result:
    """One step: all samples of a rank are its batch; the ratio metrics describe the weights after truncation or masking."""
    level, action = str(settings["vllm_importance_sampling_mode"]).split("_")
    lo, hi = settings["vllm_importance_sampling_clip_min"], settings["vllm_importance_sampling_clip_max"]
    means, largest, ratios = [], [], []
    weights = []
    for rank in by_rank(packs).values():
        rows = make_rows(rank)
        # the product is not bounded before exp: it can be inf
        d = (rows.t - rows.r) * rows.m  # a NaN or inf under the mask becomes NaN
        w = (d if level == "token" else d.sum(-1, keepdim=True)).exp()
        if action == "truncate":
            w = w if lo is None and hi is None else w.clamp(lo, hi)
        else:
            rejected = torch.zeros_like(w, dtype=torch.bool)
            if lo is not None:
                rejected |= w < lo
            if hi is not None:
                rejected |= w > hi
            w = w.masked_fill(rejected, 0.0)
        weights.append(rows.packed(torch.where(rows.m, w, 0.0)))
        if not any(has_sample(pack) for pack in rank):
            continue
        diff = rows.d.abs()[rows.m]
        means.append(float(diff.mean()) if diff.numel() else 0.0)
        largest.append(float(diff.max()) if diff.numel() else 0.0)
        values = w[rows.m] if level == "token" else w[:, 0]  # every row, a fully masked one as 1
        ratios.append(
            (float(values.min()), float(values.mean()), float(values.max())) if values.numel() else (0.0,) * 3
        )
    metrics = {}
    if ratios:
        low, middle, high = zip(*ratios, strict=True)
        metrics = {
            "sampling/sampling_logp_difference/mean": sum(means) / len(means),
            "sampling/sampling_logp_difference/max": max(largest),
            "sampling/importance_sampling_ratio/min": _over_ranks(min, low),
            "sampling/importance_sampling_ratio/mean": _over_ranks(lambda x: sum(x) / len(x), middle),
            "sampling/importance_sampling_ratio/max": _over_ranks(max, high),
        }
    return Result(metrics, weights=torch.cat(weights))


def _over_ranks(reduce: Callable[[list[float]], float], values: Sequence[float]) -> float:
    """Over the ranks that have a number (nanmin, nanmean, nanmax)."""
    numbers = [value for value in values if not math.isnan(value)]
    return reduce(numbers) if numbers else math.nan
