"""What `train_step` can train on, as plain data, which crosses a process: how a forest is read, and
the function that makes a loss of it.

    backend.train_step(batches, PolicyLoss(algorithm, Scoring(temperature=1.0)), lr=1e-6)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from saccade.algorithms.objective import imitation_objective, objective, value_objective
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.plugins.preferences.comparison import Comparison, comparison_objective, sides_of
from saccade.trainer import OWN, Objective, Reader, Scoring
from saccade.trainer.forward_inputs import column, columns_of
from saccade.types import Batch


@dataclass(frozen=True)
class PolicyLoss:
    """What an algorithm makes of sampled tokens. A batch without advantages is imitated."""

    algorithm: Algorithm
    scoring: Scoring
    role: ClassVar[str] = "policy"
    whole: ClassVar[bool] = False

    def read(self, trainer: Reader, batch: Batch) -> Objective:
        if batch.advantages is None:  # a demonstration, beside what was sampled
            new, _ = trainer.read(batch, OWN)
            shown, scales = {"policy/ptx_loss": -new}, column(batch.scales, new)
            return partial(imitation_objective, -new, shown, scales)
        asked = self.algorithm.entropy_coef != 0
        new, entropy = trainer.read(batch, self.scoring, entropy_gradient=asked)
        columns = columns_of(batch, trainer.family, new)
        return partial(objective, self.algorithm, new, entropy, columns)


@dataclass(frozen=True)
class ValueLoss:
    """A critic, on batches with values, returns and scales."""

    clip: float
    role: ClassVar[str] = "critic"
    whole: ClassVar[bool] = False

    def read(self, trainer: Reader, batch: Batch) -> Objective:
        new = trainer.read_values(batch, batch.reads)
        old, returns = column(batch.values, new), column(batch.returns, new)
        scales = column(batch.scales, new)
        return partial(value_objective, new, old, returns, scales, clip=self.clip)


@dataclass(frozen=True)
class PreferenceLoss:
    """Responses that are compared; `comparison` holds the counts of the optimizer step."""

    comparison: Comparison
    role: ClassVar[str] = "policy"

    @property
    def whole(self) -> bool:
        return self.comparison.paired

    def read(self, trainer: Reader, batch: Batch) -> Objective:
        new, _ = trainer.read(batch, OWN)
        return partial(comparison_objective, self.comparison, new, sides_of(batch, new))
