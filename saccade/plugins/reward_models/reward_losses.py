"""The losses of reward models: the formulas, and their sums on one micro-batch of scored pairs or
judged steps.

    loss = sum over heads of weight * (sum of the losses of its labelled pairs) / labelled pairs
    loss = sum over steps of the cross-entropy with their labels / steps

A formula is `f(chosen, rejected, *, options) -> [P]` on fp32 scores. `Rating` and `Steps` hold the
labels and denominators of a whole optimizer step, so micro-losses simply add up. A pair is a group
of two sequences; its label says for each head whether the first (1), the second (-1) or neither (0)
is better. NaN: nothing was said, which is no tie. Axes: S sequences, P pairs, H heads, R reads, K
tokens that name a verdict.

    >>> REWARD_LOSSES["bt"].function(chosen, rejected, margin=0.1)   # [P]
    >>> rating = of_pairs(Rating(loss="bt", heads={"preference": 1.0}), ids, labels, margins)
    >>> loss, sums = rating_objective(rating, scores, kappa, batch.keys)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.objective import LossSums, mean_of
from saccade.algorithms.table import Entry, bound
from saccade.config import RewardModelConfig
from saccade.plugins.preferences.preference_losses import negative_log_sigmoid
from saccade.types import Batch

Keys = Sequence[tuple[str, int]]


# -- formulas --------------------------------------------------------------------------------------

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


# -- pairs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rating:
    """A loss on pairs with the labels and counts of its optimizer step, as plain data."""

    loss: str
    heads: Mapping[str, float]  # name → weight, in the order of the model's scores
    margin: float = 0.0
    center_coef: float = 0.0
    tie_coef: float = 0.0
    labels: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by sample, per head
    margins: Mapping[str, float] = field(default_factory=dict)  # of samples that have their own
    counts: tuple[int, ...] = ()  # pairs with a label, per head


def from_config(config: RewardModelConfig) -> Rating:
    own = config.margin if config.margin is not None else 0.1
    return Rating(
        loss=config.loss,
        heads=dict(config.heads),
        margin=own if config.loss == "bt" else 0.0,
        center_coef=config.center_coef,
        tie_coef=config.tie_coef,
    )


def of_pairs(
    row: Rating, ids: Sequence[str], labels: Mapping[str, tuple[float, ...]], margins: Mapping[str, float]
) -> Rating:
    """With what is known of the samples of an optimizer step."""
    known = ~np.isnan(np.array([labels[id] for id in ids]).reshape(len(ids), len(row.heads)))
    counts = tuple(known.sum(0).tolist())
    return replace(row, labels=labels, margins=margins, counts=counts)


def rating_objective(row: Rating, scores: Tensor, kappa: Tensor, keys: Keys) -> tuple[Tensor, LossSums]:
    """scores [S, H], the sides of a pair next to each other."""
    ids = [id for id, _ in keys[::2]]
    assert ids == [id for id, _ in keys[1::2]], "the sides of a pair stand next to each other"
    first, second = scores[0::2].T, scores[1::2].T
    labels = scores.new_tensor([row.labels[id] for id in ids]).T
    margins = scores.new_tensor([row.margins.get(id, row.margin) for id in ids])
    loss, means = scores.sum() * 0.0, dict[str, tuple[Tensor, Tensor]]()
    for index, (name, weight) in enumerate(row.heads.items()):
        label = labels[index]
        upper = torch.where(label < 0, second[index], first[index])
        lower = torch.where(label < 0, first[index], second[index])
        decided, tied = label.abs() == 1, label == 0
        chosen, rejected = upper[decided], lower[decided]
        options = {"margin": margins[decided], "kappa": kappa}
        total = bound(REWARD_LOSSES[row.loss].function, options)(chosen, rejected).sum()
        if row.center_coef:
            total = total + row.center_coef * center(chosen, rejected).sum()
        total = total + row.tie_coef * tie(upper[tied], lower[tied]).sum()
        loss = loss + weight * total / max(row.counts[index], 1)
        found = {n: v.double() for n, v in reward_metrics(chosen, rejected).items()}
        both = scores.detach()[:, index].double()
        found |= {"mean": both, "square": both**2}
        means |= {f"{name}/{what}": mean_of(values) for what, values in found.items()}
    return loss, _reported(loss, means, len(scores))


def _reported(loss: Tensor, means: Mapping[str, tuple[Tensor, Tensor]], size: int) -> LossSums:
    tokens = torch.tensor(size, device=loss.device)
    return LossSums(tokens=tokens, terms={"policy/loss": loss.detach()}, means=means)


# -- steps -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Labels of the steps of an optimizer step's samples: how probable each token should be."""

    labels: Mapping[str, np.ndarray]  # by sample: [steps, K], rows of sum 1
    count: int


def of_steps(ids: Sequence[str], labels: Mapping[str, np.ndarray]) -> Steps:
    return Steps(labels=labels, count=sum(len(labels[id]) for id in ids))


def steps_objective(row: Steps, logits: Tensor, batch: Batch) -> tuple[Tensor, LossSums]:
    """logits [R, K] of the tokens that name a verdict, at the steps of all sequences in order."""
    wanted = np.concatenate([row.labels[id] for id, _ in batch.keys]).astype(np.float32)
    target = torch.from_numpy(wanted).to(logits.device)
    logprobs = logits.log_softmax(-1)
    loss = -(target * logprobs).sum() / row.count
    found = {
        "accuracy": (logprobs.argmax(-1) == target.argmax(-1)).double(),
        "good_mean": logprobs[:, 0].detach().exp().double(),
        "label_mean": target[:, 0].double(),
    }
    means = {f"steps/{what}": mean_of(values) for what, values in found.items()}
    return loss, _reported(loss, means, len(logits))
