"""Heads that give numbers, as the trainer sees them: that of a critic, one number per token, stands
where the language head stood; a `SavedHead` stands beside it and has a file in the model's folder.

Knows nothing of what the numbers are trained to mean.

    attach_score(model, seed=0)
    values = read_scores(model.score, hidden[reads])

Legend: R reads, E hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saccade.system.contents import File, on_host, tensor_file


def attach_score(model: nn.Module, *, seed: int) -> None:
    """Replace `lm_head` by `score`, linear without a bias, from a normal of std 1 / (E + 1).

    An embedding that was tied to `lm_head` stays; otherwise its memory is free.
    """
    assert not hasattr(model, "score"), "the model has a score head already"
    score = nn.Linear(_size(model), 1, bias=False, device="meta")
    score.weight = drawn(model, 1, seed)
    model.score = score
    model.lm_head = None  # type: ignore[assignment]


def read_scores(score: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """hidden [R, E] → [R], in fp32 or wider."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return score(hidden.to(wide)).squeeze(-1)


class SavedHead(nn.Module):
    """`model.score` of a model that is saved without it, and with the blocks above the one it reads."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.above = file, list[nn.Module]()


@contextmanager
def without_head(model: nn.Module) -> Iterator[SavedHead | None]:
    """Inside, the model is whole and has no such head; yields it, or None where there was none."""
    head = getattr(model, "score", None)
    if not isinstance(head, SavedHead):
        yield None
        return
    del model.score
    blocks = blocks_of(model)
    blocks.extend(head.above)
    try:
        yield head
    finally:
        model.score = head
        del blocks[len(blocks) - len(head.above) :]


def head_file(head: SavedHead, *, copy: bool = False) -> File:
    tensors = {f"score.{n}": on_host(p, copy=copy) for n, p in head.named_parameters()}
    return head.file, tensor_file(tensors, {"format": "pt"})


def blocks_of(model: Any) -> nn.ModuleList:
    """Of the language model."""
    return getattr(model.get_decoder(), "layers", None) or nn.ModuleList()


def _size(model: nn.Module) -> int:
    return model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]


def drawn(model: nn.Module, count: int, seed: int) -> nn.Parameter:
    """[count, E]. In fp32 even on a bf16 model: it costs nothing, and a value is a sum of thousands
    of products. Drawn on the CPU: a seed is the same head on every device.
    """
    like, size = next(model.parameters()), _size(model)
    drawn = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) / (size + 1)
    return nn.Parameter(drawn.to(like.device, torch.promote_types(like.dtype, torch.float32)))
