"""An oracle for every statistic of METRICS.md but ``pareto_k``: loops over sequences, longdouble and ``math.fsum``.

Written from the definitions alone. It shares no code with ``rollout_is`` and imports nothing of it, so that a misreading on
either side shows as a difference. It is slow on purpose: no blocks, no merging, no histograms.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

LD = np.longdouble
BIG = LD(np.finfo(np.float64).max)
TINY = LD(np.finfo(np.float64).tiny)

QUANTILES = {
    "log_ratio_p0_1": Fraction(1, 1000),
    "log_ratio_p1": Fraction(1, 100),
    "log_ratio_p5": Fraction(5, 100),
    "log_ratio_p25": Fraction(25, 100),
    "log_ratio_p50": Fraction(50, 100),
    "log_ratio_p75": Fraction(75, 100),
    "log_ratio_p95": Fraction(95, 100),
    "log_ratio_p99": Fraction(99, 100),
    "log_ratio_p99_9": Fraction(999, 1000),
}
FILLS = (0.0, 1.0, math.inf, -math.inf, -9999.0, -1e10)


@dataclass(frozen=True)
class Expected:
    """What a statistic has to be.

    ``value`` None: no number, and ``why`` (a word that the reason must hold) if the definition gives one. ``log``: the natural log,
    which must be reported when ``needs_log``. ``floor``: absolute error that float64 cannot avoid (1e-12 of the mean absolute summand
    for means that cancel). ``stderr`` is compared when ``clustered``. ``alternatives`` lists a null as allowed (subnormal values).
    """

    value: float | None
    n: int
    why: str | None = None
    log: float | None = None
    needs_log: bool = False
    floor: float = 0.0
    clustered: bool = False
    stderr: float | None = None
    stderr_floor: float = 0.0
    quantile: bool = False
    rel: float = 0.0
    may_be_null: bool = False


@dataclass(frozen=True)
class Packed:
    """One shard in memory: float64 log-probs, boolean mask, boundaries and optional per-segment columns."""

    t: np.ndarray[Any, Any]
    r: np.ndarray[Any, Any]
    m: np.ndarray[Any, Any]
    cu: Sequence[int]
    pad: Sequence[bool] | None = None
    groups: Sequence[Hashable] | None = None


@dataclass
class _Row:
    """One segment in one view."""

    t: np.ndarray[Any, Any]  # finite tokens
    r: np.ndarray[Any, Any]
    d: np.ndarray[Any, Any]
    plus: int  # tokens with d = +inf
    minus: int
    nan: int
    masked_out: bool  # fully masked, standing in the padded view
    cluster: Hashable


def summarize(
    shards: Iterable[Packed],
    *,
    lower: float | None = None,
    upper: float = 2.0,
    veto_lower: float | None = None,
    veto_upper: float | None = None,
) -> dict[str, Expected]:
    """Every statistic by id (``masked.token.rollout_is_mean``), pooled over the shards."""
    lower = 1.0 / upper if lower is None else lower
    shards = list(shards)
    out: dict[str, Expected] = {}
    for view in ("unmasked", "padded", "masked"):
        rows = list(_rows(shards, view))
        with np.errstate(all="ignore"):  # overflow is one of the answers
            found = _view(rows, lower, upper, veto_lower, veto_upper)
        out |= {f"{view}.{name}": expected for name, expected in found.items()}
    return out


def coverage(shards: Iterable[Packed]) -> dict[str, int]:
    """The counts of the coverage block."""
    c = dict.fromkeys(
        (
            "positions",
            "valid_tokens",
            "segments",
            "sequences",
            "fully_masked",
            "fully_masked_with_content",
            "zero_length",
            "nonfinite_valid_tokens",
            "shards",
        ),
        0,
    )
    for shard in shards:
        c["shards"] += 1
        c["positions"] += len(shard.t)
        for i in range(len(shard.cu) - 1):
            a, b = int(shard.cu[i]), int(shard.cu[i + 1])
            c["segments"] += 1
            if a == b:
                c["zero_length"] += 1
                continue
            t, r, m = shard.t[a:b], shard.r[a:b], shard.m[a:b]
            valid = int(m.sum())
            c["valid_tokens"] += valid
            if valid:
                c["sequences"] += 1
                with np.errstate(invalid="ignore"):
                    d = t[m] - r[m]
                c["nonfinite_valid_tokens"] += int((~(np.isfinite(t[m]) & np.isfinite(r[m]) & np.isfinite(d))).sum())
            else:
                c["fully_masked"] += 1
                known = (bool(np.all(r == r[0])) and r[0] in FILLS) or bool(np.all(np.isnan(r)))
                declared = shard.pad is not None and bool(shard.pad[i])
                c["fully_masked_with_content"] += not (known or declared)
    return c


def _rows(shards: Iterable[Packed], view: str) -> Iterable[_Row]:
    for s, shard in enumerate(shards):
        for i in range(len(shard.cu) - 1):
            a, b = int(shard.cu[i]), int(shard.cu[i + 1])
            if a == b:
                continue
            m = np.ones(b - a, bool) if view == "unmasked" else shard.m[a:b]
            if not m.any():
                if view == "padded":
                    none = np.empty(0)
                    yield _Row(none, none, none, 0, 0, 0, True, (s, i))
                continue
            t, r = shard.t[a:b][m], shard.r[a:b][m]
            with np.errstate(invalid="ignore"):
                d = t - r
            ok = np.isfinite(t) & np.isfinite(r) & np.isfinite(d)
            cluster = (s, i) if shard.groups is None else ("group", shard.groups[i])
            plus, minus = int((d == np.inf).sum()), int((d == -np.inf).sum())
            yield _Row(t[ok], r[ok], d[ok], plus, minus, int((~ok).sum()) - plus - minus, False, cluster)


def _view(rows: list[_Row], lo: float, hi: float, veto_lo: float | None, veto_hi: float | None) -> dict[str, Expected]:
    out: dict[str, Expected] = {}
    scored = [row for row in rows if len(row.d)]
    clusters = [row.cluster for row in scored]
    d64 = [row.d for row in scored]
    d = np.concatenate([*d64, np.empty(0)]).astype(LD)
    plus, minus = sum(r.plus for r in rows), sum(r.minus for r in rows)
    token = _Tokens(d64, clusters)

    # Token level.
    empty = "no valid" if not any(row.plus or row.minus or row.nan for row in rows) else "no "
    out |= _weights("token", d, lo, hi, plus, minus, empty)
    if len(d):
        name = "token.rollout_is_mean"
        if out[name].value is not None:
            out[name] = _replace(out[name], **token.of_weights(d.max()))

    # Sequence levels: fully masked rows of the padded view stand in with L = 0.
    product = [
        LD(0) if row.masked_out else LD(math.fsum(row.d))
        for row in rows
        if row.masked_out or (len(row.d) and not (row.plus or row.minus or row.nan))
    ]
    kept = [row for row in rows if row.masked_out or len(row.d)]
    geometric = [LD(0) if row.masked_out else LD(math.fsum(row.d)) / len(row.d) for row in kept]
    out |= _weights("sequence", np.array(product, LD), lo, hi, 0, 0, "non-finite" if kept else empty)
    out |= _weights("geometric", np.array(geometric, LD), lo, hi, 0, 0, empty)

    out |= _per_sequence(kept, lo, hi)
    out |= _veto(rows, veto_lo, veto_hi)
    out |= _mismatch(scored, kept, token, product, geometric, plus + minus)
    return out


def _weights(
    level: str, L: np.ndarray[Any, Any], lo: float, hi: float, plus: int, minus: int, empty: str
) -> dict[str, Expected]:
    names = ("mean", "std", "min", "max", "eff_sample_size", "max_weight_share")
    n, out = len(L), {}
    counted = n + plus + minus
    for side, share in (("high", int((L > math.log(hi)).sum()) + plus), ("low", int((L < math.log(lo)).sum()) + minus)):
        out[f"{level}.rollout_is_ratio_fraction_{side}"] = _fraction(share, counted)
    if n == 0:
        for name in names:
            out[f"{level}.rollout_is_{name}"] = Expected(None, 0, empty)
        for name in QUANTILES:
            out[f"{level}.{name}"] = Expected(None, 0, empty)
        return out
    top = L.max()
    w = np.exp(L - top)  # scaled: the largest is 1
    mean = w.sum() / n
    std = np.sqrt(((w - mean) ** 2).sum() / n)
    big = float(min(np.exp(min(top, LD(11000))), BIG)) * max(
        1.0, abs(float(top))
    )  # exp carries the rounding of its argument
    out[f"{level}.rollout_is_mean"] = _exp(top + np.log(mean), n, needs_log=True)
    out[f"{level}.rollout_is_std"] = _exp(top + _log(std), n, floor=4e-15 * big)
    out[f"{level}.rollout_is_min"] = _exp(L.min(), n, needs_log=True)
    out[f"{level}.rollout_is_max"] = _exp(top, n, needs_log=True)
    out[f"{level}.rollout_is_eff_sample_size"] = Expected(float(min(LD(1), w.sum() ** 2 / (n * (w * w).sum()))), n)
    out[f"{level}.rollout_is_max_weight_share"] = Expected(float(1 / w.sum()), n)
    rel = 4e-16 * float(np.abs(L).max())
    out = {name: _replace(expected, rel=rel) for name, expected in out.items()}
    order = np.sort(L)
    for name, p in QUANTILES.items():
        out[f"{level}.{name}"] = Expected(float(order[max(0, math.ceil(p * n) - 1)]), n, quantile=True)
    return out


def _per_sequence(rows: list[_Row], lo: float, hi: float) -> dict[str, Expected]:
    n, out = len(rows), {}
    if n == 0:
        names = ("mean", "std", "min", "max", "max_deviation", "fraction_high", "fraction_low")
        return {f"per_sequence.rollout_is_seq_{name}": Expected(None, 0, "no ") for name in names}
    # log x_i; a fully masked row of the padded view is x = 0, log -inf.
    logs = np.array([-np.inf if row.masked_out else _log_mean_exp(row.d) for row in rows], LD)
    top, bottom = logs.max(), logs.min()
    if top == -np.inf:
        u, top = np.zeros(n, LD), LD(0)
    else:
        u = np.exp(logs - top)  # scaled: the largest is 1
    mean = u.sum() / n
    scale = float(min(np.exp(min(top, LD(11000))), BIG)) * max(1.0, abs(float(top)))
    family = "per_sequence.rollout_is_seq_"
    out[f"{family}mean"] = _exp(top + _log(mean), n, needs_log=True)
    if n == 1:
        out[f"{family}std"] = Expected(None, 1, "one sequence")
    else:
        std = np.sqrt(((u - mean) ** 2).sum() / (n - 1))
        out[f"{family}std"] = _exp(top + _log(std), n, floor=4e-15 * scale)
    out[f"{family}min"] = _exp(bottom, n, needs_log=True)
    out[f"{family}max"] = _exp(logs.max(), n, needs_log=True)
    if top > 50:
        out[f"{family}max_deviation"] = _exp(top, n)
    else:
        deviation = float(np.abs(np.exp(logs) - 1).max())
        out[f"{family}max_deviation"] = Expected(deviation, n, floor=1e-15 * max(1.0, scale))
    out[f"{family}fraction_high"] = _fraction(int((logs > np.log(LD(hi))).sum()), n)
    out[f"{family}fraction_low"] = _fraction(int((logs < np.log(LD(lo))).sum()), n)
    return out


def _veto(rows: list[_Row], lo: float | None, hi: float | None) -> dict[str, Expected]:
    tokens, sequences = "veto.rollout_is_catastrophic_token_fraction", "veto.rollout_is_veto_fraction"
    if lo is None and hi is None:
        return {name: Expected(None, -1, "veto is off") for name in (tokens, sequences)}
    bad = []
    for row in rows:
        count = 0
        if lo is not None:
            count += int((row.d < math.log(lo)).sum()) + row.minus
        if hi is not None:
            count += int((row.d > math.log(hi)).sum()) + row.plus
        bad.append(count)
    n = sum(len(row.d) + row.plus + row.minus for row in rows)
    return {tokens: _fraction(sum(bad), n), sequences: _fraction(sum(c > 0 for c in bad), len(rows))}


def _mismatch(
    scored: list[_Row],
    kept: list[_Row],
    token: _Tokens,
    product: list[Any],
    geometric: list[Any],
    infinite: int,
) -> dict[str, Expected]:
    out: dict[str, Expected] = {}
    n = token.n
    means = [
        "kl",
        "k2_kl",
        "k3_kl",
        "logprob_abs_diff",
        "prob_abs_diff",
        "mult_prob_error",
        "identical_fraction",
        "extreme_fraction",
        "chi2_token",
    ]
    if n == 0:
        for name in [*means, "logprob_diff_std", "logprob_abs_diff_max", "prob_abs_diff_max", "prob_pearson"]:
            out[f"mismatch.mismatch_{name}"] = Expected(None, 0, "no ")
        if infinite:
            out["mismatch.mismatch_extreme_fraction"] = _fraction(infinite, infinite)
    else:
        out |= _token_mismatch(scored, token, infinite)
    out |= _sequence_mismatch(kept, product, geometric)
    return out


def _token_mismatch(scored: list[_Row], token: _Tokens, infinite: int) -> dict[str, Expected]:
    n, out = token.n, {}
    t = np.concatenate([row.t for row in scored])
    r = np.concatenate([row.r for row in scored])
    d64 = t - r
    d = d64.astype(LD)
    pt, pr = np.exp(t.astype(LD)), np.exp(r.astype(LD))
    size = float(np.abs(d).mean())
    e = np.expm1(d)
    cut = np.cumsum([len(row.d) for row in scored])[:-1]

    def mean(name: str, terms: np.ndarray[Any, Any], floor: float, *, clustered: bool = True) -> None:
        value = _number(terms.sum() / n, n, floor=floor)
        more = token.parts(np.split(terms, cut)) if clustered and value.value is not None else {}
        out[f"mismatch.mismatch_{name}"] = _replace(value, **more)

    mean("kl", -d, 1e-12 * size)
    mean("k2_kl", d * d / 2, 0.0)
    mean("logprob_abs_diff", np.abs(d), 0.0)
    mean("identical_fraction", (t == r).astype(LD), 0.0)
    if d.max() < 300:
        mean("k3_kl", e - d, 4e-16 * size)
        mean("chi2_token", e * e + 2 * e, 1e-12 * float((e * e + 2 * np.abs(e)).mean()), clustered=False)
    else:  # what is subtracted lies far below the last digit
        out["mismatch.mismatch_k3_kl"] = _exp(_log_mean_exp(d), n, null_log=False)
        out["mismatch.mismatch_chi2_token"] = _exp(_log_mean_exp(2 * d), n)
    if np.abs(d).max() < 300:
        mean("mult_prob_error", np.exp(np.abs(d)), 0.0)
    else:
        out["mismatch.mismatch_mult_prob_error"] = _exp(_log_mean_exp(np.abs(d)), n)
    out["mismatch.mismatch_extreme_fraction"] = _fraction(
        int((np.abs(d64) > math.log(2)).sum()) + infinite, n + infinite
    )
    if not infinite:
        parts = np.split((np.abs(d64) > math.log(2)).astype(LD), cut)
        out["mismatch.mismatch_extreme_fraction"] = _replace(
            out["mismatch.mismatch_extreme_fraction"], **token.parts(parts)
        )
    std = np.sqrt(((d - d.sum() / n) ** 2).sum() / n)
    out["mismatch.mismatch_logprob_diff_std"] = _number(std, n, floor=4e-15 * float(np.abs(d).max()))
    out["mismatch.mismatch_logprob_abs_diff_max"] = _number(np.abs(d).max(), n)
    if max(pt.max(), pr.max()) > 1e150:  # log-probs that are none: the probability family is not promised
        return out
    mean("prob_abs_diff", np.abs(pt - pr), 4e-16 * float((pt + pr).mean()))
    largest = np.abs(pt - pr).max()
    out["mismatch.mismatch_prob_abs_diff_max"] = _number(largest, n, floor=4e-16 * float(max(pt.max(), pr.max())))
    if pt.min() == pt.max() or pr.min() == pr.max():
        out["mismatch.mismatch_prob_pearson"] = Expected(None, n, "constant")
    else:
        a, b = pt - pt.sum() / n, pr - pr.sum() / n
        r_ = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
        out["mismatch.mismatch_prob_pearson"] = Expected(float(r_), n, floor=1e-11)
    return out


def _sequence_mismatch(kept: list[_Row], product: list[Any], geometric: list[Any]) -> dict[str, Expected]:
    out: dict[str, Expected] = {}
    n = len(kept)
    for name, levels in (("chi2_seq", product), ("chi2_geometric", geometric)):
        key = f"mismatch.mismatch_{name}"
        if not levels:
            out[key] = Expected(None, 0, "no ")
            continue
        twice = 2 * np.array(levels, LD)
        top = twice.max()
        if top > 700:
            log = top + np.log(np.exp(twice - top).sum() / len(levels))
            out[key] = _exp(log, len(levels))
        else:
            x = np.expm1(twice)
            out[key] = _number(x.sum() / len(levels), len(levels), floor=1e-12 * float(np.abs(x).mean()))
    names = "training_log_ppl rollout_log_ppl training_ppl rollout_ppl log_ppl_diff log_ppl_abs_diff log_ppl_diff_max"
    names += " log_ppl_diff_min ppl_ratio"
    if n == 0:
        return out | {f"mismatch.mismatch_{name}": Expected(None, 0, "no ") for name in names.split()}
    train = np.array([LD(0) if w.masked_out else -LD(math.fsum(w.t)) / len(w.t) for w in kept])
    rollout = np.array([LD(0) if w.masked_out else -LD(math.fsum(w.r)) / len(w.r) for w in kept])
    D = np.array([LD(0) if w.masked_out else -LD(math.fsum(w.d)) / len(w.d) for w in kept])
    ulp = 4e-16 * float(max(np.abs(train).max(), np.abs(rollout).max()))

    def put(name: str, value: Any, floor: float) -> None:
        out[f"mismatch.mismatch_{name}"] = _number(value, n, floor=floor)

    put("training_log_ppl", train.sum() / n, 1e-12 * float(np.abs(train).mean()))
    put("rollout_log_ppl", rollout.sum() / n, 1e-12 * float(np.abs(rollout).mean()))
    for name, logs in (("training_ppl", train), ("rollout_ppl", rollout), ("ppl_ratio", D)):
        out[f"mismatch.mismatch_{name}"] = _exp(_log_mean_exp(logs), n, null_log=name == "ppl_ratio")
    put("log_ppl_diff", D.sum() / n, 1e-12 * float(np.abs(D).mean()) + ulp)
    put("log_ppl_abs_diff", np.abs(D).sum() / n, ulp)
    put("log_ppl_diff_max", D.max(), ulp)
    put("log_ppl_diff_min", D.min(), ulp)
    return out


class _Tokens:
    """Clustered standard errors of token means: sqrt(G/(G-1) sum_g (S_g - mean n_g)^2) / N."""

    def __init__(self, d: list[np.ndarray[Any, Any]], clusters: list[Hashable]) -> None:
        self.d = d
        self.clusters = clusters
        self.n = sum(len(x) for x in d)

    def parts(self, parts: Sequence[Any]) -> dict[str, Any]:
        sums: dict[Hashable, Any] = {}
        counts: dict[Hashable, int] = {}
        for cluster, part in zip(self.clusters, parts, strict=True):
            sums[cluster] = sums.get(cluster, LD(0)) + part.sum()
            counts[cluster] = counts.get(cluster, 0) + len(part)
        mean = sum(sums.values()) / self.n
        size = sum(np.abs(p).sum() for p in parts) / self.n
        g = len(sums)
        if g < 2:
            return {"clustered": True, "stderr": None}
        total = sum((sums[c] - mean * counts[c]) ** 2 for c in sums)
        stderr = np.sqrt(LD(g) / (g - 1) * total) / self.n
        if not stderr <= BIG:
            return {"clustered": False}
        return {"clustered": True, "stderr": float(stderr), "stderr_floor": 1e-12 * float(size)}

    def of_weights(self, top: Any) -> dict[str, Any]:
        """The same for w = exp(d), computed scaled by exp(-top)."""
        if not -300 < top < 300:  # not promised: such weights are kept as logarithms
            return {}
        got = self.parts([np.exp(x.astype(LD) - top) for x in self.d])
        if got.get("stderr") is None:
            return got
        unit = np.exp(top)
        if got["stderr"] * unit > BIG:
            return {"clustered": False}
        return got | {"stderr": float(got["stderr"] * unit), "stderr_floor": float(got["stderr_floor"] * unit)}


def _log_mean_exp(d: np.ndarray[Any, Any]) -> Any:
    x = np.asarray(d, LD)
    return x.max() + np.log(np.exp(x - x.max()).sum() / len(x))


def _fraction(count: int, n: int) -> Expected:
    return Expected(count / n, n) if n else Expected(None, 0, "no ")


def _log(x: Any) -> Any:
    return np.log(x) if x > 0 else LD(-np.inf)


def _exp(log: Any, n: int, *, needs_log: bool = False, floor: float = 0.0, null_log: bool = True) -> Expected:
    """exp(log) as float64 when float64 can hold it, else null with its log (``null_log``: the log is due then)."""
    if log == -np.inf:
        return Expected(0.0, n, floor=floor)
    if log > np.log(BIG) or log < -745.2:
        return Expected(None, n, "", float(log), null_log)
    return Expected(float(np.exp(log)), n, None, float(log), needs_log, floor, may_be_null=bool(log < np.log(TINY)))


def _number(x: Any, n: int, *, floor: float = 0.0) -> Expected:
    if not abs(x) <= BIG:
        return Expected(None, n, "")
    return Expected(float(x), n, floor=floor, may_be_null=bool(0 < abs(x) < TINY))


def _replace(e: Expected, **changes: Any) -> Expected:
    return Expected(**{**e.__dict__, **changes})
