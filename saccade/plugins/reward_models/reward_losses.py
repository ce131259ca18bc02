"""Reward models on token forests: scores of whole sequences, verdicts at each step (process reward models), and
their losses.

    loss = sum over heads of weight * (sum of the losses of its labelled pairs) / labelled pairs
    loss = sum over steps of the cross-entropy with their labels / steps

A formula is `f(chosen, rejected, *, options) -> [P]` on fp32 scores. `RatingLoss` and `StepsLoss` hold the
labels and denominators of a whole optimizer step, so the losses of micro-batches add up. A pair is a group
of two sequences; its label says for each head whether the first (1), the second (-1) or neither (0, a tie)
is better; NaN is no label, not a tie. Axes: S sequences, P pairs, H heads, R targets (predicted tokens),
K verdict tokens. A sequence is packed including its last token (`pack(..., ends=True)`); a step is read at
its placeholder.

    >>> REWARD_LOSSES["bt"].function(chosen, rejected, margin=0.1)   # [P]
    >>> loss = of_pairs(RatingLoss(loss="bt", heads={"preference": 1.0}), ids, labels, margins)
    >>> train_ratings(trainer, batches, loss, lr=9e-6)
    >>> [scores] = ratings(trainer, batches)  # [sequences, heads]
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.objective import LossSums, mean_of, to_metrics
from saccade.algorithms.table import Entry, add
from saccade.config import Config, RewardModelConfig
from saccade.forest.batch import Batch
from saccade.models.heads import change_logits
from saccade.plugins.preferences.preference_losses import negative_log_sigmoid
from saccade.plugins.reward_models.reward_head import RewardHead
from saccade.trainer import ForwardModel, Loss, Objective, Update
from saccade.trainer.local import LocalTrainer
from saccade.types import Metrics

Keys = Sequence[tuple[str, int]]
Labels = Mapping[str, tuple[float, ...]]  # by sample, per head
REWARD_LOSSES: dict[str, Entry] = {}


# -- formulas --------------------------------------------------------------------------------------

# hps learns its scale as a logarithm. The parameter is clamped after each update: a clamp inside the loss
# would make the gradient zero at the bound, and the scale could never shrink again.
FIRST_LOG_KAPPA = math.log(1 / 0.07)
LARGEST_LOG_KAPPA = math.log(100)


@add(REWARD_LOSSES, "-log sigmoid(chosen - rejected - margin)")
def bt(chosen: Tensor, rejected: Tensor, *, margin: float | Tensor = 0.0) -> Tensor:
    """Bradley-Terry; the margin is one number or one per pair [P]."""
    return negative_log_sigmoid(chosen - rejected - margin)


@add(REWARD_LOSSES, "log(1 + exp(rejected - chosen))")
def logexp(chosen: Tensor, rejected: Tensor) -> Tensor:
    return bt(chosen, rejected)


@add(REWARD_LOSSES, "-log softmax(kappa [chosen, rejected])[0]")
def hps(chosen: Tensor, rejected: Tensor, *, kappa: float | Tensor) -> Tensor:
    """Cross-entropy of the two scores, scaled by kappa (arXiv 2306.09341). Scores used as rewards are not scaled."""
    return bt(kappa * chosen, kappa * rejected)


def check(config: Config) -> Iterator[str]:
    """Problems of a config for training a reward model that show without data or weights."""
    own = config.reward_model
    if own.bounded and own.center_coef:
        yield "reward_model.center_coef: draws scores to 0, where a sigmoid cannot go; set it to 0"
    if not own.heads or not all(weight > 0 for weight in own.heads.values()):
        yield "reward_model.heads: names with weights above 0; try reward_model.heads=[preference]"
    if len(set(own.tokens)) < 2 or not own.placeholder.strip():
        yield "reward_model.tokens: two labels or more, and a placeholder; try tokens=[+,-]"


# -- pairs -----------------------------------------------------------------------------------------


class _RewardLoss:
    role: ClassVar[str] = "policy"

    def forward(self, trainer: ForwardModel, batch: Batch) -> Objective:
        return partial(self.objective, trainer, batch, self.outputs(trainer, batch))  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class RatingLoss(_RewardLoss):
    """A loss on pairs, with the labels and counts of one optimizer step."""

    loss: str
    heads: Mapping[str, float]  # name → weight, in the order of the model's scores
    margin: float = 0.0
    center_coef: float = 0.0
    tie_coef: float = 0.0
    labels: Labels = field(default_factory=dict)
    margins: Mapping[str, float] = field(default_factory=dict)  # by sample, where the row has its own
    counts: tuple[int, ...] = ()  # labelled pairs, per head
    whole: ClassVar[bool] = True

    def outputs(self, trainer: ForwardModel, batch: Batch) -> Tensor:
        return _rate(trainer, batch)

    def objective(self, trainer: ForwardModel, batch: Batch, outputs: Tensor) -> tuple[Tensor, LossSums]:
        return rating_objective(self, outputs, head_of(trainer).log_scale.exp(), batch.keys)


def from_config(config: RewardModelConfig) -> RatingLoss:
    shared = {name: getattr(config, name) for name in ("loss", "center_coef", "tie_coef")}
    return RatingLoss(heads=dict(config.heads), margin=config.margin if config.loss == "bt" else 0.0, **shared)


def of_pairs(row: RatingLoss, ids: Sequence[str], labels: Labels, margins: Mapping[str, float]) -> RatingLoss:
    """The loss with the labels, margins and counts of an optimizer step; `ids` may hold a sample twice."""
    labelled = ~np.isnan(np.array([labels[id] for id in ids]).reshape(len(ids), len(row.heads)))
    return replace(row, labels=labels, margins=margins, counts=tuple(labelled.sum(0).tolist()))


def rating_objective(row: RatingLoss, scores: Tensor, kappa: Tensor, keys: Keys) -> tuple[Tensor, LossSums]:
    """Returns (loss, sums for the metrics). scores [S, H]: the two sides of a pair are neighbours."""
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
        total = REWARD_LOSSES[row.loss].with_options(options)(chosen, rejected).sum()
        if row.center_coef:  # keeps scores around 0 (arXiv 2312.09244)
            total = total + row.center_coef * (chosen + rejected).square().sum()
        total = total + row.tie_coef * (upper[tied] - lower[tied]).abs().sum()
        loss = loss + weight * total / max(row.counts[index], 1)
        gap, both = (chosen - rejected).detach(), scores.detach()[:, index].double()
        found = {"accuracy": gap > 0, "gap": gap, "chosen_mean": chosen.detach(), "rejected_mean": rejected.detach()}
        found |= {"mean": both, "square": both**2}
        means |= {f"{name}/{what}": mean_of(values.double()) for what, values in found.items()}
    return loss, _reported(loss, means, len(scores))


def _reported(loss: Tensor, means: Mapping[str, tuple[Tensor, Tensor]], size: int) -> LossSums:
    tokens = torch.tensor(size, device=loss.device)
    return LossSums(tokens=tokens, terms={"policy/loss": loss.detach()}, means=means)


# -- steps -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepsLoss(_RewardLoss):
    """Cross-entropy of the verdicts at each step, with the labels and step count of one optimizer step."""

    labels: Mapping[str, np.ndarray]  # by sample: target probabilities [steps, K], each row sums to 1
    count: int  # labelled steps in the optimizer step
    tokens: Sequence[int] = ()  # ids of the verdict tokens
    whole: ClassVar[bool] = False

    def outputs(self, trainer: ForwardModel, batch: Batch) -> Tensor:
        return _judge(trainer, self.tokens, batch)

    def objective(self, trainer: ForwardModel, batch: Batch, outputs: Tensor) -> tuple[Tensor, LossSums]:
        return steps_objective(self, outputs, batch)


def steps_objective(row: StepsLoss, logits: Tensor, batch: Batch) -> tuple[Tensor, LossSums]:
    """Returns (loss, sums for the metrics). logits [R, K] of the verdict tokens, at the steps of all sequences."""
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


# -- on a model ------------------------------------------------------------------------------------

RewardLoss = RatingLoss | StepsLoss


def train_ratings(trainer: LocalTrainer, batches: Sequence[Batch], loss: RewardLoss, *, lr: float) -> Update:
    """One optimizer step, after which the head's scale is clamped to its bound."""
    update = trainer.train_step(batches, loss, lr=lr)
    if trainer.engine is None:  # else the ranks do it
        bound_scale(trainer, loss)
    return update


@torch.no_grad()
def bound_scale(trainer: LocalTrainer, loss: Loss) -> None:
    """Clamp the head's scale; call it after each update (see LARGEST_LOG_KAPPA)."""
    if isinstance(loss, RatingLoss):
        head_of(trainer).log_scale.clamp_(max=LARGEST_LOG_KAPPA)


def ratings(trainer: LocalTrainer, batches: Sequence[Batch]) -> list[np.ndarray]:
    """Scores [sequences, heads] of each batch."""
    return _arrays(trainer.map_batches(batches, partial(_rate, trainer)))


def judgements(trainer: LocalTrainer, batches: Sequence[Batch], tokens: Sequence[int]) -> list[np.ndarray]:
    """Log-probs [targets, tokens] of each batch at every step, normalised over the verdict tokens only."""
    logits = trainer.map_batches(batches, partial(_judge, trainer, tokens))
    return _arrays(found.log_softmax(-1) for found in logits)


@torch.no_grad()
def measured(trainer: LocalTrainer, batches: Sequence[Batch], loss: RewardLoss) -> tuple[Metrics, list[np.ndarray]]:
    """The metrics that training on these batches would report, and the model's outputs; without an update."""
    outputs = trainer.map_batches(batches, partial(loss.outputs, trainer))
    sums = [loss.objective(trainer, batch, found)[1] for batch, found in zip(batches, outputs, strict=True)]
    return to_metrics(sums), _arrays(outputs)


def _arrays(tensors: Iterable[Tensor]) -> list[np.ndarray]:
    return [tensor.float().cpu().numpy() for tensor in tensors]


def head_of(trainer: ForwardModel) -> RewardHead:
    head = getattr(trainer.model, "score", None)
    assert isinstance(head, RewardHead), "not a scalar reward model"
    return head


def _rate(trainer: ForwardModel, batch: Batch) -> Tensor:
    """Scores [sequences, heads]."""
    assert batch.sampled is not None and batch.ends is not None, "packed without its last tokens"
    head, count = head_of(trainer), len(batch.keys)
    places, sequence = batch.sampled, batch.sequence
    if head.card.pooling == "last":
        places, sequence = batch.ends, np.arange(count)
    hidden = trainer.hidden_at(batch, places)
    return head(hidden, torch.from_numpy(sequence).to(hidden.device), count)


def _judge(trainer: ForwardModel, tokens: Sequence[int], batch: Batch) -> Tensor:
    """Logits [targets, tokens] of the verdict tokens."""
    hidden = trainer.hidden_at(batch, batch.predictors)  # must come first: the forward pass gathers a sharded head
    weight = trainer.model.get_output_embeddings().weight[list(tokens)]  # type: ignore[operator]
    wide = torch.promote_types(weight.dtype, torch.float32)
    return change_logits(trainer.model, hidden.to(wide) @ weight.to(wide).T)
