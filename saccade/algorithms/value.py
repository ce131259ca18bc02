"""What a critic learns: the value of each read against its return.

    loss = 1/2 sum(max((V - Ret)^2, (V_old + clip(V - V_old) - Ret)^2) scale)

Scales hold the denominators of the whole optimizer step, as in `objective.py`. Tokens with scale 0
are not live: nothing about them, not even NaN, reaches the loss or a metric. Knows nothing of
models. Axis: T tokens.

    >>> loss, stats = value_objective(new, old, returns, scales, clip=0.2)
    >>> value_metrics([stats]).means()["critic/clip_frac"]
    0.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.types import Metrics


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


@dataclass(frozen=True, kw_only=True)
class ValueStats:
    """Sums over live tokens as 0-d tensors; they stay on the device until `value_metrics`."""

    tokens: Tensor
    loss: Tensor
    clipped: Tensor
    value: Tensor


def value_objective(
    new: Tensor, old: Tensor, returns: Tensor, scales: Tensor, *, clip: float
) -> tuple[Tensor, ValueStats]:
    live = scales > 0
    new, old, returns = (column.where(live, 0.0) for column in (new, old, returns))
    losses, clipped = value_loss(new, old, returns, clip=clip)
    loss = (losses * scales).sum()
    return loss, ValueStats(
        tokens=live.sum(), loss=loss.detach(), clipped=clipped.sum(), value=new.detach().sum()
    )


def value_metrics(stats: Sequence[ValueStats]) -> Metrics:
    """Metrics of all micro-batches of an optimizer step. The device is waited for once."""
    metrics = Metrics()
    if not stats:
        return metrics
    rows = [torch.stack([s.tokens, s.loss, s.clipped, s.value]).double() for s in stats]
    tokens, loss, clipped, value = torch.stack(rows).sum(0).tolist()
    metrics.add("critic/loss", loss)
    metrics.add("critic/clip_frac", clipped, tokens)
    metrics.add("critic/value_mean", value, tokens)
    return metrics


def explained_variance(values: Tensor, returns: Tensor, live: Tensor) -> float | None:
    """1 - Var(Ret - V) / Var(Ret) over live tokens; None where returns do not vary."""
    values, returns = values[live].double(), returns[live].double()
    if len(returns) == 0 or bool((returns == returns[0]).all()):
        return None
    return 1 - ((returns - values).var() / returns.var()).item()
