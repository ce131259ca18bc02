"""Preference training on pairs of responses, or on responses that are labelled good or bad.

The reference is the model that a run starts from. Only its total log-prob of each response is needed: it is
computed once for all rows and cached under run.out, or in every step by a reference that stays loaded.

    saccade dpo run.yaml data.train=pairs.jsonl dpo.loss=ipo
"""

import gc
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.config import Config, DpoConfig
from saccade.data.datasets import Dataset
from saccade.data.records import content_hash
from saccade.errors import ConfigError, DataError
from saccade.forest.batch import Batch
from saccade.models.families import Family
from saccade.models.files import stamp
from saccade.models.load import pick_dtype
from saccade.plugins.check_data.length_cache import renderer
from saccade.plugins.preferences.pairs import candidate_group, held_out, load_pairs, pack_groups
from saccade.plugins.preferences.preference_losses import PreferenceLoss, from_config, of_step
from saccade.recipes import model_setup, offline_loop, questions, run_parts
from saccade.run.folder import write_whole
from saccade.run.quarantine import decode_error
from saccade.run.training_run import Run
from saccade.trainer import MODEL_SCORING, Trainer
from saccade.trainer.local import LocalTrainer
from saccade.trainer.reference import Reference
from saccade.types import Group, Sample

BLOCK = 1024  # rows between two writes of the reference's log-probs
Sets = dict[str, Dataset]
RefLogprobs = Callable[[Sequence[Batch], Sequence[Group]], list[np.ndarray]]  # [sequences] per batch


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config, family = offline_loop.resolve(config, "dpo")
    options = from_config(config.dpo)
    data = questions.require_rows(load_pairs(config, config.data.train, family, paired=options.whole), "data.train")
    _require_both_labels(config.dpo, data.samples)
    held, asked = _validation_sets(config, family, options)
    every = [sample for dataset in (data, *held.values()) for sample in dataset.samples]
    with Run(config, "dpo", run_parts.manifest(family, data, config.data)) as this:
        mismatched = {} if options.whole else mismatched_pairs(every)
        ref_logprobs: RefLogprobs | None = None
        kind, rows = config.dpo.reference if options.needs_reference else None, [*every, *mismatched.values()]
        if kind == "precompute" and config.run.gpus == 1:  # before the policy is loaded, to save memory
            load = lambda: LocalTrainer(model_setup.load_policy(config, family), family)  # noqa: E731
            ref_logprobs = cached_reference(this, config, family, rows, load)
        job = offline_loop.set_up(this, family, data, rows=held, questions=asked)
        load_reference = partial(model_setup.load_beside, "reference", config, family, None, job.trainer)
        if kind == "precompute" and config.run.gpus > 1:
            ref_logprobs = cached_reference(this, config, family, rows, load_reference)
        if kind == "compute":
            reference = load_reference()
            ref_logprobs = lambda batches, groups: logp_sums(reference, batches)  # noqa: E731

        def batches_of(samples: Sequence[Sample]) -> list[Batch]:
            groups = [candidate_group(sample, family) for sample in samples]
            batches = pack_groups(groups, config.train.micro_tokens, dp_size=job.trainer.dp_size)
            found = ref_logprobs(batches, groups) if ref_logprobs else [None] * len(batches)
            return [replace(batch, ref_totals=total) for batch, total in zip(batches, found, strict=True)]

        def prepare(samples: Sequence[Sample]) -> tuple[list[Batch], PreferenceLoss]:
            batches, z = batches_of(samples), 0.0
            if not options.whole:  # z: mean log-ratio of responses paired with other questions
                others = batches_of([mismatched[sample.id] for sample in samples])
                gaps = np.concatenate(logp_sums(job.trainer, others)) - np.concatenate([b.ref_totals for b in others])
                z = max(0.0, float(gaps.mean()))
            return batches, of_step(options, batches, z=z)

        def measure(dataset: Dataset, step: int, prefix: str) -> dict[str, float]:
            samples = this.quarantine.whole(dataset, family)
            found = with_prefix(job.trainer.measure(*prepare(samples)).means(), prefix)
            ties = step == 0 and options.needs_reference  # the policy is still the reference
            return found | {name: math.nan for name in found if ties and name.endswith("/accuracy")}

        task = offline_loop.Task(
            prepare=prepare, train=job.trainer.train_step, metrics=metrics, measure=measure, preparing="logp_ref"
        )
        return offline_loop.train(job, task)


def metrics(found: Mapping[str, float], batches: Sequence[Batch], loss: PreferenceLoss) -> dict[str, float]:
    z = {} if loss.whole else {"dpo/z": loss.z}
    return {**found, **with_prefix(found, "dpo"), **z}


def with_prefix(found: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The objective's metrics under a prefix; without pairs, the margin is the difference of the mean rewards."""
    values = {n.removeprefix("dpo/"): value for n, value in found.items() if n.startswith("dpo/")}
    values["loss"] = found.get("policy/loss", float("nan"))
    if "margin" not in values and {"reward_chosen", "reward_rejected"} <= values.keys():
        values["margin"] = values["reward_chosen"] - values["reward_rejected"]
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _require_both_labels(dpo: DpoConfig, samples: Sequence[Sample]) -> None:
    """For KTO: refuse rows of one label only. Pairs have no label and pass."""
    found = {sample.desirable for sample in samples}
    if len(found) == 1 and None not in found:
        label = int(found == {True})
        one = f"all {len(samples)} rows have the label {label}; add rows with the label {1 - label}"
        raise DataError(f"data.train: dpo.loss={dpo.loss} learns from good and bad responses, and {one}")


def _validation_sets(config: Config, family: Family, options: PreferenceLoss) -> tuple[Sets, Sets]:
    """Returns (sets with candidates to compare, sets of questions that the model answers)."""
    sets = questions.validation_sets(config, family) if config.val.every else {}
    held: Sets = {}
    for (name, dataset), source in zip(sets.items(), config.data.val, strict=False):
        if any(sample.candidates for sample in dataset.samples):
            held[name] = held_out(load_pairs(config, [source], family, paired=options.whole), name, source.path)
    asked = {name: dataset for name, dataset in sets.items() if name not in held}
    if asked and not config.reward.given:
        helps = "set reward.terms=[exact], give rows with chosen and rejected, or val.every=0"
        raise ConfigError(f"data.val: {', '.join(asked)} has no candidates, and nothing scores an answer; {helps}")
    return held, asked


# -- the reference ---------------------------------------------------------------------------------


def logp_sums(model: Reference | Trainer, batches: Sequence[Batch]) -> list[np.ndarray]:
    """Total log-prob of each response, [sequences] per batch."""
    found = model.logprobs(batches, MODEL_SCORING)
    return [
        np.bincount(batch.sequence, weights=new.astype(np.float64), minlength=len(batch.keys))
        for batch, (new, _) in zip(batches, found, strict=True)
    ]


def cached_reference(
    run: Run, config: Config, family: Family, samples: Iterable[Sample], load: Callable[[], Trainer]
) -> RefLogprobs:
    """Score every sample with the reference, through a cache file; the reference is loaded only if rows are missing."""
    path = Path(config.run.out) / ".cache" / f"reference-{_reference_id(config, family)}.json"
    scores: dict[str, list[float]] = json.loads(path.read_text()) if path.is_file() else {}
    # A row with a damaged image is not scored; training skips it.
    missing = {k: s for s in samples if (k := content_hash(s)) not in scores and not decode_error(s)}
    if missing:
        reference, keys = load(), list(missing)
        with run.phase("logp_ref"):
            # The file is written after each block, so an interrupted run continues from there.
            for start in range(0, len(keys), BLOCK):
                block = keys[start : start + BLOCK]
                groups = [candidate_group(missing[key], family) for key in block]
                batches = pack_groups(groups, config.train.micro_tokens, dp_size=reference.dp_size)
                keyed = (key for batch in batches for key in batch.keys)
                found = dict(zip(keyed, np.concatenate(logp_sums(reference, batches)).tolist(), strict=True))
                for key, group in zip(block, groups, strict=True):
                    scores[key] = [found[member.key] for member in group.trajectories]
                write_whole(path, json.dumps(scores))
                run.display.console.progress(min(start + BLOCK, len(keys)), len(keys))
        reference.close()
        del reference
        gc.collect()  # a trainer and its inputs form a reference cycle
        torch.cuda.empty_cache()  # return the memory to the device, for other processes

    def ref_logprobs(batches: Sequence[Batch], groups: Sequence[Group]) -> list[np.ndarray]:
        known = ((group.trajectories, scores[content_hash(group.sample)]) for group in groups)
        found = {m.key: total for members, own in known for m, total in zip(members, own, strict=True)}
        return [np.array([found[key] for key in batch.keys]) for batch in batches]

    return ref_logprobs


def _reference_id(config: Config, family: Family) -> str:
    """Cache key: what the log-probs depend on besides the row, so weights, dtype, quantisation and rendering."""
    dtype = pick_dtype(config.model.dtype, model_setup.device_of(config.run))
    what = [stamp(Path(family.path)), str(dtype), config.model.train == "qlora", renderer(family)]
    return hashlib.blake2b(repr(what).encode(), digest_size=12).hexdigest()


def mismatched_pairs(samples: Sequence[Sample]) -> dict[str, Sample]:
    """By sample id: its question paired with the response to the next different question (for kto's z)."""
    found = {}
    for index, sample in enumerate(samples):
        others = (samples[(index + step) % len(samples)] for step in range(1, len(samples)))
        other = next((o for o in others if o.messages != sample.messages and not decode_error(o)), None)
        if other is None:
            raise DataError("dpo.loss=kto needs responses to other questions, and all rows ask the same one; add rows")
        found[sample.id] = replace(sample, id=f"{sample.id}~", candidates=other.candidates[:1], desirable=True)
    return found
