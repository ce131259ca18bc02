"""Verifiers that compare texts: the same, one inside the other, a pattern.

>>> exact(RewardSample(id="a", response="<answer>Paris.</answer>", answer="paris")).value
1.0
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from saccade.plugins.verifiers.extract import Scope, answer_of
from saccade.plugins.verifiers.peel import peel
from saccade.rewards.reward_sample import RewardSample, graded, no_gold
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


ROWS = {
    "exact": Verifier(function=exact),
    "contains_one_of": Verifier(function=contains_one_of),
    "regex": Verifier(function=regex, isolated=True, needs_answer=False, deadline=1.0),  # a pattern may hang
}
