"""The interface of a trainer: a model with an optional optimizer. Policy, critic and reference are
instances of the same class (except the reference of a policy with adapters: `reference.py`).

Arguments are plain records: forests, the algorithm, references to images.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from saccade.algorithms.objective import LossSums
from saccade.forest.batch import Batch
from saccade.models.families import Family
from saccade.system.contents import File
from saccade.types import Metrics

Objective = Callable[[], tuple[Tensor, LossSums]]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Which distribution a log-prob belongs to: that of the rollout, or the model's own."""

    temperature: float = 1.0
    ban: bool = True  # remove the ids that are never sampled


MODEL_SCORING = Scoring(ban=False)  # the model's own distribution, for tokens that it did not sample


@dataclass(frozen=True, kw_only=True)
class Update:
    """The result of one optimizer step."""

    metrics: Metrics
    skipped: bool  # a loss or gradient was not finite: parameters and optimizer are unchanged


class Trainer(Protocol):
    """The interface of recipes to a model, in this process (`local.LocalTrainer`) or on several GPUs."""

    model: Any  # for its names and shapes; the weights may be in other processes
    family: Family
    device: torch.device
    dtype: torch.dtype
    dp_size: int  # number of data-parallel groups over which the forests of a step are dealt
    engine: Any  # generates with the same weights; None: the recipe makes one
    changes: int  # optimizer steps that have begun to change the weights

    def logprobs(self, batches: Sequence[Batch], scoring: Scoring) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def values(self, batches: Sequence[Batch]) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def train_step(self, batches: Sequence[Batch], loss: "Loss", *, lr: float, moves: bool = True) -> Update: ...

    def measure(self, batches: Sequence[Batch], loss: "Loss") -> Metrics:
        """The metrics that a step on these batches would report, without taking it."""

    def recomputed_share(self) -> float:
        """Share of the layer forwards since the last call whose activations were recomputed in backward."""

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...], int]]: ...

    def spare_bytes(self) -> int: ...

    def saved_bytes(self) -> int: ...

    def model_files(self, *, copy: bool = False) -> list[File]: ...

    def state_files(self, *, copy: bool = False) -> Iterable[File]: ...

    def load_state(self, folder: Path) -> None: ...

    def close(self) -> None: ...


class ForwardModel(Protocol):
    """The interface of a loss to the model: forwards on one forest."""

    model: nn.Module
    family: Family
    device: torch.device

    def score(self, batch: Batch, scoring: Scoring, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]: ...

    def values_at(self, batch: Batch, places: np.ndarray) -> Tensor: ...

    def hidden_at(self, batch: Batch, places: np.ndarray) -> Tensor: ...

    def at_targets(self, batch: Batch, compute: Callable[[Any], Sequence[Tensor]]) -> list[Tensor]:
        """Apply `compute` to the tokens of this process; return its rows for all targets, gathered over processes."""


class Loss(Protocol):
    """The loss of one micro-batch. Its denominators are those of the whole optimizer step, so
    micro-losses simply add up.
    """

    @property
    def role(self) -> str:
        """Prefix of its metrics: policy or critic."""

    @property
    def whole(self) -> bool:
        """Whether the members of a group are compared, so that they stay in one micro-batch."""

    def forward(self, trainer: ForwardModel, batch: Batch) -> Objective:
        """Run the forward of a forest; the returned function computes loss and sums from its outputs."""
