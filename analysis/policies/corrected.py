"""The ``corrected`` view: what a policy took out, said first, then the statistics of the applied weights over the survivors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout_is.analysis.policies.presets import SHARE_NOTED
from rollout_is.analysis.summary import Group, Statistic, Summary
from rollout_is.dumps.notes import Note

KEY = "policy"  # where the one policy's consumer puts its result in Summary.extra
_TOKEN = {
    "rollout_is_mean": "mean",
    "rollout_is_std": "std",
    "rollout_is_min": "min",
    "rollout_is_max": "max",
    "rollout_is_eff_sample_size": "ess",
    "rollout_is_max_weight_share": "max_weight_share",
}
_ROWS = {
    "rollout_is_seq_mean": "seq_mean",
    "rollout_is_seq_std": "seq_std",
    "rollout_is_seq_min": "seq_min",
    "rollout_is_seq_max": "seq_max",
    "rollout_is_seq_max_deviation": "seq_max_deviation",
}
_LOGGED = (
    *("rollout_is_mean", "rollout_is_std", "rollout_is_min", "rollout_is_max"),
    *(
        "rollout_is_seq_mean",
        "rollout_is_seq_std",
        "rollout_is_seq_min",
        "rollout_is_seq_max",
        "rollout_is_seq_max_deviation",
    ),
)
_LOGGED_MISMATCH = (
    *(
        "mismatch_k3_kl",
        "mismatch_mult_prob_error",
        "mismatch_chi2_token",
        "mismatch_chi2_seq",
        "mismatch_chi2_geometric",
    ),
    *("mismatch_training_ppl", "mismatch_rollout_ppl", "mismatch_ppl_ratio"),
)
# What the policy took away, with both denominators: named beside the veto figures, so that limits can be put on it.
_REJECTION = (
    "rejected_token_fraction",
    "rejected_token_fraction_of_all",
    "rejected_sequence_fraction",
    "rejected_sequence_fraction_of_all",
    "touched_sequence_fraction",
    "changed_token_fraction",
    "changed_token_fraction_of_all",
    "weight_moved_fraction",
    "ess_kept",
)


def corrected_view(policy: Mapping[str, Any], total: Mapping[str, Any]) -> dict[str, dict[str, Statistic]]:
    """The sections of the view from a policy's figures (``PolicyConsumer`` output)."""
    figures = {name: Statistic.from_dict(s) for name, s in total["figures"].items()}

    def section(names: Mapping[str, str]) -> dict[str, Statistic]:
        return {name: figures[key] for name, key in names.items()}

    full = {k: {n: Statistic.from_dict(x) for n, x in names.items()} for k, names in total.get("view", {}).items()}
    view = {"token": section(_TOKEN) | full.get("token", {})}
    view |= {level: full[level] for level in ("sequence", "geometric") if level in full}
    view["per_sequence"] = section(_ROWS) | full.get("per_sequence", {})
    view["veto"] = {name: figures[name] for name in _REJECTION}
    view["mismatch"] = full.get("mismatch", {})
    logged = {"token": _LOGGED, "per_sequence": _LOGGED, "mismatch": _LOGGED_MISMATCH}
    for section_name, names in logged.items():
        for name in set(names) & set(view[section_name]):
            view[section_name][name] = _with_log(view[section_name][name])
    return view


def _with_log(statistic: Statistic) -> Statistic:
    """A statistic of weights carries its log, as in the other views."""
    value = statistic.value
    log_value = math.log(value) if value is not None and value > 0 else None
    return replace(statistic, log_value=log_value, has_log=True)


def with_corrected(summary: Summary, *, share: float = SHARE_NOTED) -> Summary:
    """The summary with the view ``corrected``, ``extra["policy"]`` and their notes.

    Args:
        summary: of an analysis that ran with ``PolicyConsumer([policy], "policy", settings.bounds)``.
        share: rejecting more than this share of the eligible tokens or sequences is noted.
    """
    policy = summary.extra[KEY]["policies"][0]
    views = {**summary.views, "corrected": corrected_view(policy, policy["total"])}
    groups = dict(summary.groups)
    if "step" in groups:
        groups["step"] = {key: _with_step(group, policy, key) for key, group in groups["step"].items()}
    # the view stands in ``views``: said once
    slim = {"total": _without_view(policy["total"]), "steps": {k: _without_view(v) for k, v in policy["steps"].items()}}
    extra = {**summary.extra, KEY: policy | slim | {"mask": summary.settings.get("mask", "response_mask")}}
    notes = tuple(dict.fromkeys((*summary.notes, *_notes(summary, policy, share))))
    return replace(summary, views=views, groups=groups, extra=extra, notes=notes)


def _without_view(total: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in total.items() if key != "view"}


def _with_step(group: Group, policy: Mapping[str, Any], key: str) -> Group:
    if key not in policy["steps"]:
        return group
    return replace(group, views={**group.views, "corrected": corrected_view(policy, policy["steps"][key])})


def _notes(summary: Summary, policy: Mapping[str, Any], share: float) -> list[Note]:
    counts, figures = policy["total"]["counts"], policy["total"]["figures"]
    notes = []
    if policy["note"]:
        notes.append(Note("policy-oddity", "notice", "corrected", f"{policy['name']}: {policy['note']}"))
    for unit in ("token", "sequence"):
        value, of_all = (figures[f"rejected_{unit}_fraction{end}"]["value"] for end in ("", "_of_all"))
        if value is not None and value > share:
            worst = max(policy["total"]["by_rule"], key=lambda r: (r[f"{unit}s"], r["tokens"]))
            notes.append(
                Note(
                    "policy-rejects",
                    "warning",
                    f"corrected.veto.rejected_{unit}_fraction",
                    f"{policy['name']} rejects {value:.1%} of the eligible {unit}s ({of_all:.1%} of all), above {share:.0%}; most by: "
                    f"{worst['rule']}. The figures of the survivors say nothing about what was rejected",
                )
            )
    if counts and counts["unjudged"]:
        notes.append(
            Note(
                "policy-unjudged",
                "warning",
                "corrected",
                f"{counts['unjudged']:,} valid tokens without a finite log-ratio were not judged by {policy['name']}",
            )
        )
    if counts and counts["held"]:
        notes.append(
            Note(
                "policy-held",
                "warning",
                "corrected.token.rollout_is_mean",
                f"{counts['held']:,} weights beyond e^300 were counted as e^300: {policy['name']} does not bound them",
            )
        )
    return notes
