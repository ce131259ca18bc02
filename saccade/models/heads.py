"""Heads that give numbers: one per token for a critic, some per sequence for a reward model.

Knows nothing of what the numbers are trained to mean. A critic's head stands where the language
head stood; a reward model keeps that one, at rest, so that its folder stays a whole model.

    attach_score(model, seed=0)
    values = read_scores(model.score, hidden[reads])

    attach_reward(model, RewardHead(like=model, heads=1, pooling="last", seed=0))
    scores = model.score(hidden, sequence, count)  # [sequences, heads]

Legend: R reads, E hidden size, S sequences, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import EnvironmentProblem

REWARD_FILE = "reward_head.safetensors"


def attach_score(model: nn.Module, *, seed: int) -> None:
    """Replace `lm_head` by `score`, linear without a bias, from a normal of std 1 / (E + 1).

    An embedding that was tied to `lm_head` stays; otherwise its memory is free.
    """
    assert not hasattr(model, "score"), "the model has a score head already"
    score = nn.Linear(_size(model), 1, bias=False, device="meta")
    score.weight = _drawn(model, 1, seed)
    model.score = score
    model.lm_head = None  # type: ignore[assignment]


@torch.no_grad()
def start_score(model: nn.Module, folder: Path) -> None:
    """A critic that starts from a reward model reads values as that one read its first score."""
    from safetensors.torch import load_file

    if (folder / REWARD_FILE).is_file():
        model.score.weight.copy_(load_file(folder / REWARD_FILE)["score.weight"][:1])  # type: ignore


def read_scores(score: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """hidden [R, E] → [R], in fp32 or wider."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return score(hidden.to(wide)).squeeze(-1)


class RewardHead(nn.Module):
    """Pools the hidden states of each sequence and gives it a number per head."""

    def __init__(
        self, *, like: nn.Module, heads: int, pooling: str, seed: int, first_log_scale: float = 0.0
    ) -> None:
        """`first_log_scale` starts a scale that some losses learn beside the scores."""
        super().__init__()
        self.pooling = pooling
        self.weight = _drawn(like, heads, seed)
        # At first all states count alike; with `mean` it stays so.
        self.query = nn.Parameter(torch.zeros_like(self.weight[0]))
        self.log_scale = nn.Parameter(torch.full_like(self.weight[0, :1], first_log_scale))
        self.query.requires_grad_(pooling == "attention")
        self.log_scale.requires_grad_(first_log_scale != 0)

    def forward(self, hidden: Tensor, sequence: Tensor, count: int) -> Tensor:
        """hidden [R, E] of sequences [R] → [S, H]. With `last` there is one state of each."""
        hidden = hidden.to(self.weight.dtype)
        if self.pooling == "last":
            return hidden @ self.weight.T
        logits = hidden @ self.query / len(self.query) ** 0.5
        highest = logits.detach().new_full((count,), -torch.inf)
        highest = highest.scatter_reduce(0, sequence, logits.detach(), "amax")
        weights = (logits - highest[sequence]).exp()
        total = weights.new_zeros(count).index_add(0, sequence, weights)
        weights = weights / total[sequence]
        scores = weights[:, None] * (hidden @ self.weight.T)
        return scores.new_zeros(count, len(self.weight)).index_add(0, sequence, scores)


def attach_reward(model: nn.Module, head: RewardHead) -> None:
    """An untied `lm_head` stays as it is, for the folder's sake; it learns nothing."""
    model.score = head
    output, embedding = model.lm_head.weight, model.get_input_embeddings().weight  # type: ignore
    if output is not embedding:
        output.requires_grad_(False)


@contextmanager
def without_reward(model: nn.Module) -> Iterator[RewardHead | None]:
    """Inside, the model has no reward head; it, or None where there was none."""
    head = getattr(model, "score", None)
    if not isinstance(head, RewardHead):
        yield None
        return
    del model.score
    try:
        yield head
    finally:
        model.score = head


def save_reward(head: RewardHead, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {f"score.{n}": p.detach().cpu().contiguous() for n, p in head.named_parameters()}
    save_file(tensors, folder / REWARD_FILE, metadata={"format": "pt"})


@torch.no_grad()
def load_reward(head: RewardHead, folder: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(folder / REWARD_FILE)
    mine: dict[str, Any] = {f"score.{n}": p for n, p in head.named_parameters()}
    if {n: p.shape for n, p in mine.items()} != {n: p.shape for n, p in stored.items()}:
        raise EnvironmentProblem(f"{folder / REWARD_FILE}: its tensors do not fit config.json")
    for name, parameter in mine.items():
        parameter.copy_(stored[name])


def _size(model: nn.Module) -> int:
    return model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]


def _drawn(model: nn.Module, count: int, seed: int) -> nn.Parameter:
    """[count, E]. In fp32 even on a bf16 model: it costs nothing, and a value is a sum of thousands
    of products. Drawn on the CPU: a seed is the same head on every device.
    """
    like, size = next(model.parameters()), _size(model)
    drawn = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) / (size + 1)
    return nn.Parameter(drawn.to(like.device, torch.promote_types(like.dtype, torch.float32)))
