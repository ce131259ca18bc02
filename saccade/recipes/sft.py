"""Supervised fine-tuning: rows, forests, update, again. Loss on what an assistant wrote.

saccade sft run.yaml data.train=demonstrations.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from saccade import checks
from saccade.algorithms import stages
from saccade.algorithms.build import resolve
from saccade.backends import Scoring
from saccade.backends.local import LocalBackend
from saccade.backends.schedule import rate
from saccade.config import AlgorithmConfig, Config, defaults_for, load
from saccade.data.datasets import Stream
from saccade.forest import pack
from saccade.models.families import Family
from saccade.models.load import describe_trained
from saccade.plan import total_steps
from saccade.recipes import parity, parts
from saccade.recipes.engines import make_engine
from saccade.recipes.guard import guard
from saccade.recipes.run import Run
from saccade.recipes.validation import Validation
from saccade.recipes.work import sft_work
from saccade.types import Group, Metrics, Sample, Source, Trajectory

# -log p of each trained token, all tokens alike: the policy gradient of an advantage of 1.
SUPERVISED = resolve(AlgorithmConfig(preset="reinforce"), max_tokens=1)


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config = defaults_for("sft", load(config))
    checks.check(config, "sft")
    parts.quiet_libraries()
    family = parts.family_of(config, parts.start_folder(config))
    data = parts.load_dialogues(config, config.data.train, family)
    with Run(config, "sft", parts.manifest(family, data, config)) as this:
        this.console.note(data.summary)
        policy = parts.load_policy(config, family, folder=str(this.start) if this.start else None)
        this.console.note(describe_trained(policy.model, family))
        checkpointing = parts.use_checkpointing(config)
        backend = LocalBackend(policy.model, family, config.train, checkpointing=checkpointing)
        stream = Stream(data, seed=config.run.seed, config=config.data)
        this.progress.setdefault("stream", stream.state())
        if this.start is not None:
            backend.load_state(this.start / "state")
            stream.restore(this.progress["stream"])
        validation = _validation(this, config, policy, backend)
        this.begin(total_steps(config, stream.rows_per_epoch), backend, family)
        parts.write_quarantine(this.folder.path / "quarantine.jsonl", data)
        return _train(this, config, backend, family, stream, validation)


def _train(
    run: Run,
    config: Config,
    backend: LocalBackend,
    family: Family,
    stream: Stream,
    validation: Validation,
) -> dict[str, Any]:
    train, last = config.train, dict[str, Any]()
    assert train.lr is not None, "the defaults of the command are filled in"
    _compare(run, config, backend, validation)
    validation.before()
    for step in run.steps():
        with run.phase("data"):
            rows = [
                dialogue(s, family, config.sft.loss_on)
                for s in run.take(stream, train.prompts_per_step)
            ]
            batches = pack(rows, positions=family.positions, micro_tokens=train.micro_tokens)
            batches = stages.write_supervision(batches)
        lr = rate(
            step - 1,
            total=run.total,
            lr=train.lr,
            schedule=train.schedule,
            warmup=train.warmup,
            min_lr=train.min_lr,
        )
        with run.phase("update"):
            update = backend.train_step(batches, SUPERVISED, Scoring(ban=False), lr=lr)
            guard(run, train, batches, update)
        run.progress["stream"] = stream.state()
        values = _metrics(update.metrics, rows, stream) | sft_work(backend, batches)
        if validation.due(step):
            values |= validation.metrics(step=step)
        last = run.finish_step(values)
    return last


def dialogue(sample: Sample, family: Family, loss_on: str) -> Group:
    """A row as a trajectory that somebody else has sampled."""
    rendered = family.render_dialogue(sample.messages)
    sources = TRAINED[loss_on](rendered.sources, rendered.ids != family.chat.placeholder)
    nothing = np.full(len(rendered), np.nan, np.float32)
    trajectory = Trajectory(
        sample_id=sample.id,
        repeat=0,
        ids=rendered.ids,
        sources=sources,
        logprobs=nothing,
        versions=np.full(len(rendered), -1, np.int32),
        media=rendered.media,
        messages=sample.messages,
    )
    return Group(sample=sample, uid=sample.id, trajectories=(trajectory,))


def _last_turn(sources: np.ndarray, is_text: np.ndarray) -> np.ndarray:
    policy = np.flatnonzero(sources == Source.POLICY)
    breaks = np.flatnonzero(np.diff(policy) > 1)
    first = policy[breaks[-1] + 1] if len(breaks) else policy[0]
    return np.where(
        (sources == Source.POLICY) & (np.arange(len(sources)) < first), Source.PROMPT, sources
    )


def _all(sources: np.ndarray, is_text: np.ndarray) -> np.ndarray:
    trained = is_text.copy()
    trained[0] = False  # nothing stands before it to predict it from
    return np.where(trained, Source.POLICY, Source.PROMPT)


TRAINED = {"assistant": lambda sources, is_text: sources, "last_turn": _last_turn, "all": _all}


def _metrics(update: Metrics, rows: Sequence[Group], stream: Stream) -> dict[str, float]:
    means = update.means()
    kept = (
        "policy/grad_norm",
        "policy/grad_norm_vision",
        "policy/lr",
        "guard/nonfinite",
        "mem/oom_splits",
    )
    loss = means.get("policy/loss", float("nan"))
    trained = sum(t.response_length for group in rows for t in group.trajectories)
    return {name: means[name] for name in kept if name in means} | {
        "sft/loss": loss,
        "sft/ppl": float(np.exp(min(loss, 20.0))),
        "sft/tokens": trained,
        "policy/update_skipped": means["policy/update_skipped"],
        "data/epoch": stream.epoch,
    }


def _validation(
    run: Run, config: Config, policy: parts.Policy, backend: LocalBackend
) -> Validation:
    family = policy.family
    sets = parts.validation_sets(config, family) if config.val.every else {}
    scorer = parts.make_scorer(config) if sets else None
    run.close_at_end(scorer)
    for dataset in sets.values():
        parts.test_rewards(config, scorer, dataset.samples)
    engine = None
    if sets:
        engine = make_engine(config, policy, logs=run.folder.path, say=run.console.note)
    run.close_at_end(engine)
    return Validation(run, config, family, engine, backend, scorer, sets, training_follows=True)


def _compare(run: Run, config: Config, backend: LocalBackend, validation: Validation) -> None:
    """Before step 1: do both mean the same model? Then the engine leaves the memory to training."""
    if validation.engine is not None:
        samples = [s for dataset in validation.sets.values() for s in dataset.samples]
        validation.engine.update_weights(backend, version=run.step)
        parity.check(run, config, validation.engine, backend, samples)
        validation.engine.sleep()
