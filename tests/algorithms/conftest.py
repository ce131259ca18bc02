"""The reference fixture: four ragged rows of at most six tokens, in float64; algorithms and small records."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.algorithms import algorithm_state, annotate
from saccade.algorithms.advantages import AdvantageInputs
from saccade.algorithms.aggregation import AGGREGATIONS, token_scales
from saccade.algorithms.corrections import Mismatch, measure
from saccade.algorithms.policy_losses import LOSSES, LossInputs, SelectionInputs
from saccade.checks.steps import algorithm_of
from saccade.config import load
from saccade.errors import ConfigError
from tests.algorithms.by_member import LENGTHS, Records, rows

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
        return measure(self.old, self.rollout, live=self.live, sequence=self.sequence, sequences=4)

    def inputs(self, **changes: Any) -> LossInputs:
        inputs = LossInputs(
            old=self.old, advantages=self.advantages, sequence=self.sequence, sequences=4,
            scales=torch.ones_like(self.old), rewards=torch.tensor(REWARDS, dtype=torch.float64)[self.sequence],
        )  # fmt: skip
        return replace(inputs, **changes)

    def scales(self, aggregation: str, *, fixed_length: int = 6) -> Tensor:
        entry = AGGREGATIONS[aggregation].with_options({"fixed_length": fixed_length})
        return token_scales(entry, self.sequence, live=torch.ones(4, dtype=torch.bool))[0]

    def selected(self, name: str, new: Tensor, options: dict[str, Any]) -> Tensor | None:
        entry = LOSSES[name].with_options(options)
        if entry.select is None:
            return None
        inputs = SelectionInputs(
            new=new.detach(), old=self.old, advantages=self.advantages, noise=(torch.arange(len(new)) * 7919) % 101
        )
        return entry.bound("select")(inputs)

    def losses(self, name: str, new: Tensor, *, weights: Tensor | None = None, **options: Any) -> Tensor:
        """[T] with its correction weights; options that the loss does not have are ignored."""
        selected = self.selected(name, new, options)
        inputs = self.inputs(weights=weights, selected=selected)
        losses, _ = LOSSES[name].with_options(options)(new, inputs)
        weighed = weights is not None and not LOSSES[name].applies_weights
        return losses * weights if weighed else losses

    def loss(
        self, name: str, aggregation: str, *, wide: bool = False, fixed_length: int = 6, **options: Any
    ) -> tuple[float, float]:
        """(value, norm of the gradient with respect to the new log-probs)"""
        new = (self.wide if wide else self.new).clone().requires_grad_()
        losses = self.losses(name, new, **options)
        total = (losses * self.scales(aggregation, fixed_length=fixed_length)).sum()
        (gradient,) = torch.autograd.grad(total, new)
        return total.item(), gradient.norm().item()

    def members(self, rewards: tuple[float, ...] = REWARDS, **changes: object):
        """The rows as two groups of two."""
        fields = {
            "rewards": torch.tensor(rewards, dtype=torch.float64), "groups": torch.tensor([0, 0, 1, 1]),
            "live": torch.ones(4, dtype=torch.bool), "baseline": torch.ones(4, dtype=torch.bool),
            "lengths": torch.tensor([6, 4, 5, 3]), "sequence": self.sequence,
            "token_penalties": torch.zeros(18, dtype=torch.float64),
        }  # fmt: skip
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


def resolved(*overrides: str, max_tokens: int = 2048, **train: Any):
    """From overrides of the `algorithm` section; those of other sections are written in full."""
    sections = ("train.", "rollout.", "algorithm.")
    full = [o if o.startswith(sections) else f"algorithm.{o}" for o in overrides]
    sizes = [f"rollout.max_tokens={max_tokens}"]
    sizes += [f"train.{name}={value}" for name, value in train.items() if value is not None]
    return algorithm_of(load(None, [*sizes, *full]))


@pytest.fixture
def algorithm():
    return resolved


@pytest.fixture
def refused():
    """The message of a refusal."""

    def message(*overrides: str, **train: Any) -> str:
        with pytest.raises(ConfigError) as refusal:
            resolved(*overrides, **train)
        return str(refusal.value)

    return message


@pytest.fixture
def records() -> type[Records]:
    return Records


@pytest.fixture
def written(records, golden):
    """The reference fixture as two groups with their advantages; in its order while nothing is packed otherwise."""

    def write(row, *, budget=1000, flip=False, updates=1, measured=False):
        groups = [records.group("a", [2.0, 0.0], LENGTHS[:2]), records.group("b", [0.5, 2.0], LENGTHS[2:])]
        groups = groups[::-1] if flip else groups
        parts = [groups] if updates == 1 else [[group] for group in groups]
        packed = records.filled(
            records.packed(parts, budget),
            old_logprobs=rows(golden.old),
            rollout_logprobs=rows(golden.rollout),
            ref_logprobs=rows(golden.ref),
            old_entropies=rows(1 + (2 * golden.sequence + 3 * golden.position).double().sin()),
        )
        known = algorithm_state.observe(algorithm_state.restore(row, None), groups, row)
        found = annotate.add_advantages(packed, groups, row, known)
        return found if measured else found[0]

    return write
