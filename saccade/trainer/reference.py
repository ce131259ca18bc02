"""The reference model of a policy that trains adapters: the policy without them, or with older ones.

No second model is loaded. Knows nothing of how the policy is trained.

    AdapterReference(policy).logprobs(batches, Scoring())
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from saccade.forest.batch import Batch
from saccade.models import lora
from saccade.system.contents import File, host_copies, tensor_file
from saccade.trainer import Scoring
from saccade.trainer.local import LocalTrainer

STATE = "adapters.safetensors"


class AdapterReference:
    def __init__(self, policy: LocalTrainer) -> None:
        self.policy = policy
        self.adapters: dict[str, Tensor] = {}  # adapters of an earlier step; empty: none

    def logprobs(self, batches: Sequence[Batch], scoring: Scoring) -> list[tuple[np.ndarray, np.ndarray]]:
        model = self.policy.model
        with lora.with_adapters(model, self.adapters) if self.adapters else lora.without_adapters(model):
            return self.policy.logprobs(batches, scoring)

    def blend(self, source: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Copy the current adapters. `source` is unused: it is the policy, which this object holds."""
        assert share == 1, "a blend of weights is no adapter"
        self.adapters = lora.copy_adapters(self.policy.model)

    def saved_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.adapters.values())

    def state_files(self, *, copy: bool = False) -> Iterator[File]:
        yield STATE, tensor_file(host_copies(self.adapters, copy=copy))

    def load_state(self, folder: Path) -> None:
        from safetensors.torch import load_file

        self.adapters = {n: t.to(self.policy.device) for n, t in load_file(folder / STATE).items()}


# What a KL term compares with: frozen, unless it follows the policy.
Reference = LocalTrainer | AdapterReference
