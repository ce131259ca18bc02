"""What trains and scores: a model with an optional optimizer. Policy, reference and critic are
instances of one thing.

Arguments are records: forests, the algorithm, references to images.
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


MODEL_SCORING = Scoring(ban=False)  # the distribution of the model itself, for what it did not sample


@dataclass(frozen=True, kw_only=True)
class Update:
    """What became of one optimizer step."""

    metrics: Metrics
    skipped: bool  # a loss or gradient was not finite: parameters and optimizer are as before


class Trainer(Protocol):
    """What a recipe sees of a model: it is in this process (`local.LocalBackend`), or on several GPUs."""

    model: Any  # its names and shapes; the weights may be elsewhere
    family: Family
    device: torch.device
    dtype: torch.dtype
    parts: int  # among which the forests of a step are dealt
    engine: Any  # that generates with the same weights, where it brings one

    def logprobs(self, batches: Sequence[Batch], scoring: Scoring) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def values(self, batches: Sequence[Batch]) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def train_step(self, batches: Sequence[Batch], loss: "Loss", *, lr: float, moves: bool = True) -> Update: ...

    def measure(self, batches: Sequence[Batch], loss: "Loss") -> Metrics:
        """What a step on these batches would report, without it."""
        ...

    def repeats(self) -> float:
        """Share of the layers that computed their activations again since the last call."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...], int]]: ...

    def spare_bytes(self) -> int: ...

    def saved_bytes(self) -> int: ...

    def model_files(self, *, copy: bool = False) -> list[File]: ...

    def state_files(self, *, copy: bool = False) -> Iterable[File]: ...

    def load_state(self, folder: Path) -> None: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """What a loss sees of a backend: the model, read on one forest."""

    model: nn.Module
    family: Family
    device: torch.device

    def read(self, batch: Batch, scoring: Scoring, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]: ...

    def read_values(self, batch: Batch, places: np.ndarray) -> Tensor: ...

    def hidden_at(self, batch: Batch, places: np.ndarray) -> Tensor: ...

    def at_reads(self, batch: Batch, found: Callable[[Any], Sequence[Tensor]]) -> list[Tensor]:
        """What is found for every read of a forest, where this process may look at some of its tokens only."""
        ...


class Loss(Protocol):
    """The loss of one micro-batch. Its denominators are those of the whole optimizer step, so
    micro-losses simply add up.
    """

    @property
    def role(self) -> str:
        """Prefix of its metrics: policy or critic."""
        ...

    @property
    def whole(self) -> bool:
        """Whether the members of a group are compared, so that they stay in one micro-batch."""
        ...

    def read(self, trainer: Reader, batch: Batch) -> Objective:
        """The forward of a forest; what it returns computes loss and sums from its outputs."""
        ...
