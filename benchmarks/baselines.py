"""What a user would otherwise run, written plainly: read the bytes, whole arrays in torch, padded rectangles pack by pack."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

LOW, HIGH = math.log(0.5), math.log(2.0)
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
Figures = dict[str, float]


def read_bytes(paths: list[Path]) -> int:
    """Every byte of the files, through one reused buffer of 1 MiB."""
    buffer = bytearray(1 << 20)
    total = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(buffer):
                total += n
    return total


def load(path: Path) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with safe_open(str(path), "pt") as shard:
        names = ("train_logprobs", "rollout_logprobs", "response_mask", "cu_seqlens")
        train, rollout, mask, cu = (shard.get_tensor(name) for name in names)
        packs = shard.get_tensor("cu_packs") if "cu_packs" in shard.keys() else cu[[0, -1]]  # noqa: SIM118
    return train, rollout, mask, cu, packs


def weights(level: Tensor, out: Figures, prefix: str, sort: bool) -> None:
    """Mean, spread, extremes, sample size and fractions of exp(level); quantiles by sorting."""
    if not len(level):
        return
    w = level.exp()
    out[f"{prefix}.mean"] = float(w.mean())
    out[f"{prefix}.std"] = float(w.std(correction=0))
    out[f"{prefix}.min"], out[f"{prefix}.max"] = float(w.min()), float(w.max())
    out[f"{prefix}.ess"] = float(w.sum() ** 2 / (len(w) * (w * w).sum()))
    out[f"{prefix}.share"] = float(w.max() / w.sum())
    out[f"{prefix}.high"] = float((level > HIGH).double().mean())
    out[f"{prefix}.low"] = float((level < LOW).double().mean())
    if sort:
        ordered = level.sort().values
        for q in QUANTILES:
            out[f"{prefix}.p{q}"] = float(ordered[max(0, math.ceil(q * len(ordered)) - 1)])


def clustered_error(x: Tensor, segment: Tensor, count: Tensor, segments: int) -> float:
    """Standard error of mean(x), clustered by segment."""
    sums = torch.zeros(segments, dtype=torch.float64).index_add_(0, segment, x)
    groups = int((count > 0).sum())
    deviation = sums - float(x.mean()) * count
    return math.sqrt(groups / max(1, groups - 1) * float((deviation * deviation).sum())) / len(x)


def view(t: Tensor, r: Tensor, segment: Tensor, segments: int, prefix: str, sort: bool) -> Figures:
    """All figures of one view from the tokens that it counts: float64 [n] log-probs and the segment of each."""
    out: Figures = {}
    d = t - r

    def per_segment(x: Tensor) -> Tensor:
        return torch.zeros(segments, dtype=torch.float64).index_add_(0, segment, x)

    count = per_segment(torch.ones_like(d))
    kept = count > 0
    w, e = d.exp(), d.expm1()
    weights(d, out, f"{prefix}.token", sort)
    total = per_segment(d)[kept]
    weights(total, out, f"{prefix}.sequence", sort)
    weights(total / count[kept], out, f"{prefix}.geometric", sort)
    x = per_segment(w)[kept] / count[kept]
    out |= {
        f"{prefix}.seq_{k}": float(v)
        for k, v in {"mean": x.mean(), "std": x.std(), "min": x.min(), "max": x.max()}.items()
    }
    out[f"{prefix}.seq_deviation"] = float((x - 1).abs().max())
    p, q = t.exp(), r.exp()
    token = {
        "kl": -d,
        "k2": d * d / 2,
        "k3": e - d,
        "abs": d.abs(),
        "prob_abs": (p - q).abs(),
        "mult": d.abs().exp(),
        "extreme": (d.abs() > math.log(2)).double(),
        "identical": (t == r).double(),
        "chi2": e * e + 2 * e,
    }
    for name, values in token.items():
        out[f"{prefix}.{name}"] = float(values.mean())
        out[f"{prefix}.{name}.stderr"] = clustered_error(values, segment, count, segments)
    out[f"{prefix}.std"] = float(d.std(correction=0))
    out[f"{prefix}.abs_max"] = float(d.abs().max())
    out[f"{prefix}.prob_abs_max"] = float((p - q).abs().max())
    out[f"{prefix}.pearson"] = float(torch.corrcoef(torch.stack([p, q]))[0, 1])
    mean_t, mean_r = per_segment(t)[kept] / count[kept], per_segment(r)[kept] / count[kept]
    gap = mean_r - mean_t
    out[f"{prefix}.log_ppl"], out[f"{prefix}.rollout_log_ppl"] = float(-mean_t.mean()), float(-mean_r.mean())
    out[f"{prefix}.ppl"], out[f"{prefix}.rollout_ppl"] = float((-mean_t).exp().mean()), float((-mean_r).exp().mean())
    out[f"{prefix}.ppl_gap"], out[f"{prefix}.ppl_gap_abs"] = float(gap.mean()), float(gap.abs().mean())
    out[f"{prefix}.ppl_gap_max"], out[f"{prefix}.ppl_gap_min"] = float(gap.max()), float(gap.min())
    out[f"{prefix}.ppl_ratio"] = float(gap.exp().mean())
    out[f"{prefix}.chi2_seq"] = float((2 * total).exp().mean() - 1)
    out[f"{prefix}.chi2_geometric"] = float((2 * total / count[kept]).exp().mean() - 1)
    return out


def whole_arrays(path: Path, sort: bool = True) -> Figures:
    """One shard at a time, every step a float64 operation on whole arrays. The padded view is the masked one with rows added."""
    train, rollout, mask, cu, _ = load(path)
    t, r = train.double(), rollout.double()
    segment = torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff().long())
    out = view(t, r, segment, len(cu) - 1, "unmasked", sort)
    return out | view(t[mask], r[mask], segment[mask], len(cu) - 1, "masked", sort)


def reduced(level: Tensor, mask: Tensor, prefix: str) -> Figures:
    """What trainers log of a [B, L] rectangle of log weights under a [B, L] mask, float32."""
    w = level.clamp(-20, 20).exp()
    m = mask.float()
    n = m.sum().clamp(min=1)
    mean = (w * m).sum() / n
    kept = w.masked_fill(~mask, 0)
    out = {
        "mean": mean,
        "std": (((w - mean) ** 2 * m).sum() / n).sqrt(),
        "min": w.masked_fill(~mask, float("inf")).min(),
        "max": w.masked_fill(~mask, float("-inf")).max(),
        "ess": kept.sum() ** 2 / (n * (kept * kept).sum()).clamp(min=1e-8),
        "high": ((w > 2.0).float() * m).sum() / n,
        "low": ((w < 0.5).float() * m).sum() / n,
    }
    row = (w * m).sum(1) / m.sum(1).clamp(min=1)
    out |= {"seq_mean": row.mean(), "seq_min": row.min(), "seq_max": row.max(), "seq_deviation": (row - 1).abs().max()}
    out["seq_std"] = row.std() if len(row) > 1 else row.sum() * 0
    out["seq_high"], out["seq_low"] = (row > 2.0).float().mean(), (row < 0.5).float().mean()
    return {f"{prefix}.{k}": float(v) for k, v in out.items()}


def rectangle(t: Tensor, r: Tensor, mask: Tensor, prefix: str) -> Figures:
    """Three levels and the mismatch family of one padded rectangle, as a trainer's metric function takes them."""
    d = t - r
    m = mask.float()
    n, row_n = m.sum().clamp(min=1), m.sum(1).clamp(min=1)
    product = (d * m).sum(1, keepdim=True)
    out = reduced(d, mask, f"{prefix}.token")
    out |= reduced(product.expand_as(d), mask, f"{prefix}.sequence")
    out |= reduced((product / row_n[:, None]).expand_as(d), mask, f"{prefix}.geometric")
    w = d.clamp(-20, 20).exp()
    p, q = t.exp(), r.exp()
    mean_t, mean_r = (t * m).sum(1) / row_n, (r * m).sum(1) / row_n
    figures = {
        "kl": -(d * m).sum() / n,
        "k3": ((w - d - 1) * m).sum() / n,
        "abs": (d.abs() * m).sum() / n,
        "prob_abs": ((p - q).abs() * m).sum() / n,
        "pearson": torch.corrcoef(torch.stack([p[mask], q[mask]]))[0, 1] if mask.any() else n * 0,
        "ppl": (-mean_t).exp().mean(),
        "rollout_ppl": (-mean_r).exp().mean(),
        "ppl_ratio": (mean_r - mean_t).exp().mean(),
        "ppl_gap_abs": (mean_r - mean_t).abs().mean(),
        "chi2": ((w * w) * m).sum() / n - 1,
        "chi2_seq": (2 * product.clamp(-20, 20)).exp().mean() - 1,
    }
    return out | {f"{prefix}.{k}": float(v) for k, v in figures.items()}


def padded_rectangles(path: Path, packs: int | None = None) -> tuple[int, Figures]:
    """(positions covered, mean over packs of every figure): each pack to [B, L] float32 with padding, both scopes."""
    train, rollout, mask, cu, pack_offsets = load(path)
    bounds = cu.tolist()
    pooled: Figures = {}
    done = 0
    ends = pack_offsets.tolist()[: packs + 1 if packs else None]
    for first, last in pairwise(ends):
        rows = [(a, b) for a, b in pairwise(bounds) if first <= a and b <= last and b > a]

        def pad(x: Tensor, rows: list[tuple[int, int]] = rows) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence([x[a:b] for a, b in rows], batch_first=True)

        t, r, m = pad(train), pad(rollout), pad(mask)
        real = pad(torch.ones_like(mask))
        for name, value in (rectangle(t, r, m, "masked") | rectangle(t, r, real, "unmasked")).items():
            pooled[name] = pooled.get(name, 0.0) + value
        done += 1
    return ends[-1], {name: value / done for name, value in pooled.items()}
