"""Mixtures of experts: their routers, and a loss that balances how often experts are used.

The matrix products are transformers' own. `grouped_mm` suits training and decoding: tokens are sorted by expert, and
each selected expert is read once. `batched_mm` copies an expert's matrices for every token that chose it (350 MB
each in a Mixtral 8x7B), and `eager` synchronises with the host to find the selected experts.

    with recorded_logits(routers(model)) as logits: model(...)
    balance_loss(logits, chosen=2)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MARK = ".experts."  # occurs in the name of every expert matrix


def routers(model: nn.Module) -> list[Any]:
    """The modules that choose experts, in layer order; empty: the model is not a mixture of experts."""
    found = [module for module in model.modules() if isinstance(getattr(module, "top_k", None), int)]
    return [module for module in found if isinstance(getattr(module, "weight", None), nn.Parameter)]


def count(model: nn.Module) -> int:
    """Number of parameters in all experts."""
    return sum(p.numel() for name, p in model.named_parameters() if MARK in name)


@contextmanager
def recorded_logits(found: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the logits [tokens, experts] of every forward of these routers, with gradient."""
    logits: list[Tensor] = []
    hooks = [r.register_forward_hook(lambda _, __, out: logits.append(out[0])) for r in found]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(logits: Sequence[Tensor], chosen: int) -> Tensor:
    """experts * sum over experts of (share of tokens that chose it) * (its mean probability), over all layers:
    equals `chosen` if all experts are used equally, larger otherwise.
    """
    experts = logits[0].shape[-1]
    taken = wanted = torch.zeros(experts, device=logits[0].device)
    for layer in logits:
        odds = layer.float().softmax(-1)
        best = odds.detach().topk(chosen, dim=-1).indices
        taken = taken + torch.zeros_like(odds).scatter_(1, best, 1.0).sum(0)
        wanted = wanted + odds.sum(0)
    rows = sum(map(len, logits))
    return experts * (taken / rows * wanted / rows).sum()


def capturable(model: Any) -> bool:
    """Whether a forward can be captured in a CUDA graph. On data-centre GPUs since Hopper the grouped product reads
    the number of tokens per expert on the device; elsewhere it synchronises with the host.
    """
    if not routers(model):
        return True
    grouped = getattr(model.config, "_experts_implementation", None) == "grouped_mm"
    major, _ = torch.cuda.get_device_capability(model.device)
    return grouped and model.dtype == torch.bfloat16 and major in (9, 10)
