"""Validation inside a run: the same path as `saccade eval`, with the weights as they are."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from saccade.backends.local import LocalBackend
from saccade.config import Config
from saccade.data.datasets import Dataset
from saccade.engines import Engine
from saccade.models.families import Family
from saccade.recipes import models, parity, parts
from saccade.recipes.engines import make_engine
from saccade.recipes.evaluate import describe, evaluate_set
from saccade.recipes.run import Run, Stopping
from saccade.rewards.scorer import Scorer
from saccade.rollout.scoring import unread
from saccade.tracking.diagnosis import unread_answers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Validation:
    """Evaluates the validation sets, stores some responses, remembers the best step."""

    run: Run
    config: Config
    family: Family
    engine: Engine | None  # where there are sets
    weights: LocalBackend
    scorer: Scorer | None
    sets: dict[str, Dataset]
    training_follows: bool  # and wants the memory; else a rollout, with the same weights

    def before(self) -> None:
        """The score of the start, for the comparison; before it, whether engine and trainer mean
        the same model, where no rollout asks.
        """
        if self.engine is not None and self.training_follows:
            samples = [s for dataset in self.sets.values() for s in dataset.samples]
            self.engine.update_weights(self.weights, version=self.run.step)
            parity.check(self.run, self.config, self.engine, self.weights, samples)
            self.engine.sleep()
        if self.sets and self.config.val.before and self.run.step == 0:
            self.run.loggers.log(self.metrics(step=0), 0)

    def due(self, step: int) -> bool:
        every = self.config.val.every
        return bool(self.sets and every) and (step % every == 0 or step == self.run.total)

    def metrics(self, *, step: int) -> dict[str, float]:
        assert self.engine is not None
        known = self.run.progress.setdefault("scores", [])
        self.engine.update_weights(self.weights, version=step)
        with self.run.phase("validation"):
            try:
                results = [
                    evaluate_set(
                        *(self.engine, self.family, self.scorer, name, dataset, self.config),
                        quarantine=self.run.quarantine,
                        progress=self.run.watch_validation,
                        known=known,
                    )
                    for name, dataset in self.sets.items()
                ]
            except Stopping:  # the run ends after this step; half a validation says nothing
                return {}
        if self.training_follows:
            self.engine.sleep()
        for result in results:
            known += sorted(set(result.scores) - set(known))
            groups = result.groups[: self.config.val.log_generations]
            self.run.store(groups, step=step, kind=f"val/{result.name}")
            log.info(f"step {step}  {describe(result)}")
            shown = unread(result.groups, self.scorer, self.family)
            if line := unread_answers(result.metrics.get("parse_rate", 1.0), shown):
                self.run.advise("length/parse_rate", f"{result.name}: {line}")
        metrics = {f"val/{r.name}/{key}": v for r in results for key, v in r.metrics.items()}
        self.run.note_validation(metrics, step)
        return metrics


def answering(
    run: Run,
    config: Config,
    policy: models.Policy,
    weights: LocalBackend,
    sets: dict[str, Dataset],
) -> Validation:
    """For training that samples nothing itself: engine and rewards only where there are sets."""
    if not sets:
        if config.reward.given:
            log.info(
                "reward scores nothing here, as no set of data.val has questions that are answered "
                "while this trains"
            )
        return Validation(
            run, config, policy.family, None, weights, None, sets, training_follows=True
        )
    scorer = parts.make_scorer(config)
    run.close_at_end(scorer)
    for dataset in sets.values():
        parts.test_rewards(config, scorer, dataset.samples)
    parts.warn_of_unused(scorer, sets.values())
    engine = make_engine(config, policy, logs=run.folder.path)
    run.close_at_end(engine)
    return Validation(
        run, config, policy.family, engine, weights, scorer, sets, training_follows=True
    )
