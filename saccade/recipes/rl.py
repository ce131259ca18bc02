"""Reinforcement learning: sample, score, filter, pack, advantages, update, again.

saccade rl run.yaml algorithm.preset=dapo
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from saccade import checkpoint, checks
from saccade.algorithms import columns, memory, stages
from saccade.algorithms.algorithm import Algorithm
from saccade.algorithms.build import from_config
from saccade.algorithms.describe import describe
from saccade.algorithms.memory import Memory
from saccade.backends.losses import PolicyLoss, ValueLoss
from saccade.backends.schedule import rate
from saccade.config import Config, defaults_for, load
from saccade.disk import require_writable
from saccade.errors import ConfigError
from saccade.estimate.estimate_command import preflight
from saccade.forest.packing import pack
from saccade.plan import total_steps
from saccade.recipes import average, models, parity, parts, questions
from saccade.recipes.actors import Actors, make_actors, parts_with_state
from saccade.recipes.guard import check_mismatch, guard
from saccade.recipes.rollouts import Rollouts, sample_groups
from saccade.recipes.run import Run
from saccade.recipes.work import rl_work
from saccade.rollout.scoring import unread
from saccade.tracking.metrics import signal_metrics
from saccade.types import Batch, Group, Metrics

log = logging.getLogger(__name__)


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config = defaults_for("rl", load(config))
    checks.check(config, "rl")
    algorithm = from_config(config)
    refuse_another_algorithm(config, algorithm)
    require_writable(config.run.out, "run.out")
    models.quiet_libraries()
    family = models.family_of(config, models.start_folder(config))
    models.require_reward_models(config)
    data = questions.load_prompts(config, config.data.train, family)
    warnings = preflight(config, family, data.samples)
    with Run(config, "rl", parts.manifest(family, data, config)) as this:
        for text in (data.summary, describe(algorithm), *warnings):
            log.info(text)
        actors = make_actors(config, algorithm, family, data, this)
        total = total_steps(config, actors.stream.rows_per_epoch)
        averages = average.kept(config, family, actors.policy, this.start)
        sets = (data, *actors.validation.sets.values())
        this.begin(total, actors.policy, family, sets, parts_with_state(actors) | averages)
        last: dict[str, Any] = {}
        known = memory.recall(algorithm, this.progress.get("memory"))
        parity.check(this, config, actors.engine, actors.policy, data.samples)
        actors.validation.before()
        for step in this.steps():
            metrics, steered = Metrics(), known.steered(algorithm)
            with this.phase("rollout"):
                rollouts = sample_groups(this, actors, step, metrics)
            with this.phase("pack"):
                known, groups = choose(rollouts, actors, known, metrics)
                updates = pack_updates(groups, actors, step)
            updates = score_forests(this, actors, updates)
            with this.phase("advantage"):
                updates = weigh(updates, groups, actors, steered, known, metrics)
            with this.phase("update"):
                for batches in policy_updates(this, actors, steered, updates, metrics):
                    train_policy(this, actors, steered, batches, metrics)
                refresh_reference(actors, step)
            with this.phase("hand_over"):
                actors.engine.update_weights(actors.policy, version=step)
            known = memory.steer(known, steered, metrics)
            last = finish_step(this, actors, known, rollouts, groups, updates, metrics)
        return last


def refuse_another_algorithm(config: Config, algorithm: Algorithm) -> None:
    """A checkpoint of another run goes on with its own algorithm: the state belongs to it."""
    if config.run.resume in ("none", "auto", "best"):
        return  # the folder of the run compares its whole config
    path, now = Path(config.run.resume), describe(algorithm).splitlines()
    before = (
        checkpoint.read_progress(path).get("algorithm") if checkpoint.is_complete(path) else None
    )
    if before is not None and before != now:
        changed = next(pair for pair in zip_longest(before, now) if pair[0] != pair[1])
        raise ConfigError(
            f"run.resume={path} was trained with another algorithm ({changed[0]!r}, now "
            f"{changed[1]!r}); set algorithm back, or start anew from its weights with "
            f"run.resume=none model.path={path}"
        )


# -- the stages of a step --------------------------------------------------------------------------


def choose(
    rollouts: Rollouts, actors: Actors, known: Memory, metrics: Metrics
) -> tuple[Memory, list[Group]]:
    """Who trains, with which reward."""
    algorithm = actors.algorithm
    known = memory.observe(known, rollouts.scored, algorithm)
    weights = component_weights(actors)
    known, groups = stages.shape(rollouts.groups, algorithm, known, metrics, weights)
    if algorithm.estimator.group:
        found = signal_metrics(groups, rollouts.scored, algorithm.exclude_status)
        for name, value in found.items():
            metrics.add(name, value)
    return known, stages.choose_members(groups, algorithm, metrics)


def component_weights(actors: Actors) -> columns.ComponentWeights | None:
    return None if actors.scorer is None else actors.scorer.component_weights


def pack_updates(groups: Sequence[Group], actors: Actors, step: int) -> stages.Updates:
    train, algorithm = actors.config.train, actors.algorithm
    seed = int(np.random.SeedSequence([actors.config.run.seed, step]).generate_state(1)[0])
    return [
        pack(
            part,
            positions=actors.family.positions,
            micro_tokens=train.micro_tokens,
            ends=algorithm.needs_critic and algorithm.critic.bootstrap_truncated,
        )
        for part in stages.split_updates(groups, algorithm.updates_per_step, seed=seed)
    ]


def score_forests(run: Run, actors: Actors, updates: stages.Updates) -> stages.Updates:
    """Old and reference log-probs and values, only those that are needed, on the forests that
    train.
    """
    batches = [batch for part in updates for batch in part]
    if actors.algorithm.old == "recompute":
        with run.phase("logp_old"):
            scored = actors.policy.logprobs(batches, actors.scoring)
            updates = columns.with_scores(updates, ("old_logprobs", "old_entropies"), scored)
    if actors.reference is not None:
        with run.phase("logp_ref"):
            scored = actors.reference.logprobs(batches, actors.scoring)
            updates = columns.with_scores(updates, ("ref_logprobs",), scored)
    if actors.critic is not None:
        with run.phase("values"):
            scored = actors.critic.values(batches)
            updates = columns.with_scores(updates, ("values", "last_values"), scored)
    return updates


def weigh(
    updates: stages.Updates,
    groups: Sequence[Group],
    actors: Actors,
    algorithm: Algorithm,
    known: Memory,
    metrics: Metrics,
) -> stages.Updates:
    """Advantages, denominators and corrections, written into the forests."""
    updates = columns.write_advantages(
        updates,
        groups,
        algorithm,
        known,
        metrics,
        component_weights(actors),
        version=actors.engine.version,
    )
    return columns.write_corrections(updates, algorithm, metrics)


def policy_updates(
    run: Run, actors: Actors, algorithm: Algorithm, updates: stages.Updates, metrics: Metrics
) -> Iterator[Sequence[Batch]]:
    """What the policy learns from, one optimizer step at a time; the critic has learned from it."""
    train = actors.config.train
    tokens = sum(batch.tokens for batches in updates for batch in batches)
    metrics.add("count/update_tokens", tokens * train.epochs_per_batch)
    warming = is_warming(run, actors)
    for _ in range(train.epochs_per_batch):
        for batches in updates:
            live = _live(batches)
            if live and actors.critic is not None:
                train_critic(run, actors, batches, metrics)
            if live and not warming:
                yield batches
            else:  # nothing live, or only the critic learns: the schedule goes on
                run.progress["updates"] += 1
    # Updates for which there was no group are over, too: the schedule counts steps.
    each_step = algorithm.updates_per_step * train.epochs_per_batch
    run.progress["updates"] += each_step - len(updates) * train.epochs_per_batch
    taught = any(_live(batches) and teaches(actors, algorithm, batches) for batches in updates)
    metrics.add("policy/empty_step", not taught)


def _live(batches: Sequence[Batch]) -> bool:
    return any(batch.scales is not None and bool(batch.scales.any()) for batch in batches)


def teaches(actors: Actors, algorithm: Algorithm, batches: Sequence[Batch]) -> bool:
    """Whether anything but the pull to the reference and weight decay would move the policy. These
    two alone do not count: a decayed weight makes a KL, and Adam scales up the least gradient.
    """
    beside = actors.demonstrations is not None or actors.config.train.aux_coef > 0
    if beside or algorithm.entropy.coef != 0 or not algorithm.loss.by_advantage:
        return True
    return any(b.advantages is not None and b.advantages.any() for b in batches)


def is_warming(run: Run, actors: Actors) -> bool:
    """Whether only the critic learns in this step."""
    return actors.critic is not None and run.step < actors.algorithm.critic.warmup_steps


def train_policy(
    run: Run, actors: Actors, algorithm: Algorithm, batches: Sequence[Batch], metrics: Metrics
) -> None:
    """One optimizer step, only measured where nothing teaches."""
    train = actors.config.train
    assert train.lr is not None, "the defaults of the command are filled in"
    moves = teaches(actors, algorithm, batches)
    batches = select_tokens(run, actors, algorithm, batches)
    if actors.demonstrations is not None:
        batches = [*batches, *actors.demonstrations.batches(run)]
    lr = train.lr * learning_rate(run, actors)
    loss = PolicyLoss(algorithm, actors.scoring)
    update = actors.policy.train_step(batches, loss, lr=lr, moves=moves)
    update.metrics.add("policy/kl_coef", algorithm.kl.coef)
    update.metrics.add("policy/entropy_coef", algorithm.entropy.coef)
    if "policy/loss" not in metrics.sums and not update.skipped:  # the first update of the step
        check_mismatch(update.metrics, algorithm, actors.config.rollout.parity_max)
    metrics.merge(update.metrics)
    guard(run, train, batches, update)
    run.progress["updates"] += not update.skipped


def train_critic(run: Run, actors: Actors, batches: Sequence[Batch], metrics: Metrics) -> None:
    assert actors.critic is not None
    critic, batches = actors.algorithm.critic, columns.for_critic(batches)
    lr = critic.lr * learning_rate(run, actors)
    update = actors.critic.train_step(batches, ValueLoss(critic.clip), lr=lr)
    metrics.merge(update.metrics)
    guard(run, actors.config.train, batches, update, who="critic")


def learning_rate(run: Run, actors: Actors) -> float:
    """The schedule at this update, as a share of the peak."""
    train = actors.config.train
    each_step = actors.algorithm.updates_per_step * train.epochs_per_batch
    return rate(
        run.progress["updates"],
        total=run.total * each_step,
        lr=1.0,
        schedule=train.schedule,
        warmup=train.warmup * (1 if train.warmup < 1 else each_step),
        min_lr=train.min_lr,
    )


def select_tokens(
    run: Run, actors: Actors, algorithm: Algorithm, batches: Sequence[Batch]
) -> Sequence[Batch]:
    """For losses that treat some tokens of an optimizer step apart. The old log-probs are the
    current ones only in the first update.
    """
    if algorithm.loss.select is None:
        return batches
    each_step = algorithm.updates_per_step * actors.config.train.epochs_per_batch
    if each_step == 1:
        current = columns.old_logprobs(batches)
    else:
        current = [new for new, _ in actors.policy.logprobs(batches, actors.scoring)]
    seed = f"{actors.config.run.seed}/{run.progress['updates']}"
    return columns.write_selection(batches, current, algorithm, seed=seed)


def refresh_reference(actors: Actors, step: int) -> None:
    kl = actors.algorithm.kl
    if actors.reference is not None and kl.update != "none" and step % kl.update_every == 0:
        share = {"copy": 1.0, "ema": kl.ema}[kl.update]
        actors.reference.blend(actors.policy.weights(), share)


def finish_step(
    run: Run,
    actors: Actors,
    known: Memory,
    rollouts: Rollouts,
    groups: Sequence[Group],
    updates: stages.Updates,
    metrics: Metrics,
) -> dict[str, Any]:
    """Here the step becomes part of what a checkpoint stores."""
    config = actors.config
    run.progress["stream"] = actors.stream.state()
    if actors.demonstrations is not None:
        run.progress["demonstrations"] = actors.demonstrations.stream.state()
    run.progress["memory"] = memory.to_json(known)
    actors.surplus.groups = rollouts.surplus
    metrics.add("data/epoch", actors.stream.epoch)
    metrics.add("data/cursor", run.progress["stream"]["cursor"])
    metrics.add("data/bad_rows", len(run.quarantine.found(actors.stream.dataset)))
    step = run.step + 1
    values = metrics.means() | rl_work(
        actors.policy,
        actors.critic,
        rollouts.scored,
        updates,
        config,
        actors.algorithm,
        warming=is_warming(run, actors),
    )
    every = config.track.trajectories_every
    if every and (step % every == 0 or step in (1, run.total)):
        stored = groups[: config.track.trajectories_groups]
        run.store(columns.show_advantages(stored, updates), step=step)
    unseen = unread(rollouts.scored, actors.scorer, actors.family)
    return run.finish_step(values, actors.validation, unseen)
