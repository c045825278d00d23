"""Runs units of any shard: the settings worked out once, and the buffers of one process. What is done with a unit is ``UnitRun``.

Nothing here knows how many workers there are. All float sums of a unit are made inside the unit, in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollout_is.analysis import grouped, units
from rollout_is.analysis.batch import Consumer, Ints, Unit
from rollout_is.analysis.columns import Store
from rollout_is.analysis.fused.call import Fused
from rollout_is.analysis.fused.figures import Figures
from rollout_is.analysis.fused.library import kernel
from rollout_is.analysis.ops import make_ops
from rollout_is.analysis.pareto import LARGEST
from rollout_is.analysis.partial import Partial
from rollout_is.analysis.populations import Bounds
from rollout_is.analysis.select import Masks, Picker
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.split import SLACK
from rollout_is.analysis.sums import Workspace
from rollout_is.analysis.unit_run import UnitRun

if TYPE_CHECKING:
    from rollout_is.dumps.shard import OpenShard


def bounds_of(settings: Settings) -> Bounds:
    """The settings' bounds as log-ratios."""
    lower, upper = settings.bounds
    return Bounds(
        math.log(lower),
        math.log(upper),
        None if settings.veto_lower is None else math.log(settings.veto_lower),
        None if settings.veto_upper is None else math.log(settings.veto_upper),
    )


class Engine:
    """Runs units of any shard; holds the buffers of one process.

    Args:
        settings: what to compute.
        consumers: extra statistics that see every block.
        skip: segments to leave out by (shard, segment): the second pass without duplicates.
        tail: how many of the largest sequence weights of a unit to keep: see ``pareto.capacity``.
    """

    def __init__(
        self,
        settings: Settings,
        consumers: Sequence[Consumer] = (),
        skip: frozenset[tuple[int, int]] = frozenset(),
        tail: int = LARGEST,
    ) -> None:
        self.settings = settings
        self.bounds = bounds_of(settings)
        self.consumers = consumers
        self.skip = skip
        self.tail = tail
        self.mismatch = settings.only != "weights"
        block = units.BLOCK_TOKENS + units.BLOCK_TOKENS // SLACK
        self.ops = make_ops(settings.device, block)
        self.work = Workspace(self.ops, block)
        self.work2 = Workspace(self.ops, block) if grouped.needed(settings) else None
        self.picker = Picker()
        self.masks = Masks()
        self.kernel, compiled = kernel() if settings.device == "cpu" else ("torch", None)
        self.fused = None if compiled is None else Fused(compiled.block, self.bounds)
        self.figures = None if compiled is None else Figures(compiled.sequences, self.bounds, self.mismatch, tail)
        self.stores = (Store(), Store())  # masked-out, valid

    def run(self, shard: OpenShard, unit: Unit, offsets: Ints) -> Partial:
        """Analyse one unit.

        Args:
            shard: open, with the roles train, rollout and mask settled.
            unit: which positions.
            offsets: int64 [S+1] of the shard.

        Raises:
            DumpError: a mask value is negative or NaN, or the file cannot be read.
        """
        with np.errstate(all="ignore"):
            return UnitRun(self, shard, unit, offsets).run()
