"""Verifiers of short answers: options, a digit, DAPO's answer line, audio questions, verdicts; and `judge` and
`hybrid`, which decide without the judge if the answer is missing or (`hybrid`) a rule is certain.

A score with ASK in its info holds the answer to be judged and the rule's own score; the scorer passes it to the judge.

    >>> dapo_math(RewardSample(id="a", response="Answer: 12", answer="12")).value
    1.0
    >>> hybrid(RewardSample(id="a", response="<answer>4 cats</answer>", answer="four cats")).info
    {'ask': True}
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from saccade.plugins.verifiers.choice import letters_in, single_letter
from saccade.plugins.verifiers.extract import NUMBER, Scope, answer_of, answering, score_of
from saccade.plugins.verifiers.maths import MATH, MATH_ORDER, math, spelling
from saccade.plugins.verifiers.numbers import count, gsm8k, number, relaxed
from saccade.plugins.verifiers.response_shape import check_think_answer
from saccade.plugins.verifiers.text_match import contains_one_of, exact, joined
from saccade.plugins.verifiers.wording import REASON, peel, unsettled
from saccade.rewards.reward_sample import RewardSample, no_gold
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

# Verdicts on two items: the first is better, the second, neither.
VERDICTS: Mapping[str, tuple[str, str, str]] = {
    name.lower(): (f"{name} 1 is better", f"{name} 2 is better", f"Both {name.lower()}s are equally good")
    for name in ("Image", "Video", "Audio", "Response")
}

ITEM = r"\b(?:image|video|audio|text|answer|response|item)\s*"
BETTER = re.compile(
    rf"(?:overall\s+judge?ment\W*)?{ITEM}([12ab])\s+is\s+(?:the\s+)?(?:slightly\s+)?better\b"
    rf"(?:\s+one\b)?(?:\s+than\s+(?:{ITEM}(?!\1)[12ab]|the\s+other)\b)?"
    r"|\b(?:it\s+is\s+)?(?:a\s+)?(both\s+\w+\s+are\s+equally\s+good|tie)\b",
    re.IGNORECASE,
)
ALONE = re.compile(r"(?<![\d.-])\d(?!\.?\d)")  # a digit that is not part of a longer number
SIDES = {"a": 0, "1": 0, "b": 1, "2": 1, "c": 2, "0": 2, "tie": 2, "equal": 2, "both": 2}


@answering("answer_tag", "boxed", "answer_line", "letter")
def choice(sample: RewardSample, found: str | None) -> Score:
    """1 if the answer names exactly the gold options; several letters are compared as a set."""
    gold = _gold_letters(sample.golds, tuple(sample.choices))
    if not gold:
        return no_gold(sample)
    letters = letters_in(found or "", sample.choices)
    return score_of(found, letters == gold, "wrong" if letters else "unparseable")


@lru_cache(maxsize=4096)
def _gold_letters(golds: tuple[str, ...], choices: tuple[str, ...]) -> frozenset[str]:
    found = [letters_in(gold, choices) for gold in golds]
    return frozenset().union(*found) if all(found) else frozenset()


@answering("answer_tag")
def digit(sample: RewardSample, found: str | None, *, allowed: Sequence[str] = "0123456789") -> Score:
    """1 if the first allowed digit that stands alone in the answer is the gold."""
    digits = [str(one) for one in allowed]
    golds = {gold.strip() for gold in sample.golds} & set(digits)
    if not digits or any(len(one) != 1 for one in digits):
        raise ValueError(f"allowed are single digits, such as [0, 1, 2], not {allowed!r}")
    if not golds:
        return no_gold(sample)
    first = next((sign for sign in ALONE.findall(found or "") if sign in digits), None)
    right = first in golds and not unsettled(found or "")
    return score_of(found, right, "wrong" if first else "unparseable")


def dapo_math(sample: RewardSample, *, scope: Scope = "after_think") -> Score:
    """+1 if the last line `Answer: …` has the gold's normalised spelling, else -1."""
    found = answer_of(sample, ("answer_line",), scope)
    right = found is not None and spelling(found) in map(spelling, sample.golds)
    return replace(score_of(found, right), value=1.0 if right else -1.0, parts={"accuracy_normalized": float(right)})


def avqa(sample: RewardSample, *, scope: Scope = "after_think") -> Score:
    """1 for the right option in the answer tag (its text, letter or index from 0), plus 1 for the format."""
    found = answer_of(sample, ("answer_tag",), scope)
    gold = {_option(gold, sample.choices) for gold in sample.golds}
    return _two(sample, found, found is not None and _option(found, sample.choices) in gold)


@answering("answer_tag")
def verdict(sample: RewardSample, found: str | None) -> Score:
    """1 for naming the better of two items, or a tie, in the words of `VERDICTS`, followed at most by a
    reason; plus 1 for the format.
    """
    sides = [_side(gold) for gold in sample.golds]
    if not sides or None in sides:
        return no_gold(sample)
    said = BETTER.fullmatch(peel(REASON.sub("", found or "").replace("*", "")).strip(" .,!\n"))
    return _two(sample, found, said is not None and _side(said[0]) in sides)


def right_verdict(sample: RewardSample, **args: Any) -> str:
    side = _side(next(iter(sample.golds), ""))
    return "" if side is None else VERDICTS["image"][side]


def _side(gold: str) -> Literal[0, 1, 2] | None:
    named = BETTER.search(gold)
    word = (named[1] or "tie") if named else gold.strip()
    return SIDES.get(word.lower())  # type: ignore[return-value]


def _option(text: str, choices: Sequence[str]) -> str:
    """The letter of an option, or the normalised text if it is none."""
    letters = letters_in(text, choices) if choices else set()
    if len(letters) == 1:
        return letters.pop()
    text = text.strip().rstrip(".")
    indices = {str(index): chr(65 + index) for index in range(len(choices))}
    return indices.get(text) or re.sub(r"\s+", " ", text).casefold()


def _two(sample: RewardSample, found: str | None, right: bool) -> Score:
    shape = float(check_think_answer(sample))
    parts = {"accuracy": float(right), "format": shape}
    return replace(score_of(found, right), value=float(right) + shape, parts=parts)


ASK = "ask"
RULES = {each.__name__: each for each in (choice, math, number, count, relaxed, gsm8k, exact, contains_one_of)}
DEFINITE = ("choice", "number", "count", "gsm8k")  # if these say wrong, the judge is not asked


@answering(*MATH_ORDER)
def judge(sample: RewardSample, found: str | None) -> Score:
    """The judge's score of the answer; 0 if there is no answer."""
    if not any(sample.golds):
        return no_gold(sample)
    if found is None:
        return score_of(None, False)
    return Score(kind="abstain", reason="unjudged", extracted=found, info={ASK: True})


def hybrid(
    sample: RewardSample,
    *,
    rule: str = "auto",
    options: Mapping[str, Any] | None = None,
    order: Sequence[str] = MATH_ORDER,
    scope: Scope = "after_think",
) -> Score:
    """A rule if it is certain, else the judge. `rule` auto: `choice` for rows with options, `exact` and
    then `math` for others; `options` are arguments of the rule.
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


ROWS = {
    "choice": Verifier(function=choice, best_answer=joined),
    "digit": Verifier(function=digit),
    "dapo_math": Verifier(function=dapo_math),
    "avqa": Verifier(function=avqa),
    "verdict": Verifier(function=verdict, best_answer=right_verdict),
    "judge": Verifier(function=judge, uses_judge=True),
    "hybrid": replace(MATH, function=hybrid, uses_judge=True),
}
