"""The balance loss of a mixture of experts, added to whatever else a forest is trained on.

A forest counts by its share of the tokens of the optimizer step. A trunk is one row of it however
many leaves it has, so the term depends on how the rows were packed, unlike every other loss. Knows
nothing of that other loss.

    balance = Balance(model, coef=0.001)
    balance.begin(batches)
    loss, found = balance.added(batch, loss_of)          # forest by forest
    stats = balance.end([found])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

from saccade.errors import ConfigError
from saccade.models import experts
from saccade.types import Batch, Metrics

S = TypeVar("S")
NAMES = {"policy": "moe/aux_loss", "critic": "moe/aux_loss_critic"}


class Balance:
    def __init__(self, model: nn.Module, coef: float) -> None:
        self.coef = coef
        self.routers = experts.routers(model) if coef else []
        if coef and not self.routers:
            raise ConfigError(
                f"train.aux_coef={coef:g}: {type(model).__name__} has no experts to balance; "
                "try train.aux_coef=0"
            )
        self._tokens = 1
        self._seen: list[Tensor] = []

    def begin(self, batches: Sequence[Batch]) -> None:
        self._tokens = max(1, sum(batch.tokens for batch in batches))

    def added(
        self, batch: Batch, loss_of: Callable[[Batch], tuple[Tensor, S]]
    ) -> tuple[Tensor, tuple[S, Tensor | None]]:
        """The loss with this term, and beside what `loss_of` reports the term without its weight:
        a forward that runs out of memory leaves nothing behind.
        """
        if not self.routers:
            loss, stats = loss_of(batch)
            return loss, (stats, None)
        with experts.watched(self.routers) as logits:
            loss, stats = loss_of(batch)
        term = experts.balance_loss(logits, self.routers[0].top_k) * (batch.tokens / self._tokens)
        return loss + self.coef * term, (stats, term.detach())

    def end(self, found: Sequence[tuple[S, Tensor | None]]) -> list[S]:
        self._seen = [term for _, term in found if term is not None]
        return [stats for stats, _ in found]

    def report(self, role: str, metrics: Metrics) -> None:
        if self._seen:
            metrics.add(NAMES[role], sum(term.item() for term in self._seen))
