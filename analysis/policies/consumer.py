"""Policies on the engine's one pass: a consumer that gathers each unit once and judges it under every policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_is.analysis.batch import Block, SequenceTable, Unit
from rollout_is.analysis.policies.gather import Gathered, Gatherer, Plan
from rollout_is.analysis.policies.judge import Tally, judge
from rollout_is.analysis.policies.rules import Policy
from rollout_is.analysis.policies.totals import Total, total_of
from rollout_is.dumps.errors import DumpError

if TYPE_CHECKING:
    from rollout_is.dumps.shard import OpenShard, ShardInfo


class PolicyConsumer:
    """Applies policies to a dump as it streams by.

    Args:
        policies: what to apply, each on its own.
        name: where the result stands in ``Summary.extra``.
        bounds: for one policy in full (the ``corrected`` view): count weights outside these and sum the survivors' mismatch.

    ``finish`` gives plain data for JSON: for each policy its description, its figures over the dump and by step.
    """

    def __init__(
        self, policies: Sequence[Policy], name: str = "policies", bounds: tuple[float, float] | None = None
    ) -> None:
        self.name, self.bounds = name, bounds
        self.policies = tuple(policies)
        self.plan = Plan.of(self.policies, bounds)
        self.advantages = any(policy.needs_advantages for policy in self.policies)
        self._shard: OpenShard | None = None
        self._unit: Unit | None = None
        self._gather: Gatherer | None = None

    def begin(self, unit: Unit, shard: OpenShard) -> None:
        """Start a unit.

        Raises:
            DumpError: a policy looks at advantages and the shard has none.
        """
        if self.advantages and "advantages" not in shard.info.columns:
            names = ", ".join(policy.name for policy in self.policies if policy.needs_advantages)
            raise DumpError(
                shard.info.name,
                "expected a column advantages [T], found none",
                f"{names} rejects by the sign of the advantage",
                "dump advantages, or leave this policy out",
                code="policy-needs-advantages",
            )
        self._shard, self._unit = shard, unit
        self._gather = Gatherer(self.plan, unit.last - unit.first)

    def block(self, block: Block) -> None:
        """Take in a block."""
        assert self._gather is not None and self._shard is not None
        self._gather.see(block)
        if self.advantages and len(block.starts):
            first = block.positions[block.starts]
            column = self._shard.read("advantages", block.start, block.start + len(block.mask))
            self._gather.see_advantages(block.sequence, column.double().numpy()[first].astype(np.float64))

    def end(self, table: SequenceTable) -> Gathered | tuple[Tally, ...]:
        """Judge the unit; a fragment of a long sequence is judged when it is whole."""
        assert self._gather is not None and self._unit is not None
        gathered = self._gather.finish(table, self._unit.fragment)
        self._gather = self._shard = None
        return gathered if self._unit.fragment else self._judge(gathered)

    def finish(self, partials: list[tuple[Unit, ShardInfo, Any]]) -> dict[str, Any]:
        """All units, in their order, as plain data."""
        units = list(self._whole(partials))
        steps = list(dict.fromkeys(step for step, _ in units))
        out = []
        for number, policy in enumerate(self.policies):
            by_step = {step: total_of(policy, [t[number] for s, t in units if s == step]) for step in steps}
            whole = total_of(policy, [t[number] for _, t in units], list(by_step.values()))
            out.append(_plain(policy, whole, by_step))
        return {"policies": out}

    def _judge(self, gathered: Gathered) -> tuple[Tally, ...]:
        return tuple(judge(policy, gathered, self.bounds) for policy in self.policies)

    def _whole(self, partials: list[tuple[Unit, ShardInfo, Any]]) -> Iterator[tuple[int | None, tuple[Tally, ...]]]:
        """(step, tallies) of each unit, fragments of one sequence joined first."""
        open_piece: Gathered | None = None
        key: tuple[int, int] | None = None
        step: int | None = None
        for unit, info, partial in partials:
            here = (unit.id.shard, unit.first) if unit.fragment else None
            if open_piece is not None and here != key:
                yield step, self._judge(open_piece)
                open_piece = None
            if isinstance(partial, Gathered):
                open_piece = partial if open_piece is None else open_piece.join(partial)
                key, step = here, info.step
            else:
                yield info.step, partial
        if open_piece is not None:
            yield step, self._judge(open_piece)


def _plain(policy: Policy, whole: Total, by_step: dict[int | None, Total]) -> dict[str, Any]:
    known = {str(step): total.to_dict() for step, total in by_step.items() if step is not None}
    return policy.to_dict() | {"rejected": policy.denominators, "total": whole.to_dict(), "steps": known}
