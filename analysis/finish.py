"""From the rows of all units to the statistics of METRICS.md: one pool, one division, null with its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from rollout_is.analysis import weights
from rollout_is.analysis.clusters import ClusterRow, GroupTable, rows_of_groups, standard_error
from rollout_is.analysis.histogram import merge
from rollout_is.analysis.pareto import TopLogWeights, capacity, tail_length
from rollout_is.analysis.rows import SEQUENCE_ERRORS, TOKEN_ERRORS, Row, SequenceRow, TokenRow
from rollout_is.analysis.summary import Statistic
from rollout_is.analysis.weights import WeightRow

if TYPE_CHECKING:
    from rollout_is.analysis.tails import Folded

Section = dict[str, Statistic]

QUANTILES = {
    "log_ratio_p0_1": 0.001,
    "log_ratio_p1": 0.01,
    "log_ratio_p5": 0.05,
    "log_ratio_p25": 0.25,
    "log_ratio_p50": 0.5,
    "log_ratio_p75": 0.75,
    "log_ratio_p95": 0.95,
    "log_ratio_p99": 0.99,
    "log_ratio_p99_9": 0.999,
}
TOO_LARGE, TOO_SMALL = "value exceeds float64; see log_value", "value is below float64; see log_value"
NOT_FINITE = "non-finite: no sequence has only finite tokens"


def statistic(
    value: float, n: int, stderr: float | None = None, *, log: float | None = None, has_log: bool = False
) -> Statistic:
    """A number that JSON can hold: what float64 cannot is null with the reason, and its log stands."""
    why = None
    held: float | None = value
    if not math.isfinite(value):
        held, why = None, TOO_LARGE if has_log else "value exceeds float64"
    elif has_log and value == 0.0 and log is not None and math.isfinite(log):
        held, why = None, TOO_SMALL
    log_value = log if has_log and log is not None and math.isfinite(log) else None
    return Statistic(held, n, stderr if held is not None else None, why, log_value, has_log)


def missing(why: str, n: int = 0, *, has_log: bool = False) -> Statistic:
    return Statistic(None, n, None, why, None, has_log)


def _log(value: float) -> float | None:
    return math.log(value) if value > 0 and math.isfinite(value) else None


class Pool:
    """All rows of one population and one group, with what the sections need of them.

    Args:
        rows: in unit order.
        padded: fully masked segments counted as sequences of weight 1 (x = 0).
        empty: the reason for a null where the pool holds nothing.
        why_no_sequences: set under a token grouping, where statistics of sequences do not exist.
        same_tokens: another pool of the same rows, which has the figures of tokens already.
    """

    def __init__(
        self, rows: Sequence[Row], bounds: tuple[float, float], *, veto: bool, mismatch: bool, padded: int = 0,
        empty: str = "no valid tokens", why_no_sequences: str | None = None, folded: Folded | None = None,
        same_tokens: Pool | None = None,
    ) -> None:  # fmt: skip
        self.tokens: list[TokenRow] = [r.token for r in rows if r.token is not None]
        # Joined fragments have no token row; their tails are not among those that were folded on arrival.
        self.joined: list[SequenceRow] = [r.sequence for r in rows if r.token is None and r.sequence is not None]
        self.seqs: list[SequenceRow] = [r.sequence for r in rows if r.sequence is not None]
        self.log_lower, self.log_upper = math.log(bounds[0]), math.log(bounds[1])
        self.veto = veto
        self.mismatch = mismatch
        self.padded = padded
        self.empty = empty
        self.no_sequences = why_no_sequences
        self._same_tokens = same_tokens
        self.folded = folded
        self.tail = None if folded is None else folded.tail
        self.n = sum(t.n for t in self.tokens)
        self.sequences = sum(s.sequences for s in self.seqs)
        self.measured = sum(s.measured for s in self.seqs) + padded
        self._token_clusters = _clusters([*(t.clusters for t in self.tokens), *(r.clusters for r in rows)])
        self._sequence_clusters = _clusters([s.clusters for s in self.seqs])

    @property
    def clusters(self) -> int:
        """How many clusters the standard errors of token means rest on."""
        return sum(r.clusters for r in self._token_clusters)

    def views(self) -> dict[str, Section]:
        token, mismatch = self.of_tokens
        out: dict[str, Section] = {"token": dict(token)}
        product = self._with_pads(self._whole(weights.join([s.product for s in self.seqs]), "product"))
        geometric = self._with_pads(self._whole(weights.join([s.geometric for s in self.seqs]), "geometric"))
        out["sequence"] = self._level(product, "product")
        out["sequence"]["pareto_k"] = self._pareto(product.n)
        out["geometric"] = self._level(geometric, "geometric")
        out["per_sequence"] = self._per_sequence()
        out["veto"] = self._veto()
        if self.mismatch:
            out["mismatch"] = mismatch | self._mismatch(product, geometric)
        return out

    @cached_property
    def of_tokens(self) -> tuple[Section, Section]:
        """Figures of tokens, which no pad changes: of their weights, and of the mismatch family."""
        if self._same_tokens is not None:
            return self._same_tokens.of_tokens
        row = self._whole(weights.join([t.weights for t in self.tokens]), "token")
        return self._level(row, "w", sum_infinite=True), self._mismatch_tokens(row) if self.mismatch else {}

    def _whole(self, row: WeightRow, level: str) -> WeightRow:
        """The row with the histogram that was folded apart from it."""
        if self.folded is None or not row.n:
            return row
        return replace(row, histogram=merge([row.histogram, getattr(self.folded, level)]))

    def _with_pads(self, row: WeightRow) -> WeightRow:
        return weights.join([row, weights.ones(self.padded, self.log_lower, self.log_upper)]) if self.padded else row

    def _token_error(self, name: str, mean: float) -> float | None:
        return standard_error(self._token_clusters, TOKEN_ERRORS.index(name), mean, self.n)

    def _weight_error(self, name: str, mean: float, row: WeightRow) -> float | None:
        """The cluster sums leave out the weights that are kept as logarithms: where those matter, there is no error."""
        held = max((scale for scale, _, _ in row.parts), default=math.inf) == 0.0
        return self._token_error(name, mean) if held else None

    def _sequence_error(self, name: str, mean: float, pad: float, n: int | None = None) -> float | None:
        index = SEQUENCE_ERRORS.index(name)
        rows = [*self._sequence_clusters, *_pad_clusters(self.padded, pad, len(SEQUENCE_ERRORS))]
        return standard_error(rows, index, mean, n or self.measured)

    def _level(self, row: WeightRow, error: str, *, sum_infinite: bool = False) -> Section:
        names = [
            "mean",
            "std",
            "min",
            "max",
            "eff_sample_size",
            "ratio_fraction_high",
            "ratio_fraction_low",
            "max_weight_share",
        ]
        token = error == "w"
        infinite = [sum(t.infinite[side] for t in self.tokens) if sum_infinite else 0 for side in (0, 1)]
        why = self._why(token)
        if row.n == 0 or (why and not token):
            left_out = not token and self.measured > 0
            reason = why or (NOT_FINITE if left_out else self.empty)
            out = {f"rollout_is_{n}": missing(reason, has_log=n in ("mean", "std", "min", "max")) for n in names}
            out |= {q: missing(reason) for q in QUANTILES}
            if sum(infinite) and token:
                self._fractions(out, row, infinite, error)
            return out
        n = row.n
        value, log = weights.mean(row)
        stderr = self._weight_error("w", value, row) if token else self._sequence_error(error, value, 1.0)
        if not token and error == "product" and n != self.measured:
            stderr = None
        out = {"rollout_is_mean": statistic(value, n, stderr, log=log, has_log=True)}
        scale, var = weights.variance(row)
        std = math.sqrt(var)
        log_std = scale + math.log(std) if std > 0 else None
        plain = std if scale == 0 else (weights.safe_exp(log_std) if log_std is not None else 0.0)
        out["rollout_is_std"] = statistic(plain, n, log=log_std, has_log=True)
        out["rollout_is_min"] = statistic(weights.safe_exp(row.low), n, log=row.low, has_log=True)
        out["rollout_is_max"] = statistic(weights.safe_exp(row.high), n, log=row.high, has_log=True)
        out["rollout_is_eff_sample_size"] = statistic(weights.effective_sample_size(row), n)
        self._fractions(out, row, infinite, error)
        out["rollout_is_max_weight_share"] = statistic(weights.largest_share(row), n)
        for name, q in zip(
            QUANTILES, row.histogram.quantiles(tuple(QUANTILES.values()), row.low, row.high), strict=True
        ):
            out[name] = statistic(q, n)
        return out

    def _fractions(self, out: Section, row: WeightRow, infinite: list[int], error: str) -> None:
        n = row.n + sum(infinite)
        for name, count, own in (("high", row.above + infinite[1], "high"), ("low", row.below + infinite[0], "low")):
            value = count / n
            stderr = self._token_error(own, value) if error == "w" and not sum(infinite) else None
            out[f"rollout_is_ratio_fraction_{name}"] = statistic(value, n, stderr)

    def _why(self, token: bool) -> str | None:
        """Why there is no statistic of sequences, where there is none."""
        if token:
            return None
        if self.no_sequences:
            return self.no_sequences
        if self.measured == 0:
            return self.empty
        if self.sequences and self.measured == self.padded:
            return "no finite valid tokens"
        return None

    def _pareto(self, n: int) -> Statistic:
        why = self._why(False)
        if why:
            return missing(why)
        if any(s.dropped for s in self.seqs):
            return missing("non-finite", n)
        states = [s.pareto for s in self.seqs if s.pareto is not None]
        top = TopLogWeights(capacity(n))
        if self.tail is not None:
            top.merge(self.tail)
        for state in states if self.tail is None else [s.pareto for s in self.joined if s.pareto is not None]:
            top.merge(state)
        if self.padded:
            top.update([0.0] * self.padded)
        if top.n == 0:
            return missing(self.empty)
        if min(tail_length(top.n) + 1, top.n) > len(top):
            return missing(f"more than {top.n:,} sequences in one group", n)
        return top.result()

    def _per_sequence(self) -> Section:
        names = ["mean", "std", "min", "max", "max_deviation", "fraction_high", "fraction_low"]
        logs = ("mean", "std", "min", "max", "max_deviation")
        why = self._why(False)
        row = weights.join([s.x for s in self.seqs])
        if why or (row.n == 0 and not self.padded):
            return {f"rollout_is_seq_{n}": missing(why or self.empty, has_log=n in logs) for n in names}
        n = row.n + self.padded
        log_n = math.log(n)
        log = weights.log_sums(row)[0] - log_n if row.n else -math.inf
        value = weights.mean(row)[0] * (row.n / n) if row.n else 0.0
        out = {"rollout_is_seq_mean": statistic(value, n, self._sequence_error("x", value, 0.0), log=log, has_log=True)}
        if n < 2:
            out["rollout_is_seq_std"] = missing("one sequence", n, has_log=True)
        else:
            scale, var = self._x_variance(row)
            std = math.sqrt(var)
            log_std = scale + math.log(std) if std > 0 else None
            plain = std if scale == 0 else (weights.safe_exp(log_std) if log_std is not None else 0.0)
            out["rollout_is_seq_std"] = statistic(plain, n, log=log_std, has_log=True)
        low = -math.inf if self.padded else row.low
        high = row.high if row.n else -math.inf
        out["rollout_is_seq_min"] = statistic(math.exp(low) if low < 709.0 else math.inf, n, log=low, has_log=True)
        out["rollout_is_seq_max"] = statistic(weights.safe_exp(high), n, log=high, has_log=True)
        deviation = max([s.x_deviation for s in self.seqs] + ([1.0] if self.padded else []))
        log_deviation = _log(deviation) if math.isfinite(deviation) else high  # 1 is far below its last digit
        out["rollout_is_seq_max_deviation"] = statistic(deviation, n, log=log_deviation, has_log=True)
        above = sum(s.x_counts[0] for s in self.seqs)
        below = sum(s.x_counts[1] for s in self.seqs) + self.padded
        out["rollout_is_seq_fraction_high"] = statistic(above / n, n)
        out["rollout_is_seq_fraction_low"] = statistic(below / n, n)
        return out

    def _x_variance(self, row: WeightRow) -> tuple[float, float]:
        if not self.padded:
            return weights.variance(row, sample=True)
        scale = max((m.scale for m in row.moments), default=0.0)
        zeros = weights.Moments(scale, self.padded, -1.0 if scale == 0.0 else 0.0, 0.0)  # x = 0, as u - 1 or as u
        scale, total = weights.pooled_moments((*row.moments, zeros))
        return scale, max(0.0, total.m2) / (total.n - 1) if total.n > 1 else 0.0

    def _veto(self) -> Section:
        token, sequence = "rollout_is_catastrophic_token_fraction", "rollout_is_veto_fraction"
        if not self.veto:
            return {token: missing("veto is off"), sequence: missing("veto is off")}
        infinite = sum(sum(t.infinite) for t in self.tokens)
        n = self.n + infinite
        out: Section = {}
        if n == 0:
            out[token] = missing(self.empty)
        else:
            value = sum(t.counts["veto"] + t.infinite_vetoed for t in self.tokens) / n
            out[token] = statistic(value, n, None if infinite else self._token_error("veto", value))
        rows = self.sequences + self.padded
        if self.no_sequences:
            out[sequence] = missing(self.no_sequences)
        elif rows == 0:
            out[sequence] = missing(self.empty)
        else:
            out[sequence] = statistic(sum(s.vetoed for s in self.seqs) / rows, rows)
        return out

    def _mismatch(self, product: WeightRow, geometric: WeightRow) -> Section:
        out = self._mismatch_sequences()
        for name, row in (("seq", product), ("geometric", geometric)):
            why = self._why(False)
            if why or row.n == 0:
                left_out = NOT_FINITE if self.measured > 0 else self.empty
                out[f"mismatch_chi2_{name}"] = missing(why or left_out, has_log=True)
            else:
                value, log = weights.chi_squared(row)
                out[f"mismatch_chi2_{name}"] = statistic(value, row.n, log=log, has_log=True)
        return out

    def _mismatch_tokens(self, token: WeightRow) -> Section:
        n = self.n
        infinite = sum(sum(t.infinite) for t in self.tokens)
        if n == 0:
            names = [
                "kl",
                "k2_kl",
                "k3_kl",
                "logprob_abs_diff",
                "logprob_diff_std",
                "logprob_abs_diff_max",
                "prob_abs_diff",
            ]
            names += [
                "prob_abs_diff_max",
                "prob_pearson",
                "mult_prob_error",
                "extreme_fraction",
                "identical_fraction",
                "chi2_token",
            ]
            logs = ("k3_kl", "mult_prob_error", "chi2_token")
            none = {f"mismatch_{x}": missing(self.empty, has_log=x in logs) for x in names}
            return none | ({"mismatch_extreme_fraction": self._extreme()} if infinite else {})
        total = {k: math.fsum(t.sums[k] for t in self.tokens) for k in ("d", "d2", "abs", "dp")}
        out: Section = {}

        def put(name: str, value: float, error: str | None = None, factor: float = 1.0) -> None:
            stderr = self._token_error(error, value / factor) if error else None
            out[f"mismatch_{name}"] = statistic(value, n, None if stderr is None else abs(factor) * stderr)

        put("kl", 0.0 - total["d"] / n, "d", -1.0)  # 0.0 - 0.0 is 0, and not -0
        put("k2_kl", total["d2"] / n / 2.0, "d2", 0.5)
        self._logged(out, "k3_kl", "k3", [t.scaled_k3 for t in self.tokens])
        put("logprob_abs_diff", total["abs"] / n, "abs")
        spread = token.low != token.high
        _, moments = weights.pooled_moments(tuple(weights.Moments(0.0, *t.moments) for t in self.tokens if t.n))
        put("logprob_diff_std", math.sqrt(moments.m2 / n) if spread else 0.0)
        put("logprob_abs_diff_max", max(abs(token.low), abs(token.high)))
        put("prob_abs_diff", total["dp"] / n, "dp")
        put("prob_abs_diff_max", max(p.max_dp for t in self.tokens for _, p in t.pooled))
        out["mismatch_prob_pearson"] = self._pearson()
        self._logged(out, "mult_prob_error", "mult", [t.scaled_mult for t in self.tokens])
        put("identical_fraction", sum(t.counts["identical"] for t in self.tokens) / n, "identical")
        out["mismatch_extreme_fraction"] = self._extreme()
        value, log = weights.chi_squared(token)
        out["mismatch_chi2_token"] = statistic(
            value, n, self._weight_error("w2", value + 1.0, token), log=log, has_log=True
        )
        return out

    def _extreme(self) -> Statistic:
        """An infinite log-ratio is an extreme one, though it leaves the other token statistics."""
        infinite = sum(sum(t.infinite) for t in self.tokens)
        value = (sum(t.counts["extreme"] for t in self.tokens) + infinite) / (self.n + infinite)
        return statistic(value, self.n + infinite, None if infinite else self._token_error("extreme", value))

    def _logged(self, out: Section, name: str, key: str, scaled: list[tuple[tuple[float, float], ...]]) -> None:
        """A mean of something exponential: plain where it can be, a logarithm where tokens were kept as one."""
        plain = math.fsum(t.sums[key] for t in self.tokens)
        parts = [p for row in scaled for p in row]
        if not parts:
            value = plain / self.n
            out[f"mismatch_{name}"] = statistic(
                value, self.n, self._token_error(key, value), log=_log(value), has_log=True
            )
            return
        row = WeightRow(n=self.n, parts=tuple((k, s, 0.0) for k, s in [(0.0, plain), *parts]))
        log = weights.log_sums(row)[0] - math.log(self.n)
        out[f"mismatch_{name}"] = statistic(weights.safe_exp(log), self.n, log=log, has_log=True)

    def _pearson(self) -> Statistic:
        pooled = [(n, p) for t in self.tokens for n, p in t.pooled if n]
        for side, label in (("train", "training"), ("rollout", "rollout")):
            low = min(getattr(p, side)[0] for _, p in pooled)
            high = max(getattr(p, side)[1] for _, p in pooled)
            if weights.safe_exp(low) == weights.safe_exp(high):
                return missing(f"constant: every {label} probability is the same", self.n)
        n = self.n
        p_mean = [p.p / k + (p.shift or (0.0, 0.0))[0] for k, p in pooled]
        q_mean = [p.q / k + (p.shift or (0.0, 0.0))[1] for k, p in pooled]
        p_all = math.fsum(k * m for (k, _), m in zip(pooled, p_mean, strict=True)) / n
        q_all = math.fsum(k * m for (k, _), m in zip(pooled, q_mean, strict=True)) / n
        pp, qq, pq = [], [], []
        for (k, row), mp, mq in zip(pooled, p_mean, q_mean, strict=True):
            a, b = mp - p_all, mq - q_all
            pp += [row.p2 - row.p * row.p / k, k * a * a]
            qq += [row.q2 - row.q * row.q / k, k * b * b]
            pq += [row.cross - row.p * row.q / k, k * a * b]
        if not all(map(math.isfinite, [*pp, *qq, *pq])):
            return missing("value exceeds float64", n)
        var_p, var_q = math.fsum(pp), math.fsum(qq)
        if var_p <= 0 or var_q <= 0:
            return missing("constant to float64 precision", n)
        return statistic(max(-1.0, min(1.0, math.fsum(pq) / math.sqrt(var_p) / math.sqrt(var_q))), n)

    def _mismatch_sequences(self) -> Section:
        exps = {"training_ppl": "train", "rollout_ppl": "rollout", "ppl_ratio": "ratio"}
        plain = (
            "training_log_ppl",
            "rollout_log_ppl",
            "log_ppl_diff",
            "log_ppl_abs_diff",
            "log_ppl_diff_max",
            "log_ppl_diff_min",
        )
        why = self._why(False)
        if why or self.measured == 0:
            out = {f"mismatch_{x}": missing(why or self.empty) for x in plain}
            return out | {f"mismatch_{x}": missing(why or self.empty, has_log=True) for x in exps}
        n = self.measured
        out = {}
        for name, key, error in (
            ("training_log_ppl", "train_nll", "train_nll"),
            ("rollout_log_ppl", "rollout_nll", "rollout_nll"),
            ("log_ppl_diff", "diff", "ppl_diff"),
            ("log_ppl_abs_diff", "abs_diff", "ppl_abs_diff"),
        ):
            value = math.fsum(getattr(s, key) for s in self.seqs) / n
            out[f"mismatch_{name}"] = statistic(value, n, self._sequence_error(error, value, 0.0))
        for name, attribute in exps.items():
            row = self._with_pads(weights.join([getattr(s, attribute) for s in self.seqs]))
            value, log = weights.mean(row)
            error = {"ratio": "ppl_ratio"}.get(attribute, f"{attribute}_ppl")
            out[f"mismatch_{name}"] = statistic(
                value, n, self._sequence_error(error, value, 1.0), log=log, has_log=True
            )
        ratio = self._with_pads(weights.join([s.ratio for s in self.seqs]))
        out["mismatch_log_ppl_diff_max"] = statistic(ratio.high, n)
        out["mismatch_log_ppl_diff_min"] = statistic(ratio.low, n)
        return out


def _clusters(parts: Sequence[ClusterRow | GroupTable | None]) -> list[ClusterRow]:
    rows = [p for p in parts if isinstance(p, ClusterRow)]
    return rows + rows_of_groups([p for p in parts if isinstance(p, GroupTable)])


def _pad_clusters(count: int, value: float, quantities: int) -> list[ClusterRow]:
    """``count`` clusters of one row each with one value: residuals about it are 0."""
    if not count:
        return []
    import numpy as np

    zero = np.zeros(quantities)
    return [ClusterRow(count, np.full(quantities, value), zero, zero, float(count))]
