"""The balance loss of a mixture of experts, added to whatever else a forest is trained on.

A forest counts by its share of the tokens of the optimizer step. A trunk is one row of it however
many leaves it has, so the term depends on how the rows were packed, unlike every other loss. Knows
nothing of that other loss.

    balance = Balance(model, coef=0.001)
    with balance.watched() as logits:
        loss, sums = ...                                   # the forward of a forest
    loss, sums = balance.added(loss, sums, logits, share, role="policy")
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor, nn

from saccade.algorithms.objective import LossSums
from saccade.errors import ConfigError
from saccade.models import experts

NAMES = {"policy": "moe/aux_loss", "critic": "moe/aux_loss_critic"}


class Balance:
    def __init__(self, model: nn.Module, coef: float) -> None:
        self.coef = coef
        self.routers = experts.routers(model) if coef else []
        if coef and not self.routers:
            raise ConfigError(
                f"train.aux_coef={coef:g}: {type(model).__name__} has no experts to balance; try train.aux_coef=0"
            )

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
        means = {**sums.means, NAMES[role]: (term.detach(), term.new_full((), share))}
        return loss + self.coef * term, replace(sums, means=means)
