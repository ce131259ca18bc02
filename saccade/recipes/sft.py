"""Supervised fine-tuning: rows, forests, update, again. Loss on what an assistant wrote, on whole
documents, or beside a teacher.

saccade sft run.yaml data.train=demonstrations.jsonl
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from saccade import checks
from saccade.algorithms import select
from saccade.algorithms.build import resolve
from saccade.backends import OWN, Update
from saccade.backends.distil import DistillationLoss
from saccade.backends.local import LocalBackend
from saccade.backends.losses import PolicyLoss
from saccade.config import AlgorithmConfig, Config, load
from saccade.data.datasets import Stream
from saccade.disk import require_writable
from saccade.forest.packing import pack
from saccade.models.families import Family
from saccade.models.load import describe_trained
from saccade.plan import total_steps
from saccade.recipes import ema, models, parts, questions
from saccade.recipes.dialogues import dialogue, document
from saccade.recipes.failures import guard
from saccade.recipes.run import Run
from saccade.recipes.validation import Validation, answering
from saccade.recipes.work import sft_work
from saccade.types import Batch, Group, Metrics, Sample

log = logging.getLogger(__name__)

# -log p of each trained token, all tokens alike: the policy gradient of an advantage of 1.
SUPERVISED = resolve(AlgorithmConfig(preset=("reinforce",)), max_tokens=1)


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config = load(config, command="sft")
    checks.check(config, "sft")
    require_writable(config.run.out, "run.out")
    models.quiet_libraries()
    family = models.family_of(config, models.start_folder(config))
    reads = questions.load_documents if config.sft.mode == "pretrain" else questions.load_dialogues
    data = reads(config, config.data.train, family)
    with Run(config, "sft", parts.manifest(family, data, config)) as this:
        log.info(data.summary)
        policy = models.load_policy(config, family, folder=str(this.start) if this.start else None)
        log.info(describe_trained(policy.model, family))
        backend = models.learner(config, policy)
        stream = Stream(data, seed=config.run.seed, config=config.data)
        this.restore(backend, {"stream": stream})
        sets = questions.validation_sets(config, family) if config.val.every else {}
        this.compare_sets(sets)
        parts.warn_of_rows(config, family, stream, sets.values())
        sets = questions.asking_for_the_best(config, data, sets)
        validation = answering(this, config, policy, backend, sets)
        teacher = models.load_teacher(config, family)
        averages = ema.follow(config, family, backend, this.start)
        total = total_steps(config, stream.rows_per_epoch)
        this.begin(total, backend, family, (data, *sets.values()), averages)
        return _train(this, config, backend, teacher, family, stream, validation)


def _train(
    run: Run,
    config: Config,
    backend: LocalBackend,
    teacher: LocalBackend | None,
    family: Family,
    stream: Stream,
    validation: Validation,
) -> dict[str, Any]:
    train, last = config.train, dict[str, Any]()
    run.log_start(validation.check_engine(run.step))
    run.validate_start(validation)
    read = _reader(config, family)
    for step in run.steps():
        with run.phase("data"):
            taken = run.quarantine.take(stream, train.prompts_per_step, family)
            rows = [read(sample) for sample in taken]
            batches = pack(rows, positions=family.positions, micro_tokens=train.micro_tokens)
            batches = select.write_supervision(batches)
        with run.phase("update"):
            update = _learn(batches, backend, teacher, config, lr=run.learning_rate())
            before, folder = run.progress.bad_updates, run.folder.path
            bad = guard(update, batches, before, train, folder, step=step)
        progress = replace(run.progress, step=step, stream=stream.state(), bad_updates=bad)
        values = _metrics(update.metrics, rows, stream) | sft_work(backend, batches)
        last = run.finish_step(progress, values, validation)
    return last


def _reader(config: Config, family: Family) -> Callable[[Sample], Group]:
    if config.sft.mode == "pretrain":
        return partial(document, family=family, max_tokens=config.sft.max_tokens)
    return partial(dialogue, family=family, loss_on=config.sft.loss_on)


def _learn(
    batches: Sequence[Batch],
    backend: LocalBackend,
    teacher: LocalBackend | None,
    config: Config,
    *,
    lr: float,
) -> Update:
    if teacher is None:
        return backend.train_step(batches, PolicyLoss(SUPERVISED, OWN), lr=lr)
    return backend.train_step(batches, DistillationLoss(teacher, config.sft.kd_coef), lr=lr)


def _metrics(update: Metrics, rows: Sequence[Group], stream: Stream) -> dict[str, float]:
    means = update.means()
    kept = (
        "policy/grad_norm",
        "policy/grad_norm_vision",
        "moe/aux_loss",
        "policy/lr",
        "guard/nonfinite",
        "mem/oom_splits",
        "sft/teacher",
    )
    loss = means.get("policy/loss", float("nan"))
    written = means.get("sft/ce", loss)  # beside a teacher the loss is not that of tokens alone
    trained = sum(t.response_length for group in rows for t in group.trajectories)
    return {name: means[name] for name in kept if name in means} | {
        "sft/loss": loss,
        "sft/ppl": float(np.exp(min(written, 20.0))),
        "sft/tokens": trained,
        "policy/update_skipped": means["policy/update_skipped"],
        "data/epoch": stream.epoch,
    }
