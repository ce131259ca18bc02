"""Functions of your own, one for each axis of an algorithm; the rest of the row stays as it is.

    saccade rl run.yaml \\
      algorithm.advantage=examples/my_algorithm.py:best_of_rest \\
      algorithm.policy_loss=examples/my_algorithm.py:soft_clip algorithm.args='{width: 0.3}' \\
      algorithm.aggregation=examples/my_algorithm.py:root_length \\
      algorithm.kl.kind=examples/my_algorithm.py:huber algorithm.kl.coef=0.01 \\
      algorithm.correct=examples/my_algorithm.py:drop_outliers \\
      algorithm.filter.function=examples/my_algorithm.py:only_pictures

The keyword-only parameters of a function are its options. A plain function is enough; an `Entry`
around it says more, such as that the rules of groups hold. Try it from the folder of the
repository:

    $ python examples/my_algorithm.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.algorithms.advantages import AdvantageInputs
from saccade.algorithms.corrections import Correction, Mismatch
from saccade.algorithms.policy_losses import Losses, LossInputs, log_ratio
from saccade.algorithms.table import Entry
from saccade.types import Group


def _best_of_rest(inputs: AdvantageInputs) -> Tensor:
    """R minus the best score among the other members of the group."""
    scores, result = inputs.scores, inputs.scores.clone()
    for member in range(len(scores)):
        others = (inputs.groups == inputs.groups[member]) & inputs.baseline
        others[member] = False
        if others.any():
            result[member] -= scores[others].max()
    return inputs.per_token(result)


best_of_rest = Entry(function=_best_of_rest, formula="R - max of the others", group=True)


def soft_clip(new: Tensor, inputs: LossInputs, *, width: float = 0.2) -> Losses:
    """-A width tanh((r - 1) / width): a clip without a corner."""
    moved = log_ratio(new, inputs.old).expm1()
    return -inputs.advantages * width * (moved / width).tanh(), {"saturated": moved.abs() > width}


def root_length(lengths: Tensor, trajectory: Tensor, group: Tensor) -> Tensor:
    """sum(l) / sqrt(n), mean over sequences: between seq_mean and seq_sum."""
    live = lengths > 0
    return (1 / (live.sum() * lengths.double().sqrt())).where(live, 0.0)


def huber(new: Tensor, ref: Tensor) -> Tensor:
    """u^2 / 2 near the reference, |u| - 1/2 far from it."""
    return torch.nn.functional.huber_loss(new, ref, reduction="none")


def drop_outliers(mismatch: Mismatch) -> Correction:
    """No token whose probability differs threefold between engine and trainer."""
    return Correction(keep=mismatch.delta.abs() < 1.1)


def only_pictures(groups: Sequence[Group]) -> list[Group]:
    """Groups whose question shows an image."""
    return [group for group in groups if group.sample.media]


if __name__ == "__main__":
    from saccade.algorithms.build import resolve
    from saccade.algorithms.describe import describe
    from saccade.config import AlgorithmConfig

    names = {
        "advantage": "best_of_rest",
        "policy_loss": "soft_clip",
        "aggregation": "root_length",
        "correct": "drop_outliers",
    }
    mine = {axis: f"{__file__}:{name}" for axis, name in names.items()}
    options = {"kl": {"kind": f"{__file__}:huber", "coef": 0.01}, "args": {"width": 0.3}}
    print(describe(resolve(AlgorithmConfig(**mine, **options), max_tokens=512)))
