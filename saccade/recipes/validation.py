"""Validation inside a run: the same path as `saccade eval`, with the current weights."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.config import Config
from saccade.data.datasets import Dataset
from saccade.engines import Engine
from saccade.models.families import Family
from saccade.recipes import run_parts
from saccade.recipes.engines import check_parity, make_engine
from saccade.recipes.evaluator import Evaluator, Result, describe, read_of
from saccade.registry import HOOKS
from saccade.rewards.scorer import Scorer
from saccade.rollout.collect import Pool
from saccade.rollout.scoring import missing_answer
from saccade.run.training_run import Measured, Run
from saccade.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Sets of data.val, measured with the current weights: `questions` are answered and the answers scored; on `rows`
    the metrics of training are computed.
    """

    evaluator: Evaluator | None  # None without questions
    weights: Trainer
    questions: Mapping[str, Dataset]
    every: int
    training_follows: bool  # so the engine must free its memory; False: a rollout follows
    rows: Mapping[str, Dataset] = field(default_factory=dict)
    # (set, step, prefix of the names) → metrics
    measure_rows: Callable[[Dataset, int, str], Mapping[str, float]] = lambda dataset, step, prefix: {}
    saves: Callable[[int], bool] = lambda step: False  # steps at which it is due, too
    rollout_pool: Pool | None = None  # pool of the rollouts, if they run during training

    @property
    def sets(self) -> dict[str, Dataset]:
        return {**self.rows, **self.questions}

    def due(self, step: int, total: int) -> bool:
        if not (self.sets and self.every):
            return False
        return step % self.every == 0 or step == total or self.saves(step)

    def check_engine(self, config: Config, version: int) -> dict[str, float]:
        """Parity check of engine and trainer in commands without rollouts; returns its metrics."""
        if self.evaluator is None:
            return {}
        engine = self.evaluator.engine
        samples = [s for dataset in self.questions.values() for s in dataset.samples]
        engine.update_weights(self.weights, version=version)
        found = check_parity(config, engine, self.weights, samples, version=version)
        engine.sleep()
        return found

    def measure(self, step: int, scores: Sequence[str]) -> Measured:
        values = dict[str, float]()
        # In reverse: a reward model's statistics are overwritten by each set, and should be those of the first.
        for name, dataset in reversed(list(self.rows.items())):
            values = {**self.measure_rows(dataset, step, f"val/{name}"), **values}
        if values:
            shown = {n: v for n, v in values.items() if n.endswith("/margin") or (n.endswith("/accuracy") and v >= 0)}
            log.info(f"step {step}  " + "  ".join(f"{n} {v:.3g}" for n, v in shown.items()))
        if self.evaluator is None or not self.questions:
            return Measured(metrics=values)
        engine = self.evaluator.engine
        engine.update_weights(self.weights, version=step)
        results = [self.evaluator.evaluate(name, data, scores) for name, data in self.questions.items()]
        if self.training_follows:
            engine.sleep()
        return self._found(step, results, values)

    def begin(self, step: int, scores: Sequence[str]) -> Callable[[], Measured]:
        """Submit the questions to the pool of rollouts (`rollout_pool`), whose engine has the weights of this step; the
        returned function waits for the answers.
        """
        assert self.evaluator is not None and self.evaluator.engine.version == step
        begun = [self.evaluator.begin(name, data, scores, self.rollout_pool) for name, data in self.questions.items()]
        return lambda: self._found(step, [result() for result in begun], {})

    def _found(self, step: int, results: Sequence[Result], values: Mapping[str, float]) -> Measured:
        evaluator, advice = self.evaluator, dict[str, str]()
        assert evaluator is not None
        for result in results:
            log.info(f"step {step}  {describe(result)}")
            shown_answers = missing_answer(result.groups, evaluator.scorer, evaluator.family)
            for about, line in HOOKS["diagnose_answers"](result.metrics, shown_answers).items():
                advice.setdefault(about, f"{result.name}: {line}")
        most = evaluator.val.log_generations
        found = {f"val/{r.name}/{key}": v for r in results for key, v in r.metrics.items()}
        return Measured(
            metrics={**values, **found},
            scores=[source for result in results for source in result.scores],
            stored={f"val/{result.name}": result.groups[:most] for result in results},
            advice=advice,
        )


def evaluator_of(run: Run, engine: Engine, family: Family, scorer: Scorer | None) -> Evaluator:
    used: dict[str, Any] = {"engine": engine, "family": family, "scorer": scorer, "quarantine": run.quarantine}
    return Evaluator(**used, **read_of(run.config, family), progress=run.watch_validation)


def make_evaluator(run: Run, policy: Trainer, sets: Mapping[str, Dataset]) -> Evaluator | None:
    """Engine and rewards for training without rollouts; None if there are no sets."""
    config = run.config
    if not sets:
        if config.reward.given:
            log.info("reward scores nothing here: no set of data.val has questions to be answered")
        return None
    scorer = run_parts.make_scorer(config)
    run.close_at_end(scorer)
    HOOKS["place_reward_models"](scorer, policy)
    for dataset in sets.values():
        run_parts.test_rewards(config, scorer, dataset.samples)
    HOOKS["warn_of_rewards"](scorer, sets.values())
    engine = make_engine(config, policy, logs=run.folder.path)
    run.close_at_end(engine)
    return evaluator_of(run, engine, policy.family, scorer)
