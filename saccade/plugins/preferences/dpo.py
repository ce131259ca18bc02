"""Preference training on pairs of responses, or on responses that are labelled good or bad.

saccade dpo run.yaml data.train=pairs.jsonl dpo.loss=ipo
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from saccade.config import Config
from saccade.data.datasets import Dataset
from saccade.errors import ConfigError, DataError
from saccade.models.families import Family
from saccade.plugins.preferences import pairs
from saccade.plugins.preferences.comparison import Comparison, from_config
from saccade.recipes import model_setup, offline_loop, parts, questions
from saccade.run.training_run import Run
from saccade.trainer.losses import PreferenceLoss
from saccade.types import Batch, Sample


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config, family = offline_loop.resolve(config, "dpo")
    options = from_config(config.dpo)
    data = pairs.load_pairs(config, config.data.train, family, paired=options.paired)
    questions.require_rows(data, "data.train")
    _require_both_labels(config, data.samples)
    held, asked = _validation_sets(config, family, options)
    every = [sample for dataset in (data, *held.values()) for sample in dataset.samples]
    with Run(config, "dpo", parts.manifest(family, data, config)) as this:
        mismatched = {} if options.paired else pairs.mismatched_pairs(every)
        totals = None
        if options.needs_reference and config.dpo.reference == "precompute":
            totals = pairs.precomputed(this, config, family, [*every, *mismatched.values()])
        job = offline_loop.set_up(this, family, data, rows=held, questions=asked)
        if options.needs_reference and config.dpo.reference == "compute":
            reference = model_setup.load_reference(config, family, None, job.backend)
            totals = partial(pairs.computed, reference)
        batches = pairs.PreferenceBatches(
            family=family,
            micro_tokens=config.train.micro_tokens,
            policy=job.backend,
            options=options,
            totals=totals,
            mismatched=mismatched,
        )

        def measure(dataset: Dataset, step: int, prefix: str) -> dict[str, float]:
            samples = this.quarantine.whole(dataset, family)
            return pairs.named(offline_loop.measure(job.backend, *batches.prepare(samples)), prefix)

        task = offline_loop.Task(
            prepare=batches.prepare,
            train=job.backend.train_step,
            metrics=metrics,
            measure=measure,
            preparing="logp_ref",
        )
        return offline_loop.train(job, task)


def metrics(found: Mapping[str, float], batches: Sequence[Batch], loss: PreferenceLoss) -> dict[str, float]:
    z = {} if loss.comparison.paired else {"dpo/z": loss.comparison.z}
    return {**found, **pairs.named(found, "dpo"), **z}


def _require_both_labels(config: Config, samples: Sequence[Sample]) -> None:
    """KTO only: both labels must occur. Pairs have no label."""
    found = {sample.desirable for sample in samples}
    if len(found) == 1 and None not in found:
        label = int(found == {True})
        raise DataError(
            f"data.train: dpo.loss={config.dpo.loss} learns from good and bad responses, and all "
            f"{len(samples)} rows have the label {label}; add rows with the label {1 - label}, or "
            "use saccade sft where all are good"
        )


def _validation_sets(
    config: Config, family: Family, options: Comparison
) -> tuple[dict[str, Dataset], dict[str, Dataset]]:
    """Sets whose candidates are compared, and sets of questions that are answered."""
    sets = questions.validation_sets(config, family) if config.val.every else {}
    held: dict[str, Dataset] = {}
    for (name, dataset), source in zip(sets.items(), config.data.val, strict=False):
        if any(sample.candidates for sample in dataset.samples):
            found = pairs.load_pairs(config, [source], family, paired=options.paired)
            held[name] = pairs.held_out(found, name, source.path)
    asked = {name: dataset for name, dataset in sets.items() if name not in held}
    if asked and not config.reward.given:
        raise ConfigError(
            f"data.val: {', '.join(asked)} asks without candidates, and nothing scores an answer; "
            "set reward.terms=[exact], give rows with chosen and rejected, or val.every=0"
        )
    return held, asked
