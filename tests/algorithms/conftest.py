"""The reference fixture: four ragged rows of at most six tokens, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from saccade.algorithms.advantages import AdvantageInputs, AdvantageOptions
from saccade.algorithms.aggregation import AGGREGATIONS, token_scales
from saccade.algorithms.policy_losses import LOSSES, LossInputs, LossOptions


@dataclass(frozen=True, kw_only=True)
class Golden:
    """Flat tensors of the 18 valid tokens."""

    old: Tensor
    new: Tensor
    wide: Tensor
    rollout: Tensor
    ref: Tensor
    advantages: Tensor
    sequence: Tensor
    position: Tensor

    def inputs(self) -> LossInputs:
        return LossInputs(
            old=self.old,
            advantages=self.advantages,
            sequence=self.sequence,
            sequences=4,
            sequence_sum=lambda x: x.new_zeros(4).index_add(0, self.sequence, x),
        )

    def scales(self, aggregation: str, fixed_length: int = 6) -> Tensor:
        function = AGGREGATIONS[aggregation].function
        live = torch.ones(4, dtype=torch.bool)
        return token_scales(function, self.sequence, live=live, fixed_length=fixed_length).values

    def loss(
        self,
        name: str,
        aggregation: str,
        *,
        wide: bool = False,
        fixed_length: int = 6,
        **options: float,
    ) -> tuple[float, float]:
        """(value, norm of the gradient with respect to the new log-probs)"""
        new = (self.wide if wide else self.new).clone().requires_grad_()
        losses, _ = LOSSES[name].function(new, self.inputs(), LossOptions(**options))
        total = (losses * self.scales(aggregation, fixed_length)).sum()
        (gradient,) = torch.autograd.grad(total, new)
        return total.item(), gradient.norm().item()

    def members(self, rewards: tuple[float, ...] = (1, 0, 0.5, 2), **changes: object):
        """The rows as two groups of two."""
        fields = {
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "groups": torch.tensor([0, 0, 1, 1]),
            "live": torch.ones(4, dtype=torch.bool),
            "baseline": torch.ones(4, dtype=torch.bool),
            "lengths": torch.tensor([6, 4, 5, 3]),
            "sequence": self.sequence,
            "token_penalties": torch.zeros(18, dtype=torch.float64),
            "options": AdvantageOptions(),
        }
        return AdvantageInputs(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def golden() -> Golden:
    i, t = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
    i, t = i.double(), t.double()
    mask = t < torch.tensor([6, 4, 5, 3])[:, None]
    old = -0.5 - 0.1 * ((3 * i + 5 * t) % 7)
    advantages = torch.tensor([1, -1, -0.75, 0.75], dtype=torch.float64)[:, None].expand(4, 6)
    return Golden(
        old=old[mask],
        new=(old + 0.3 * torch.sin(1 + i + 2 * t))[mask],
        wide=(old + 1.6 * torch.sin(1 + i + 2 * t))[mask],
        rollout=(old + 0.05 * torch.cos(2 + 3 * i + t))[mask],
        ref=(old - 0.2 * torch.sin(0.5 + i - t))[mask],
        advantages=advantages[mask],
        sequence=i[mask].long(),
        position=t[mask].long(),
    )
