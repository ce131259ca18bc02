"""What a demonstration teaches: the log-probs of its tokens, or beside them those of a teacher.

    loss = sum(l scale),  l = -log p of the token, or a mix of that with a teacher's cross-entropy

Scales hold the denominators of the whole optimizer step (and a coefficient, where the loss is one
of several), as in `objective.py`. Knows nothing of models. Axis: T tokens.

    >>> loss, stats = imitation_objective(-logprobs, {"ptx/loss": -logprobs}, scales)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.types import Metrics


@dataclass(frozen=True, kw_only=True)
class ImitationStats:
    """0-d tensors; they stay on the device until `imitation_metrics`."""

    tokens: Tensor
    loss: Tensor  # share of the step's
    sums: Mapping[str, Tensor]  # over tokens, without scale


def imitation_objective(
    losses: Tensor, reported: Mapping[str, Tensor], scales: Tensor
) -> tuple[Tensor, ImitationStats]:
    loss = (losses * scales).sum()
    return loss, ImitationStats(
        tokens=torch.tensor(len(losses), device=losses.device),
        loss=loss.detach(),
        sums={name: values.detach().double().sum() for name, values in reported.items()},
    )


def imitation_metrics(stats: Sequence[ImitationStats]) -> tuple[float, Metrics]:
    """The loss of all micro-batches, and means per token. The device is waited for once."""
    metrics = Metrics()
    if not stats:
        return 0.0, metrics
    names = list(stats[0].sums)
    rows = [torch.stack([s.loss, s.tokens, *s.sums.values()]).double() for s in stats]
    loss, tokens, *sums = torch.stack(rows).sum(0).tolist()
    for name, total in zip(names, sums, strict=True):
        metrics.add(name, total, tokens)
    return loss, metrics
