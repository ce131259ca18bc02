"""Reward models on forests: scores of whole sequences, probabilities at the steps of a process.

A sequence is packed up to its last token (`pack(..., ends=True)`); a step is read at its mark.
Knows nothing of data or of what the numbers are used for.

    update = train_ratings(backend, batches, RatingLoss(rating), lr=9e-6)
    [scores] = ratings(backend, batches)  # [sequences, heads]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.objective import LossSums, to_metrics
from saccade.models.heads import RewardHead
from saccade.plugins.reward_models.reward_losses import (
    LARGEST_LOG_KAPPA,
    Rating,
    Steps,
    rating_objective,
    steps_objective,
)
from saccade.trainer import Objective, Reader, Update
from saccade.trainer.local import LocalBackend
from saccade.types import Batch, Metrics


@dataclass(frozen=True)
class RatingLoss:
    """Whole pairs, each side with its scores."""

    rating: Rating
    role: ClassVar[str] = "policy"
    whole: ClassVar[bool] = True

    def read(self, trainer: Reader, batch: Batch) -> Objective:
        return partial(self.objective, trainer, batch, self.outputs(trainer, batch))

    def outputs(self, trainer: Reader, batch: Batch) -> Tensor:
        """[sequences, heads]"""
        return _rate(trainer, head_of(trainer), batch)

    def objective(self, trainer: Reader, batch: Batch, scores: Tensor) -> tuple[Tensor, LossSums]:
        kappa = head_of(trainer).log_scale.exp()
        return rating_objective(self.rating, scores, kappa, batch.keys)


@dataclass(frozen=True)
class StepsLoss:
    """The steps of a process, whose verdicts are `tokens`."""

    steps: Steps
    tokens: Sequence[int]
    role: ClassVar[str] = "policy"
    whole: ClassVar[bool] = False

    def read(self, trainer: Reader, batch: Batch) -> Objective:
        return partial(self.objective, trainer, batch, self.outputs(trainer, batch))

    def outputs(self, trainer: Reader, batch: Batch) -> Tensor:
        """[reads, tokens]"""
        return _judge(trainer, batch, self.tokens)

    def objective(self, trainer: Reader, batch: Batch, logits: Tensor) -> tuple[Tensor, LossSums]:
        return steps_objective(self.steps, logits, batch)


def train_ratings(
    backend: LocalBackend, batches: Sequence[Batch], loss: RatingLoss | StepsLoss, *, lr: float
) -> Update:
    """One optimizer step; the scale of a head stays within its bound."""
    update = backend.train_step(batches, loss, lr=lr)
    if isinstance(loss, RatingLoss):
        with torch.no_grad():  # not in the loss: there a clamp would stop the gradient for good
            head_of(backend).log_scale.clamp_(max=LARGEST_LOG_KAPPA)
    return update


@torch.no_grad()
def ratings(backend: LocalBackend, batches: Sequence[Batch]) -> list[np.ndarray]:
    """[sequences, heads] of each batch."""
    _ready(backend, batches)
    head = head_of(backend)
    found = [_rate(backend, head, batch) for batch in batches]
    return [scores.float().cpu().numpy() for scores in found]


@torch.no_grad()
def judgements(backend: LocalBackend, batches: Sequence[Batch], tokens: Sequence[int]) -> list[np.ndarray]:
    """[reads, tokens]: log-probs of the verdicts among themselves at every step."""
    _ready(backend, batches)
    found = [_judge(backend, batch, tokens).log_softmax(-1) for batch in batches]
    return [logprobs.float().cpu().numpy() for logprobs in found]


@torch.no_grad()
def measured(
    backend: LocalBackend, batches: Sequence[Batch], loss: RatingLoss | StepsLoss
) -> tuple[Metrics, list[np.ndarray]]:
    """What training on these batches would report, without it, and the outputs of the model."""
    _ready(backend, batches)
    outputs = [loss.outputs(backend, batch) for batch in batches]
    pairs = zip(batches, outputs, strict=True)
    sums = [loss.objective(backend, batch, found)[1] for batch, found in pairs]
    return to_metrics(sums), [found.float().cpu().numpy() for found in outputs]


def _ready(backend: LocalBackend, batches: Sequence[Batch]) -> None:
    backend.model.eval()
    backend.prefetch(batches)


def head_of(backend: Reader) -> RewardHead:
    head = getattr(backend.model, "score", None)
    assert isinstance(head, RewardHead), "not a scalar reward model"
    return head


def _rate(backend: Reader, head: RewardHead, batch: Batch) -> Tensor:
    assert batch.sampled is not None and batch.ends is not None, "packed without its last tokens"
    count = len(batch.keys)
    places, sequence = batch.sampled, batch.sequence
    if head.card.pooling == "last":
        places, sequence = batch.ends, np.arange(count)
    hidden = backend.hidden_at(batch, places)
    return head(hidden, torch.from_numpy(sequence).to(hidden.device), count)


def _judge(backend: Reader, batch: Batch, tokens: Sequence[int]) -> Tensor:
    weight = backend.model.lm_head.weight[list(tokens)]  # type: ignore[union-attr, index]
    wide = torch.promote_types(weight.dtype, torch.float32)
    return backend.hidden_at(batch, batch.reads).to(wide) @ weight.to(wide).T
