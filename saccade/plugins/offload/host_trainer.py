"""A frozen model that is on the GPU only while it scores, such as a reference with `train.offload` or a reward model
with `reward.offload`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from saccade.forest.batch import Batch
from saccade.models.families import Family
from saccade.plugins.offload.host_state import host_zeros, require_host_bytes
from saccade.plugins.ranks.machines import sum_of_machine
from saccade.trainer.local import LocalTrainer


class HostTrainer(LocalTrainer):
    """Between calls the weights are in pinned main memory, and are changed there; scoring changes none."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        super().__init__(model, family)
        if self.device.type == "cuda":
            needed, what = sum(weight.nbytes for weight in model.parameters()), f"the frozen model {family.path}"
            total = sum_of_machine if dist.is_initialized() else float  # ranks load theirs together
            require_host_bytes(needed, what, "train.offload=false reward.offload=false", total)
        self._on_host = [(weight, self._copied(weight.data)) for weight in model.parameters()]
        self._leave()

    def map_batches(self, batches: Sequence[Batch], read: Callable[[Batch], Any]) -> list[Any]:
        for parameter, host in self._on_host:
            parameter.data = host.to(self.device, non_blocking=True)
        try:
            return super().map_batches(batches, read)
        finally:
            self._leave()

    def _copied(self, weight: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return weight
        return host_zeros(weight.numel(), weight.dtype, self.device).view(weight.shape).copy_(weight)

    def _leave(self) -> None:
        for parameter, host in self._on_host:
            parameter.data = host
        self.forget_features()
        torch.cuda.empty_cache()
