"""A rank without a model whose calls go wrong in one of two ranks, or are slow."""

import threading
import time
from typing import Any

import torch.distributed as dist

from saccade.plugins.ranks import rank_process
from saccade.plugins.ranks.machines import agreed
from saccade.system.process import Block, connect


class StallingRank(rank_process.Visitor):
    def perform(self, block: Block) -> Any:
        call = block.row["call"]
        return getattr(self, call)(dist.get_rank() == 1) if hasattr(StallingRank, call) else super().perform(block)

    def in_order(self, second: bool) -> float:
        return agreed([1.0], dist.ReduceOp.SUM).item()

    def sleeps(self, second: bool) -> float:
        if second:
            threading.Event().wait()
        return self.in_order(second)

    def sleeps_alone(self, second: bool) -> None:
        """The other has answered."""
        if second:
            threading.Event().wait()

    def skips_the_last(self, second: bool) -> float:
        return 0.0 if second else self.in_order(second)

    def skips_one(self, second: bool) -> float:
        if not second:
            agreed([1.0, 2.0], dist.ReduceOp.SUM)
        return self.in_order(second)

    def raises(self, second: bool) -> float:
        if second:
            raise ValueError("in one rank")
        return self.in_order(second)

    def loops(self, second: bool) -> float:
        while second:
            work()
        return self.in_order(second)

    def is_slow(self, second: bool) -> float:
        end = time.monotonic() + (2.5 if second else 0.5)
        while time.monotonic() < end:
            work()
        return self.in_order(second)


def work() -> None:
    """With a fifth of a core, which counts as progress."""
    sum(range(100_000))
    time.sleep(0.01)


if __name__ == "__main__":
    rank_process.Visitor = StallingRank  # type: ignore[misc]
    rank_process.serve(connect(tied=True))
