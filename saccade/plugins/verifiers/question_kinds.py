"""Verifiers for datasets that mix kinds of questions: multiple choice, and formulas, or numbers and text.

>>> typed(RewardSample(id="a", response="B", answer="dog", choices=["cat", "dog"])).value
1.0
>>> typed(RewardSample(id="a", response="It is 3.14.", answer="3.1"), decimals=1).value
1.0
"""

from collections.abc import Sequence
from dataclasses import replace

from saccade.plugins.verifiers.choice import single_letter
from saccade.plugins.verifiers.extract import Scope, answer_of, score_of
from saccade.plugins.verifiers.maths import MATH, equivalent, math
from saccade.plugins.verifiers.numbers import number, single_number
from saccade.plugins.verifiers.short_answers import choice
from saccade.plugins.verifiers.text_match import SHORTEST, contains_one_of, exact
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

PLACES = ("answer_tag", "boxed", "answer_line", "letter")


def choice_or_math(sample: RewardSample, *, order: Sequence[str] = PLACES, scope: Scope = "after_think") -> Score:
    """`choice` for rows with options or a letter as gold, else `math`."""
    if _has_options(sample):
        return choice(sample, order=order, scope=scope)
    return math(sample, order=_without_letter(order), scope=scope)


def typed(
    sample: RewardSample,
    *,
    decimals: int | None = None,
    alone: bool = False,
    order: Sequence[str] = PLACES,
    scope: Scope = "after_think",
) -> Score:
    """`choice` for rows with options or a letter as gold. Otherwise 1 if the answer is: for a gold number, one number
    that is equal when rounded to the row's `precision` or to `decimals`; an equal list; a text that contains the gold,
    or is the gold if `alone`.
    """
    if _has_options(sample):
        return choice(sample, order=order, scope=scope)
    places = [*(place for place in _without_letter(order) if place != "whole"), "whole"]
    if any(gold.lstrip().startswith("[") for gold in sample.golds):
        found = answer_of(sample, places, scope)
        return score_of(found, any(equivalent(found or "", gold, formulas=False) for gold in sample.golds))
    if sample.golds and all(single_number(gold) is not None for gold in sample.golds):
        own = sample.extra.get("precision")
        digits = decimals if own is None else int(own)
        return number(sample, order=places, scope=scope, decimals=digits)
    long = not alone and min(map(len, sample.golds), default=0) >= SHORTEST
    return (contains_one_of if long else exact)(sample, order=places, scope=scope)


def _has_options(sample: RewardSample) -> bool:
    return bool(sample.choices) or all(single_letter(gold, ()) for gold in sample.golds)


def _without_letter(order: Sequence[str]) -> list[str]:
    return [place for place in order if place != "letter"]


ROWS = {"choice_or_math": replace(MATH, function=choice_or_math), "typed": Verifier(function=typed)}
