"""The optimizer steps of one step of reinforcement learning.

progress, metrics = update_models(updates, algorithm, learners, progress, step)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade.algorithms import annotate
from saccade.algorithms.objective import add_sample_sizes
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.algorithms.select import Updates
from saccade.config import TrainConfig
from saccade.forest.batch import Batch
from saccade.recipes.failures import check_mismatch, guard
from saccade.run.progress import Progress
from saccade.trainer import Scoring, Trainer
from saccade.trainer.losses import PolicyLoss, ValueLoss
from saccade.trainer.optimizer import lr_factor
from saccade.types import Metrics


@dataclass(frozen=True, kw_only=True)
class Learners:
    """Models and settings of the optimizer steps; the same in every step of a run."""

    policy: Trainer
    critic: Trainer | None
    demonstrations: Any  # rows to imitate in the same updates, or None
    train: TrainConfig
    scoring: Scoring
    seed: int
    parity_max: float | None  # largest mean gap between log-probs of engine and trainer
    total: int  # steps of the run
    folder: Path  # of the run; batches of skipped updates are saved there


def update_models(
    updates: Updates, algorithm: Algorithm, learners: Learners, progress: Progress, step: int
) -> tuple[Progress, Metrics]:
    """One optimizer step of critic and policy per update and epoch. Returns the progress with these updates counted,
    and their metrics.
    """
    policy, critic, train = learners.policy, learners.critic, learners.train
    assert train.lr is not None, "the defaults of the command are filled in"
    metrics, bad, taught = Metrics(), progress.bad_updates, False
    per_step = algorithm.updates_per_step * train.epochs_per_batch
    # It costs two forward passes: some forests of every tenth step are enough.
    first = [batch for batches in updates for batch in batches][: policy.dp_size]
    if step % 10 == 1 and any(batch.forest.support for batch in first):
        metrics.add("mismatch/kept_mass", _kept_mass(first, learners))
    # Every update counts, also one that is skipped or not trained on: the schedule follows steps.
    for made, batches in enumerate(updates * train.epochs_per_batch, start=progress.updates):
        live = any(batch.scales is not None and bool(batch.scales.any()) for batch in batches)
        share = lr_factor(made, learners.total, train, updates_per_step=per_step)
        if live and critic is not None:
            seen, lr = annotate.for_critic(batches), algorithm.critic.lr * share
            update = critic.train_step(seen, ValueLoss(algorithm.critic.clip), lr=lr)
            metrics.merge(update.metrics)
            bad = guard(update, seen, bad, train, learners.folder, step=step, who="critic")
        moves = live and _teaches(batches, algorithm, learners)
        taught |= moves
        if not live or algorithm.is_warming(step):
            continue
        batches = _select_tokens(batches, algorithm, learners, f"{learners.seed}/{made}")
        if learners.demonstrations is not None:
            batches += learners.demonstrations.batches()
        update = policy.train_step(batches, PolicyLoss(algorithm, learners.scoring), lr=train.lr * share, moves=moves)
        add_sample_sizes(update.metrics)
        update.metrics.add("policy/kl_coef", algorithm.kl.coef)
        update.metrics.add("policy/entropy_coef", algorithm.entropy_coef)
        if "policy/loss" not in metrics.sums and not update.skipped:  # the first update of the step
            check_mismatch(update.metrics, algorithm, learners.parity_max)
        metrics.merge(update.metrics)
        bad = guard(update, batches, bad, train, learners.folder, step=step)
    metrics.add("policy/empty_step", not taught)
    metrics.add("count/update_tokens", train.epochs_per_batch * sum(b.tokens for part in updates for b in part))
    return replace(progress, updates=progress.updates + per_step, bad_updates=bad), metrics


def _kept_mass(batches: Sequence[Batch], learners: Learners) -> float:
    """Mean probability of the ids that truncated sampling kept."""
    whole = [replace(batch, forest=replace(batch.forest, support=None)) for batch in batches]
    kept, all_ids = (
        np.concatenate([logprobs for logprobs, _ in learners.policy.logprobs(forests, learners.scoring)])
        for forests in (batches, whole)
    )
    return float(np.exp(all_ids - kept).mean())


def _teaches(batches: Sequence[Batch], algorithm: Algorithm, learners: Learners) -> bool:
    """Whether anything but the KL to the reference and weight decay has a gradient. These two alone must not move the
    policy: weight decay causes a KL, and Adam scales up the smallest gradient.
    """
    other_losses = learners.demonstrations is not None or learners.train.aux_coef > 0
    if other_losses or algorithm.entropy_coef != 0 or not algorithm.loss.by_advantage:
        return True
    given = [b for b in batches if b.advantages is not None and b.advantages.any()]
    return any(b.keep is None or (b.per_target("advantages") * b.per_target("keep")).any() for b in given)


def _select_tokens(batches: Sequence[Batch], algorithm: Algorithm, learners: Learners, seed: str) -> list[Batch]:
    """Mark the tokens that the loss treats differently, if it has `select`. Current log-probs are recomputed unless the
    step has one update: only there the old ones are current.
    """
    if algorithm.loss.select is None:
        return [*batches]
    current = None
    if algorithm.updates_per_step * learners.train.epochs_per_batch > 1:
        current = [new for new, _ in learners.policy.logprobs(batches, learners.scoring)]
    return annotate.write_selection(batches, current, algorithm, seed=seed)
