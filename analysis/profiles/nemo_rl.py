"""NeMo-RL (7ea279ab): mismatch errors over global token counts and its truncated importance sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_is.analysis.profiles import core
from rollout_is.analysis.profiles.rows import Pack, Result, Rows, Settings, has_sample, make_rows

DEFAULTS: Settings = {
    "reference_policy_kl_type": "k3",
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
    "seq_logprob_error_threshold": None,
    "layout": "dense",
    "fully_masked_sample_mask": 0,
}


def run(packs: Sequence[Pack], settings: Settings) -> Result:
    """One step: every micro-batch emits its share of the global token (or sequence) count; shares are summed."""
    batches = [make_rows([pack]) for pack in packs]
    kind = settings["truncated_importance_sampling_type"]
    if settings["truncated_importance_sampling_ratio"] is not None and kind is None:
        return Result({}, error="ValueError: a truncation ratio without a truncation type")
    used = [rows for rows, pack in zip(batches, packs, strict=True) if has_sample(pack)]
    errors = [core.row_sum(rows.d.abs().exp(), rows.m) / rows.n.clamp(min=1) for rows in used]
    threshold = settings["seq_logprob_error_threshold"]
    before, after = torch.cat([rows.valid for rows in used]), []
    samples = []
    for rows, error in zip(used, errors, strict=True):
        sample = rows.valid | bool(settings["fully_masked_sample_mask"])
        if threshold is not None:
            sample = sample & ~(rows.valid & (error > threshold))
        samples.append(sample)
        after.append(rows.valid & sample)
    kept = torch.cat(after)
    tokens = float(sum(int((rows.m & s[:, None]).sum()) for rows, s in zip(used, samples, strict=True)))
    sequences = float(sum(int(s.sum()) for s in samples))
    metrics: dict[str, float] = {}
    weights: list[Tensor] = []
    keeps: list[Tensor] = []
    for rows, sample in zip(used, samples, strict=True):
        shares, w = _micro_batch(rows, sample, settings, tokens, sequences)
        for key, value in shares.items():
            metrics[key] = metrics.get(key, 0.0) + value
        weights.append(w)
        keeps.append(rows.m & sample[:, None])
    all_errors = torch.cat(errors)
    for suffix, chosen in (("", before), ("_after_mask", kept)):
        values = all_errors[chosen]
        metrics[f"max_seq_mult_prob_error{suffix}"] = float(values.max()) if values.numel() else 0.0
        metrics[f"mean_seq_mult_prob_error{suffix}"] = float(values.mean()) if values.numel() else 0.0
        metrics[f"min_seq_mult_prob_error{suffix}"] = float(values.min()) if values.numel() else 0.0
    metrics["num_masked_seqs_by_logprob_error"] = float(int(before.sum()) - int(kept.sum()))
    metrics["global_valid_seqs"], metrics["global_valid_toks"] = sequences, tokens
    done = iter(zip(weights, keeps, strict=True))
    packed = []
    for rows, pack in zip(batches, packs, strict=True):
        w, keep = next(done) if has_sample(pack) else (torch.zeros_like(rows.d), rows.m)
        packed.append((rows.packed(torch.where(keep, w, 0.0)), rows.packed(keep)))
    return Result(
        metrics,
        weights=torch.cat([w for w, _ in packed]),
        keep=torch.cat([k for _, k in packed]) if threshold is not None else None,
    )


def _kl(kind: str, log_ratio: Tensor) -> Tensor:
    """Estimator of KL(sampler || reference) with log_ratio = reference - sampler; the type is that of the reference-policy KL."""
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return log_ratio.exp() - 1 - log_ratio


def _micro_batch(
    rows: Rows, sample: Tensor, settings: Settings, tokens: float, sequences: float
) -> tuple[dict[str, float], Tensor]:
    m, d = rows.m & sample[:, None], rows.t - rows.r  # masked by multiplying: an inf or NaN under the mask shows
    kind = settings["reference_policy_kl_type"]

    def share(x: Tensor) -> float:
        return float((x * m).sum() / (tokens + 1e-8))

    middle = torch.logaddexp(rows.t, rows.r) - torch.log(torch.tensor(2.0))
    t, r = rows.t - middle, rows.r - middle
    out = {
        "token_mult_prob_error": share((d.abs() * m).exp()),
        "gen_kl_error": share(_kl(kind, d)),
        "policy_kl_error": share(_kl(kind, -d)),
        "js_divergence_error": share(0.5 * (t.exp() - t - 1) + 0.5 * (r.exp() - r - 1)),
        "approx_entropy": -share(d.exp() * rows.t),
        "num_valid_samples": float(sample.sum()),
    }
    by_sequence = bool(settings["sequence_level_importance_ratios"])
    logs = (d * rows.m).sum(-1, keepdim=True) if by_sequence else d
    w = logs.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # an infinite weight becomes 0, not the cap
    w, outside = _truncated(rows, w, sample, settings)
    if outside is not None:
        by_rows = settings["truncated_importance_sampling_type"] == "seq-mask-tis"
        flagged = outside.float()
        out["is_oob_ratio"] = float((flagged[:, 0] * sample).sum() / (sequences + 1e-8)) if by_rows else share(flagged)
    if not by_sequence:
        out["sampling_importance_ratio"] = share(w)
    elif (
        settings["layout"] == "dense"
    ):  # [B, 1] weights meet a [B] mask: every weight counts once for each valid sample
        out["sampling_importance_ratio"] = float(w.sum() * sample.sum() / (sequences + 1e-8))
    else:
        out["sampling_importance_ratio"] = float((w[:, 0] * sample).sum() / (sequences + 1e-8))
    return out, w.expand_as(
        rows.d
    )  # computed and logged even when the correction is off; then the loss does not use them


def _truncated(rows: Rows, w: Tensor, sample: Tensor, settings: Settings) -> tuple[Tensor, Tensor | None]:
    kind = settings["truncated_importance_sampling_type"]
    if kind is None:
        return w, None
    hi = float(settings["truncated_importance_sampling_ratio"])
    lo = float(settings["truncated_importance_sampling_ratio_min"] or 0.0)
    if kind == "tis":
        return w.clamp(lo, hi), ((w < lo) | (w > hi)).expand_as(rows.d)
    if kind == "icepop":
        inside = (w >= lo) & (w <= hi)
        return torch.where(inside, w, 0.0), (~inside).expand_as(rows.d)
    geometric = core.row_mean(rows.d, rows.m).exp()[:, None]
    inside = (geometric >= lo) & (geometric <= hi)
    return torch.where(inside, w, 0.0), ~inside
