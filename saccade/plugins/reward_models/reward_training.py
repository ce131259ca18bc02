"""Training of reward models on labelled pairs or labelled steps, and their evaluation: how often a model
agrees with the labels of `data.val`.

    saccade reward-model run.yaml data.train=pairs.jsonl reward_model.loss=hps
    saccade eval model.path=runs/rm/checkpoints/step-100 data.val=held_out.jsonl
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from saccade.config import Config, load
from saccade.data.datasets import Dataset
from saccade.errors import ConfigError
from saccade.forest.batch import Batch
from saccade.plugins.evaluation.eval_folder import begin_folder, missing
from saccade.plugins.evaluation.results import add_rows, write_numbers
from saccade.plugins.reports.eval_report import table_lines, write_eval_report
from saccade.plugins.reward_models.reward_card import RewardCard, read_card, write_card
from saccade.plugins.reward_models.reward_losses import RewardLoss, StepsLoss, measured, train_ratings
from saccade.plugins.reward_models.reward_rows import held_out, rows_of, with_prefix, with_statistics
from saccade.plugins.suites.suites import in_category, with_pairs
from saccade.recipes import model_setup, offline_loop, questions, run_parts
from saccade.recipes.accuracy import Table, accuracy, with_interval
from saccade.run import statistics
from saccade.run.console import Console
from saccade.run.folder import RESULTS
from saccade.run.quarantine import Quarantine
from saccade.run.training_run import Run
from saccade.trainer import Loss
from saccade.trainer.local import LocalTrainer
from saccade.types import Sample

log = logging.getLogger(__name__)

LOGGED = ("policy/grad_norm", "policy/grad_norm_vision", "policy/lr", "moe/aux_loss", "guard/nonfinite")


def run(config: Any) -> dict[str, Any]:
    """Train until the steps are over; returns the metrics of the last step."""
    config, family = offline_loop.resolve(config, "reward-model")
    rows = rows_of(config, family)
    data = questions.require_rows(rows.load(config.data.train), "data.train")
    rows.check(data.samples)
    held = held_out(config, rows) if config.val.every else {}
    with Run(config, "reward-model", run_parts.manifest(family, data, config.data)) as this:
        card = rows.card(this.start, data.samples)
        job = offline_loop.set_up(
            this, family, data, rows=held, attach=partial(rows.attach, card=card, stored=this.start)
        )
        trainer: Any = job.trainer
        prepare = partial(rows.prepare, dp_size=trainer.dp_size)
        write = partial(write_card, trainer.model) if trainer.engine is None else trainer.write_card
        write(card)

        def store_statistics(found: Mapping[str, float], step: int) -> None:
            """Store mean and std of the scores in the card, with the step of the weights that gave them."""
            write(with_statistics(card, found, step))

        def measure(dataset: Dataset, step: int, prefix: str) -> dict[str, float]:
            samples = this.quarantine.whole(dataset, family)
            found = trainer.measure(*prepare(samples)).means()
            store_statistics(found, step)
            return with_prefix(found, prefix)

        def unmeasured(samples: Sequence[Sample], found: Mapping[str, float], step: int) -> None:
            if not this.checkpointer.due(step):
                store_statistics(found, step - 1)  # the scores were computed before the update
            elif card.heads:
                with this.phase("validation"):
                    store_statistics(trainer.measure(*prepare(samples)).means(), step)

        task = offline_loop.Task(
            prepare=prepare,
            train=partial(train_ratings, trainer),
            metrics=metrics,
            measure=measure,
            unmeasured=unmeasured,
            measure_saved=True,
        )
        return offline_loop.train(job, task)


def metrics(found: Mapping[str, float], batches: Sequence[Batch], loss: Loss) -> dict[str, float]:
    return {name: found[name] for name in LOGGED if name in found} | with_prefix(found, "rm")


# -- evaluation ------------------------------------------------------------------------------------


def evaluate(config: Config, folder: Path, asked: Mapping[str, Any], summary: dict[str, Any]) -> None:
    """Store the metrics of every set of data.val and of eval.suites, and for a scalar model the scores of each pair;
    add the metrics to `summary`. Heads, pooling and verdict tokens come from the model's folder; nothing is generated.
    """
    given, config = config, with_pairs(config)
    if not config.data.val:
        raise ConfigError("data.val: a reward model judges rows; try data.val=held_out.jsonl")
    card = read_card(config.model.path)
    assert card is not None, "not a reward model"
    with Console("eval", folder.name) as console:
        format = f"prompt.format={config.prompt.format}, which should be that of its training"
        log.info(f"{config.model.path} is a reward model: it judges the rows of data.val, worded by {format}")
        config = _as_trained(config, card)
        family = model_setup.family_of(config, config.model.path)
        rows = rows_of(config, family)
        sets = held_out(config, rows)
        facts = {**asked, **run_parts.manifest(family, None, config.data)}
        facts["sets"] = [{"name": n, "rows": len(data.samples), "hash": data.hash} for n, data in sets.items()]
        facts["answers"] = {"model": given.model.path, "prompt": str(given.prompt.format)}
        summary |= (done := begin_folder(folder, given, facts))
        model = model_setup.load_policy(config, family, train="full")
        rows.attach(model, card=card, stored=Path(family.path))
        trainer, quarantine = LocalTrainer(model, family), Quarantine(folder, config.data)
        for name in missing(sets, done, folder):
            dataset = sets[name]
            with console.phase(name):
                samples = quarantine.whole(dataset, family)
                batches, loss = rows.prepare(samples)
                metrics, outputs = measured(trainer, batches, loss)
            left_out = quarantine.left_out(dataset)
            found = {n.removeprefix(f"{name}/"): value for n, value in with_prefix(metrics.means(), name).items()}
            found |= intervals(loss, batches, outputs) | {"items": len(samples), "left_out": left_out}
            pairs = _scored(card.heads, batches, outputs)
            kinds = {sample.id: str(in_category(sample).extra.get("category") or "") for sample in samples}
            tables = _by_category(pairs, kinds)
            summary[name] = {**found, **tables}
            log.info(f"{name}: {with_interval(found, 'accuracy')}  items {len(samples)}  rows left out {left_out}")
            if dataset.excluded_rows:
                log.info(f"{name}: {dataset.summary}")
                quarantine.record(dataset.excluded_rows)
            for line in table_lines(name, tables):
                log.info(line)
            add_rows(folder, ({"set": name, **row, "extra": {"category": kinds[row["id"]]}} for row in pairs))
            write_numbers(folder, summary)
        log.info(f"{RESULTS}, samples.jsonl, {write_eval_report(folder).name} are in {folder}")


def intervals(loss: RewardLoss, batches: Sequence[Batch], outputs: Sequence[np.ndarray]) -> dict[str, float]:
    """Confidence interval of the accuracy, and the accuracy with ties where rows have some; with several heads for
    each head, none for their mean.
    """
    if isinstance(loss, StepsLoss):
        return _ends("", _shares(loss.labels, batches, outputs))
    said = np.concatenate([[loss.labels[uid] for uid, _ in b.keys[::2]] for b in batches])
    gaps = np.concatenate([found[::2] - found[1::2] for found in outputs])
    ends: dict[str, float] = {}
    for name, label, gap in zip(loss.heads, said.T, gaps.T, strict=True):
        right = (label * gap > 0)[np.abs(label) == 1].astype(float)
        prefix = f"{name}/" if len(loss.heads) > 1 else ""
        ends |= _ends(prefix, right)
        if (label == 0).any():
            ends[f"{prefix}accuracy_with_ties"] = with_ties(*np.array([label, gap])[:, ~np.isnan(label)])
    return ends


def with_ties(label: np.ndarray, gap: np.ndarray) -> float:
    """The best accuracy if the pairs of the smallest gaps, one at least, are called ties (Deutsch et al., 2023)."""
    order = np.argsort(abs(gap), kind="stable")
    tied, right = (label == 0)[order], (label * gap > 0)[order]
    return float((tied.cumsum() + right.sum() - right.cumsum()).max() / len(label))


def _shares(labels: Mapping[str, np.ndarray], batches: Sequence[Batch], outputs: Sequence[np.ndarray]) -> np.ndarray:
    """One value per row, with the accuracy over all steps as their mean (linearised ratio estimator): the interval is
    over rows, as the steps of one row are correlated; a longer row weighs more.
    """
    wanted = [labels[uid].argmax(-1) for batch in batches for uid, _ in batch.keys]
    found = np.split(np.concatenate(outputs).argmax(-1), np.cumsum([len(row) for row in wanted])[:-1])
    right = np.array([float((a == b).sum()) for a, b in zip(wanted, found, strict=True)])
    steps = np.array([float(len(row)) for row in wanted])
    accuracy = right.sum() / steps.sum()
    return accuracy + (right - accuracy * steps) / steps.mean()


def _ends(prefix: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    low, high = np.clip(statistics.mean_interval(values), 0.0, 1.0).tolist()
    return {f"{prefix}ci_low": low, f"{prefix}ci_high": high}


def _by_category(pairs: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> dict[str, Table]:
    """Accuracy of the first head by category, for sets whose rows have one; else empty."""
    right: dict[str, list[np.ndarray]] = {}
    for pair in pairs:
        chosen, rejected = (next(iter(pair[side].values())) for side in ("chosen", "rejected"))
        right.setdefault(kinds[pair["id"]], []).append(np.array([float(chosen > rejected)]))
    return {"by_category": {kind: accuracy(right[kind]) for kind in sorted(right)}} if right.keys() - {""} else {}


def _as_trained(config: Config, card: RewardCard) -> Config:
    """The config with the reward-model options of the card, so those that the folder was trained with."""
    own: dict[str, Any] = {"kind": card.kind}
    if card.kind == "process":
        own |= {"placeholder": card.placeholder, "tokens": card.tokens}
    else:
        own |= {name: getattr(card, name) for name in ("pooling", "probe_layer", "head", "bounded")}
        own |= {"pooling_heads": card.pooling_heads} if card.pooling == "attention" else {}
        own["heads"] = {name: config.reward_model.heads.get(name, 1.0) for name in card.heads}
    changed = config.reward_model.model_copy(update=own)
    return load(config.model_copy(update={"reward_model": changed}), command="reward-model")


def _scored(heads: Sequence[str], batches: Sequence[Batch], outputs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """The scores of both sides of each pair; empty for a process reward model, which has no heads."""
    if not heads:
        return []
    ids = [uid for batch in batches for uid, _ in batch.keys[::2]]
    scores = [dict(zip(heads, row, strict=True)) for row in np.concatenate(outputs).tolist()]
    pairs = zip(ids, scores[::2], scores[1::2], strict=True)
    return [{"id": uid, "chosen": chosen, "rejected": rejected} for uid, chosen, rejected in pairs]
