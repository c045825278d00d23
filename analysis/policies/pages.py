"""Pages for ``explain``: every preset, and the figures that a policy adds."""

from __future__ import annotations

from rollout_is.analysis.policies.presets import PRESETS, explain_policy

_FIGURES = {
    "rejected_token_fraction": "valid tokens that keep no weight (masked out or zeroed) / valid tokens",
    "rejected_token_fraction_of_all": "the same tokens / all positions of the dump, prompts and padding included",
    "rejected_sequence_fraction": "sequences none of whose tokens keeps a weight / sequences with a valid token",
    "rejected_sequence_fraction_of_all": "the same sequences / all non-empty segments, fully masked ones included",
    "touched_sequence_fraction": "sequences that lose at least one token / sequences",
    "changed_token_fraction": "surviving tokens whose weight was cut to a bound / valid tokens",
    "changed_token_fraction_of_all": "the same tokens / all positions",
    "weight_moved_fraction": "sum of |applied - raw weight| / sum of raw weights, at the level of the policy's weight, before normalisation",
    "ess_kept": "(sum of applied weights)^2 / (valid tokens * sum of their squares): effective tokens left, as a share of all eligible ones",
}


# Notes and findings of policies, profiles and audits: what, why, what to do.
_REMARKS = {
    "note.policy-rejects": (
        "a policy rejects more than the set share of the eligible tokens or sequences",
        "the survivors' figures look healthy because what was unhealthy is gone",
        "look at which rule rejects (by_rule) and at the KL of what was rejected; repair the mismatch before you filter it",
    ),
    "note.policy-oddity": (
        "the preset reproduces a rule of its framework that its name does not suggest",
        "it is what the framework does",
        "explain the preset; write the rule that you mean as a spec",
    ),
    "note.policy-unjudged": (
        "valid tokens without a finite log-ratio were judged by no rule",
        "a missing or infinite log-prob under the mask",
        "run doctor; the trainer either crashes on them or hides them",
    ),
    "note.policy-held": (
        "weights beyond e^300 were counted as e^300",
        "a policy without an upper bound on sequences far off policy",
        "bound the weight",
    ),
    "note.profile-error": (
        "the trainer would have failed on this input",
        "it divides by zero or refuses a setting",
        "see the message",
    ),
    "note.audit-unknown": (
        "the trainer logged names that the profile does not have under these settings",
        "other metrics of the trainer, or a setting that is missing",
        "give the settings that the run had",
    ),
    "audit.padding-rows": (
        "numbers that the trainer logged count padding segments as sequences",
        "pad segments of a pack, or fully masked rows of a batch, enter its row means as 0, or as perplexity 1",
        "read the masked figures instead; update the trainer",
    ),
    "audit.not-reproduced": (
        "no variant of the profile gives a number that the trainer logged",
        "other settings than those given, another version, packs or ranks missing from the dump, or a mask overwritten after logging",
        "give the settings of the run; check coverage with inspect",
    ),
}


def pages() -> dict[str, tuple[tuple[str, str], ...]]:
    """``policy.NAME`` for each preset (rule, default, source, oddity), ``corrected.veto.NAME`` for each figure.

    >>> dict(pages()["policy.trl/sequence_mask"])["default"]
    'on, the default'
    """
    out: dict[str, tuple[tuple[str, str], ...]] = {}
    for name in PRESETS:
        page = explain_policy(name)
        rules = page["rule"]
        lines = [("rule", "; ".join(rules) if isinstance(rules, list) else str(rules))]
        lines += [(key, str(page[key])) for key in ("rejected", "default", "source", "oddity") if page[key]]
        lines.append(("use", f"rollout-is analyze DUMP --policy {name}"))
        out[f"policy.{name}"] = tuple(lines)
    for name, text in _FIGURES.items():
        out[f"corrected.veto.{name}"] = (
            ("formula", text),
            ("use", "a limit in check, beside the figures of the survivors"),
        )
    for name, texts in _REMARKS.items():
        out[name] = tuple(zip(("what", "why", "do"), texts, strict=True))
    return out
