"""Corrections for the mismatch between trainer and engine: what they would do to a dump. docs/policies.md has the vocabulary.

from rollout_is.analysis.policies import evaluate, parse_policy
applied = evaluate(parse_policy("verl/token_tis"), train, rollout, mask, cu_seqlens)
"""

from rollout_is.analysis.policies.evaluate import Applied, evaluate
from rollout_is.analysis.policies.presets import PRESETS, explain_policy, parse_policy
from rollout_is.analysis.policies.rules import Policy, Rule, Weight

__all__ = ["PRESETS", "Applied", "Policy", "Rule", "Weight", "evaluate", "explain_policy", "parse_policy"]
