"""The loss of one micro-batch of preferences, from the log-probs of its reads.

    loss = sum(losses of pairs) / pairs + nll_coef sum(-log-probs of chosen) / tokens of chosen

`Comparison` holds the denominators of the whole optimizer step, so micro-losses simply add up. A
pair is a group of two sequences, chosen (repeat 0) before rejected (repeat 1); where responses are
judged on their own, repeat 0 is a good one and repeat 1 a bad one. Knows nothing of models. Axes:
R reads, S sequences.

    >>> row = of_step(Comparison(loss="dpo", options={"beta": 0.1}), batches)
    >>> loss, sums = comparison_objective(row, new, sides_of(batch, new))
    >>> to_metrics([sums]).means()["dpo/accuracy"]
    0.75
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.objective import LossSums, mean_of
from saccade.algorithms.table import bound, parsed
from saccade.config import DpoConfig
from saccade.plugins.preferences.preference_losses import PREFERENCES, UNPAIRED, WITHOUT_REFERENCE, Labelled, Pairs
from saccade.types import Batch

CHOSEN, REJECTED = 0, 1  # repeats


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A loss on preferences with the counts of its optimizer step, as plain data."""

    loss: str
    options: Mapping[str, Any]
    nll_coef: float = 0.0
    count: int = 0  # pairs or, for an unpaired loss, responses
    chosen_tokens: int = 0
    z: float = 0.0  # of kto

    @property
    def paired(self) -> bool:
        return self.loss not in UNPAIRED

    @property
    def needs_reference(self) -> bool:
        return self.loss not in WITHOUT_REFERENCE


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Which sequence each read belongs to, and what is known of the sequences."""

    sequence: Tensor  # [R] int64
    chosen: Tensor  # [S] bool
    lengths: Tensor  # [S]
    ref: Tensor | None = None  # [S] totals under the reference


def from_config(config: DpoConfig) -> Comparison:
    """Options that are empty are the loss's own."""
    options = parsed(PREFERENCES[config.loss], config.args, "dpo.args")
    if config.beta is not None:
        options["beta"] = config.beta
    return Comparison(loss=config.loss, options=options, nll_coef=config.nll_coef)


def of_step(row: Comparison, batches: Sequence[Batch], *, z: float = 0.0) -> Comparison:
    """With the counts of all batches of an optimizer step."""
    chosen = [int(batch.lengths[_is_chosen(batch)].sum()) for batch in batches]
    responses = sum(len(batch.keys) for batch in batches)
    count = responses // 2 if row.paired else responses
    return replace(row, count=count, chosen_tokens=sum(chosen), z=z)


def sides_of(batch: Batch, like: Tensor) -> Sides:
    """What the loss reads of a batch, where `like` is."""

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(like.device)

    return Sides(
        sequence=tensor(batch.sequence),
        chosen=tensor(_is_chosen(batch)),
        lengths=tensor(batch.lengths),
        ref=None if batch.ref_totals is None else tensor(batch.ref_totals),
    )


def _is_chosen(batch: Batch) -> np.ndarray:
    return np.array([repeat == CHOSEN for _, repeat in batch.keys])


def comparison_objective(row: Comparison, new: Tensor, sides: Sides) -> tuple[Tensor, LossSums]:
    chosen, lengths = sides.chosen, sides.lengths
    # In float64: a log-ratio is the small difference of two sums over many tokens.
    totals = new.new_zeros(len(chosen), dtype=torch.float64)
    totals = totals.index_add(0, sides.sequence, new.double())
    function = PREFERENCES[row.loss].function
    if row.paired:
        pairs = _pairs(totals, sides)
        losses, found = bound(function, row.options)(pairs)
    else:
        assert sides.ref is not None, "this loss needs a reference"
        judged = Labelled(logprobs=totals, ref=sides.ref, desirable=chosen, z=totals.new_tensor(row.z))
        losses, found = bound(function, row.options)(judged)
    nll = -totals[chosen].sum()
    loss = losses.sum() / row.count
    if row.nll_coef and row.chosen_tokens:  # a step of kto may have bad responses only
        loss = loss + row.nll_coef * nll / row.chosen_tokens
    means = {NAMES[name]: mean_of(values) for name, values in found.items()} | {
        "dpo/logp_chosen": mean_of(totals[chosen]),
        "dpo/logp_rejected": mean_of(totals[~chosen]),
        "dpo/nll": (nll.detach(), lengths[chosen].sum()),
        "dpo/length_chosen": mean_of(lengths[chosen]),
        "dpo/length_rejected": mean_of(lengths[~chosen]),
    }
    tokens = torch.tensor(len(new), device=new.device)
    return loss, LossSums(tokens=tokens, terms={"policy/loss": loss.detach()}, means=means)


NAMES = {
    "chosen": "dpo/reward_chosen",
    "rejected": "dpo/reward_rejected",
    "margin": "dpo/margin",
    "acc": "dpo/accuracy",
}


def _pairs(totals: Tensor, sides: Sides) -> Pairs:
    chosen, ref = sides.chosen, sides.ref
    return Pairs(
        chosen=totals[chosen],
        rejected=totals[~chosen],
        chosen_length=sides.lengths[chosen],
        rejected_length=sides.lengths[~chosen],
        ref_chosen=None if ref is None else ref[chosen],
        ref_rejected=None if ref is None else ref[~chosen],
    )
