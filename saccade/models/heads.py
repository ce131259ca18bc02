"""Heads that stand where the language head stood: one number per token, for a critic.

Knows nothing of what the number is trained to mean.

    attach_score(model, seed=0)
    values = read_scores(model.score, hidden[reads])

Legend: R reads, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def attach_score(model: nn.Module, *, seed: int) -> None:
    """Replace `lm_head` by `score`, linear without a bias, from a normal of std 1 / (E + 1).

    An embedding that was tied to `lm_head` stays; otherwise its memory is free.
    """
    assert not hasattr(model, "score"), "the model has a score head already"
    size = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    like = next(model.parameters())
    # In fp32 even on a bf16 model: it costs nothing, and a value is a sum of thousands of products.
    dtype = torch.promote_types(like.dtype, torch.float32)
    # Drawn on the CPU: a seed is the same head on every device.
    drawn = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) / (size + 1)
    score = nn.Linear(size, 1, bias=False, device="meta")
    score.weight = nn.Parameter(drawn.to(like.device, dtype))
    model.score = score
    model.lm_head = None  # type: ignore[assignment]


def read_scores(score: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """hidden [R, E] → [R], in fp32 or wider."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return score(hidden.to(wide)).squeeze(-1)
