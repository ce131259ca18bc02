"""A rank whose GPU, if it is the second one, has no room for large micro-batches from the second update on, while the
other waits for it inside of one.
"""

from typing import Any

import torch

from saccade.plugins.ranks import rank_process
from saccade.plugins.ranks.sharded import ShardedTrainer
from saccade.system.process import connect
from saccade.trainer.optimizer import Optimizer

ROOM = 40  # tokens


class FullTrainer(ShardedTrainer):
    def hidden_at(self, batch: Any, places: Any) -> torch.Tensor:
        if self.rank and self.optimizer and Optimizer.updates(self.optimizer) and batch.tokens > ROOM:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")
        return super().hidden_at(batch, places)


if __name__ == "__main__":
    rank_process.TRAINERS["sharded"] = FullTrainer, rank_process.TRAINERS["sharded"][1]  # type: ignore[index]
    rank_process.serve(connect(tied=True))
