"""The rollout phase of reinforcement learning: prompts become scored groups, until a step is full.

rollouts = sample_groups(run, actors, step, metrics)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from saccade.algorithms import stages
from saccade.algorithms.algorithm import Algorithm
from saccade.errors import TrainingError
from saccade.media.pixel_cache import in_background
from saccade.media.videos import PAIR
from saccade.recipes import parts
from saccade.recipes.accuracy import outcomes_by_source, score_terms
from saccade.recipes.actors import Actors
from saccade.recipes.guard import check_errors
from saccade.recipes.run import Run
from saccade.rollout.collect import collect
from saccade.rollout.scoring import RewardStream, make_room, parsed, telling, thinks
from saccade.tracking.metrics import group_metrics
from saccade.types import ALWAYS_EXCLUDED, Group, Metrics

# Bytes of pixels, a quarter of what is kept: more would push out those that are trained on.
LOOK_AHEAD = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What the rollout phase of a step gave."""

    groups: list[Group]  # to train on
    scored: list[Group]  # all that were sampled in this step
    surplus: list[Group]  # for the next one


def sample_groups(run: Run, actors: Actors, step: int, metrics: Metrics) -> Rollouts:
    """Dynamic sampling goes on until the step is full; a surplus may have come from the last."""
    algorithm, wanted = actors.algorithm, actors.config.train.prompts_per_step
    carried = list(actors.surplus.groups)
    kept, dropped, scored = list(carried), Counter[str](), list[Group]()
    rounds = 0
    while len(kept) < wanted and rounds < (
        algorithm.filter.max_rounds if algorithm.filter.dynamic else 1
    ):
        rounds += 1
        groups = _sample(run, actors, step, rounds)
        scored += groups
        if algorithm.filter.dynamic:
            groups, reasons = stages.keep_informative(groups, algorithm)
            dropped += reasons
        if algorithm.filter.function is not None:
            groups, reasons = stages.keep_chosen(groups, algorithm)
            dropped += reasons
        kept += groups
    actors.engine.sleep()
    _rollout_metrics(run, scored, actors, metrics)
    metrics.add("group/rounds", rounds)
    metrics.add("group/carried", len(carried))
    metrics.add("group/kept_frac", len(kept) - len(carried), len(scored))
    for reason, number in dropped.items():
        metrics.add(f"group/dropped/{reason}", number)
    kept = _unique(kept)
    fresh = kept[max(wanted, len(carried)) :]  # what was carried once is not carried again
    surplus = fresh if algorithm.filter.keep_surplus else []
    metrics.add("group/surplus_dropped", len(kept[wanted:]) - len(surplus))
    chosen = _full_step(kept, wanted, algorithm)
    if not chosen:
        metrics.add("group/dropped/exhausted", len(kept))
    _staleness(chosen, step - 1, metrics)
    return Rollouts(groups=chosen, scored=scored, surplus=surplus)


def look_ahead(actors: Actors) -> None:
    """Pictures and text of the next prompts, in the background: while the GPU decodes the host has
    little to do; while it reads prompts or trains the host hands it one kernel after the other. As
    many pictures as are kept.
    """
    following = actors.stream.peek(actors.config.train.prompts_per_step)
    pictures = [media for sample in following for media in sample.media]
    layers = [PAIR if picture.kind == "video" else 1 for picture in pictures]
    tokens = [actors.family.measure(picture)[1] for picture in pictures]
    pixels = np.cumsum(np.multiply(layers, tokens)) * actors.family.unit**2
    fit = int((3 * pixels <= LOOK_AHEAD).sum())
    actors.family.prefetch(pictures[:fit])
    for sample in following:
        in_background(actors.family.render, sample.messages)


def _sample(run: Run, actors: Actors, step: int, round: int) -> list[Group]:
    config, algorithm = actors.config, actors.algorithm
    rewards = RewardStream(actors.scorer, actors.family, step=step)
    samples = run.take(actors.stream, config.train.prompts_per_step)
    looked_ahead = False

    def progress(done: int, total: int) -> None:
        nonlocal looked_ahead
        if not looked_ahead:  # after the engine's first look, so most prompts are read
            looked_ahead = True
            look_ahead(actors)
        run.watch(done, total)

    groups = collect(
        actors.engine,
        samples,
        repeats=algorithm.samples_per_prompt,
        greedy=algorithm.estimator.greedy,
        environment=parts.environments_of(config, actors.family),
        family=actors.family,
        sampling=parts.rollout_sampling(config, algorithm),
        limits=parts.limits_of(config),
        seed=f"{config.run.seed}/{step}/{round}",
        on_finish=rewards.submit,
        progress=progress,
    )
    make_room(actors.engine, actors.scorer)
    with run.console.phase("reward_wait"):
        watch = telling(run.watch, actors.scorer, config.reward)
        groups = rewards.attach(groups, watch, tolerated=config.reward.max_error_rate)
    check_errors(groups, config)
    return groups


def _rollout_metrics(run: Run, scored: Sequence[Group], actors: Actors, metrics: Metrics) -> None:
    algorithm, known = actors.algorithm, run.progress.setdefault("scores", [])
    scores = score_terms(actors.scorer, outcomes_by_source(scored), known)
    known += sorted(set(scores) - set(known))
    found = group_metrics(
        scored,
        algorithm.exclude_status,
        excluded_in_baseline=algorithm.excluded_in_baseline,
        compares=algorithm.estimator.group,
        scores=scores,
    )
    for name, value in found.items():
        metrics.add(name, value)
    for name, value in (actors.scorer.metrics() if actors.scorer else {}).items():
        metrics.add(name, value)
    trajectories = [t for group in scored for t in group.trajectories]
    greedy = [group.greedy for group in scored if group.greedy is not None]
    metrics.add("count/samples", len(trajectories) + len(greedy))
    metrics.add("count/rollout_tokens", sum(t.response_length for t in [*trajectories, *greedy]))
    for name, flags in {
        "length/parse_rate": [
            parsed(t.extracted, t.reason) for t in trajectories if t.status not in ALWAYS_EXCLUDED
        ],
        "length/think_rate": [thinks(t, actors.family) for t in trajectories],
    }.items():
        metrics.add(name, sum(flags), len(flags))


def _staleness(groups: Sequence[Group], version: int, metrics: Metrics) -> None:
    """How many updates ago the oldest token of each member was sampled."""
    for trajectory in (t for group in groups for t in group.trajectories if t.response_length):
        age = version - int(trajectory.versions[trajectory.policy_mask].min())
        metrics.add("data/staleness_mean", age)
        metrics.add_max("data/staleness_max", age)


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
    used: set[str] = set()
    result = []
    for group in groups:
        if group.uid in used:
            uid = next(u for n in count(2) if (u := f"{group.uid}@{n}") not in used)
            members = tuple(replace(t, sample_id=uid) for t in group.trajectories)
            group = replace(group, uid=uid, trajectories=members)
        used.add(group.uid)
        result.append(group)
    return result
