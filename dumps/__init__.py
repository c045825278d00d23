"""The dump format: scan, read, write, foreign formats; what a trainer imports (``from rollout_is.dumps import DumpWriter``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_is.dumps.writer import DumpWriter as DumpWriter

__all__ = ["DumpWriter"]


def __getattr__(name: str) -> Any:  # on first use: no module of this package should pay for the writer
    if name == "DumpWriter":
        from rollout_is.dumps.writer import DumpWriter

        return DumpWriter
    raise AttributeError(f"module 'rollout_is.dumps' has no attribute {name!r}")
