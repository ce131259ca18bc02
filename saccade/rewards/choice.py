"""The multiple-choice verifier.

>>> choice(RewardSample(id="a", response="<answer>B. cat</answer>", answer="B")).value
1.0
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from saccade.rewards.extract import Scope, answer_of
from saccade.rewards.letters import letters_in
from saccade.rewards.sample import RewardSample, graded, no_gold
from saccade.types import Score

CHOICE_ORDER = ("answer_tag", "boxed", "answer_line", "letter")


def choice(
    sample: RewardSample, *, order: Sequence[str] = CHOICE_ORDER, scope: Scope = "after_think"
) -> Score:
    """1 when exactly the gold options are named; a gold of several letters is compared as a set."""
    gold = _gold_letters(sample.golds, tuple(sample.choices))
    if not gold:
        return no_gold(sample)
    found = answer_of(sample, order, scope)
    letters = letters_in(found or "", sample.choices)
    return graded(found, letters == gold, "wrong" if letters else "unparseable")


@lru_cache(maxsize=4096)
def _gold_letters(golds: tuple[str, ...], choices: tuple[str, ...]) -> frozenset[str]:
    found = [letters_in(gold, choices) for gold in golds]
    return frozenset().union(*found) if all(found) else frozenset()
