"""How token losses become one number: every aggregation is a constant factor per sequence.

    loss = sum over tokens of  l * k * w * scale[sequence]

Scales are computed once over all sequences of an optimizer step and stored with the tokens, so
micro-batches, ranks and the order of samples cannot change the result. Knows nothing of losses. An
aggregation gets lengths [S] (0: not live), the trajectory and the group of each sequence [S], and
returns a scale [S]. Axes: T tokens, S sequences.

    >>> token_scales(AGGREGATIONS["seq_mean"], sequence, live=live)[0].sum()
    tensor(1., dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from saccade.algorithms.table import Count, add, table_of

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = table_of("aggregations")


@add(AGGREGATIONS, "sum(l) / N")
def token_mean(lengths: Tensor, trajectory: Tensor, group: Tensor) -> Tensor:
    return inverse(lengths.sum().expand_as(lengths), lengths)


@add(AGGREGATIONS, "mean over sequences of sum(l) / n_i")
def seq_mean(lengths: Tensor, trajectory: Tensor, group: Tensor) -> Tensor:
    return inverse(_live(lengths) * lengths, lengths)


@add(AGGREGATIONS, "mean over sequences of sum(l)")
def seq_sum(lengths: Tensor, trajectory: Tensor, group: Tensor) -> Tensor:
    return inverse(_live(lengths).expand_as(lengths), lengths)


@add(AGGREGATIONS, "sum(l) / (S * fixed_length)")
def fixed(lengths: Tensor, trajectory: Tensor, group: Tensor, *, fixed_length: Count) -> Tensor:
    """A constant in place of the length, as in Dr. GRPO (arXiv 2503.20783)."""
    return inverse((_live(lengths) * fixed_length).expand_as(lengths), lengths)


def _live(lengths: Tensor) -> Tensor:
    return (lengths > 0).sum()


def inverse(denominator: Tensor, lengths: Tensor) -> Tensor:
    """1 / denominator where the sequence is live, else 0: nothing live gives zeros, never 0/0."""
    live = lengths > 0
    return 1 / denominator.double().where(live, float("inf"))


def token_scales(
    aggregation: Callable[..., Tensor],
    sequence: Tensor,  # [T] index of the sequence of each token
    *,
    live: Tensor,  # [S] bool
    group: Tensor | None = None,  # [S]; None: each sequence is its own group
    counted: Tensor | None = None,  # [T] bool, tokens that count as trained; None: all
) -> tuple[Tensor, Tensor]:
    """Returns scales [T] in float64, 0 for tokens that do not count, and the number of counted tokens of
    each sequence [S]. Exclusion enters the loss only here, numerator and denominator together.
    """
    counted = sequence >= 0 if counted is None else counted
    owners, counts = masked_select(sequence, counted).unique_consecutive(return_counts=True)
    lengths = counts.new_zeros(len(live)).index_add(0, owners, counts) * live
    return fill_outside(sequence_scales(aggregation, lengths, group).index_select(0, sequence), counted), lengths


def sequence_scales(aggregation: Callable[..., Tensor], lengths: Tensor, group: Tensor | None = None) -> Tensor:
    """Scales [S], from the number of counted tokens of each sequence [S]."""
    own = lengths.new_ones(len(lengths)).cumsum(0)
    return aggregation(lengths, own, own if group is None else group)


# With millions of tokens numpy reads a mask faster than torch, and `index_select` is faster than `values[index]`.


def fill_outside(values: Tensor, mask: Tensor, other: float = 0.0) -> Tensor:
    """Values [T] where the mask is set, else `other`. On a CPU, returns `values` itself if the mask is all set."""
    return values if mask.device.type == "cpu" and mask.numpy().all() else values.where(mask, other)


def masked_select(values: Tensor, mask: Tensor) -> Tensor:
    """The values where the mask [T] is set; `values` itself, not a copy, if all of it is."""
    return values if mask.numpy().all() else values[mask]
