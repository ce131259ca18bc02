"""Training on existing rows: one set-up and one loop for sft, dpo and reward models.

config, family = resolve(config, "sft")
with Run(config, "sft", run_parts.manifest(family, data, config.data)) as run:
    job = set_up(run, family, data, questions=sets)
    return train(job, Task(prepare=prepare, metrics=metrics, train=job.trainer.train_step))
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade import checks
from saccade.checks.steps import total_steps
from saccade.config import Config, load
from saccade.data.datasets import Dataset, Stream
from saccade.forest.batch import Batch
from saccade.models.families import Family
from saccade.recipes import model_setup
from saccade.recipes.failures import guard
from saccade.recipes.validation import Validation, make_evaluator
from saccade.registry import HOOKS
from saccade.run.training_run import Run
from saccade.system.disk import require_writable
from saccade.trainer import Trainer, Update
from saccade.trainer.optimizer import lr_factor
from saccade.types import Sample

log = logging.getLogger(__name__)

Means = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is ready to train: the model, its training rows and its validation sets."""

    run: Run
    trainer: Trainer
    stream: Stream
    rows: Mapping[str, Dataset]  # sets of data.val to compute the metrics of training on
    questions: Mapping[str, Dataset]  # sets of data.val to answer; the answers are scored
    averages: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The functions of one recipe that the loop calls."""

    prepare: Callable[[Sequence[Sample]], tuple[Sequence[Batch], Any]]  # forests and their loss
    train: Callable[..., Update]  # (forests, loss, lr=): one optimizer step
    metrics: Callable[[Means, Sequence[Batch], Any], dict[str, float]]  # means of the update → log
    # (set, step, prefix) → metrics of held-out rows
    measure: Callable[[Dataset, int, str], Means] = lambda dataset, step, prefix: {}
    # (rows, means of the update, step), after a step without validation
    unmeasured: Callable[[Sequence[Sample], Means, int], None] = lambda samples, found, step: None
    preparing: str = "data"  # the phase of `prepare`
    measure_saved: bool = False  # also measure the held-out rows before a save


def resolve(config: Any, command: str) -> tuple[Config, Family]:
    """The checked config of a command and the family of its model."""
    config = load(config, command=command)
    checks.check(config, command)
    require_writable(config.run.out, "run.out")
    model_setup.quiet_libraries()
    return config, model_setup.family_of(config, model_setup.start_folder(config))


def set_up(
    run: Run,
    family: Family,
    data: Dataset,
    *,
    rows: Mapping[str, Dataset] | None = None,
    questions: Mapping[str, Dataset] | None = None,
    attach: Callable[[Any], None] = lambda model: None,
) -> Job:
    """Load the model, from the start or a checkpoint, and begin the run. `attach` adds heads."""
    config = run.config
    log.info(data.summary)
    trainer = model_setup.start_policy(run, family, attach=attach)
    stream = Stream(data, seed=config.run.seed, config=config.data)
    run.restore(trainer, {"stream": stream}, parts={})
    sets = {**(rows or {}), **(questions or {})}
    run.compare_sets(sets)
    HOOKS["warn_of_rows"](config, family, stream, sets.values())
    return Job(
        run=run,
        trainer=trainer,
        stream=stream,
        rows=rows or {},
        questions=questions or {},
        averages=HOOKS["average"](config, family, trainer, run.start, attach=attach),
    )


def train(job: Job, task: Task) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    run, trainer, stream, options = job.run, job.trainer, job.stream, job.run.config.train
    validation = Validation(
        evaluator=make_evaluator(run, trainer, job.questions),
        weights=trainer,
        questions=job.questions,
        rows=job.rows,
        measure_rows=task.measure,
        every=run.config.val.every,
        saves=run.checkpointer.due if task.measure_saved else lambda step: False,
        training_follows=True,
    )
    total, sets = total_steps(run.config, stream.rows_per_epoch), validation.sets.values()
    run.begin(total, trainer, (stream.dataset, *sets), job.averages)
    run.log_start(validation.check_engine(run.config, run.step))
    run.validate_start(validation)
    last: dict[str, Any] = {}
    for step in run.steps():
        with run.phase("data"):
            samples = run.quarantine.take(stream, options.prompts_per_step, trainer.family)
        with run.phase(task.preparing):
            batches, loss = task.prepare(samples)
        with run.phase("update"):
            update = task.train(batches, loss, lr=options.lr * lr_factor(run.step, total, options))
            bad = guard(update, batches, run.progress.bad_updates, options, run.folder.path, step=step)
        progress = replace(run.progress, step=step, stream=stream.state(), bad_updates=bad)
        found = update.metrics.means()
        values = task.metrics(found, batches, loss) | {"data/epoch": stream.epoch}
        if not validation.due(step, total):
            task.unmeasured(samples, found, step)
        last = run.finish_step(progress, values | HOOKS["offline_work"](trainer, batches), validation)
    return last
