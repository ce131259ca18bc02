"""What the losses of micro-batches report: sums that stay on the device until the step is over.

>>> to_metrics([sums_of_first, sums_of_second]).means()["policy/loss"]
0.25
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.types import Metrics


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """0-d tensors of one micro-batch."""

    tokens: Tensor  # its share of the step's tokens is its share of a term's weight
    terms: Mapping[str, Tensor]  # of the loss: they add up to that of the optimizer step
    means: Mapping[str, tuple[Tensor, Tensor]]  # a total and what divides it
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # -inf: of nothing


def to_metrics(sums: Sequence[LossSums], *, step_tokens: int | None = None) -> Metrics:
    """Metrics of micro-batches of an optimizer step of `step_tokens` tokens; None: all of it. The
    device is waited for once.
    """
    metrics = Metrics()
    if not sums:
        return metrics
    tensors = {id(tensor): tensor for one in sums for tensor in _tensors(one)}
    listed = torch.stack([tensor.to(torch.float64) for tensor in tensors.values()]).tolist()
    number = dict(zip(tensors, listed, strict=True))
    whole = Counter[str]()
    for one in sums:
        whole.update(dict.fromkeys(one.terms, number[id(one.tokens)]))
    for one in sums:
        for name, term in one.terms.items():
            tokens = whole[name] if step_tokens is None else step_tokens
            share = number[id(one.tokens)] / tokens if tokens else 0.0
            metrics.add(name, number[id(term)], share)
        for name, (total, count) in one.means.items():
            metrics.add(name, number[id(total)], number[id(count)])
        for name, largest in one.maxima.items():
            if number[id(largest)] != -torch.inf:
                metrics.add_max(name, number[id(largest)])
    return metrics


def _tensors(sums: LossSums) -> Iterator[Tensor]:
    yield sums.tokens
    yield from sums.terms.values()
    yield from sums.maxima.values()
    for pair in sums.means.values():
        yield from pair


def mean_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Their sum, and what makes it a mean."""
    return values.detach().sum(), torch.tensor(len(values), device=values.device)
