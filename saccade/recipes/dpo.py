"""Preference training: pairs (or labelled responses), forests, reference, update, again.

saccade dpo run.yaml data.train=pairs.jsonl dpo.loss=ipo
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from saccade import checks
from saccade.algorithms.comparison import Comparison, from_config
from saccade.backends.local import LocalBackend
from saccade.backends.losses import PreferenceLoss
from saccade.config import Config, load
from saccade.data.datasets import Dataset, Stream
from saccade.disk import require_writable
from saccade.errors import ConfigError, DataError
from saccade.models.families import Family
from saccade.models.load import describe_trained
from saccade.plan import total_steps
from saccade.recipes import ema, models, pairs, parts, questions
from saccade.recipes.failures import guard
from saccade.recipes.pairs import Comparer
from saccade.recipes.quarantine import Quarantine
from saccade.recipes.run import Measured, Run
from saccade.recipes.validation import Validation, answering
from saccade.recipes.work import sft_work
from saccade.types import Metrics, Sample

log = logging.getLogger(__name__)


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config = load(config, command="dpo")
    checks.check(config, "dpo")
    require_writable(config.run.out, "run.out")
    models.quiet_libraries()
    row = from_config(config.dpo)
    family = models.family_of(config, models.start_folder(config))
    data = pairs.load_pairs(config, config.data.train, family, paired=row.paired)
    questions.require_rows(data, "data.train")
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
        stream = Stream(data, seed=config.run.seed, config=config.data)
        this.restore(backend, {"stream": stream})
        sets = held | asked
        this.compare_sets(sets)
        parts.warn_of_rows(config, family, stream, sets.values())
        answers = answering(this, config, policy, backend, asked)
        validation = HeldOut(comparer, backend, this.quarantine, held, answers)
        averages = ema.follow(config, family, backend, this.start)
        total = total_steps(config, stream.rows_per_epoch)
        this.begin(total, backend, family, (data, *sets.values()), averages)
        return _train(this, comparer, backend, stream, validation)


def _train(
    run: Run, comparer: Comparer, backend: LocalBackend, stream: Stream, validation: HeldOut
) -> dict[str, Any]:
    train, last = comparer.config.train, dict[str, Any]()
    run.validate_start(validation)
    for step in run.steps():
        with run.phase("data"):
            rows = run.quarantine.take(stream, train.prompts_per_step, backend.family)
        with run.phase("logp_ref"):
            batches, row = comparer.prepare(rows, backend)
        with run.phase("update"):
            update = backend.train_step(batches, PreferenceLoss(row), lr=run.learning_rate())
            before, folder = run.progress.bad_updates, run.folder.path
            bad = guard(update, batches, before, train, folder, step=step)
        progress = replace(run.progress, step=step, stream=stream.state(), bad_updates=bad)
        values = _metrics(update.metrics, row, stream) | sft_work(backend, batches)
        last = run.finish_step(progress, values, validation)
    return last


def _metrics(update: Metrics, row: Comparison, stream: Stream) -> dict[str, float]:
    found = update.means()
    z = {} if row.paired else {"dpo/z": row.z}
    return found | pairs.named(found, "dpo") | z | {"data/epoch": stream.epoch}


@dataclass(frozen=True)
class HeldOut:
    """Pairs that are not trained on, beside questions whose answers are scored."""

    comparer: Comparer
    backend: LocalBackend
    quarantine: Quarantine
    held: Mapping[str, Dataset]
    answers: Validation

    @property
    def sets(self) -> dict[str, Dataset]:
        return {**self.held, **self.answers.sets}

    def due(self, step: int, total: int) -> bool:
        every = self.comparer.config.val.every
        return bool(self.sets and every) and (step % every == 0 or step == total)

    def measure(self, step: int, scores: Sequence[str]) -> Measured:
        values: dict[str, float] = {}
        for name, dataset in self.held.items():
            samples = self.quarantine.whole(dataset, self.backend.family)
            found = self.comparer.measure(samples, self.backend)
            values |= pairs.named(found, f"val/{name}")
        if values:
            shown = {n: v for n, v in values.items() if n.endswith(("/accuracy", "/margin"))}
            text = "  ".join(f"{name} {value:.3g}" for name, value in shown.items())
            log.info(f"step {step}  {text}")
        if not self.answers.sets:
            return Measured(metrics=values)
        answered = self.answers.measure(step, scores)
        return replace(answered, metrics={**values, **answered.metrics})


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
