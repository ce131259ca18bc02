"""Verifiers that compare texts: equality, containment, a regular expression, overlap of labels and of words.

A list as gold means all of its labels for `labels_*`, and alternatives for all others.

    >>> exact(RewardSample(id="a", response="<answer>Paris.</answer>", answer="paris")).value
    1.0
    >>> sample = RewardSample(id="a", response="<answer>edema</answer>", answer="edema, effusion")
    >>> round(labels_f1(sample).value, 3)
    0.667
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from string import punctuation
from typing import Any

from saccade.plugins.verifiers.extract import answering, score_of
from saccade.plugins.verifiers.wording import peel
from saccade.rewards.reward_sample import RewardSample, no_gold
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

SHORTEST = 2  # characters; a shorter gold occurs in almost any text


@answering("answer_tag")
def exact(sample: RewardSample, found: str | None, *, ignore_case: bool = True) -> Score:
    """1 if the answer is the gold's text, up to case, white space and what `peel` removes."""
    golds = {plain_text(gold, ignore_case) for gold in sample.golds}
    return score_of(found, plain_text(found or "", ignore_case) in golds)


@answering("answer_tag")
def contains_one_of(sample: RewardSample, found: str | None, *, ignore_case: bool = True) -> Score:
    """1 if the answer contains one of the golds, not as part of a longer word or number."""
    golds = [plain_text(gold, ignore_case) for gold in sample.golds]
    if min(map(len, golds), default=0) < SHORTEST:
        return no_gold(sample)
    either = rf"(?<![a-zA-Z0-9])(?:{'|'.join(map(re.escape, golds))})(?![a-zA-Z0-9])"
    return score_of(found, re.search(either, plain_text(found or "", ignore_case)) is not None)


@answering("answer_tag")
def regex(sample: RewardSample, found: str | None, *, pattern: str) -> Score:
    """1 if the pattern matches somewhere in the answer."""
    try:
        return score_of(found, re.search(pattern, found or "") is not None)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r}: {error}") from None


@answering("answer_tag", "boxed", "answer_line", "whole")
def anls(sample: RewardSample, found: str | None, *, threshold: float = 0.5) -> Score:
    """DocVQA's score: 1 - edit distance / length of the longer text, for the nearest gold; 0 below `threshold`. Case
    and runs of white space do not count, but the length is that of the texts as they are.
    """
    values = []
    for gold in sample.golds:
        longer = max(len(gold), len(found or ""))
        # The distance is at least the difference of the lengths, and a long response would be slow.
        near = found is not None and min(len(gold), len(found)) >= threshold * longer
        values.append(1 - edit_distance(_squeezed(gold), _squeezed(found or "")) / longer if near else 0.0)
    best = max(values, default=0.0)
    return score_of(found, best if best >= threshold else 0.0)


def _squeezed(text: str) -> str:
    return " ".join(text.lower().split())


def edit_distance(a: str, b: str) -> int:
    """The number of insertions, deletions and replacements of a character that turn one text into the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before if x == y else 1 + min(before, row[j], row[j - 1])
    return row[-1]


def plain_text(text: str, ignore_case: bool = True) -> str:
    """Normalised text: Unicode form, white space, case, and without what `peel` removes."""
    text = unicodedata.normalize("NFC", peel(re.sub(r"\s+", " ", text).rstrip("! ")))
    return text.casefold() if ignore_case else text


BETWEEN = re.compile(r"[,;/\n&\uff0c\uff1b\u3001]|\s+and\s+", re.IGNORECASE)
OUTSIDE = punctuation + " \t\r\u3002\u201c\u201d"
TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|(?:(?![\u3040-\u30ff\u3400-\u9fff])[^\W_])+")
ARTICLES = {"a", "an", "the"}


def joined(sample: RewardSample, **args: Any) -> str:
    """The right answer to a row whose golds are all required."""
    return ", ".join(sample.golds)


def _labels(value: Callable[[int, int, int], float]) -> Callable[..., Score]:
    """A verifier of sets of labels: value(in both, in the answer, in the gold), or 1 if both are empty."""

    @answering("answer_tag", "boxed", blank=True)
    def verify(sample: RewardSample, found: str | None, *, synonyms: Mapping[str, str] | None = None) -> Score:
        if sample.answer is None:
            return no_gold(sample)
        labels, gold = labels_in(found or "", synonyms), labels_in(joined(sample), synonyms)
        return score_of(found, value(len(labels & gold), len(labels), len(gold)) if labels and gold else labels == gold)

    return verify


def labels_in(text: str, synonyms: Mapping[str, str] | None = None) -> set[str]:
    same = {_plain(word): _plain(label) for word, label in (synonyms or {}).items()}
    text = re.sub(r"[^\S\n]+", " ", text)  # long gaps would make the next pattern slow
    plain = {_plain(part) for part in BETWEEN.split(text)} - {""}
    return {same.get(label, label) for label in plain}


def _plain(label: str) -> str:
    return re.sub(r"\s+", " ", label).strip(OUTSIDE).casefold()


def _tokens(value: Callable[[int, int, int], float]) -> Callable[..., Score]:
    """A verifier of multisets of words, without articles: the best value over the golds."""

    @answering("answer_tag", "boxed")
    def verify(sample: RewardSample, found: str | None) -> Score:
        golds = [words for gold in sample.golds if (words := _words(gold))]
        if not golds:
            return no_gold(sample)
        words = _words(found or "")
        return score_of(found, max(value((words & gold).total(), words.total(), gold.total()) for gold in golds))

    return verify


def _words(text: str) -> Counter[str]:
    return Counter(word for word in TOKEN.findall(text.lower()) if word not in ARTICLES)


def f1(both: int, found: int, gold: int) -> float:
    return 2 * both / (found + gold)


def recall(both: int, found: int, gold: int) -> float:
    return both / gold


labels_f1 = _labels(f1)


ROWS = {
    "exact": Verifier(function=exact),
    "contains_one_of": Verifier(function=contains_one_of),
    "regex": Verifier(function=regex, isolated=True, needs_answer=False, deadline=1.0),  # a pattern may hang
    "anls": Verifier(function=anls, isolated=True, partial_credit=True, deadline=1.0),  # long texts take time
    "labels_f1": Verifier(function=labels_f1, partial_credit=True, best_answer=joined, blank_counts=True),
    "labels_recall": Verifier(function=_labels(recall), partial_credit=True, best_answer=joined, blank_counts=True),
    "token_f1": Verifier(function=_tokens(f1), partial_credit=True),
    "token_recall": Verifier(function=_tokens(recall), partial_credit=True),
}
