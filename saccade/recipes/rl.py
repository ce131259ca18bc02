"""Reinforcement learning: sample, score, filter, pack, advantages, update, repeat.

saccade rl run.yaml algorithm.preset=dapo
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from saccade import checks
from saccade.algorithms import algorithm_state, annotate, select
from saccade.algorithms.algorithm_state import AlgorithmState
from saccade.algorithms.annotate import ComponentWeights, add_advantages, add_corrections
from saccade.algorithms.describe import describe, resolved_options
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.algorithms.select import Updates
from saccade.checks.steps import algorithm_of
from saccade.config import Config, RunConfig, load
from saccade.errors import ConfigError
from saccade.forest.packing import pack
from saccade.models.families import Family
from saccade.recipes import model_setup, questions, run_parts
from saccade.recipes.engines import check_parity
from saccade.recipes.rl_rollout import Rollouts, rollout_metrics, sample_groups
from saccade.recipes.rl_setup import set_up
from saccade.recipes.rl_update import Learners, update_models
from saccade.registry import HOOKS
from saccade.rollout.scoring import missing_answer
from saccade.run import checkpoint
from saccade.run.metrics import signal_metrics
from saccade.run.training_run import Run
from saccade.system.disk import require_writable
from saccade.trainer import Trainer
from saccade.trainer.reference import Reference
from saccade.types import Group, Metrics, Sample

log = logging.getLogger(__name__)

Preflight = Callable[[Config, Family, Sequence[Sample]], list[str]]
Phase = Callable[[str], AbstractContextManager[object]]


def run(config: Any, *, preflight: Preflight | None = None) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step. Before weights are loaded, `preflight`
    returns warnings that the run may not fit into memory, or raises.
    """
    config = load(config, command="rl")
    checks.check(config, "rl")
    configured = algorithm_of(config)
    refuse_another_algorithm(config.run, configured)
    require_writable(config.run.out, "run.out")
    model_setup.quiet_libraries()
    family = model_setup.family_of(config, model_setup.start_folder(config))
    HOOKS["require_reward_models"](config.reward)
    data = questions.load_prompts(config, config.data.train, family)
    doubts = preflight(config, family, data.samples) if preflight else []
    about = run_parts.manifest(family, data, config.data)
    with Run(config, "rl", about, configured) as this, ThreadPoolExecutor(1, "count") as background:
        for text in (data.summary, describe(configured), *doubts):
            log.info(text)
        setup = set_up(config, configured, family, data, this)
        sampler, learners, validation = setup.sampler, setup.learners, setup.validation
        engine, policy, reference = sampler.engine, learners.policy, setup.reference
        imitated = learners.demonstrations
        sampler.ahead.delete_records_after(this.step)
        state = algorithm_state.restore(configured, this.progress.algorithm_state)
        weights = sampler.scorer.component_weights if sampler.scorer else None
        store_every = config.track.trajectories_every
        last: dict[str, Any] = {}
        this.log_start(check_parity(config, engine, policy, data.samples, version=this.step))
        this.validate_start(validation)
        for step in this.steps():
            algorithm = state.apply_to(configured)  # with its current coefficients
            scores = this.progress.scores
            with this.phase("rollout"):
                rollouts = sample_groups(sampler, setup.surplus.groups, scores, step=step)
            with this.phase("pack"):
                groups, state, selected = select_members(rollouts, algorithm, state, weights)
                seed = (config.run.seed, step)
                updates = pack_updates(groups, algorithm, policy, config.train.micro_tokens, seed)
            with sampler.ahead.polled():
                updates = score_forests(updates, algorithm, learners, reference, this.phase)
            with this.phase("advantage"):
                updates, weighed = add_advantages(updates, groups, algorithm, state, weights, version=engine.version)
                updates, corrected = add_corrections(updates, algorithm)
            # Metrics are computed in a background thread during the update.
            work = background.submit(HOOKS["rl_work"], policy, learners.critic, updates, config.train, algorithm, step)
            counted = background.submit(rollout_metrics, rollouts, sampler, policy, step=step)
            measured = [background.submit(count) for count in (weighed, corrected)]
            this.finish_validation()
            with this.phase("update"), sampler.ahead.polled():
                progress, learned = update_models(updates, algorithm, learners, this.progress, step)
                refresh_reference(reference, policy, algorithm, step)
            with this.phase("hand_over"):
                sampler.ahead.before_update(config.rollout.at_update, saved=this.checkpointer.due(step))
                engine.update_weights(policy, version=step)
            metrics = rollouts.metrics
            metrics.merge(counted.result(), selected, *(count.result() for count in measured), learned)
            state = algorithm_state.after_step(state, algorithm, metrics)
            setup.surplus.groups = rollouts.surplus
            sampler.ahead.snapshot()
            progress = replace(
                progress.with_scores(rollouts.scores),
                step=step,
                stream=sampler.stream.state(),
                demonstrations=imitated and imitated.stream.state(),
                algorithm_state=algorithm_state.to_json(state),
            )
            if store_every and (step % store_every == 0 or step in (1, this.total)):
                stored = annotate.show_columns(groups[: config.track.trajectories_groups], updates)
                this.display.store(stored, step=step, scores=progress.scores)
            missed = missing_answer(rollouts.scored, sampler.scorer, family)
            last = this.finish_step(progress, metrics.means() | work.result()(), validation, missed)
        return last


def refuse_another_algorithm(run: RunConfig, algorithm: Algorithm) -> None:
    """Refuse to resume from a checkpoint of another run that was trained with another algorithm."""
    if run.resume in ("none", "auto", "best"):
        return  # `RunFolder` compares the whole config
    path, now = Path(run.resume), [*resolved_options(algorithm)]
    before = checkpoint.read_progress(path).get("algorithm") if checkpoint.is_complete(path) else None
    if before and before != now:
        changed = next(pair for pair in zip_longest(before, now) if pair[0] != pair[1])
        other = f"another algorithm ({changed[0]!r}, now {changed[1]!r})"
        raise ConfigError(f"run.resume={path}: of {other}; set it back, or use run.resume=none model.path={path}")


# -- the stages of a step --------------------------------------------------------------------------


def select_members(
    rollouts: Rollouts, algorithm: Algorithm, state: AlgorithmState, weights: ComponentWeights | None
) -> tuple[list[Group], AlgorithmState, Metrics]:
    """Returns the groups with shaped rewards and marks on who trains, the next state, and metrics."""
    state = algorithm_state.observe(state, rollouts.scored, algorithm)
    groups, state, metrics = select.shape_rewards(rollouts.groups, algorithm, state, weights)
    if algorithm.estimator.group:
        for name, value in signal_metrics(groups, rollouts.scored, algorithm.exclude_status).items():
            metrics.add(name, value)
    groups, marked = select.mark_members(groups, algorithm)
    metrics.merge(marked)
    return groups, state, metrics


def pack_updates(
    groups: Sequence[Group], algorithm: Algorithm, policy: Trainer, micro_tokens: int, seed: tuple[int, int]
) -> Updates:
    """Returns the forests of each optimizer step; `seed` (of run and step) shuffles groups into the steps."""
    drawn = int(np.random.SeedSequence(seed).generate_state(1)[0])
    ends = algorithm.needs_critic and algorithm.critic.bootstrap_truncated
    parts = select.split_updates(groups, algorithm.updates_per_step, seed=drawn)
    return [pack(part, micro_tokens=micro_tokens, ends=ends, dp_size=policy.dp_size) for part in parts]


def score_forests(
    updates: Updates, algorithm: Algorithm, learners: Learners, reference: Reference | None, phase: Phase
) -> Updates:
    """Add old log-probs, reference log-probs and values to the forests, as far as they are needed."""
    batches = [batch for part in updates for batch in part]
    if algorithm.old == "recompute":
        with phase("logp_old"):
            scored = learners.policy.logprobs(batches, learners.scoring)
            updates = annotate.with_scores(updates, ("old_logprobs", "old_entropies"), scored)
    if reference is not None:
        with phase("logp_ref"):
            scored = reference.logprobs(batches, learners.scoring)
            updates = annotate.with_scores(updates, ("ref_logprobs",), scored)
    if learners.critic is not None:
        with phase("values"):
            scored = learners.critic.values(batches)
            updates = annotate.with_scores(updates, ("values", "last_values"), scored)
    return updates


def refresh_reference(reference: Reference | None, policy: Trainer, algorithm: Algorithm, step: int) -> None:
    kl = algorithm.kl
    if reference is not None and kl.update != "none" and step % kl.update_every == 0:
        reference.blend(policy.weights(), {"copy": 1.0, "ema": kl.ema}[kl.update])
