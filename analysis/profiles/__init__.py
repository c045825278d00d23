"""What a trainer would have logged: its own metrics, names and oddities, from packed tensors.

    from rollout_is.analysis.profiles import profile
    result = profile("xtuner", {"rollout_is_threshold": [2.0, 0.5]})(train, rollout, mask, cu_seqlens, cu_packs=packs)
    result.metrics, result.weights, result.keep

Several ranks of a step: ``profile(...).run(packs_of(..., rank=0) + packs_of(..., rank=1))``. docs/profiles.md has the list.
"""

from rollout_is.analysis.profiles.registry import KNOWN, Profile, parse, profile
from rollout_is.analysis.profiles.rows import Pack, Result, packs_of

__all__ = ["KNOWN", "Pack", "Profile", "Result", "packs_of", "parse", "profile"]
