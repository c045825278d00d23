"""What is wrong with the log-probs of a dump, with evidence: one small class a fingerprint, riding along the one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_is.analysis.doctor.api import Diagnosis as Diagnosis
    from rollout_is.analysis.doctor.api import run as run

__all__ = ["Diagnosis", "run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollout_is.analysis.doctor import api  # imports torch through the pipeline, so only on use

    return getattr(api, name)
