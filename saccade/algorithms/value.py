"""What a critic learns: the value of each read against its return.

    loss = 1/2 sum(max((V - Ret)^2, (V_old + clip(V - V_old) - Ret)^2) scale)

Scales hold the denominators of the whole optimizer step, as in `objective.py`. Tokens with scale 0
are not live: nothing about them, not even NaN, reaches the loss or a metric. Knows nothing of
models. Axis: T tokens.

    >>> loss, sums = value_objective(new, old, returns, scales, clip=0.2)
    >>> to_metrics([sums]).means()["critic/clip_frac"]
    0.0
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.algorithms.loss_sums import LossSums


def value_loss(new: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Loss [T] and where the clip holds the gradient back [T] bool; clip 0 is the plain square."""
    error = (new - returns).square()
    if clip == 0:
        return error / 2, torch.zeros_like(error, dtype=torch.bool)
    moved = new - old
    # Not old + moved inside the bounds: its rounding would count as a clip.
    bounded = new.where(moved.abs() <= clip, old + moved.clamp(-clip, clip))
    held = (bounded - returns).square()
    return torch.maximum(error, held) / 2, held > error


def value_objective(
    new: Tensor, old: Tensor, returns: Tensor, scales: Tensor, *, clip: float
) -> tuple[Tensor, LossSums]:
    live = scales > 0
    new, old, returns = (column.where(live, 0.0) for column in (new, old, returns))
    losses, clipped = value_loss(new, old, returns, clip=clip)
    loss = (losses * scales).sum()
    tokens = live.sum()
    means = {"critic/clip_frac": clipped.sum(), "critic/value_mean": new.detach().sum()}
    return loss, LossSums(
        tokens=tokens,
        terms={"critic/loss": loss.detach()},
        means={name: (total, tokens) for name, total in means.items()},
    )


def explained_variance(values: Tensor, returns: Tensor, live: Tensor) -> float | None:
    """1 - Var(Ret - V) / Var(Ret) over live tokens; None where returns do not vary."""
    values, returns = values[live].double(), returns[live].double()
    if len(returns) == 0 or bool((returns == returns[0]).all()):
        return None
    return 1 - ((returns - values).var() / returns.var()).item()
