"""Answers that are several labels, or free words: overlap of sets and of multisets.

A list as gold means all of its labels for `labels_*`, and alternatives for `token_*`.

    >>> sample = RewardSample(id="a", response="<answer>edema</answer>", answer="edema, effusion")
    >>> round(labels_f1(sample).value, 3), labels_recall(sample).value
    (0.667, 0.5)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from string import punctuation
from typing import Any

from saccade.plugins.verifiers.extract import Scope, answer_of, written
from saccade.rewards.reward_sample import RewardSample, graded, no_gold
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

LABEL_ORDER = ("answer_tag", "boxed")
BETWEEN = re.compile(r"[,;/\n&\uff0c\uff1b\u3001]|\s+and\s+", re.IGNORECASE)
OUTSIDE = punctuation + " \t\r\u3002\u201c\u201d"
TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|(?:(?![\u3040-\u30ff\u3400-\u9fff])[^\W_])+")
ARTICLES = {"a", "an", "the"}

Labels = frozenset[str]


def labels_in(text: str, synonyms: Mapping[str, str] | None = None) -> Labels:
    same = {_plain(word): _plain(label) for word, label in (synonyms or {}).items()}
    text = re.sub(r"[^\S\n]+", " ", text)  # long gaps would be searched again and again
    plain = {_plain(part) for part in BETWEEN.split(text)} - {""}
    return frozenset(same.get(label, label) for label in plain)


def set_f1(found: Labels, gold: Labels) -> float:
    """2·|found and gold| / (|found| + |gold|); 1 where both are empty."""
    return 2 * len(found & gold) / (len(found) + len(gold)) if found or gold else 1.0


def joined(sample: RewardSample, **args: Any) -> str:
    """The right answer where a list means all of its entries."""
    return ", ".join(sample.golds)


def _set_recall(found: Labels, gold: Labels) -> float:
    return len(found & gold) / len(gold) if gold else float(not found)


def _plain(label: str) -> str:
    return re.sub(r"\s+", " ", label).strip(OUTSIDE).casefold()


def _labels(
    value: Callable[[Labels, Labels], float],
    sample: RewardSample,
    *,
    synonyms: Mapping[str, str] | None = None,
    order: Sequence[str] = LABEL_ORDER,
    scope: Scope = "after_think",
) -> Score:
    if sample.answer is None:
        return no_gold(sample)
    gold = labels_in(", ".join(sample.golds), synonyms)
    text = written(sample, order, scope)
    if text is None:
        return graded(None, False)
    return _part(text, value(labels_in(text, synonyms), gold))


def _tokens(
    value: Callable[[int, int, int], float],
    sample: RewardSample,
    *,
    order: Sequence[str] = LABEL_ORDER,
    scope: Scope = "after_think",
) -> Score:
    """Words without articles, each as often as it stands there; the best of the golds."""
    golds = [words for gold in sample.golds if (words := _words(gold))]
    if not golds:
        return no_gold(sample)
    text = answer_of(sample, order, scope)
    if text is None:
        return graded(None, False)
    found = _words(text)
    return _part(text, max(value((found & gold).total(), found.total(), gold.total()) for gold in golds))


def _words(text: str) -> Counter[str]:
    return Counter(word for word in TOKEN.findall(text.lower()) if word not in ARTICLES)


def _part(text: str, value: float) -> Score:
    return Score(kind="value", value=value, reason="" if value else "wrong", extracted=text)


labels_f1, labels_recall = partial(_labels, set_f1), partial(_labels, _set_recall)
token_f1 = partial(_tokens, lambda shared, found, gold: 2 * shared / (found + gold))
token_recall = partial(_tokens, lambda shared, found, gold: shared / gold)


ROWS = {
    "labels_f1": Verifier(function=labels_f1, graded=True, right=joined, blank_counts=True),
    "labels_recall": Verifier(function=labels_recall, graded=True, right=joined, blank_counts=True),
    "token_f1": Verifier(function=token_f1, graded=True),
    "token_recall": Verifier(function=token_recall, graded=True),
}
