"""Generates answers to the questions of a set, scores them, and computes the metrics of the set.

Validation inside a run and `saccade eval` share this code: prompt, sampling, parser and verifier are the same, so a
score in training is the score of the exported folder.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from saccade.checks.steps import val_by_set
from saccade.config import Config, EnvConfig, RewardConfig, ValConfig
from saccade.data.datasets import Dataset
from saccade.engines import Engine
from saccade.environments import gives_rewards
from saccade.models.families import Family
from saccade.recipes import accuracy, run_parts
from saccade.recipes.accuracy import Scores, Table
from saccade.registry import HOOKS
from saccade.rewards.scorer import Scorer
from saccade.rollout.collect import Pool
from saccade.rollout.episode import EpisodeSetup, Limits
from saccade.rollout.scoring import Progress, RewardStream, free_memory_for_rewards, parsed, report_slow_rewards, thinks
from saccade.run.console import unscored
from saccade.run.metrics import episode_metrics, without_scores
from saccade.run.quarantine import Quarantine
from saccade.types import ALWAYS_EXCLUDED, Group, Sample, Sampling


@dataclass(frozen=True, kw_only=True)
class Result:
    """The evaluation of one set."""

    name: str
    groups: tuple[Group, ...]
    metrics: Mapping[str, float]  # without the val/<set>/ prefix
    tables: Mapping[str, Table] = field(default_factory=dict)  # by_limit, by_turns, …
    scores: Scores = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Generates and scores the answers to the questions of a set."""

    engine: Engine
    family: Family
    scorer: Scorer | None
    env: EnvConfig
    reward: RewardConfig
    val: ValConfig
    sampling: Sampling  # of sets without settings of their own
    by_set: Mapping[str, tuple[int, Sampling]]  # sets with settings of their own: (responses per question, sampling)
    limits: Limits
    setup_of: Callable[[Sampling, str], EpisodeSetup]  # (sampling, name that seeds the noise)
    quarantine: Quarantine
    progress: Progress

    def answer(self, samples: Sequence[Sample], repeats: int, sampling: Sampling, seed: str) -> list[Group]:
        """Generate answers to these questions; scored if there is a scorer or the environment gives rewards."""
        return self._ask(samples, repeats, sampling, seed)()

    def _ask(
        self,
        samples: Sequence[Sample],
        repeats: int,
        sampling: Sampling,
        seed: str,
        breakdown: Any = None,
        rollout_pool: Pool | None = None,
        name: str = "",
    ) -> Callable[[], list[Group]]:
        """Submit the questions; the returned function waits for the answers."""
        family, scorer = self.family, self.scorer
        stream, pool = RewardStream(scorer, family), rollout_pool or Pool(self.engine)
        started = pool.start(
            samples,
            self.setup_of(sampling, seed),
            repeats=repeats,
            name=name,
            on_finish=stream.submit,
            on_limit=breakdown and breakdown.submit,
        )
        if rollout_pool is not None:
            rollout_pool.prefer(started)

        def answers() -> list[Group]:
            groups = pool.finish(started, self.progress)
            if rollout_pool is None:
                free_memory_for_rewards(self.engine, scorer)
            if scorer is None and not gives_rewards(self.env):
                return groups
            return stream.attach(groups, report_slow_rewards(self.progress, scorer, self.reward))

        return answers

    def evaluate(self, name: str, dataset: Dataset, score_sources: Collection[str] = ()) -> Result:
        """Evaluate a set. `score_sources`: data sources whose outcome is a score, not an accuracy."""
        return self.begin(name, dataset, score_sources)()

    def begin(
        self, name: str, dataset: Dataset, score_sources: Collection[str], rollout_pool: Pool | None = None
    ) -> Callable[[], Result]:
        """Submit the questions of a set; the returned function waits for the result. With `rollout_pool`, they share it
        with rollouts, and metrics of judges and services are counted with those of the rollouts.
        """
        family, scorer = self.family, self.scorer
        breakdown = HOOKS["breakdown"](self.limits, lambda: RewardStream(scorer, family))
        samples, named = self.quarantine.whole(dataset, family), f"val/{name}|" if rollout_pool else ""
        repeats, sampling = self.by_set.get(name, (self.val.n, self.sampling))
        answers = self._ask(samples, repeats, sampling, "val", breakdown, rollout_pool, named)

        def result() -> Result:
            groups = answers()
            scores = accuracy.score_terms(scorer, accuracy.items_of(groups), score_sources)
            tables: dict[str, Table] = {}
            if scorer is not None or gives_rewards(self.env):
                tables = breakdown.tables(groups, scores)
            metrics = set_metrics(groups, family, scores) | (scorer.metrics() if scorer and not rollout_pool else {})
            metrics["left_out"] = self.quarantine.left_out(dataset)
            for limit, row in tables.get("by_limit", {}).items():
                if "accuracy" in row:
                    metrics[f"accuracy_within_{limit}_turns"] = row["accuracy"]
            return Result(name=name, groups=tuple(groups), metrics=metrics, tables=tables, scores=scores)

        return result


def read_of(config: Config, family: Family) -> dict[str, Any]:
    """The fields of an `Evaluator` that follow from the config."""
    return {
        **{"env": config.env, "reward": config.reward, "val": config.val},
        "sampling": run_parts.validation_sampling(config, config.val),
        "by_set": {
            name: (val.n, run_parts.validation_sampling(config, val)) for name, val in val_by_set(config).items()
        },
        "limits": run_parts.limits_of(config, evaluation=True),
        "setup_of": partial(run_parts.episode_setup, config, family, evaluation=True),
    }


def set_metrics(groups: Sequence[Group], family: Family, scores: Scores) -> dict[str, float]:
    """Accuracy with its interval, and rates that may explain a change of it: parsed answers, thinking, truncation."""
    trajectories = [t for group in groups for t in group.trajectories]
    metrics = verdict_metrics(groups, scores)
    metrics["think_rate"] = float(np.mean([thinks(t, family) for t in trajectories]))
    metrics["response_mean"] = float(np.mean([t.response_length for t in trajectories]))
    plain = [t for group in without_scores(groups, scores) for t in group.trajectories]
    return metrics | episode_metrics(plain)


def verdict_metrics(groups: Sequence[Group], scores: Scores) -> dict[str, float]:
    """Metrics of a set that follow from the rewards alone, without tokens."""
    trajectories = [t for group in groups for t in group.trajectories]
    metrics = accuracy.group_accuracy(groups, scores)
    if rewards := [t.reward for t in trajectories if t.reward is not None]:
        metrics["reward"] = float(np.mean(rewards))
    if formats := [v for t in trajectories for k, v in t.parts.items() if k.startswith("format")]:
        metrics["format"] = float(np.mean(formats))
    judged = [t for t in trajectories if t.status not in ALWAYS_EXCLUDED]
    if any(t.reward is not None or t.reason for t in judged):  # else nothing has been scored
        metrics["parse_rate"] = float(np.mean([parsed(t.extracted, t.reason) for t in judged]))
    for name, status in (("truncated_frac", "truncated"), ("error_rate", "error"), ("abstain_rate", "abstain")):
        metrics[name] = float(np.mean([t.status == status for t in trajectories]))
    return metrics


def describe(result: Result) -> str:
    m = result.metrics
    rates = (("abstain", "abstain_rate"), ("error", "error_rate"))
    lost = [f"{label} {share}" for label, share in unscored(m, rates)]
    why = "no outcome" if "parse_rate" in m else "nothing scored, for want of reward.terms"
    found = accuracy.measures(m) or ["nothing could be scored" if lost else why]
    shares = [f"{key} {m[key]:.2f}" for key in ("parse_rate", "think_rate", "truncated_frac") if key in m]
    left_out = [f"rows left out {m['left_out']:.0f}"] if m.get("left_out") else []
    return f"{result.name}: " + "  ".join([*found, *lost, *shares, f"items {m['items']:.0f}", *left_out])
