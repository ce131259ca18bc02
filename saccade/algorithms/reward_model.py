"""Losses on the scores of a scalar reward model: one per pair, to be minimised.

A loss is `f(chosen, rejected, *, options) -> [P]` on fp32 scores. Which pairs have a label, and for
which head, is for the caller to select: a missing label is no tie. Knows nothing of heads,
coefficients or denominators. Axis: P pairs.

    >>> REWARD_LOSSES["bt"].function(chosen, rejected, margin=0.1)   # [P]
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from saccade.algorithms.preference import negative_log_sigmoid
from saccade.algorithms.table import Entry

if TYPE_CHECKING:
    from torch import Tensor

# Of the scale of hps, which is learned as its logarithm. The trainer clamps the parameter after an
# update: a clamp inside the loss would stop the gradient, and the scale could never come back.
FIRST_LOG_KAPPA = math.log(1 / 0.07)
LARGEST_LOG_KAPPA = math.log(100)


def bt(chosen: Tensor, rejected: Tensor, *, margin: float | Tensor = 0.0) -> Tensor:
    """Bradley-Terry; the margin is one number or one per pair [P]."""
    return negative_log_sigmoid(chosen - rejected - margin)


def logexp(chosen: Tensor, rejected: Tensor) -> Tensor:
    return bt(chosen, rejected)


def hps(chosen: Tensor, rejected: Tensor, *, kappa: float | Tensor) -> Tensor:
    """Cross-entropy of both scaled scores (arXiv 2306.09341).

    The scale serves training only; a served score has none.
    """
    return bt(kappa * chosen, kappa * rejected)


def center(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Added with a coefficient (usually 0.01) to keep scores around 0 (arXiv 2312.09244)."""
    return (chosen + rejected).square()


def tie(first: Tensor, second: Tensor) -> Tensor:
    """For pairs labelled as ties: no side is chosen. With a coefficient (usually 0.01)."""
    return (first - second).abs()


def reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """[P] each, to be summed with their counts: a mean of means or a maximum would be wrong."""
    chosen, rejected = chosen.detach(), rejected.detach()
    gap = chosen - rejected
    return {"accuracy": gap > 0, "gap": gap, "chosen_mean": chosen, "rejected_mean": rejected}


REWARD_LOSSES: dict[str, Entry] = {
    "bt": Entry(function=bt, formula="-log sigmoid(chosen - rejected - margin)"),
    "logexp": Entry(function=logexp, formula="log(1 + exp(rejected - chosen))"),
    "hps": Entry(function=hps, formula="-log softmax(kappa [chosen, rejected])[0]"),
}
