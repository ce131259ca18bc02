"""The reference fixture: four ragged rows of at most six tokens, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.algorithms.advantages import AdvantageInputs
from saccade.algorithms.aggregation import AGGREGATIONS, token_scales
from saccade.algorithms.corrections import Mismatch, measure
from saccade.algorithms.covariance import SelectionInputs
from saccade.algorithms.policy_losses import LOSSES, LossInputs
from saccade.algorithms.table import call

REWARDS = (1.0, 0.0, 0.5, 2.0)


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

    @property
    def live(self) -> Tensor:
        return torch.ones(len(self.old), dtype=torch.bool)

    @property
    def mismatch(self) -> Mismatch:
        return measure(self.old, self.rollout, live=self.live, sequence=self.sequence)

    def inputs(self, **changes: Any) -> LossInputs:
        inputs = LossInputs(
            old=self.old,
            advantages=self.advantages,
            sequence=self.sequence,
            sequences=4,
            live=self.live,
            sequence_sum=lambda x: x.new_zeros(4).index_add(0, self.sequence, x),
            rewards=torch.tensor(REWARDS, dtype=torch.float64)[self.sequence],
        )
        return replace(inputs, **changes)

    def scales(
        self, aggregation: str, *, fixed_length: int = 6, counted: Tensor | None = None
    ) -> Tensor:
        return token_scales(
            AGGREGATIONS[aggregation].function,
            self.sequence,
            live=torch.ones(4, dtype=torch.bool),
            counted=counted,
            options={"fixed_length": fixed_length},
        ).values

    def selected(self, name: str, new: Tensor, options: dict[str, Any]) -> Tensor | None:
        select = LOSSES[name].select
        if select is None:
            return None
        inputs = SelectionInputs(
            new=new.detach(),
            old=self.old,
            advantages=self.advantages,
            noise=(torch.arange(len(new)) * 7919) % 101,
        )
        return call(select, inputs, options=options)

    def losses(
        self, name: str, new: Tensor, *, weights: Tensor | None = None, **options: Any
    ) -> Tensor:
        """[T] with its correction weights; options that the loss does not have are ignored."""
        selected = self.selected(name, new, options)
        inputs = self.inputs(weights=weights, selected=selected)
        losses, _ = call(LOSSES[name].function, new, inputs, options=options)
        weighed = weights is not None and not LOSSES[name].applies_weights
        return losses * weights if weighed else losses

    def loss(
        self,
        name: str,
        aggregation: str,
        *,
        wide: bool = False,
        fixed_length: int = 6,
        keep: Tensor | None = None,
        denominator: str = "original",
        **options: Any,
    ) -> tuple[float, float]:
        """(value, norm of the gradient with respect to the new log-probs)"""
        new = (self.wide if wide else self.new).clone().requires_grad_()
        losses = self.losses(name, new, **options)
        counted = keep if denominator == "kept" else None
        scales = self.scales(aggregation, fixed_length=fixed_length, counted=counted)
        total = (losses * scales * (1 if keep is None else keep)).sum()
        (gradient,) = torch.autograd.grad(total, new)
        return total.item(), gradient.norm().item()

    def members(self, rewards: tuple[float, ...] = REWARDS, **changes: object):
        """The rows as two groups of two."""
        fields = {
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "groups": torch.tensor([0, 0, 1, 1]),
            "live": torch.ones(4, dtype=torch.bool),
            "baseline": torch.ones(4, dtype=torch.bool),
            "lengths": torch.tensor([6, 4, 5, 3]),
            "sequence": self.sequence,
            "token_penalties": torch.zeros(18, dtype=torch.float64),
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
