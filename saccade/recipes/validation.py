"""Validation inside a run: the same path as `saccade eval`, with the weights as they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.backends.local import LocalBackend
from saccade.config import Config
from saccade.data.datasets import Dataset
from saccade.engines import Engine
from saccade.models.families import Family
from saccade.recipes import models, parity_check, parts
from saccade.recipes.engines import make_engine
from saccade.recipes.evaluate import Evaluator, describe
from saccade.recipes.run import Measured, Run
from saccade.rewards.scorer import Scorer
from saccade.rollout.scoring import unread
from saccade.tracking.diagnosis import unread_answers

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Evaluates the validation sets with the weights of this moment."""

    evaluator: Evaluator | None  # where there are sets
    weights: LocalBackend
    sets: dict[str, Dataset]
    every: int
    training_follows: bool  # and wants the memory; else a rollout, with the same weights

    def due(self, step: int, total: int) -> bool:
        return bool(self.sets and self.every) and (step % self.every == 0 or step == total)

    def check_engine(self, version: int) -> dict[str, float]:
        """Whether engine and trainer mean the same model, where no rollout asks that."""
        if self.evaluator is None:
            return {}
        engine, config = self.evaluator.engine, self.evaluator.config
        samples = [s for dataset in self.sets.values() for s in dataset.samples]
        engine.update_weights(self.weights, version=version)
        found = parity_check.check(config, engine, self.weights, samples, version=version)
        engine.sleep()
        return found

    def measure(self, step: int, scores: Sequence[str]) -> Measured:
        assert self.evaluator is not None
        engine, scorer, family = (
            self.evaluator.engine,
            self.evaluator.scorer,
            self.evaluator.family,
        )
        engine.update_weights(self.weights, version=step)
        results = [self.evaluator.evaluate(name, data, scores) for name, data in self.sets.items()]
        if self.training_follows:
            engine.sleep()
        advice: dict[str, str] = {}
        for result in results:
            log.info(f"step {step}  {describe(result)}")
            shown = unread(result.groups, scorer, family)
            if line := unread_answers(result.metrics.get("parse_rate", 1.0), shown):
                advice.setdefault("length/parse_rate", f"{result.name}: {line}")
        kept = self.evaluator.config.val.log_generations
        return Measured(
            metrics={f"val/{r.name}/{key}": v for r in results for key, v in r.metrics.items()},
            scores=[source for result in results for source in result.scores],
            stored={f"val/{result.name}": result.groups[:kept] for result in results},
            advice=advice,
        )


def evaluator_of(run: Run, engine: Engine, family: Family, scorer: Scorer | None) -> Evaluator:
    return Evaluator(
        engine=engine,
        family=family,
        scorer=scorer,
        config=run.config,
        quarantine=run.quarantine,
        progress=run.watch_validation,
    )


def answering(
    run: Run, config: Config, policy: models.Policy, weights: LocalBackend, sets: dict[str, Dataset]
) -> Validation:
    """For training that samples nothing itself: engine and rewards only where there are sets."""
    evaluator = None
    if sets:
        scorer = parts.make_scorer(config)
        run.close_at_end(scorer)
        for dataset in sets.values():
            parts.test_rewards(config, scorer, dataset.samples)
        parts.warn_of_unused(scorer, sets.values())
        engine = make_engine(config, policy, logs=run.folder.path)
        run.close_at_end(engine)
        evaluator = evaluator_of(run, engine, policy.family, scorer)
    elif config.reward.given:
        log.info(
            "reward scores nothing here, as no set of data.val has questions that are answered "
            "while this trains"
        )
    return Validation(
        evaluator=evaluator,
        weights=weights,
        sets=sets,
        every=config.val.every,
        training_follows=True,
    )
