"""Reinforcement learning: sample, score, filter, pack, advantages, update, again.

saccade rl run.yaml algorithm.preset=dapo
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from saccade import checks
from saccade.algorithms import stages
from saccade.algorithms.algorithm import Algorithm
from saccade.algorithms.build import from_config
from saccade.algorithms.describe import describe
from saccade.backends import Scoring
from saccade.backends.local import LocalBackend
from saccade.backends.schedule import rate
from saccade.config import Config, defaults_for, load
from saccade.data.datasets import Dataset, Stream
from saccade.engines import Engine
from saccade.engines.embedded import EmbeddedEngine
from saccade.environments import environment_factory
from saccade.errors import RewardError, TrainingError
from saccade.forest import pack
from saccade.models.families import Family
from saccade.plan import total_steps
from saccade.recipes import parts
from saccade.recipes.guard import guard
from saccade.recipes.run import Run
from saccade.recipes.validation import Validation
from saccade.rewards.scorer import Scorer
from saccade.rollout.collect import collect
from saccade.rollout.scoring import RewardStream, parsed, thinks
from saccade.tracking.metrics import group_metrics
from saccade.types import Group, Metrics

LARGEST_MISMATCH = 1.05  # mean of exp|old - rollout|: beyond it the engine samples another policy


@dataclass(frozen=True, kw_only=True)
class Actors:
    """Who takes part in a step."""

    config: Config
    algorithm: Algorithm
    family: Family
    engine: Engine
    policy: LocalBackend
    reference: LocalBackend | None
    scorer: Scorer | None
    stream: Stream
    validation: Validation

    @property
    def scoring(self) -> Scoring:
        return Scoring(temperature=self.config.rollout.temperature)


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config = defaults_for("rl", load(config))
    checks.check(config, "rl")
    algorithm = from_config(config)
    parts.quiet_libraries()
    family = parts.family_of(config, parts.start_folder(config))
    data = parts.load_prompts(config, config.data.train, family)
    with Run(config, "rl", parts.manifest(family, data, config)) as this:
        this.console.note(data.summary)
        this.console.note(describe(algorithm))
        actors = _actors(config, algorithm, family, data, this)
        this.begin(total_steps(config, actors.stream.rows_per_epoch), actors.policy, family)
        parts.write_quarantine(this.folder.path / "quarantine.jsonl", data)
        return _train(this, actors)


def _train(run: Run, actors: Actors) -> dict[str, Any]:
    last: dict[str, Any] = {}
    actors.validation.before()
    for step in run.steps():
        metrics = Metrics()
        with run.phase("rollout"):
            groups = sample_groups(run, actors, step, metrics)
        with run.phase("pack"):
            groups = stages.choose_members(groups, actors.algorithm, metrics)
            updates = pack_updates(groups, actors, step)
        updates = score_forests(run, actors, updates)
        with run.phase("advantage"):
            updates = stages.write_advantages(updates, groups, actors.algorithm, metrics)
        with run.phase("update"):
            optimize(run, actors, updates, metrics)
        actors.engine.update_weights(actors.policy, version=step)
        last = finish_step(run, actors, groups, updates, metrics)
    return last


# -- the stages of a step --------------------------------------------------------------------------


def sample_groups(run: Run, actors: Actors, step: int, metrics: Metrics) -> list[Group]:
    """Prompts → scored groups; dynamic sampling goes on until the step is full."""
    config, algorithm = actors.config, actors.algorithm
    wanted = config.train.prompts_per_step
    kept: list[Group] = []
    dropped: Counter[str] = Counter()
    everything: list[Group] = []
    rounds = 0
    while len(kept) < wanted and rounds < (
        algorithm.filter.max_rounds if algorithm.filter.dynamic else 1
    ):
        rounds += 1
        rewards = RewardStream(actors.scorer, actors.family, step=step)
        groups = collect(
            actors.engine,
            run.take(actors.stream, wanted),
            repeats=algorithm.samples_per_prompt,
            environment=environment_factory(config.env.name),
            family=actors.family,
            sampling=parts.rollout_sampling(config),
            limits=parts.limits_of(config),
            seed=f"{config.run.seed}/{step}/{rounds}",
            on_finish=rewards.submit,
            progress=run.watch,
        )
        with run.console.phase("reward_wait"):
            groups = rewards.attach(groups)
        check_errors(groups, config)
        everything += groups
        if algorithm.filter.dynamic:
            groups, reasons = stages.keep_informative(groups, algorithm)
            dropped += reasons
        if algorithm.filter.function is not None:
            groups, reasons = stages.keep_chosen(groups, algorithm)
            dropped += reasons
        kept += groups
    actors.engine.sleep()
    for name, value in group_metrics(everything, algorithm.exclude_status).items():
        metrics.add(name, value)
    trajectories = [t for group in everything for t in group.trajectories]
    metrics.add("count/samples", len(trajectories))
    metrics.add("count/rollout_tokens", sum(t.response_length for t in trajectories))
    for name, flags in {
        "length/parse_rate": [parsed(t.extracted, t.reason) for t in trajectories],
        "length/think_rate": [thinks(t, actors.family) for t in trajectories],
        "reward/clip_frac": ["clipped" in t.info for t in trajectories],
    }.items():
        metrics.add(name, sum(flags), len(flags))
    metrics.add("group/rounds", rounds)
    metrics.add("group/kept_frac", len(kept), len(everything))
    for reason, count in dropped.items():
        metrics.add(f"group/dropped/{reason}", count)
    return _full_step(_unique(kept), wanted, algorithm)


def _full_step(kept: list[Group], wanted: int, algorithm: Algorithm) -> list[Group]:
    if len(kept) >= wanted or not algorithm.filter.dynamic:
        return kept[:wanted]
    if algorithm.filter.on_exhausted == "stop":
        raise TrainingError(
            f"dynamic sampling kept {len(kept)} of {wanted} groups in "
            f"{algorithm.filter.max_rounds} rounds; raise algorithm.filter.max_rounds, or use "
            "algorithm.filter.on_exhausted=train_partial"
        )
    return kept if algorithm.filter.on_exhausted == "train_partial" else []


def _unique(groups: Sequence[Group]) -> list[Group]:
    """A sample that came round again inside one step is a group of its own."""
    seen: Counter[str] = Counter()
    result = []
    for group in groups:
        seen[group.uid] += 1
        if seen[group.uid] > 1:
            uid = f"{group.uid}@{seen[group.uid]}"
            members = tuple(replace(t, sample_id=uid) for t in group.trajectories)
            group = replace(group, uid=uid, trajectories=members)
        result.append(group)
    return result


def check_errors(groups: Sequence[Group], config: Config) -> None:
    failed = [t for group in groups for t in group.trajectories if t.status == "error"]
    total = sum(len(group.trajectories) for group in groups)
    if len(failed) > config.reward.max_error_rate * total:
        kinds = Counter((t.reason or t.end_reason).split(":")[0] for t in failed)
        example = failed[0]
        raise RewardError(
            f"{len(failed)} of {total} samples could not be scored ({dict(kinds)}), for example "
            f"{example.sample_id}: {example.reason or example.end_reason}; mend the reward, or "
            "raise "
            f"reward.max_error_rate above {config.reward.max_error_rate:g}"
        )


def pack_updates(groups: Sequence[Group], actors: Actors, step: int) -> stages.Updates:
    train = actors.config.train
    seed = int(np.random.SeedSequence([actors.config.run.seed, step]).generate_state(1)[0])
    return [
        pack(part, positions=actors.family.positions, micro_tokens=train.micro_tokens)
        for part in stages.split_updates(groups, train.updates_per_step, seed=seed)
    ]


def score_forests(run: Run, actors: Actors, updates: stages.Updates) -> stages.Updates:
    """Old and reference log-probs, only those that are needed, on the forests that train."""
    batches = [batch for part in updates for batch in part]
    if actors.algorithm.old == "recompute":
        with run.phase("logp_old"):
            scored = actors.policy.logprobs(batches, actors.scoring)
            updates = stages.with_logprobs(updates, "old_logprobs", scored)
    if actors.reference is not None:
        with run.phase("logp_ref"):
            scored = actors.reference.logprobs(batches, actors.scoring)
            updates = stages.with_logprobs(updates, "ref_logprobs", scored)
    return updates


def optimize(run: Run, actors: Actors, updates: stages.Updates, metrics: Metrics) -> None:
    train = actors.config.train
    assert train.lr is not None, "the defaults of the command are filled in"
    each_step = train.updates_per_step * train.epochs_per_batch
    tokens = sum(batch.tokens for batches in updates for batch in batches)
    metrics.add("count/update_tokens", tokens * train.epochs_per_batch)
    for _ in range(train.epochs_per_batch):
        for batches in updates:
            if not any(batch.scales is not None and batch.scales.any() for batch in batches):
                run.progress["updates"] += 1
                continue  # nothing is live: there is no gradient to take
            lr = rate(
                run.progress["updates"],
                total=run.total * each_step,
                lr=train.lr,
                schedule=train.schedule,
                warmup=train.warmup * (1 if train.warmup < 1 else each_step),
                min_lr=train.min_lr,
            )
            update = actors.policy.train_step(batches, actors.algorithm, actors.scoring, lr=lr)
            if "policy/loss" not in metrics.sums:  # the first update of the step
                check_mismatch(update.metrics)
            metrics.merge(update.metrics)
            guard(run, train, batches, update)
            run.progress["updates"] += not update.skipped


def check_mismatch(metrics: Metrics) -> None:
    """Before anything has drifted, the engine and the trainer must mean the same policy."""
    error = metrics.means().get("mismatch/mult_prob_error", 1.0)
    if error > LARGEST_MISMATCH:
        raise TrainingError(
            f"engine and trainer disagree: mean exp|log-prob gap| is {error:.3f}, above "
            f"{LARGEST_MISMATCH}; compare temperature, banned ids and weights of both, or use "
            "model.dtype=float32"
        )


def finish_step(
    run: Run,
    actors: Actors,
    groups: Sequence[Group],
    updates: stages.Updates,
    metrics: Metrics,
) -> dict[str, Any]:
    config = actors.config
    run.progress["stream"] = actors.stream.state()
    metrics.add("data/epoch", actors.stream.epoch)
    metrics.add("data/cursor", run.progress["stream"]["cursor"])
    metrics.add("data/bad_rows", run.set_aside)
    step = run.step + 1
    values = metrics.means()
    every = config.track.trajectories_every
    if every and (step % every == 0 or step in (1, run.total)):
        stored = groups[: config.track.trajectories_groups]
        run.store(stages.show_advantages(stored, updates), step=step)
    if actors.validation.due(step):
        values |= actors.validation.metrics(step=step)
    return run.finish_step(values)


# -- setting up ------------------------------------------------------------------------------------


def _actors(
    config: Config, algorithm: Algorithm, family: Family, data: Dataset, run: Run
) -> Actors:
    environment_factory(config.env.name)  # refused here, not in the first rollout
    scorer = parts.make_scorer(config, algorithm)
    run.close_at_end(scorer)
    parts.test_rewards(config, scorer, data.samples)
    policy = parts.load_policy(config, family, folder=str(run.start) if run.start else None)
    checkpointing = parts.use_checkpointing(config, policy.device)
    backend = LocalBackend(policy.model, family, config.train, checkpointing=checkpointing)
    stream = Stream(data, seed=config.run.seed, config=config.data)
    engine = EmbeddedEngine(policy.model, family, max_sequences=config.rollout.max_sequences)
    run.progress.setdefault("stream", stream.state())
    if run.start is not None:
        backend.load_state(run.start / "state")
        stream.restore(run.progress["stream"])
        engine.update_weights(backend, version=run.step)
    sets = parts.validation_sets(config, family) if config.val.every else {}
    reference = None
    if algorithm.needs_reference:
        reference = LocalBackend(parts.load_policy(config, family).model, family)
    return Actors(
        config=config,
        algorithm=algorithm,
        family=family,
        engine=engine,
        policy=backend,
        reference=reference,
        scorer=scorer,
        stream=stream,
        validation=Validation(run, config, family, engine, scorer, sets),
    )
