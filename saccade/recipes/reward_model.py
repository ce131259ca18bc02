"""Reward models: rows that were judged, forests, update, again.

saccade reward-model run.yaml data.train=pairs.jsonl reward_model.loss=hps
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade import checks
from saccade.backends.local import LocalBackend
from saccade.config import Config, load
from saccade.data.datasets import Dataset, Stream
from saccade.data.sources import set_names
from saccade.disk import require_writable
from saccade.models.load import describe_trained
from saccade.models.rating import Card, write_card
from saccade.plan import total_steps
from saccade.recipes import ema, models, pairs, parts, questions
from saccade.recipes.failures import guard
from saccade.recipes.quarantine import Quarantine
from saccade.recipes.rated import Task, measure, named, statistics, task_of
from saccade.recipes.run import Measured, Run
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
    config = load(config, command="reward-model")
    checks.check(config, "reward-model")
    require_writable(config.run.out, "run.out")
    models.quiet_libraries()
    family = models.family_of(config, models.start_folder(config))
    task = task_of(config, family)
    data = questions.require_rows(task.load(config.data.train), "data.train")
    task.check(data.samples)
    held = held_out(config, task) if config.val.every else {}
    with Run(config, "reward-model", parts.manifest(family, data, config)) as this:
        log.info(data.summary)
        policy = models.load_policy(config, family, folder=str(this.start) if this.start else None)
        card = task.attach(policy.model, this.start, data.samples)
        log.info(describe_trained(policy.model, family))
        backend = models.learner(config, policy)
        stream = Stream(data, seed=config.run.seed, config=config.data)
        this.restore(backend, {"stream": stream})
        this.compare_sets(held)
        parts.warn_of_rows(config, family, stream, held.values())

        def attach(model: Any) -> None:
            own = task.attach(model, this.start, data.samples)
            write_card(model, replace(own, statistics={}, statistics_step=None))  # of other weights

        averages = ema.follow(config, family, backend, this.start, attach)
        validation = HeldOut(
            *(task, backend, this.quarantine, held, card),
            every=config.val.every,
            saves=this.checkpointer.due,
        )
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
    run.validate_start(validation)
    for step in run.steps():
        with run.phase("data"):
            samples = run.quarantine.take(stream, train.prompts_per_step, backend.family)
            batches, row = task.prepare(samples)
        with run.phase("update"):
            update = task.train(backend, batches, row, lr=run.learning_rate())
            before, folder = run.progress.bad_updates, run.folder.path
            bad = guard(update, batches, before, train, folder, step=step)
        progress = replace(run.progress, step=step, stream=stream.state(), bad_updates=bad)
        found = update.metrics.means()
        values = {name: found[name] for name in KEPT if name in found} | named(found, "rm")
        values |= {"data/epoch": stream.epoch} | sft_work(backend, batches)
        if not validation.due(step, run.total):
            if run.checkpointer.due(step):
                with run.phase("validation"):
                    validation.measure_rows(samples, step)
            else:
                validation.remember(found, step - 1)  # it was computed before the update
        last = run.finish_step(progress, values, validation)
    return last


@dataclass
class HeldOut:
    """Rows that are not trained on. Their scores, or between two validations those of the last
    step, say where the scores lie; the model's config keeps it.
    """

    task: Task
    backend: LocalBackend
    quarantine: Quarantine
    sets: Mapping[str, Dataset]
    card: Card
    every: int
    saves: Callable[[int], bool]

    def due(self, step: int, total: int) -> bool:
        """Also before a save: a model says where its scores lie."""
        return bool(self.sets) and (step % self.every == 0 or self.saves(step))

    def remember(self, found: Mapping[str, float], step: int) -> None:
        self.card = statistics(found, self.card, step)
        write_card(self.backend.model, self.card)

    def measure_rows(self, samples: Sequence[Sample], step: int) -> None:
        """Of some rows, only for what is remembered."""
        if self.card.heads:
            self.remember(measure(self.task, self.backend, samples).means(), step)

    def measure(self, step: int, scores: Sequence[str]) -> Measured:
        values: dict[str, float] = {}
        for name, dataset in reversed(list(self.sets.items())):  # the first set is remembered
            samples = self.quarantine.whole(dataset, self.backend.family)
            found = measure(self.task, self.backend, samples).means()
            self.remember(found, step)
            values |= named(found, f"val/{name}")
        shown = {n: v for n, v in values.items() if n.endswith("/accuracy")}
        text = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
        log.info(f"step {step}  {text}")
        return Measured(metrics=values)


def held_out(config: Config, task: Task) -> dict[str, Dataset]:
    """Rows of data.val, under ids that no training row has."""
    val = config.data.val
    return {
        name: pairs.held_out(task.load([source]), name, source.path)
        for name, source in zip(set_names(val), val, strict=True)
    }
