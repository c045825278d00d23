"""The verdict: what in a summary a reader must know first, with its evidence, the source of its threshold and what to run next.

Derived from the stored figures and notes alone, so that a saved summary gives the same verdict. ``doctor`` looks deeper and
adds its own.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

from rollout_is.analysis.summary import Finding, Statistic, Summary

RANK = {"error": 0, "warning": 1, "notice": 2, "info": 3}

# Thresholds, each with where it comes from. Healthy setups spread over a factor of ten, so these mark what trainers' own
# guides and CI call broken, not what is merely noisy.
MEAN_LOW, MEAN_HIGH, ESS_LOW = 0.5, 2.0, 0.3  # verl's guide
ABS_DIFF_HIGH = 0.1  # slime#1968 CI bound; SkyRL#1408 uses 0.09
MULT_ERROR_HIGH = 1.05  # NeMo-RL guide: investigate
PEARSON_LOW = 0.8  # fp8 engines still reach 0.87 (verl#7519)
MEAN_OFF, MEAN_OFF_ERRORS = 0.02, 5.0  # honest log-probs give E[w] = 1: beyond 2 % and five standard errors
VERL = "verl's rollout correction guide"

# Notes of the engine that belong into the verdict at warning and above: what to run next.
_NEXT_BY_CODE = {"duplicates": "analyze {dump} --top 20", "missing": "inspect {dump}"}
_THRESHOLD_BY_CODE = {"constant-value": "more than 0.1 % of valid tokens at 0, or a fifth of a sample at another value"}


def findings(summary: Summary) -> tuple[Finding, ...]:
    """All findings of a summary, worst first, each id once.

    Args:
        summary: any summary; its own ``findings`` are not looked at.

    >>> findings(Summary({}, {"valid_tokens": 0, "positions": 8}, {}, {}))[0].id
    'coverage.nothing_valid'
    """
    found: dict[str, Finding] = {}
    for rule in _RULES:
        for finding in rule(summary):
            found.setdefault(finding.id, finding)
    return tuple(sorted(found.values(), key=lambda f: RANK.get(f.severity, 9)))


def _nothing_valid(s: Summary) -> Iterator[Finding]:
    positions = s.coverage.get("positions", 0)
    if s.coverage.get("valid_tokens", 0) == 0:
        yield Finding(
            "coverage.nothing_valid",
            "error",
            f"no valid tokens: the mask {s.settings.get('mask', 'response_mask')} is 0 at all {positions:,} positions, nothing was measured"
            if positions
            else "no valid tokens: the dump holds no positions at all, nothing was measured",
            {"positions": positions, "valid_tokens": 0},
            "any at all: nothing comparable is never a pass",
            f"rollout-is inspect {shell_path(s, headers=True)}",
        )


def _nonfinite(s: Summary) -> Iterator[Finding]:
    bad, valid = s.coverage.get("nonfinite_valid_tokens", 0), s.coverage.get("valid_tokens", 0)
    if bad:
        yield Finding(
            "coverage.nonfinite",
            "error",
            f"{bad:,} of {valid:,} valid tokens have a NaN or infinite log-prob; the figures leave them out",
            {"nonfinite_valid_tokens": bad, "valid_tokens": valid},
            "any at all is a failing condition",
            f"rollout-is analyze {shell_path(s)} --top 20",
        )


def _noted(s: Summary) -> Iterator[Finding]:
    """Warnings and errors that the engine noted while it read (placeholders, copies, missing ranks, ...)."""
    for note in s.notes:
        if note.severity in ("error", "warning") and not note.code.startswith(("nonfinite", "non-finite", "no-valid")):
            follow = next((v for k, v in _NEXT_BY_CODE.items() if k in note.code), f"explain {note.code}")
            yield Finding(
                f"note.{note.code}",
                note.severity,
                note.message,
                {"metric": note.metric} if note.metric else {},
                _THRESHOLD_BY_CODE.get(note.code, "any at all"),
                f"rollout-is {follow.format(dump=shell_path(s, headers=follow.startswith('inspect')))}",
            )


def _mean_off(s: Summary) -> Iterator[Finding]:
    mean = _get(s, "token.rollout_is_mean")
    value = None if mean is None else mean.value
    if mean is None or (value is None and mean.log_value is None):
        return
    evidence = {"masked.token.rollout_is_mean": value, "stderr": mean.stderr}
    if value is None:  # beyond float64: the log stands
        evidence["log_value"] = mean.log_value
    if value is None or not MEAN_LOW <= value <= MEAN_HIGH:
        yield Finding(
            "weights.mean",
            "warning",
            f"mean token weight {_weight(mean)}: train and rollout are not near each other (rollout_is_mean)",
            evidence,
            f"{VERL}: outside {MEAN_LOW:g} to {MEAN_HIGH:g}",
            f"rollout-is doctor {shell_path(s)}",
        )
    elif mean.stderr and abs(value - 1) > max(MEAN_OFF, MEAN_OFF_ERRORS * mean.stderr):
        yield Finding(
            "weights.mean",
            "warning",
            (
                f"mean token weight {_short(value)} with standard error {_short(mean.stderr)}: noise and staleness leave it at 1, so "
                "the rollout log-probs are not those of the distribution that was sampled (temperature, top-p, penalties)"
            ),
            evidence,
            f"E[w] = 1; beyond {MEAN_OFF:.0%} and {MEAN_OFF_ERRORS:g} standard errors",
            f"rollout-is doctor {shell_path(s)}",
        )


def _few_effective(s: Summary) -> Iterator[Finding]:
    ess = _get(s, "token.rollout_is_eff_sample_size")
    if ess is not None and ess.value is not None and ess.value < ESS_LOW:
        yield Finding(
            "weights.ess",
            "warning",
            f"effective sample size {_short(ess.value)} of 1 at token level: a few tokens carry the sum of weights",
            {"masked.token.rollout_is_eff_sample_size": ess.value, "n": ess.n},
            f"{VERL}: below {ESS_LOW:g}",
            f"rollout-is analyze {shell_path(s)} --top 20",
        )


def _large_mismatch(s: Summary) -> Iterator[Finding]:
    diff, held = _value(s, "mismatch.mismatch_logprob_abs_diff"), _get(s, "mismatch.mismatch_mult_prob_error")
    error = None if held is None else held.value
    beyond = held is not None and error is None and held.log_value is not None  # exp|d| >= 1: only ever too large
    large_diff = diff is not None and diff > ABS_DIFF_HIGH
    large_error = beyond or (error is not None and error > MULT_ERROR_HIGH)
    if not (large_diff or large_error):
        return
    source = [f"mean |d| above {ABS_DIFF_HIGH:g}: CI bound of slime#1968"] if large_diff else []
    source += [f"mean exp|d| above {MULT_ERROR_HIGH:g}: NeMo-RL guide, investigate"] if large_error else []
    yield Finding(
        "mismatch.large",
        "warning",
        f"train and rollout log-probs differ by {_short(diff)} on average (mean exp|d| {_weight(held)}; healthy bf16 engines: 0.01 and 1.01)",
        {"masked.mismatch.mismatch_logprob_abs_diff": diff, "masked.mismatch.mismatch_mult_prob_error": error},
        "; ".join(source),
        f"rollout-is analyze {shell_path(s)} --by rank --by step --top 20",
    )


def _uncorrelated(s: Summary) -> Iterator[Finding]:
    pearson = _value(s, "mismatch.mismatch_prob_pearson")
    if pearson is not None and pearson < PEARSON_LOW:
        yield Finding(
            "mismatch.uncorrelated",
            "warning",
            f"probabilities of both sides correlate at {_short(pearson)} only: shifted by a position, or not the same tokens?",
            {"masked.mismatch.mismatch_prob_pearson": pearson},
            f"below {PEARSON_LOW:g}; fp8 engines still reach 0.87 (verl#7519)",
            f"rollout-is doctor {shell_path(s)}",
        )


def _pads_counted(s: Summary) -> Iterator[Finding]:
    """The fault that this tool began with, said in words: what counting fully masked segments does to the figures."""
    masked = s.coverage.get("fully_masked", 0)
    content = s.coverage.get("fully_masked_with_content", 0)
    before, after = _value(s, "per_sequence.rollout_is_seq_min", "padded"), _value(s, "per_sequence.rollout_is_seq_min")
    if not masked or before is None or after is None or before == after:
        return
    kind = (
        "pad segments"
        if not content
        else f"fully masked segments ({masked - content:,} pad-like, {content:,} with content)"
    )
    mean_before = _value(s, "per_sequence.rollout_is_seq_mean", "padded")
    mean_after = _value(s, "per_sequence.rollout_is_seq_mean")
    yield Finding(
        "padding.counted_as_sequences",
        "notice",
        (
            f"{masked:,} {kind if masked != 1 else kind.replace('segments', 'segment')} would be counted as sequences: rollout_is_seq_min "
            f"{_short(before)} -> {_short(after)}, rollout_is_seq_mean {_short(mean_before)} -> {_short(mean_after)} (padded -> masked)"
        ),
        {
            "coverage.fully_masked": masked,
            "padded.per_sequence.rollout_is_seq_min": before,
            "masked.per_sequence.rollout_is_seq_min": after,
            "padded.per_sequence.rollout_is_seq_mean": mean_before,
            "masked.per_sequence.rollout_is_seq_mean": mean_after,
        },
        "InternLM/xtuner#1788",
        "rollout-is explain rollout_is_seq_min",
    )


_RULES: tuple[Callable[[Summary], Iterator[Finding]], ...] = (
    _nothing_valid,
    _nonfinite,
    _noted,
    _mean_off,
    _few_effective,
    _large_mismatch,
    _uncorrelated,
    _pads_counted,
)


def _get(s: Summary, path: str, view: str = "masked") -> Statistic | None:
    return s.get(f"{view}.{path}")


def _value(s: Summary, path: str, view: str = "masked") -> float | None:
    statistic = _get(s, path, view)
    return None if statistic is None else statistic.value


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def _weight(statistic: Statistic | None) -> str:
    """The value, or exp(log) where float64 cannot hold it."""
    if statistic is None or statistic.value is not None or statistic.log_value is None:
        return _short(None if statistic is None else statistic.value)
    return f"exp({statistic.log_value:.3g})"


def shell_path(s: Summary, *, headers: bool = False) -> str:
    """The dump's paths and the options that chose its data, as a shell takes them; ``headers``: those that inspect knows."""
    paths = s.source.get("paths") or [p for p in str(s.source.get("path", "")).split(", ") if p]
    options = list(s.source.get("options", ()))
    if headers:
        return shlex.join([*paths, *(o for o in options if o != "--allow-partial")]) if paths else "DUMP"
    mask = s.settings.get("mask", "response_mask")
    options += ["--mask", mask] if mask != "response_mask" else []
    passes = s.settings.get("train", "train"), s.settings.get("rollout", "rollout")
    options += ["--logprobs", ",".join(passes)] if passes != ("train", "rollout") else []
    return shlex.join([*paths, *options]) if paths else "DUMP"
