"""Preference training: pairs (or labelled responses), forests, reference, update, again.

saccade dpo run.yaml data.train=pairs.jsonl dpo.loss=ipo
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from saccade import checks
from saccade.algorithms.comparison import Comparison, from_config
from saccade.backends.local import LocalBackend
from saccade.backends.losses import PreferenceLoss
from saccade.config import Config, defaults_for, load
from saccade.data.datasets import Dataset, Stream
from saccade.disk import require_writable
from saccade.errors import ConfigError, DataError
from saccade.models.families import Family
from saccade.models.load import describe_trained
from saccade.plan import total_steps
from saccade.recipes import average, models, pairs, parts, questions
from saccade.recipes.guard import guard
from saccade.recipes.pairs import Comparer
from saccade.recipes.run import Run
from saccade.recipes.validation import Validation, answering
from saccade.recipes.work import sft_work
from saccade.types import Metrics, Sample

log = logging.getLogger(__name__)


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config = defaults_for("dpo", load(config))
    checks.check(config, "dpo")
    require_writable(config.run.out, "run.out")
    models.quiet_libraries()
    row = from_config(config.dpo)
    family = models.family_of(config, models.start_folder(config))
    data = pairs.load_pairs(config, config.data.train, family, paired=row.paired)
    questions.not_empty(data, "data.train")
    _require_both_labels(config, data.samples)
    held, asked = _validation_sets(config, family, row)
    with Run(config, "dpo", parts.manifest(family, data, config)) as this:
        log.info(data.summary)
        every = [sample for dataset in (data, *held.values()) for sample in dataset.samples]
        strange = {} if row.paired else pairs.strangers(every)
        totals = None
        if row.needs_reference and config.dpo.reference == "precompute":
            totals = pairs.precomputed(this, config, family, [*every, *strange.values()])
        policy = models.load_policy(config, family, folder=str(this.start) if this.start else None)
        log.info(describe_trained(policy.model, family))
        backend = models.learner(config, policy)
        if row.needs_reference and config.dpo.reference == "compute":
            reference = models.load_reference(config, family, None, backend)
            totals = partial(pairs.computed, reference)
        comparer = Comparer(config=config, family=family, row=row, totals=totals, strange=strange)
        stream = this.stream(data, backend)
        sets = held | asked
        this.compare_sets(sets)
        parts.warn_of_rows(config, family, stream, sets.values())
        answers = answering(this, config, policy, backend, asked)
        validation = HeldOut(this, comparer, backend, held, answers)
        averages = average.kept(config, family, backend, this.start)
        total = total_steps(config, stream.rows_per_epoch)
        this.begin(total, backend, family, (data, *sets.values()), averages)
        return _train(this, comparer, backend, stream, validation)


def _train(
    run: Run, comparer: Comparer, backend: LocalBackend, stream: Stream, validation: HeldOut
) -> dict[str, Any]:
    train, last = comparer.config.train, dict[str, Any]()
    validation.before()
    for _ in run.steps():
        with run.phase("data"):
            rows = run.take(stream, train.prompts_per_step)
        with run.phase("logp_ref"):
            batches, row = comparer.prepare(rows, backend)
        with run.phase("update"):
            update = backend.train_step(batches, PreferenceLoss(row), lr=run.learning_rate())
            guard(run, train, batches, update)
        run.progress["stream"] = stream.state()
        values = _metrics(update.metrics, row, stream) | sft_work(backend, batches)
        last = run.finish_step(values, validation)
    return last


def _metrics(update: Metrics, row: Comparison, stream: Stream) -> dict[str, float]:
    found = update.means()
    z = {} if row.paired else {"dpo/z": row.z}
    return found | pairs.named(found, "dpo") | z | {"data/epoch": stream.epoch}


@dataclass(frozen=True)
class HeldOut:
    """Pairs that are not trained on, beside questions whose answers are scored."""

    run: Run
    comparer: Comparer
    backend: LocalBackend
    sets: Mapping[str, Dataset]
    answers: Validation

    def before(self) -> None:
        wanted = (self.sets or self.answers.sets) and self.comparer.config.val.before
        if wanted and self.run.step == 0:
            self.run.loggers.log(self.metrics(step=0), 0)

    def due(self, step: int) -> bool:
        every = self.comparer.config.val.every
        wanted = bool((self.sets or self.answers.sets) and every)
        return wanted and (step % every == 0 or step == self.run.total)

    def metrics(self, *, step: int) -> dict[str, float]:
        values: dict[str, float] = {}
        with self.run.phase("validation"):
            for name, dataset in self.sets.items():
                samples = self.run.quarantine.whole(dataset, self.backend.family)
                found = self.comparer.measure(samples, self.backend)
                values |= pairs.named(found, f"val/{name}")
        if values:
            shown = {n: v for n, v in values.items() if n.endswith(("/accuracy", "/margin"))}
            text = "  ".join(f"{name} {value:.3g}" for name, value in shown.items())
            log.info(f"step {step}  {text}")
            self.run.note_validation(values, step)
        return values | (self.answers.metrics(step=step) if self.answers.sets else {})


def _require_both_labels(config: Config, samples: Sequence[Sample]) -> None:
    """Of labelled responses; the two sides of a pair have them both, and no label."""
    found = {sample.desirable for sample in samples}
    if len(found) == 1 and None not in found:
        label = int(found == {True})
        raise DataError(
            f"data.train: dpo.loss={config.dpo.loss} learns from good and bad responses, and all "
            f"{len(samples)} rows have the label {label}; add rows with the label {1 - label}, or "
            "use saccade sft where all are good"
        )


def _validation_sets(
    config: Config, family: Family, row: Comparison
) -> tuple[dict[str, Dataset], dict[str, Dataset]]:
    """Sets to compare candidates of, and sets of questions to be answered."""
    sets = questions.validation_sets(config, family) if config.val.every else {}
    held: dict[str, Dataset] = {}
    for (name, dataset), source in zip(sets.items(), config.data.val, strict=False):
        if any(sample.candidates for sample in dataset.samples):
            found = pairs.load_pairs(config, [source], family, paired=row.paired)
            held[name] = pairs.held_out(found, name, source.path)
    asked = {name: dataset for name, dataset in sets.items() if name not in held}
    if asked and not config.reward.given:
        raise ConfigError(
            f"data.val: {', '.join(asked)} asks without candidates, and nothing scores an answer; "
            "set reward.terms=[exact], give rows with chosen and rejected, or val.every=0"
        )
    return held, asked
