"""What `train_step` can train on: how a forest is read, and the function that makes a loss of it.

backend.train_step(batches, PolicyLoss(algorithm, Scoring(temperature=1.0)), lr=1e-6)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from saccade.algorithms.objective import LossSums, imitation_objective, objective, value_objective
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.errors import ConfigError
from saccade.models import experts
from saccade.trainer import OWN, Objective, Reader, Scoring
from saccade.trainer.forward_inputs import column, loss_inputs
from saccade.types import Batch

AUX_METRICS = {"policy": "moe/aux_loss", "critic": "moe/aux_loss_critic"}


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
        assert batch.old_logprobs is not None or self.algorithm.old != "recompute", "old log-probs were not computed"
        inputs = loss_inputs(batch, new, images=trainer.family.spec.image_token is not None)
        return partial(objective, self.algorithm, new, entropy, inputs)


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


class Balance:
    """The balance loss of a mixture of experts, added to whatever else a forest is trained on.

    A forest counts by its share of the tokens of the optimizer step. A trunk is one row of it
    however many leaves it has, so the term depends on how the rows were packed, unlike every other
    loss.
    """

    def __init__(self, model: nn.Module, coef: float) -> None:
        self.coef = coef
        self.routers = experts.routers(model) if coef else []
        if coef and not self.routers:
            raise ConfigError(f"train.aux_coef={coef:g}: {type(model).__name__} has no experts to balance; use 0")

    def watched(self) -> AbstractContextManager[list[Tensor]]:
        """The logits of the routers in the forwards inside."""
        return experts.watched(self.routers)

    def added(
        self, loss: Tensor, sums: LossSums, logits: Sequence[Tensor], share: float, *, role: str
    ) -> tuple[Tensor, LossSums]:
        """Both with this term; `share`: of the tokens of the optimizer step."""
        if not self.routers:
            return loss, sums
        term = experts.balance_loss(logits, self.routers[0].top_k) * share
        means = {**sums.means, AUX_METRICS[role]: (term.detach(), term.new_full((), share))}
        return loss + self.coef * term, replace(sums, means=means)
