"""Supervised fine-tuning on conversations (the tokens that an assistant wrote), on whole documents,
or with a teacher.

saccade sft run.yaml data.train=demonstrations.jsonl
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from saccade.algorithms import select
from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig
from saccade.forest.batch import Batch
from saccade.forest.packing import pack
from saccade.recipes import model_setup, offline_loop, questions, run_parts
from saccade.recipes.to_trajectory import dialogue, document
from saccade.registry import HOOKS
from saccade.run.training_run import Run
from saccade.trainer import MODEL_SCORING, Loss
from saccade.types import Sample

# -log p of each trained token, all tokens alike: the policy gradient of an advantage of 1.
SUPERVISED = resolve(AlgorithmConfig(preset=("reinforce",)), max_tokens=1)
LOGGED = (
    *("policy/grad_norm", "policy/grad_norm_vision", "policy/lr", "policy/update_skipped"),
    *("moe/aux_loss", "guard/nonfinite", "mem/oom_splits", "perf/imbalance", "sft/teacher", "sft/token_accuracy"),
)


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config, family = offline_loop.resolve(config, "sft")
    sft = config.sft
    if sft.mode == "pretrain":
        data = questions.load_documents(config.data, config.data.train)
        read = partial(document, family=family, max_tokens=sft.max_tokens)
    else:
        data = questions.load_dialogues(config, config.data.train, family)
        read = partial(dialogue, family=family, loss_on=sft.loss_on)
    sets = questions.validation_sets(config, family) if config.val.every else {}

    def prepare(samples: Sequence[Sample]) -> tuple[list[Batch], Loss]:
        rows = [read(sample) for sample in samples]
        batches = pack(rows, micro_tokens=config.train.micro_tokens, dp_size=job.trainer.dp_size)
        return select.write_supervision(batches), loss

    with Run(config, "sft", run_parts.manifest(family, data, config.data)) as this:
        if sft.reward_tag is not None and sets:
            sets = HOOKS["asking_for_the_best"](sft.reward_tag, data, sets)
        job = offline_loop.set_up(this, family, data, questions=sets)
        loss: Loss = HOOKS["supervised"](SUPERVISED, MODEL_SCORING)
        if sft.teacher is not None:
            teacher = model_setup.load_beside("teacher", config, family, None, job.trainer)
            loss = HOOKS["distillation"](teacher, sft.kd_coef)
        task = offline_loop.Task(prepare=prepare, train=job.trainer.train_step, metrics=metrics)
        return offline_loop.train(job, task)


def metrics(found: Mapping[str, float], batches: Sequence[Batch], loss: Loss) -> dict[str, float]:
    mean = found.get("policy/loss", float("nan"))
    written = found.get("sft/ce", mean)  # with a teacher, the loss is not the cross-entropy alone
    return {name: found[name] for name in LOGGED if name in found} | {
        "sft/loss": mean,
        "sft/ppl": float(np.exp(min(written, 20.0))),
        "sft/tokens": sum(batch.target_count for batch in batches),
    }
