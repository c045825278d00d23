"""Catalog entries of the importance weights: three levels, the per-sequence family, veto."""

from __future__ import annotations

from rollout_is.analysis.catalog_entry import Entry

# level -> (what L is, what is counted)
_LEVELS = {
    "token": ("L = d = t - r of a valid token", "token"),
    "sequence": ("L = sum of d over a sequence's valid tokens (product of its ratios)", "sequence"),
    "geometric": ("L = mean of d over a sequence's valid tokens (geometric mean of its ratios)", "sequence"),
}
QUANTILES = {
    "p0_1": "0.1 %",
    "p1": "1 %",
    "p5": "5 %",
    "p25": "25 %",
    "p50": "50 %",
    "p75": "75 %",
    "p95": "95 %",
    "p99": "99 %",
    "p99_9": "99.9 %",
}
# high, low, what to do
_MEANINGS_OF_MEAN = {
    "ratio": (
        "rollout log-probs are not those of the distribution that was sampled (temperature, top-p, penalties), or a few weights carry it",
        "the same: E[w] is 1 for honest log-probs, whatever the noise or staleness; truncated sampling reads as 0.9 to 0.98",
        "compare with its standard error; then rollout-is doctor",
    ),
    "geometric": (
        "train gives the sampled tokens more probability on average",
        "below 1 even for honest log-probs: a geometric mean lies under the arithmetic one, by the KL of a sequence",
        "read it with mismatch_kl; a value near 1 - mismatch_kl is no fault of its own",
    ),
}
_TRAINERS = (
    "verl rollout_corr_helper.py and xtuner rollout_is.py, which log it under this name (there often clamped; here raw)"
)
_WHICH = "positive: train gives the sampled tokens more probability than rollout did; negative: less (rollout more confident)"


def level_entries(level: str) -> list[Entry]:
    """The weight statistics of one level.

    >>> [entry.name for entry in level_entries("sequence")][-1]
    'pareto_k'
    """
    definition, unit = _LEVELS[level]
    token = level == "token"
    product = level == "sequence"

    def entry(name: str, formula: str, high: str, low: str, action: str, **more: object) -> Entry:
        values: dict[str, object] = {
            "name": name,
            "section": level,
            "formula": f"{formula}; {definition}; w = exp(L)",
            "unit": unit,
            "reduction": "pooled sum",
            "source": _TRAINERS,
            "high": high,
            "low": low,
            "action": action,
            "weight": True,
            "same_when_padded": token,
        }
        return Entry(**(values | more))  # type: ignore[arg-type]  # the keys are Entry's own

    spread = (
        "products over long sequences spread by nature: judge them by the token and geometric levels first"
        if product
        else "look at the worst tokens and sequences with --top 20, and at --by rank and --by position"
    )
    entries = [
        entry(
            "rollout_is_mean",
            "mean of w",
            *_MEANINGS_OF_MEAN["geometric" if level == "geometric" else "ratio"],
            better="near 1",
            direction="above 1: train gives the sampled tokens more probability on average; below 1: less",
        ),
        entry(
            "rollout_is_std",
            "population standard deviation of w",
            "the policies differ much, or a few outliers do",
            "the policies agree",
            spread,
            better="lower",
        ),
        entry(
            "rollout_is_min",
            "smallest w",
            "near 1: no sample became unlikely under train",
            "some sample is very unlikely under train; exactly 0 in trainers' logs is usually padding counted as data",
            "rollout-is analyze --top 20 shows where",
            better="near 1",
            reduction="min",
        ),
        entry(
            "rollout_is_max",
            "largest w",
            "some sample is far more likely under train than rollout said; one such weight can dominate a gradient",
            "near 1: no such sample",
            "rollout-is analyze --top 20 shows where; rollout-is sweep shows what a bound would cut",
            better="near 1",
            reduction="max",
        ),
        entry(
            "rollout_is_eff_sample_size",
            "(sum w)^2 / (n * sum w^2) on raw weights, in (0, 1]",
            "near 1: all samples count alike (also when every w is the same wrong constant: read it with the mean)",
            "few samples carry the sum; verl's guide warns below 0.3",
            spread,
            better="higher",
            source="Kish 1965; PipelineRL pools it like this; verl and xtuner take it on clamped weights",
        ),
        entry(
            "rollout_is_ratio_fraction_high",
            "share of L > ln(upper), strict",
            "this share would be cut by an upper bound",
            "hardly anything is beyond the upper bound",
            "rollout-is sweep",
            better="lower",
            weight=False,
        ),
        entry(
            "rollout_is_ratio_fraction_low",
            "share of L < ln(lower), strict",
            "this share lies below the lower bound",
            "hardly anything is below the lower bound",
            "rollout-is sweep",
            better="lower",
            weight=False,
        ),
        entry(
            "rollout_is_max_weight_share",
            "largest w / sum of w",
            f"one {unit} carries this share of the whole sum",
            f"near 1/n: no {unit} stands out",
            "rollout-is analyze --top 5 shows which one",
            better="lower",
            source="importance sampling practice (largest normalised weight); Owen 2013, ch. 9",
        ),
        *(
            entry(
                f"log_ratio_{key}",
                f"{share} quantile of L (order statistic, inverted-CDF rule, from a histogram: within 1 % relative or 1e-6)",
                "above 0: these samples are more likely under train",
                "below 0: these samples are less likely under train",
                "compare the tails with the median: noise is symmetric and narrow, a fault is one-sided or bimodal",
                better="near 0",
                direction=_WHICH,
                reduction="quantile",
                weight=False,
                source="docs/METRICS.md; order statistics as numpy's inverted_cdf",
            )
            for key, share in QUANTILES.items()
        ),
    ]
    if product:
        entries.append(
            entry(
                "pareto_k",
                "shape of a generalised Pareto fit to the min(0.2 V, 3 sqrt(V)) largest product weights, weak prior",
                "above min(1 - 1/log10 V, 0.7): the mean of the weights cannot be trusted at this number of sequences",
                "the sequence weights have a light tail: averages of them converge",
                "use token or geometric weights, or truncate: rollout-is sweep",
                better="lower",
                weight=False,
                reduction="top-K fit",
                source="Vehtari, Simpson, Gelman, Yao, Gabry 2024, Pareto smoothed importance sampling",
            )
        )
    return entries


def _sequence(name: str, formula: str, high: str, low: str, better: str, reduction: str = "pooled sum") -> Entry:
    return Entry(
        name=f"rollout_is_seq_{name}",
        section="per_sequence",
        formula=f"{formula}; x_i = mean of the token ratios w over the valid tokens of sequence i",
        unit="sequence",
        reduction=reduction,  # type: ignore[arg-type]
        source="xtuner rollout_is.py (InternLM/xtuner#1788 stopped counting padding in it), verl rollout_corr_helper.py",
        high=high,
        low=low,
        action="compare padded with masked: a gap is padding counted as data; else rollout-is analyze --top 20",
        better=better,  # type: ignore[arg-type]
        weight="fraction" not in name,
    )


PER_SEQUENCE = (
    _sequence(
        "mean",
        "mean of x_i",
        "train gives the sampled tokens more probability",
        "less probability, or (padded) fully masked segments counted as 0",
        "near 1",
    ),
    _sequence(
        "std",
        "sample standard deviation of x_i (ddof 1; null for one sequence)",
        "sequences disagree: some are off, others not",
        "all sequences alike",
        "lower",
    ),
    _sequence(
        "min",
        "smallest x_i",
        "near 1: no sequence stands out",
        "some sequence is off; exactly 0 in a trainer's log is padding counted as a sequence",
        "near 1",
        "min",
    ),
    _sequence("max", "largest x_i", "some sequence is off", "near 1: no sequence stands out", "near 1", "max"),
    _sequence(
        "max_deviation",
        "largest |x_i - 1|",
        "the worst sequence is this far off; stuck at 1 in a trainer's log is padding",
        "every sequence is near 1",
        "lower",
        "max",
    ),
    _sequence("fraction_high", "share of x_i > upper", "this share is above the bound", "hardly any", "lower"),
    _sequence(
        "fraction_low",
        "share of x_i < lower",
        "this share is below the bound; with padding counted, the share of padding",
        "hardly any",
        "lower",
    ),
)

VETO = (
    Entry(
        name="rollout_is_catastrophic_token_fraction",
        section="veto",
        formula="share of valid tokens with d < ln(veto-lower) or d > ln(veto-upper); null while veto is off",
        unit="token",
        reduction="pooled sum",
        source="verl rollout_corr_helper.py, xtuner rollout_is.py",
        high="this share of tokens is beyond repair by a weight",
        low="hardly any token is catastrophic",
        action="rollout-is analyze --top 20 shows them; judge by --by length, since one token vetoes a whole sequence",
        better="lower",
        same_when_padded=True,
    ),
    Entry(
        name="rollout_is_veto_fraction",
        section="veto",
        formula="share of sequences with at least one catastrophic token; null while veto is off",
        unit="sequence",
        reduction="pooled sum",
        source="verl rollout_corr_helper.py, xtuner rollout_is.py (padded: diluted by fully masked segments)",
        high="this share of sequences would be thrown away; grows with length at equal token quality",
        low="hardly any sequence is vetoed",
        action="rollout-is analyze --by length; widen the veto bounds if long sequences alone are hit",
        better="lower",
    ),
)
