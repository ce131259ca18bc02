"""Checks for what inflates a score (`eval --also`): questions that need no picture, and items of the training data.

sets = with_blind(sets)
seen = leaked(sets, load_prompts(config, config.data.train, family).samples)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from saccade.data.dataset import ROTATION_OF, Dataset
from saccade.plugins.reports.comparison import paired_difference
from saccade.recipes.accuracy import Scores, group_accuracy
from saccade.recipes.evaluator import Result
from saccade.recipes.questions import map_samples
from saccade.types import ALWAYS_EXCLUDED, Sample

BLIND = "-blind"
Row = Mapping[str, Any]  # of samples.jsonl
Leaks = Mapping[str, set[str]]  # "picture" or "question" -> ids of the items whose one is in the training data


def with_blind(sets: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """Adds after each set with pictures or sounds the same questions without them, as NAME-blind."""
    found: dict[str, Dataset] = {}
    for name, dataset in sets.items():
        found[name] = dataset
        if any(sample.media for sample in dataset.samples):
            found[name + BLIND] = map_samples(dataset, _without_media)
    return found


def _without_media(sample: Sample) -> Sample:
    bare = (replace(m, parts=tuple(part for part in m.parts if isinstance(part, str))) for m in sample.messages)
    return replace(sample, messages=tuple(bare))


def sight_gain(seeing: Iterable[Row], blind: Iterable[Row]) -> dict[str, float]:
    """Accuracy with pictures minus accuracy without, over the items that both have, with its interval. Both arguments
    are rows of samples.jsonl.
    """
    means = [_means(rows) for rows in (blind, seeing)]
    shared = [key for key in means[0] if key in means[1]]
    if not shared:
        return {}
    mean, low, high = paired_difference(*([own[key] for key in shared] for own in means))
    return {"sight_gain": mean, "sight_gain_ci_low": low, "sight_gain_ci_high": high}


def _means(rows: Iterable[Row]) -> dict[str, float]:
    """Question id -> mean score; a question may be in several rows, each with another order of the options."""
    outcomes: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["status"] not in ALWAYS_EXCLUDED and row["score"] is not None:
            question = str(row["extra"].get(ROTATION_OF) or row["id"])
            outcomes.setdefault(question, {}).setdefault(row["id"], []).append(row["score"])
    return {question: float(np.mean([*map(np.mean, orders.values())])) for question, orders in outcomes.items()}


# -- training data ----------------------------------------------------------------------------------


def leaked(sets: Mapping[str, Dataset], training: Sequence[Sample]) -> dict[str, Leaks]:
    """For each set the items whose picture, or whose question word by word, is also in a training row."""
    pictures, questions = {m.hash for sample in training for m in sample.media}, {*map(_words, training)}
    return {
        name: {
            "picture": {s.id for s in dataset.samples if any(medium.hash in pictures for medium in s.media)},
            "question": {s.id for s in dataset.samples if _words(s) in questions},
        }
        for name, dataset in sets.items()
    }


def _words(sample: Sample) -> str:
    """The words of all messages and the hashes of their media: the same text about another picture is no match."""
    asked = " ".join(message.text for message in sample.messages).casefold().split()
    return " ".join([*asked, *sorted(medium.hash for medium in sample.media)])


def leak_metrics(result: Result, leaks: Leaks, scores: Scores) -> dict[str, Any]:
    """How many items are in the training data, and the accuracy of the others."""
    seen = set[str]().union(*leaks.values())
    rest: Sequence[Any] = [group for group in result.groups if group.sample.id not in seen]
    found: dict[str, Any] = {f"leaked_{kind}s": float(len(ids)) for kind, ids in leaks.items()}
    if seen and rest and (others := group_accuracy(rest, scores)).get("accuracy") is not None:
        found["accuracy_unseen"] = others["accuracy"]
    return found
