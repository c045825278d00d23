"""Exact importance-sampling and train/rollout mismatch statistics from dumps of packed log-probs.

Public names are loaded on first use, so importing ``rollout_is`` is cheap and imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollout_is.analysis.pipeline import analyze as analyze
    from rollout_is.analysis.pipeline import summarize as summarize
    from rollout_is.analysis.summary import Summary as Summary
    from rollout_is.dumps.writer import DumpWriter as DumpWriter

_PUBLIC = {
    "analyze": "rollout_is.analysis.pipeline",
    "summarize": "rollout_is.analysis.pipeline",
    "Summary": "rollout_is.analysis.summary",
    "DumpWriter": "rollout_is.dumps.writer",
}

__all__ = ["DumpWriter", "Summary", "__version__", "analyze", "summarize"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rollout_is' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
