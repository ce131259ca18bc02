"""The loss of one micro-batch, from flat tensors of live policy tokens.

    loss = sum(l k w scale) + beta sum(kl scale) - c_H sum(H scale)

Scales hold the denominators of the whole optimizer step, so micro-losses simply add up. Tokens
with scale 0 are not live: nothing about them, not even NaN, reaches the loss or a metric.
Statistics stay on the device until `to_metrics`, which waits once. Knows nothing of models, ranks
or where the log-probs came from. Axis: T tokens.

    >>> loss, stats = objective(algorithm, new, entropy, columns)
    >>> to_metrics(algorithm, [stats], step_tokens=scales.tokens).means()["policy/ratio_mean"]
    1.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.algorithms.algorithm import Algorithm
from saccade.algorithms.kl import k1, k3
from saccade.algorithms.policy_losses import LossInputs, log_ratio
from saccade.types import Metrics

LARGEST_EXPONENT = 20.0


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is known of each token before training on it; floats in the type of `new`."""

    advantages: Tensor
    scales: Tensor
    sequence: Tensor  # int64, index of the sequence of each token
    sequences: int
    old: Tensor | None = None  # None: the detached current ones, so that the ratio is exactly 1
    rollout: Tensor | None = None  # NaN where the engine gave no log-prob
    ref: Tensor | None = None
    keep: Tensor | None = None  # 0/1
    weights: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Sums as 0-d tensors, by what divides them."""

    tokens: Tensor  # live tokens
    scored: Tensor  # live tokens with a rollout log-prob
    per_step: dict[str, Tensor]  # terms of the loss: they add up to that of the optimizer step
    per_token: dict[str, Tensor]
    per_scored: dict[str, Tensor]
    maxima: dict[str, Tensor]


def objective(
    algorithm: Algorithm, new: Tensor, entropy: Tensor | None, columns: Columns
) -> tuple[Tensor, Stats]:
    live = columns.scales > 0
    new, advantages = new.where(live, 0.0), columns.advantages.where(live, 0.0)
    old = _old(algorithm, new, columns).where(live, 0.0)
    inputs = LossInputs(
        old=old,
        advantages=advantages,
        sequence=columns.sequence,
        sequences=columns.sequences,
        sequence_sum=lambda x: x.new_zeros(columns.sequences).index_add(0, columns.sequence, x),
    )
    losses, indicators = algorithm.loss.function(new, inputs, algorithm.loss_options)
    for factor in (columns.keep, columns.weights):
        losses = losses if factor is None else losses * factor.where(live, 0.0)
    terms = {"policy/pg_loss": (losses * columns.scales).sum()}
    loss = terms["policy/pg_loss"]

    if algorithm.kl_in_loss:
        assert columns.ref is not None, "a KL in the loss needs reference log-probs"
        distance = algorithm.divergence.function(
            new, columns.ref.where(live, 0.0), algorithm.kl.clamp
        )
        terms["policy/kl_loss"] = (distance * columns.scales).sum()
        loss = loss + algorithm.kl.coef * terms["policy/kl_loss"]
    if algorithm.entropy_coef > 0:
        assert entropy is not None, "an entropy bonus needs the entropy"
        bonus = (entropy.where(live, 0.0) * columns.scales).sum()
        loss = loss - algorithm.entropy_coef * bonus
    terms["policy/loss"] = loss
    # Where the engine's log-probs are taken for old ones, the trainer's view is the current one.
    trainer = new.detach() if algorithm.old == "rollout" else old
    return loss, _stats(terms, indicators, live, new.detach(), old, trainer, entropy, columns)


def _old(algorithm: Algorithm, new: Tensor, columns: Columns) -> Tensor:
    if algorithm.old == "rollout":
        assert columns.rollout is not None, "old=rollout needs rollout log-probs"
        return columns.rollout.where(~columns.rollout.isnan(), new.detach())
    if columns.old is None:
        assert algorithm.old == "detach", "old=recompute needs old log-probs"
        return new.detach()
    return columns.old


@torch.no_grad()
def _stats(
    terms: dict[str, Tensor],
    indicators: dict[str, Tensor],
    live: Tensor,
    new: Tensor,
    old: Tensor,
    trainer: Tensor,
    entropy: Tensor | None,
    columns: Columns,
) -> Stats:
    gap = log_ratio(new, old)
    ratio = gap.exp()
    per_token = {
        "policy/ratio_mean": ratio,
        "policy/kl_old": gap.expm1() - gap,
        "policy/kl_old_k1": -gap,
    }
    for name, flags in indicators.items():
        per_token[f"policy/{name.replace('clip_', 'clip_frac_')}"] = flags
    maxima = {"policy/ratio_max": ratio}
    if entropy is not None:
        per_token["policy/entropy"] = entropy
    if columns.ref is not None:
        per_token["policy/kl_ref"] = k3(new, columns.ref)
        per_token["policy/kl_ref_k1"] = k1(new, columns.ref)
    if columns.keep is not None:
        per_token["mismatch/masked_frac"] = 1 - columns.keep
    if columns.weights is not None:
        per_token["mismatch/is_weight_mean"] = columns.weights
        maxima["mismatch/is_weight_max"] = columns.weights

    scored, per_scored = torch.zeros_like(live), {}
    if columns.rollout is not None:
        scored = live & ~columns.rollout.isnan()
        per_token["mismatch/unscored_frac"] = ~scored
        mismatch = (trainer - columns.rollout).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        per_scored = {
            "mismatch/logp_gap_mean": (trainer - columns.rollout).abs(),
            "mismatch/mult_prob_error": mismatch.abs().exp(),
            "mismatch/kl": mismatch.expm1() - mismatch,
        }
    masked_maxima = {name: _largest(values, live) for name, values in maxima.items()}
    if columns.rollout is not None:
        gaps = per_scored["mismatch/logp_gap_mean"]
        masked_maxima["mismatch/logp_gap_max"] = _largest(gaps, scored)
    return Stats(
        tokens=live.sum(),
        scored=scored.sum(),
        per_step={name: value.detach() for name, value in terms.items()},
        per_token={name: _total(values, live) for name, values in per_token.items()},
        per_scored={name: _total(values, scored) for name, values in per_scored.items()},
        maxima=masked_maxima,
    )


def _total(values: Tensor, mask: Tensor) -> Tensor:
    return values.to(torch.float64).where(mask, 0.0).sum()


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """Of values that are never negative; 0 when there are none."""
    inside = values.where(mask, 0.0)
    return inside.max() if len(inside) else inside.sum()


def to_metrics(
    algorithm: Algorithm, stats: Sequence[Stats], *, step_tokens: int | None = None
) -> Metrics:
    """Metrics of micro-batches of an optimizer step of `step_tokens` live tokens; None: all of it.

    A loss term counts by the share of the step's tokens that it came with, so that the terms of
    all micro-batches and ranks together are one value. The device is waited for once.
    """
    metrics = Metrics()
    if not stats:
        return metrics
    tensors = [torch.stack([one.tokens for one in stats]).sum()]
    tensors += [value for one in stats for value in _flatten(one)]
    numbers = iter(torch.stack([value.to(torch.float64) for value in tensors]).tolist())
    here = next(numbers)
    whole = here if step_tokens is None else step_tokens
    for one in stats:
        tokens, scored = next(numbers), next(numbers)
        for name in one.per_step:
            metrics.add(name, next(numbers), tokens / whole if whole else 0.0)
        for name in one.per_token:
            metrics.add(name, next(numbers), tokens)
        for name in one.per_scored:
            metrics.add(name, next(numbers), scored)
        for name in one.maxima:
            metrics.add_max(name, next(numbers))
    metrics.add("policy/kl_coef", algorithm.kl.coef)
    return metrics


def _flatten(stats: Stats) -> list[Tensor]:
    groups = (stats.per_step, stats.per_token, stats.per_scored, stats.maxima)
    return [stats.tokens, stats.scored, *(value for group in groups for value in group.values())]
