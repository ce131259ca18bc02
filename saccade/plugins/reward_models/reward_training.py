"""Training of reward models on pairs with labels, or on steps with theirs.

saccade reward-model run.yaml data.train=pairs.jsonl reward_model.loss=hps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from saccade.data.datasets import Dataset
from saccade.plugins.reward_models.reward_card import write_card
from saccade.plugins.reward_models.reward_forward import train_ratings
from saccade.plugins.reward_models.reward_rows import held_out, named, rows_of, with_statistics
from saccade.recipes import offline_loop, parts, questions
from saccade.run.training_run import Run
from saccade.trainer import Loss
from saccade.types import Batch, Sample

LOGGED = ("policy/grad_norm", "policy/grad_norm_vision", "policy/lr", "moe/aux_loss", "guard/nonfinite")


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config, family = offline_loop.resolve(config, "reward-model")
    rows = rows_of(config, family)
    data = questions.require_rows(rows.load(config.data.train), "data.train")
    rows.check(data.samples)
    held = held_out(config, rows) if config.val.every else {}
    with Run(config, "reward-model", parts.manifest(family, data, config)) as this:
        card = rows.card(this.start, data.samples)
        job = offline_loop.set_up(
            this, family, data, rows=held, attach=partial(rows.attach, card=card, stored=this.start)
        )
        backend = job.backend

        def remember(found: Mapping[str, float], step: int) -> None:
            """The card says where the scores lie, and by which weights."""
            write_card(backend.model, with_statistics(card, found, step))

        def measure(dataset: Dataset, step: int, prefix: str) -> dict[str, float]:
            samples = this.quarantine.whole(dataset, family)
            found = offline_loop.measure(backend, *rows.prepare(samples))
            remember(found, step)
            return named(found, prefix)

        def unmeasured(samples: Sequence[Sample], found: Mapping[str, float], step: int) -> None:
            if not this.checkpointer.due(step):
                remember(found, step - 1)  # it was computed before the update
            elif card.heads:
                with this.phase("validation"):
                    remember(offline_loop.measure(backend, *rows.prepare(samples)), step)

        task = offline_loop.Task(
            prepare=rows.prepare,
            train=partial(train_ratings, backend),
            metrics=metrics,
            measure=measure,
            unmeasured=unmeasured,
            measure_saved=True,
        )
        return offline_loop.train(job, task)


def metrics(found: Mapping[str, float], batches: Sequence[Batch], loss: Loss) -> dict[str, float]:
    return {name: found[name] for name in LOGGED if name in found} | named(found, "rm")
