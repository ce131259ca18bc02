"""The rollout phase of reinforcement learning: prompts become scored groups, until a step is full.

sampler = Sampler(engine=engine, family=family, scorer=scorer, …)
rollouts = sample_groups(sampler, surplus, scores=(), step=12)
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from saccade.algorithms import select
from saccade.algorithms.resolved_algorithm import Algorithm
from saccade.config import EnvConfig, RewardConfig
from saccade.data.stream import Stream
from saccade.engines import Engine
from saccade.errors import ConfigError, TrainingError
from saccade.media.pixel_cache import in_background
from saccade.models.families import Family
from saccade.recipes.accuracy import Scores, items_of, score_terms
from saccade.recipes.failures import check_errors
from saccade.recipes.rollouts_ahead import Begun, Draw, RolloutsAhead
from saccade.rewards.scorer import Scorer
from saccade.rollout.episode import EpisodeSetup
from saccade.rollout.scoring import RewardStream, free_memory_for_rewards, parsed, report_slow_rewards, thinks
from saccade.run.metrics import group_metrics
from saccade.run.quarantine import Quarantine
from saccade.trainer import Trainer
from saccade.types import ALWAYS_EXCLUDED, Group, Metrics


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The result of the rollout phase of a step."""

    groups: list[Group]  # to train on
    scored: list[Group]  # all groups that were sampled in this step
    surplus: list[Group]  # for the next step
    scores: Scores  # data sources whose outcome is a score, neither right nor wrong
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Generates and scores the groups of a step; the same in every step of a run."""

    engine: Engine
    ahead: RolloutsAhead
    family: Family
    scorer: Scorer | None
    stream: Stream
    quarantine: Quarantine
    env: EnvConfig
    reward: RewardConfig
    algorithm: Algorithm
    prompts: int  # per step
    setup_of: Callable[[str], EpisodeSetup]  # name of a draw
    work: Callable[[Trainer, Sequence[Group]], Mapping[str, float]]  # FLOPs and bytes of sampling these groups
    watch: Callable[[int, int], None]  # progress callback (done, total); may raise to stop
    phase: Callable[[str], AbstractContextManager[object]]

    def draw(self, step: int) -> list[Group]:
        """Returns the scored groups of the next prompts. Rollouts of steps that may already start run meanwhile."""
        ahead = self.ahead
        ahead.pool.resume()
        while len(ahead.begun) <= ahead.last(step) - step:
            self._begin(step)
        begun, looked = ahead.begun.pop(0), False

        def progress(done: int, total: int) -> None:
            nonlocal looked
            if not looked:  # after the engine's first poll: most prompts are prefilled
                looked = True
                prefetch_prompts(self.stream, self.prompts, self.family)
            self.watch(done, total)

        groups = ahead.pool.finish(begun.started, progress)
        ahead.write_record(begun)
        if not ahead.side_by_side:
            ahead.pool.interrupt()
            free_memory_for_rewards(self.engine, self.scorer)
        with self.phase("reward_wait"):
            watch = report_slow_rewards(self.watch, self.scorer, self.reward)
            groups = begun.rewards.attach(groups, watch, tolerated=self.reward.max_error_rate)
        check_errors(groups, self.reward, self.env)
        return groups

    def _begin(self, step: int) -> None:
        """Start a draw: one that was stored in the checkpoint, else one of the next prompts."""
        family, ahead = self.family, self.ahead
        if ahead.stored:
            draw = ahead.stored.pop(0)
        else:
            samples = self.quarantine.take(self.stream, self.prompts, family)
            draw = Draw(name=ahead.next_name(step), step=step + len(ahead.begun), samples=samples)
        draw = ahead.from_record(draw)
        rewards = RewardStream(self.scorer, family, step=draw.step)
        started = ahead.pool.start(
            draw.samples,
            self.setup_of(draw.name),
            repeats=self.algorithm.samples_per_prompt,
            greedy=self.algorithm.estimator.greedy,
            name=f"{draw.name}|",
            generated=draw.generated,
            on_finish=rewards.submit,
        )
        if ahead.replay is not None and draw.generated.keys() != started.places.keys():
            theirs, ours = len(draw.generated), len(started.places)
            differ = f"draw {draw.name} has {theirs} answers, here it asks for {ours}"
            raise ConfigError(f"rollout.record={ahead.replay}: {differ}; use train.samples_per_prompt of that run")
        ahead.begun.append(Begun(draw, started, rewards))


def prefetch_prompts(stream: Stream, prompts: int, family: Family) -> None:
    """Prepare images and text of the next prompts in background threads. Called while the GPU decodes and the host has
    little to do; in prefill and training the host is busy launching kernels.
    """
    following = stream.peek(prompts)
    family.prefetch([media for sample in following for media in sample.media])
    for sample in following:
        in_background(family.render, sample.messages)


def sample_groups(sampler: Sampler, carried: Sequence[Group], scores: Sequence[str], *, step: int) -> Rollouts:
    """The groups of a step. Dynamic sampling draws round after round until the step is full. `carried`: surplus groups
    of the last step. `scores`: data sources whose outcome was a score in earlier steps.
    """
    algorithm, wanted = sampler.algorithm, sampler.prompts
    kept, dropped, scored = list(carried), Counter[str](), list[Group]()
    rounds = 0
    while len(kept) < wanted and rounds < (algorithm.filter.max_rounds if algorithm.filter.dynamic else 1):
        rounds += 1
        groups = sampler.draw(step)
        scored += groups
        if algorithm.filter.dynamic:
            groups, reasons = select.keep_informative(groups, algorithm)
            dropped += reasons
        if algorithm.filter.function is not None:
            groups, reasons = select.apply_user_filter(groups, algorithm)
            dropped += reasons
        kept += groups
    if not sampler.ahead.side_by_side:
        sampler.engine.sleep()
    found = score_terms(sampler.scorer, items_of(scored), scores)
    metrics = Metrics()
    metrics.add("data/epoch", sampler.stream.epoch)
    metrics.add("data/cursor", sampler.stream.state()["cursor"])
    metrics.add("data/bad_rows", len(sampler.quarantine.found(sampler.stream.dataset)))
    metrics.add("group/rounds", rounds)
    metrics.add("group/carried", len(carried))
    metrics.add("group/kept_frac", len(kept) - len(carried), len(scored))
    for reason, number in dropped.items():
        metrics.add(f"group/dropped/{reason}", number)
    kept = _unique(kept)
    fresh = kept[max(wanted, len(carried)) :]  # a group is carried over only once
    surplus = fresh if algorithm.filter.keep_surplus else []
    metrics.add("group/surplus_dropped", len(kept[wanted:]) - len(surplus))
    chosen = _full_step(kept, wanted, algorithm)
    if not chosen:
        metrics.add("group/dropped/exhausted", len(kept))
    return Rollouts(groups=chosen, scored=scored, surplus=surplus, scores=found, metrics=metrics)


def rollout_metrics(rollouts: Rollouts, sampler: Sampler, policy: Trainer, *, step: int) -> Metrics:
    """Metrics of all groups that were sampled in a step, and of the compute they took."""
    metrics, algorithm, scorer, family = Metrics(), sampler.algorithm, sampler.scorer, sampler.family
    groups = rollouts.scored
    found = group_metrics(
        groups,
        algorithm.exclude_status,
        excluded_in_baseline=algorithm.excluded_in_baseline,
        compares=algorithm.estimator.group,
        scores=rollouts.scores,
    )
    found |= sampler.work(policy, groups)
    for name, value in (found | (scorer.metrics() if scorer else {})).items():
        metrics.add(name, value)
    for trajectory in (t for group in rollouts.groups for t in group.trajectories if t.response_length):
        ages = step - 1 - trajectory.versions[trajectory.policy_mask]  # steps since each token was sampled
        metrics.add("data/staleness_mean", float(ages.sum()), len(ages))
        metrics.add_max("data/staleness_max", int(ages.max()))
    trajectories = [t for group in groups for t in group.trajectories]
    everyone = [t for group in groups for t in group.everyone]
    metrics.add("count/samples", len(everyone))
    metrics.add("count/rollout_tokens", sum(t.response_length for t in everyone))
    judged = [parsed(t.extracted, t.reason) for t in trajectories if t.status not in ALWAYS_EXCLUDED]
    metrics.add("length/parse_rate", sum(judged), len(judged))
    metrics.add("length/think_rate", sum(thinks(t, family) for t in trajectories), len(trajectories))
    return metrics


def _full_step(kept: list[Group], wanted: int, algorithm: Algorithm) -> list[Group]:
    if len(kept) >= wanted or not algorithm.filter.dynamic:
        return kept[:wanted]
    if algorithm.filter.on_exhausted == "stop":
        kept_of = f"dynamic sampling kept {len(kept)} of {wanted} groups in {algorithm.filter.max_rounds} rounds"
        raise TrainingError(f"{kept_of}; raise algorithm.filter.max_rounds, or use on_exhausted=train_partial")
    return kept if algorithm.filter.on_exhausted == "train_partial" else []


def _unique(groups: Sequence[Group]) -> list[Group]:
    """Rename groups of a sample that was drawn again in the same step, so that every uid is unique."""
    used: set[str] = set()
    result = []
    for group in groups:
        if group.uid in used:
            uid = next(u for n in count(2) if (u := f"{group.uid}@{n}") not in used)
            group = replace(group.each(partial(replace, sample_id=uid)), uid=uid)
        used.add(group.uid)
        result.append(group)
    return result
