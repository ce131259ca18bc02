"""Losses for `train_step`: each runs the forward of a forest and returns the function that computes its loss.

trainer.train_step(batches, PolicyLoss(algorithm, Scoring(temperature=1.0)), lr=1e-6)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from saccade.algorithms.objective import LossSums, imitation_objective, objective, value_objective
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.errors import ConfigError
from saccade.forest.batch import Batch
from saccade.models import experts
from saccade.trainer import MODEL_SCORING, ForwardModel, Objective, Scoring
from saccade.trainer.forward_inputs import column, loss_inputs

AUX_METRICS = {"policy": "moe/aux_loss", "critic": "moe/aux_loss_critic"}


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of an algorithm on sampled tokens; cross-entropy on a batch without advantages."""

    algorithm: Algorithm
    scoring: Scoring
    role: ClassVar[str] = "policy"
    whole: ClassVar[bool] = False

    def forward(self, trainer: ForwardModel, batch: Batch) -> Objective:
        if batch.advantages is None:  # a demonstration
            new, _ = trainer.score(batch, MODEL_SCORING)
            shown, scales = {"policy/ptx_loss": -new}, column(batch.per_target("scales"), new)
            return partial(imitation_objective, -new, shown, scales)
        asked = self.algorithm.entropy_coef != 0
        new, entropy = trainer.score(batch, self.scoring, entropy_gradient=asked)
        assert batch.old_logprobs is not None or self.algorithm.old != "recompute", "old log-probs were not computed"
        inputs = loss_inputs(batch, new, images=trainer.family.spec.image_token is not None)
        return partial(objective, self.algorithm, new, entropy, inputs)


@dataclass(frozen=True)
class ValueLoss:
    """The loss of a critic, on batches with values, returns and scales."""

    clip: float
    role: ClassVar[str] = "critic"
    whole: ClassVar[bool] = False

    def forward(self, trainer: ForwardModel, batch: Batch) -> Objective:
        new = trainer.values_at(batch, batch.predictors)
        old, returns = column(batch.values, new), column(batch.returns, new)
        scales = column(batch.per_target("scales"), new)
        return partial(value_objective, new, old, returns, scales, clip=self.clip)


def routers_of(model: nn.Module, coef: float) -> list[Any]:
    """The routers whose logits a balance loss with this weight needs; none if it is 0."""
    routers = experts.routers(model) if coef else []
    if coef and not routers:
        raise ConfigError(f"train.aux_coef={coef:g}: {type(model).__name__} has no experts to balance; use 0")
    return routers


def with_balance(
    loss: Tensor, sums: LossSums, logits: Sequence[Tensor], chosen: int, coef: float, share: float, role: str
) -> tuple[Tensor, LossSums]:
    """Add the balance loss of a mixture of experts, computed from its routers' logits, to loss and sums.
    A forest is weighted by its `share` of the tokens of the optimizer step. A trunk counts once however
    many leaves it has, so the term depends on how the rows were packed, unlike every other loss.
    """
    term = experts.balance_loss(logits, chosen) * share
    means = {**sums.means, AUX_METRICS[role]: (term.detach(), term.new_full((), share))}
    return loss + coef * term, replace(sums, means=means)
