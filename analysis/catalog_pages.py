"""What ``explain`` prints about statistics, counts and findings: labelled lines, as data."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_is.analysis.catalog import catalog
from rollout_is.analysis.catalog_entry import Entry

Page = tuple[tuple[str, str], ...]

_POOLED = {
    "pooled sum": "sums and counts over all shards, steps and ranks, then one division; never a mean of means",
    "min": "the smallest over all shards; one without valid tokens contributes nothing, never a 0",
    "max": "the largest over all shards; one without valid tokens contributes nothing, never a 0",
    "quantile": "one histogram of counts, added over all shards",
    "top-K fit": "the largest weights of all shards are kept and fitted once",
}
_VIEWS = {
    "unmasked": "every position of every segment, the mask ignored: what the mask hides",
    "padded": (
        "valid tokens; every non-empty segment is a row, a fully masked one counts as x = 0 in rollout_is_seq_*, as weight 1 at the "
        "sequence and geometric level, as perplexity 1 and difference 0: what a trainer logs that counts padding as sequences"
    ),
    "masked": "valid tokens, sequences with at least one of them: the truth",
    "corrected": "with a correction policy: the surviving tokens and sequences, with the weights that it applies",
}
_COUNTS = {
    "positions": ("all token positions of all shards read", ""),
    "valid_tokens": ("positions with mask > 0", "0: nothing was measured, and analyze exits with 1"),
    "segments": ("cu_seqlens intervals, zero-length ones included", ""),
    "sequences": ("segments with at least one valid token", ""),
    "fully_masked": (
        "non-empty segments without a valid token: padding, or content that a mask removed",
        "a trainer that counts them logs rollout_is_seq_min 0 and a mean biased down: compare padded with masked",
    ),
    "fully_masked_with_content": (
        "fully masked segments whose rollout log-probs are real, not one fill value",
        "sequences rejected by a filter before the dump; dump the mask before rejection too (mask.pre_rejection)",
    ),
    "zero_length": ("empty cu_seqlens intervals: counted, then ignored", ""),
    "shards": ("files read", ""),
    "steps": ("different steps read", ""),
    "ranks": ("different ranks read", ""),
    "nonfinite_valid_tokens": (
        "valid tokens whose train log-prob, rollout log-prob or difference is NaN or infinite; left out of token statistics",
        "any fails check: find them with analyze --top 20 (they are listed first)",
    ),
    "fully_masked_pad_like": (
        "fully masked segments that segment_is_pad names, or whose rollout log-probs are all one known fill value",
        "",
    ),
    "outside_positions": ("positions past the last boundary, in no segment; all masked, or the dump is refused", ""),
    "shards_with_valid_tokens": ("files that hold a valid token: what the figures rest on", ""),
    "shards_left_out": ("files that --allow-partial passed over; the notes name them", "dump them again, or read why"),
    "clusters": (
        "what the standard errors of token means are clustered by: groups where group_ids is dumped, else sequences",
        "fewer than some twenty: the standard errors are rough themselves",
    ),
}
_FINDINGS = {
    "coverage.nothing_valid": (
        "no position has mask > 0",
        "inspect the dump: another mask column? labels all -100? a dump written after rejection?",
    ),
    "coverage.nonfinite": (
        "NaN or infinity at valid tokens",
        "analyze --top 20 lists them first; fix the engine or the hook",
    ),
    "weights.mean": (
        (
            "the mean token weight is away from 1. For rollout log-probs of the distribution that was really sampled its expectation is "
            "1, with any engine noise or staleness; temperature, top-p or penalties on one side move it"
        ),
        "doctor names the likely cause",
    ),
    "weights.ess": ("a few tokens carry the sum of weights", "analyze --top 20, sweep"),
    "mismatch.large": (
        "train and rollout log-probs differ by more than trainers' own CI and guides accept",
        "analyze --by rank --by step --by position shows where it sits; doctor names the usual causes",
    ),
    "mismatch.uncorrelated": (
        "the two sides' probabilities hardly correlate: columns shifted by one position, or log-probs of other tokens",
        "doctor searches for the shift",
    ),
    "padding.counted_as_sequences": (
        (
            "the dump holds fully masked segments; a trainer that counts them as sequences logs a minimum of 0, a maximal deviation of 1 "
            "and a mean biased down. Our masked view does not; the padded view shows what such a trainer logs"
        ),
        "fix the trainer's per-sequence metrics, or read the masked column; InternLM/xtuner#1788 is one such fix",
    ),
}


def statistics() -> Mapping[str, Page]:
    """One page a statistic, by section and name.

    >>> statistics()["mismatch.mismatch_kl"][0][0]
    'what'
    """
    return {entry.path: _statistic(entry) for entry in catalog().values()}


def counts() -> Mapping[str, Page]:
    """One page a count of ``coverage``."""
    return {f"coverage.{name}": _lines(what=what, do=do) for name, (what, do) in _COUNTS.items()}


def views() -> Mapping[str, Page]:
    """One page a view."""
    return {f"view.{name}": _lines(what=what) for name, what in _VIEWS.items()}


def findings() -> Mapping[str, Page]:
    """One page a finding of ``analyze``'s verdict."""
    return {name: _lines(what=what, do=do) for name, (what, do) in _FINDINGS.items()}


def _statistic(entry: Entry) -> Page:
    return _lines(
        what=entry.formula,
        sign=entry.direction,
        better=entry.better or "neither high nor low",
        high=entry.high,
        low=entry.low,
        do=entry.action,
        over=f"n counts {entry.unit}s",
        pooled=_POOLED[entry.reduction],
        views="padded equals masked by construction" if entry.same_when_padded else "",
        source=entry.source,
    )


def _lines(**lines: str) -> Page:
    return tuple((label, text) for label, text in lines.items() if text)
