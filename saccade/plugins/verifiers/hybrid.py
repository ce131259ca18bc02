"""What is settled without a judge: a missing answer, and for `hybrid` what a rule is sure of.

Pure functions that ask nobody. A score with ASK in its info holds the answer that is to be judged
and what the rule made of it; the scorer takes it to the judge.

    >>> hybrid(RewardSample(id="a", response="<answer>4 cats</answer>", answer="four cats")).info
    {'ask': True}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from saccade.plugins.verifiers.choice import single_letter
from saccade.plugins.verifiers.extract import NUMBER, Scope, answering, graded
from saccade.plugins.verifiers.maths import MATH, MATH_ORDER, math
from saccade.plugins.verifiers.numbers import count, gsm8k, number, relaxed
from saccade.plugins.verifiers.short_answers import choice
from saccade.plugins.verifiers.text_match import contains_one_of, exact
from saccade.rewards.reward_sample import RewardSample, no_gold
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

ASK = "ask"
RULES: Mapping[str, Callable[..., Score]] = {
    each.__name__: each for each in (choice, math, number, count, relaxed, gsm8k, exact, contains_one_of)
}
DEFINITE = ("choice", "number", "count", "gsm8k")  # what these call wrong is wrong


@answering(*MATH_ORDER)
def judge(sample: RewardSample, found: str | None) -> Score:
    """Whatever answer there is goes to the judge; none at all is wrong."""
    if not any(sample.golds):
        return no_gold(sample)
    if found is None:
        return graded(None, False)
    return Score(kind="abstain", reason="unjudged", extracted=found, info={ASK: True})


def hybrid(
    sample: RewardSample,
    *,
    rule: str = "auto",
    options: Mapping[str, Any] | None = None,
    order: Sequence[str] = MATH_ORDER,
    scope: Scope = "after_think",
) -> Score:
    """The judge sees what the rule cannot settle. `auto` is `choice` for rows with options and
    `exact`, then `math` for others; `options` are arguments of the rule.
    """
    if rule != "auto" and rule not in RULES:
        raise ValueError(f"rule is auto, {', '.join(RULES)}, not {rule!r}")
    if rule == "auto" and options:
        raise ValueError("options are those of one rule; name it, such as rule: number")
    unjudged = judge(sample, order=order, scope=scope)
    found = unjudged.extracted
    if found is None:
        return unjudged
    for name in _fitting(sample) if rule == "auto" else (rule,):
        score = RULES[name](sample, order=order, scope=scope, **(options or {}))
        if score.kind == "error" or score.value >= 1:
            return score
    numbers = all(NUMBER.fullmatch(text.strip()) for text in (found, *sample.golds))
    if score.kind == "value" and (name in DEFINITE or numbers):
        return score
    return replace(score, extracted=found, info={ASK: True})


def _fitting(sample: RewardSample) -> tuple[str, ...]:
    letters = all(single_letter(gold, ()) for gold in sample.golds)
    return ("choice",) if sample.choices or letters else ("exact", "math")


ROWS = {"judge": Verifier(function=judge, judged=True), "hybrid": replace(MATH, function=hybrid, judged=True)}
