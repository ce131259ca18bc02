"""What a demonstration teaches: the log-probs of its tokens, or beside them those of a teacher.

    loss = sum(l scale),  l = -log p of the token, or a mix of that with a teacher's cross-entropy

Scales hold the denominators of the whole optimizer step (and a coefficient, where the loss is one
of several), as in `objective.py`. Knows nothing of models. Axis: T tokens.

    >>> loss, sums = imitation_objective(-logprobs, {"policy/ptx_loss": -logprobs}, scales)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from saccade.algorithms.loss_sums import LossSums


def imitation_objective(
    losses: Tensor, reported: Mapping[str, Tensor], scales: Tensor, *, term: str | None = None
) -> tuple[Tensor, LossSums]:
    """`reported`: what is shown as means per token; `term`: the loss itself, by that name."""
    loss = (losses * scales).sum()
    tokens = torch.tensor(len(losses), device=losses.device)
    return loss, LossSums(
        tokens=tokens,
        terms={} if term is None else {term: loss.detach()},
        means={name: (v.detach().double().sum(), tokens) for name, v in reported.items()},
    )
