"""Reward models: rows that were judged, forests, update, again.

saccade reward-model run.yaml data.train=pairs.jsonl reward_model.loss=hps
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade import checks
from saccade.backends.local import LocalBackend
from saccade.config import Config, defaults_for, load
from saccade.data.datasets import Dataset, Stream
from saccade.data.sources import set_names
from saccade.disk import require_writable
from saccade.models.load import describe_trained
from saccade.models.rating import Card, write_card
from saccade.plan import total_steps
from saccade.recipes import average, models, pairs, parts, questions
from saccade.recipes.guard import guard
from saccade.recipes.rated import Task, measure, named, statistics, task_of
from saccade.recipes.run import Run
from saccade.recipes.work import sft_work
from saccade.types import Sample

log = logging.getLogger(__name__)

KEPT = (
    "policy/grad_norm",
    "policy/grad_norm_vision",
    "policy/lr",
    "moe/aux_loss",
    "guard/nonfinite",
)


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config = defaults_for("reward-model", load(config))
    checks.check(config, "reward-model")
    require_writable(config.run.out, "run.out")
    models.quiet_libraries()
    family = models.family_of(config, models.start_folder(config))
    task = task_of(config, family)
    data = questions.not_empty(task.load(config.data.train), "data.train")
    task.check(data.samples)
    held = held_out(config, task) if config.val.every else {}
    with Run(config, "reward-model", parts.manifest(family, data, config)) as this:
        log.info(data.summary)
        policy = models.load_policy(config, family, folder=str(this.start) if this.start else None)
        card = task.attach(policy.model, this.start, data.samples)
        log.info(describe_trained(policy.model, family))
        backend = models.learner(config, policy)
        stream = this.stream(data, backend)
        this.compare_sets(held)
        parts.warn_of_rows(config, family, stream, held.values())

        def attach(model: Any) -> None:
            own = task.attach(model, this.start, data.samples)
            write_card(model, replace(own, statistics={}, statistics_step=None))  # of other weights

        averages = average.kept(config, family, backend, this.start, attach)
        validation = HeldOut(this, task, backend, held, card)
        total = total_steps(config, stream.rows_per_epoch)
        this.begin(total, backend, family, (data, *held.values()), averages)
        return _train(this, config, task, backend, stream, validation)


def _train(
    run: Run,
    config: Config,
    task: Task,
    backend: LocalBackend,
    stream: Stream,
    validation: HeldOut,
) -> dict[str, Any]:
    train, last = config.train, dict[str, Any]()
    validation.before()
    for step in run.steps():
        with run.phase("data"):
            samples = run.take(stream, train.prompts_per_step)
            batches, row = task.prepare(samples)
        with run.phase("update"):
            update = task.train(backend, batches, row, lr=run.learning_rate())
            guard(run, train, batches, update)
        run.progress["stream"] = stream.state()
        found = update.metrics.means()
        values = {name: found[name] for name in KEPT if name in found} | named(found, "rm")
        values |= {"data/epoch": stream.epoch} | sft_work(backend, batches)
        if not validation.due(step):
            if run.saves(step):
                validation.measure(samples, step)
            else:
                validation.remember(found, step - 1)  # it was computed before the update
        last = run.finish_step(values, validation)
    return last


@dataclass
class HeldOut:
    """Rows that are not trained on. Their scores, or between two validations those of the last
    step, say where the scores lie; the model's config keeps it.
    """

    run: Run
    task: Task
    backend: LocalBackend
    sets: Mapping[str, Dataset]
    card: Card

    def before(self) -> None:
        if self.sets and self.run.config.val.before and self.run.step == 0:
            self.run.loggers.log(self.metrics(step=0), 0)

    def due(self, step: int) -> bool:
        if not self.sets:
            return False
        every = self.run.config.val.every
        return step % every == 0 or self.run.saves(step)  # a model says where its scores lie

    def remember(self, found: Mapping[str, float], step: int) -> None:
        self.card = statistics(found, self.card, step)
        write_card(self.backend.model, self.card)

    def measure(self, samples: Sequence[Sample], step: int) -> None:
        """Of some rows, only for what is remembered."""
        if self.card.heads:
            with self.run.phase("validation"):
                self.remember(measure(self.task, self.backend, samples).means(), step)

    def metrics(self, *, step: int) -> dict[str, float]:
        values: dict[str, float] = {}
        with self.run.phase("validation"):
            for name, dataset in reversed(list(self.sets.items())):  # the first set is remembered
                samples = self.run.quarantine.whole(dataset, self.backend.family)
                found = measure(self.task, self.backend, samples).means()
                self.remember(found, step)
                values |= named(found, f"val/{name}")
        shown = {n: v for n, v in values.items() if n.endswith("/accuracy")}
        text = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
        log.info(f"step {step}  {text}")
        self.run.note_validation(values, step)
        return values


def held_out(config: Config, task: Task) -> dict[str, Dataset]:
    """Rows of data.val, under ids that no training row has."""
    val = config.data.val
    return {
        name: pairs.held_out(task.load([source]), name, source.path)
        for name, source in zip(set_names(val), val, strict=True)
    }
