"""What `train_step` can train on: how a forest is read, and the function that makes a loss of it.

backend.train_step(batches, PolicyLoss(algorithm, Scoring(temperature=1.0)), lr=1e-6)
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
from saccade.trainer import MODEL_SCORING, Objective, Reader, Scoring
from saccade.trainer.forward_inputs import column, loss_inputs

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
            new, _ = trainer.read(batch, MODEL_SCORING)
            shown, scales = {"policy/ptx_loss": -new}, column(batch.per_read("scales"), new)
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
        scales = column(batch.per_read("scales"), new)
        return partial(value_objective, new, old, returns, scales, clip=self.clip)


def routers_of(model: nn.Module, coef: float) -> list[Any]:
    """What a balance loss with this weight reads; nothing without one."""
    routers = experts.routers(model) if coef else []
    if coef and not routers:
        raise ConfigError(f"train.aux_coef={coef:g}: {type(model).__name__} has no experts to balance; use 0")
    return routers


def with_balance(
    loss: Tensor, sums: LossSums, logits: Sequence[Tensor], chosen: int, coef: float, share: float, role: str
) -> tuple[Tensor, LossSums]:
    """Both with the balance loss of a mixture of experts, by the logits of its routers. A forest counts
    by its `share` of the tokens of the optimizer step. A trunk is one row of it however many leaves it
    has, so the term depends on how the rows were packed, unlike every other loss.
    """
    term = experts.balance_loss(logits, chosen) * share
    means = {**sums.means, AUX_METRICS[role]: (term.detach(), term.new_full((), share))}
    return loss + coef * term, replace(sums, means=means)
