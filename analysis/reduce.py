"""The ranks of a torchrun launch: who they are, what they gather, and how they end together. The only user of torch.distributed."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from rollout_is.dumps.errors import RolloutIsError, WorkLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

JOIN = timedelta(seconds=100)  # for all ranks to appear: one that died before it joined must not hold the others
TIMEOUT = timedelta(minutes=30)  # for one gather, which waits for the slowest rank's share: bounds every hang


@dataclass(frozen=True)
class Launch:
    """This process among its peers, as torchrun's environment says."""

    rank: int
    world: int
    local_rank: int
    node: int

    @staticmethod
    def from_environment() -> Launch | None:
        """The launch, or None outside torchrun."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or "MASTER_ADDR" not in os.environ:
            return None
        return Launch(
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
            int(os.environ.get("LOCAL_RANK", "0")),
            int(os.environ.get("GROUP_RANK", "0")),
        )


class Ranks:
    """The process group while an analysis runs. A context manager.

    Objects travel over gloo on the CPU, also when the units run on CUDA: partials are small and stand in host memory.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._own = False

    def __enter__(self) -> Self:
        import torch.distributed as dist

        if not dist.is_initialized():
            try:
                dist.init_process_group("gloo", timeout=JOIN)
            except Exception as error:
                raise _lost(self.launch, "could not join the other ranks", error) from error
            self._own = True
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return self

    def __exit__(self, *exc: object) -> None:
        import torch.distributed as dist

        if self._own and dist.is_initialized():
            dist.destroy_process_group()

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's value, in rank order, on every rank."""
        import torch.distributed as dist

        out: list[Any] = [None] * self.launch.world
        try:
            dist.all_gather_object(out, pickle.dumps(value), group=self._group)
        except RuntimeError as error:
            raise _lost(self.launch, "a rank went away", error) from error
        return [pickle.loads(x) for x in out]

    def gather(self, value: Any) -> list[Any] | None:
        """Everybody's value on rank 0, None elsewhere."""
        import torch.distributed as dist

        out: list[Any] | None = [None] * self.launch.world if self.launch.rank == 0 else None
        try:
            dist.gather_object(pickle.dumps(value), out, dst=0, group=self._group)
        except RuntimeError as error:
            raise _lost(self.launch, "a rank went away", error) from error
        return None if out is None else [pickle.loads(x) for x in out]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        import torch.distributed as dist

        box = [pickle.dumps(value) if self.launch.rank == 0 else None]
        try:
            dist.broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as error:
            raise _lost(self.launch, "a rank went away", error) from error
        return pickle.loads(box[0])  # type: ignore[arg-type]

    def agree(self, error: RolloutIsError | None) -> None:
        """End together: raise the first error of any rank on all of them, or go on on all of them.

        Raises:
            RolloutIsError: with the rank that met it in ``where``; the same on each rank.
        """
        errors: Sequence[RolloutIsError | None] = self.all_gather(error)
        for rank, met in enumerate(errors):
            if met is not None:
                if self.launch.world > 1 and not met.where.startswith("rank "):
                    met = type(met)(f"rank {rank}: {met.where}", met.problem, met.why, met.fix, code=met.code)
                raise met


def _lost(launch: Launch, what: str, error: Exception) -> WorkLostError:
    first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    return WorkLostError(
        f"rank {launch.rank} of {launch.world}",
        f"expected all ranks to answer, but {what} ({first})",
        "a rank was killed (out of memory?), or a node cannot be reached",
        "look at the launcher's report for the rank that failed first; run again with fewer ranks a node",
        code="rank-lost",
    )
