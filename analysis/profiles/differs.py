"""Why a logged number is not the exact one: for each metric of a profile, the statistic that it stands for, and what sets it apart."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rollout_is.analysis.profiles.rows import Settings
from rollout_is.analysis.summary import Statistic, Views

_PACKS = "pack means averaged, each pack counting the same"
_ONE_PACK = "one value a pack, as if the pack were one sequence; packs averaged"
_CUT = "weights cut to the bounds first, in float32; pack values averaged"
_ROWS = "fully masked rows counted (perplexity 1, difference 0)"
_ZERO_ROWS = "padding rows counted as 0"
_APPLIED = "applied, not raw, weights"
_SAMPLES = "sample means averaged, each sample counting the same; a fully masked one counts as 0"
_PPL = "training_ppl|training_log_ppl|rollout_ppl|rollout_log_ppl|log_ppl_diff|log_ppl_abs_diff|ppl_ratio"
_SEQ = "seq_mean|seq_std|seq_min|seq_max|seq_max_deviation"


@dataclass(frozen=True)
class Counterpart:
    """What a logged name stands for.

    Attributes:
        pattern: of the whole logged name.
        path: section and name below a view; ``\\1`` and ``{level}`` are filled in.
        why: what makes the logged number differ, where it does.
    """

    pattern: str
    path: str
    why: str


def _xtuner(settings: Settings, fixed: bool) -> list[Counterpart]:
    level = settings["rollout_is_level"]
    at = "rollout_is/mismatch/rollout_is_"
    sequences = _PACKS if fixed else f"{_ZERO_ROWS}; {_PACKS}"
    extremes = "float32" if fixed else _ZERO_ROWS
    rows = "padding rows counted with weight 1" if level != "token" else "extremes of packs, held in e^20"
    out = [
        Counterpart(rf"mismatch/mismatch_({_PPL})", r"mismatch.mismatch_\1", _ONE_PACK),
        Counterpart(
            r"mismatch/mismatch_(log_ppl_diff_max|log_ppl_diff_min)",
            r"mismatch.mismatch_\1",
            "extremes of pack means, not of sequences",
        ),
        Counterpart(r"mismatch/mismatch_(kl|k3_kl|logprob_abs_diff)", r"mismatch.mismatch_\1", _PACKS),
        Counterpart(
            rf"{at}mean",
            "{level}.rollout_is_mean",
            _PACKS if level == "token" else f"weighted by length; {_PACKS}",
        ),
        Counterpart(rf"{at}(max|min)", r"{level}.rollout_is_\1", rows),
        Counterpart(rf"{at}(std|eff_sample_size)", r"{level}.rollout_is_\1", _CUT),
    ]
    if level == "token":
        out.append(Counterpart(rf"{at}(seq_mean|seq_std)", r"per_sequence.rollout_is_\1", sequences))
        out.append(Counterpart(rf"{at}(seq_max|seq_min|seq_max_deviation)", r"per_sequence.rollout_is_\1", extremes))
    else:
        out.append(Counterpart(rf"{at}seq_mean", "{level}.rollout_is_mean", sequences))
        out.append(Counterpart(rf"{at}seq_(min|max)", r"{level}.rollout_is_\1", extremes))
    return out


def _verl(settings: Settings, raw: bool) -> list[Counterpart]:
    level = settings["rollout_is"] or "token"
    at = r"(?:actor/)?rollout_corr/"
    stage = "" if raw else _APPLIED
    rows = f"{_ZERO_ROWS}; {stage}" if stage else _ZERO_ROWS
    cut = "weights cut to [1/upper, upper] first" if raw else f"{_APPLIED}, cut to [0, upper]"
    out = [
        Counterpart(rf"{at}({_PPL}|log_ppl_diff_max|log_ppl_diff_min)", r"mismatch.mismatch_\1", _ROWS),
        Counterpart(rf"{at}(kl|k3_kl|chi2_token)", r"mismatch.mismatch_\1", "micro-batches averaged, in float32"),
        Counterpart(
            rf"{at}chi2_seq",
            "mismatch.mismatch_chi2_seq",
            "fully masked rows counted as weight 1; log-ratio held in +-20",
        ),
        Counterpart(rf"{at}rollout_is_mean", "{level}.rollout_is_mean", stage or "weighted by length"),
        Counterpart(
            rf"{at}rollout_is_(max|min)", r"{level}.rollout_is_\1", stage or "fully masked rows counted with weight 1"
        ),
        Counterpart(rf"{at}rollout_is_(std|eff_sample_size)", r"{level}.rollout_is_\1", cut),
        Counterpart(r"training/rollout_probs_diff_mean", "mismatch.mismatch_prob_abs_diff", "float32"),
        Counterpart(r"training/rollout_probs_diff_max", "mismatch.mismatch_prob_abs_diff_max", "float32"),
        Counterpart(r"training/rollout_actor_probs_pearson_corr", "mismatch.mismatch_prob_pearson", "float32"),
    ]
    if level == "token":
        out.append(Counterpart(rf"{at}rollout_is_({_SEQ})", r"per_sequence.rollout_is_\1", rows))
    return out


def _slime(settings: Settings) -> list[Counterpart]:
    means = (
        "tokens averaged, a fully masked sample counted as one" if settings["calculate_per_token_loss"] else _SAMPLES
    )
    at = "train/mis_"
    return [
        Counterpart(rf"{at}({_PPL}|kl|k3_kl|chi2_token|chi2_seq)", r"mismatch.mismatch_\1", means),
        Counterpart(rf"{at}tis_weight_before_bound", f"{settings['tis_level']}.rollout_is_mean", means),
        Counterpart(
            rf"{at}(?:tis_weight_after_bound|is_ratio_mean_final)",
            f"{settings['tis_level']}.rollout_is_mean",
            f"{_APPLIED}; {means}",
        ),
        Counterpart(
            rf"{at}is_ratio_(min|max)_final",
            rf"{settings['tis_level']}.rollout_is_\1",
            f"{_APPLIED}; mean of the samples' extremes",
        ),
        Counterpart(
            r"train/train_rollout_logprob_abs_diff",
            "mismatch.mismatch_logprob_abs_diff",
            f"{means}; rejected tokens leave the numerator only",
        ),
        Counterpart(r"train/tis", "token.rollout_is_mean", means),
    ]


def _nemo(settings: Settings) -> list[Counterpart]:
    kl = {"k1": "mismatch_kl", "k2": "mismatch_k2_kl", "k3": "mismatch_k3_kl"}[settings["reference_policy_kl_type"]]
    by_sequence = settings["sequence_level_importance_ratios"]
    level = "sequence" if by_sequence else "token"
    why = _APPLIED
    if by_sequence and settings["layout"] == "dense":
        why = "each weight counts once for every valid sample of its micro-batch"
    return [
        Counterpart("token_mult_prob_error", "mismatch.mismatch_mult_prob_error", "float32"),
        Counterpart("gen_kl_error", f"mismatch.{kl}", "float32"),
        Counterpart("sampling_importance_ratio", f"{level}.rollout_is_mean", why),
    ]


def _trl(settings: Settings) -> list[Counterpart]:
    level = str(settings["vllm_importance_sampling_mode"]).split("_")[0]
    rows = "; fully masked rows counted as 1" if level == "sequence" else ""
    return [
        Counterpart(
            "sampling/sampling_logp_difference/mean", "mismatch.mismatch_logprob_abs_diff", "rank means averaged"
        ),
        Counterpart("sampling/sampling_logp_difference/max", "mismatch.mismatch_logprob_abs_diff_max", "float32"),
        Counterpart(
            r"sampling/importance_sampling_ratio/(mean|min|max)",
            rf"{level}.rollout_is_\1",
            f"{_APPLIED}{rows}; ranks averaged",
        ),
    ]


def counterparts(name: str, settings: Settings) -> list[Counterpart]:
    """The counterparts of a profile's metrics."""
    if name.startswith("xtuner"):
        return _xtuner(settings, fixed=name == "xtuner")
    if name.startswith("verl"):
        return _verl(settings, raw=name == "verl-2026-01")
    return {"slime": _slime, "nemo-rl": _nemo, "trl": _trl}[name](settings)


def find(name: str, settings: Settings, metric: str) -> tuple[str, str] | None:
    """(path below a view, why) of a logged name; None where nothing exact corresponds to it.

    >>> from rollout_is.analysis.profiles.registry import profile
    >>> find("verl", profile("verl").settings, "rollout_corr/kl")[0]
    'mismatch.mismatch_kl'
    """
    level = str(settings.get("rollout_is_level") or settings.get("rollout_is") or "token")
    for known in counterparts(name, settings):
        match = re.fullmatch(known.pattern, metric)
        if match:
            return match.expand(known.path).replace("{level}", level), known.why
    return None


def statistic(views: Views, view: str, path: str) -> Statistic | None:
    """The statistic at a path of a view."""
    section, _, name = path.partition(".")
    return views.get(view, {}).get(section, {}).get(name)


def close(a: float, b: float, metric: str = "") -> bool:
    """Equal within what float32 loses; standard deviations by E[w^2] - E[w]^2 lose more."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a == b or (math.isnan(a) and math.isnan(b))
    loose = 1e-3 * max(1.0, abs(b)) if metric.endswith("_std") and not metric.endswith("seq_std") else 0.0
    return abs(a - b) <= max(3e-6 + 5e-5 * abs(b), loose)
