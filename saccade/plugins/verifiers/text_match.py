"""Verifiers that compare texts: the same, one inside the other, a pattern; overlap of labels and of words.

A list as gold means all of its labels for `labels_*`, and alternatives for all others.

    >>> exact(RewardSample(id="a", response="<answer>Paris.</answer>", answer="paris")).value
    1.0
    >>> sample = RewardSample(id="a", response="<answer>edema</answer>", answer="edema, effusion")
    >>> round(labels_f1(sample).value, 3), labels_recall(sample).value
    (0.667, 0.5)
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from string import punctuation
from typing import Any

from saccade.plugins.verifiers.extract import Scope, answer_of, graded, written
from saccade.plugins.verifiers.wording import peel
from saccade.rewards.reward_sample import RewardSample, no_gold
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

TEXT_ORDER = ("answer_tag",)
SHORTEST = 2  # characters; a shorter gold is found in almost any text


def exact(
    sample: RewardSample, *, order: Sequence[str] = TEXT_ORDER, scope: Scope = "after_think", ignore_case: bool = True
) -> Score:
    """The same text as the gold, up to case, white space and what `peel` takes off."""
    golds = {plain_text(gold, ignore_case) for gold in sample.golds}
    found = answer_of(sample, order, scope)
    return graded(found, plain_text(found or "", ignore_case) in golds)


def contains_one_of(
    sample: RewardSample, *, order: Sequence[str] = TEXT_ORDER, scope: Scope = "after_think", ignore_case: bool = True
) -> Score:
    """The answer holds one of the golds, not as a part of a longer word or number."""
    golds = [plain_text(gold, ignore_case) for gold in sample.golds]
    if min(map(len, golds), default=0) < SHORTEST:
        return no_gold(sample)
    found = answer_of(sample, order, scope)
    either = rf"(?<![a-zA-Z0-9])(?:{'|'.join(map(re.escape, golds))})(?![a-zA-Z0-9])"
    return graded(found, re.search(either, plain_text(found or "", ignore_case)) is not None)


def regex(
    sample: RewardSample, *, pattern: str, order: Sequence[str] = TEXT_ORDER, scope: Scope = "after_think"
) -> Score:
    """The pattern is found in the answer."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r}: {error}") from None
    found = answer_of(sample, order, scope)
    return graded(found, compiled.search(found or "") is not None)


def plain_text(text: str, ignore_case: bool = True) -> str:
    """One spelling for texts that say the same."""
    text = unicodedata.normalize("NFC", peel(re.sub(r"\s+", " ", text).rstrip("! ")))
    return text.casefold() if ignore_case else text


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
    "exact": Verifier(function=exact),
    "contains_one_of": Verifier(function=contains_one_of),
    "regex": Verifier(function=regex, isolated=True, needs_answer=False, deadline=1.0),  # a pattern may hang
    "labels_f1": Verifier(function=labels_f1, graded=True, right=joined, blank_counts=True),
    "labels_recall": Verifier(function=labels_recall, graded=True, right=joined, blank_counts=True),
    "token_f1": Verifier(function=token_f1, graded=True),
    "token_recall": Verifier(function=token_recall, graded=True),
}
