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
    return out
