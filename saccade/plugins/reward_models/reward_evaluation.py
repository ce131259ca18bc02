"""`saccade eval` of a reward model: how often it prefers what the rows of `data.val` prefer.

What it judges, and how, is read from its folder; nothing is generated.

    saccade eval model.path=runs/rm/checkpoints/step-100 data.val=held_out.jsonl
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.config import Config, load
from saccade.errors import ConfigError
from saccade.plugins.reward_models.reward_card import Card
from saccade.plugins.reward_models.reward_forward import RatingLoss, StepsLoss, measured
from saccade.plugins.reward_models.reward_rows import held_out, named, rows_of
from saccade.recipes import model_setup
from saccade.recipes.accuracy import with_interval
from saccade.run import statistics
from saccade.run.console import Console
from saccade.run.quarantine import Quarantine
from saccade.trainer.local import LocalBackend
from saccade.types import Batch

log = logging.getLogger(__name__)

Summary = dict[str, dict[str, float]]


def compare(config: Config, card: Card, folder: Path, console: Console) -> tuple[Summary, list[dict[str, Any]]]:
    """The metrics of every set; of a scalar model also its scores of each pair."""
    if not config.data.val:
        raise ConfigError("data.val: a reward model judges rows; try data.val=held_out.jsonl")
    config = as_trained(config, card)
    family = model_setup.family_of(config, config.model.path)
    rows = rows_of(config, family)
    sets = held_out(config, rows)
    model = model_setup.load_policy(config, family, train="full").model
    rows.attach(model, card=card, stored=Path(family.path))
    backend = LocalBackend(model, family)
    quarantine = Quarantine(folder, config.data)
    summary, listed = Summary(), list[dict[str, Any]]()
    for name, dataset in sets.items():
        with console.phase(name):
            samples = quarantine.whole(dataset, family)
            batches, loss = rows.prepare(samples)
            metrics, outputs = measured(backend, batches, loss)
        found = named(metrics.means(), name)
        summary[name] = {n.removeprefix(f"{name}/"): value for n, value in found.items()}
        summary[name] |= intervals(loss, batches, outputs)
        left_out = quarantine.left_out(dataset)
        summary[name] |= {"items": len(samples), "left_out": left_out}
        shown = with_interval(summary[name], "accuracy")
        without = f"  rows left out {left_out}" if left_out else ""
        log.info(f"{name}: {shown}  items {len(samples)}{without}")
        if dataset.aside:
            log.info(f"{name}: {dataset.summary}")
            quarantine.record(dataset.aside)
        if card.heads:
            listed += [{"set": name, **scored} for scored in _scored(card.heads, batches, outputs)]
    return summary, listed


def intervals(
    loss: RatingLoss | StepsLoss, batches: Sequence[Batch], outputs: Sequence[np.ndarray]
) -> dict[str, float]:
    """The interval of the accuracy; with several heads that of each, and none of their mean."""
    pairs = list(zip(batches, outputs, strict=True))
    if isinstance(loss, StepsLoss):
        labels = loss.steps.labels
        rows = [right for batch, found in pairs for right in _right_steps(labels, batch, found)]
        return _ends("", _shares(rows))
    row = loss.rating
    said = np.concatenate([[row.labels[uid] for uid, _ in b.keys[::2]] for b in batches])
    gaps = np.concatenate([found[::2] - found[1::2] for found in outputs])
    ends: dict[str, float] = {}
    for name, label, gap in zip(row.heads, said.T, gaps.T, strict=True):
        decided = np.abs(label) == 1
        right = (label * gap > 0)[decided].astype(float)
        ends |= _ends(f"{name}/" if len(row.heads) > 1 else "", right)
    return ends


def _right_steps(labels: Mapping[str, np.ndarray], batch: Batch, found: np.ndarray) -> list[np.ndarray]:
    """Which steps of each sequence were judged as labelled."""
    wanted = [labels[uid] for uid, _ in batch.keys]
    right = found.argmax(-1) == np.concatenate(wanted).argmax(-1)
    return np.split(right, np.cumsum([len(labels) for labels in wanted])[:-1])


def _shares(rows: Sequence[np.ndarray]) -> np.ndarray:
    """One value for each row, whose mean is the accuracy over all steps: rows are drawn, as steps
    of one are correlated, and a longer one weighs more.
    """
    right, steps = np.array([(values.sum(), values.size) for values in rows], float).T
    accuracy = right.sum() / steps.sum()
    return accuracy + (right - accuracy * steps) / steps.mean()


def _ends(prefix: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    low, high = np.clip(statistics.mean_interval(values), 0.0, 1.0).tolist()
    return {f"{prefix}ci_low": low, f"{prefix}ci_high": high}


def as_trained(config: Config, card: Card) -> Config:
    """With the options that the folder was trained with."""
    own: dict[str, Any] = {"kind": card.kind}
    if card.kind == "process":
        own |= {"placeholder": card.placeholder, "tokens": card.tokens}
    else:
        attends = card.pooling == "attention"
        own |= {
            "heads": {name: config.reward_model.heads.get(name, 1.0) for name in card.heads},
            "pooling": card.pooling,
            "pooling_heads": card.pooling_heads if attends else None,
            "probe_layer": card.probe_layer,
            "head": card.head,
            "bounded": card.bounded,
        }
    changed = config.reward_model.model_copy(update=own)
    return load(config.model_copy(update={"reward_model": changed}), command="reward-model")


def _scored(heads: Sequence[str], batches: Sequence[Batch], outputs: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
    for batch, scores in zip(batches, outputs, strict=True):
        for (uid, _), first, second in zip(batch.keys[::2], scores[::2], scores[1::2], strict=True):
            yield {
                "id": uid,
                "chosen": dict(zip(heads, first.tolist(), strict=True)),
                "rejected": dict(zip(heads, second.tolist(), strict=True)),
            }
