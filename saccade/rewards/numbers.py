"""Counts and numbers: answers that hold exactly one number, compared exactly or nearly.

>>> single_number("There are seven items")
7
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from saccade.rewards.extract import NUMBER, Scope, answer_of
from saccade.rewards.reading import rational
from saccade.rewards.sample import RewardSample, graded, no_gold
from saccade.rewards.spelling import NARROW, TooLarge, normalise
from saccade.types import Score

NUMBER_ORDER = ("answer_tag", "boxed", "answer_line", "whole")
GSM8K_ORDER = ("hash", "answer_tag", "boxed")
GSM8K_ORDERS = {"strict": ("hash",), "boxed": ("boxed",), "flexible": ("last_number",)}

WORDS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7,
    "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14,
    "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20,
}  # fmt: skip
NUMBER_OR_WORD = re.compile(
    rf"{NUMBER.pattern}|\b(?:{'|'.join(sorted(WORDS, key=len, reverse=True))})\b", re.IGNORECASE
)
# One number in these is not their value.
FORMULA = re.compile(
    r"\\(?:sqrt|pi|log|ln|sin|cos|tan|exp)|[\u221a\u03c0\u00b2\u00b3\u00b9\u2070-\u209f]"
    r"|[\u00bc-\u00be\u2150-\u215e]"
)
LONGEST_NUMBER = 64  # characters; what is longer is no answer
LARGEST_EXPONENT = 300

Number = int | Fraction


def count(
    sample: RewardSample,
    *,
    tolerance: float = 0,
    order: Sequence[str] = NUMBER_ORDER,
    scope: Scope = "after_think",
) -> Score:
    """One integer in the answer, at most `tolerance` away from the gold."""

    def right(value: Number, gold: Number) -> bool:
        return value.denominator == 1 and -tolerance <= value - gold <= tolerance

    return _judge(sample, answer_of(sample, order, scope), right)


def number(
    sample: RewardSample,
    *,
    rel_tol: float = 1e-6,
    decimals: int | None = None,
    order: Sequence[str] = NUMBER_ORDER,
    scope: Scope = "after_think",
) -> Score:
    """One real number, within `rel_tol` of the gold, or equal after rounding to `decimals`."""
    width = Fraction(str(rel_tol))

    def right(value: Number, gold: Number) -> bool:
        if decimals is not None:
            return round(value, decimals) == round(gold, decimals)
        allowed = width * max(gold, -gold)
        return -allowed <= value - gold <= allowed

    return _judge(sample, answer_of(sample, order, scope), right)


def gsm8k(
    sample: RewardSample,
    *,
    mode: Literal["default", "strict", "boxed", "flexible"] = "default",
    order: Sequence[str] = GSM8K_ORDER,
    scope: Scope = "after_think",
) -> Score:
    """The number after `####`; `mode` picks another single place to look at."""
    if mode != "default" and mode not in GSM8K_ORDERS:
        raise ValueError(f"mode is default, {', '.join(GSM8K_ORDERS)}, not {mode!r}")
    found = answer_of(sample, GSM8K_ORDERS.get(mode, order), scope)
    return _judge(sample, found, lambda value, gold: value == gold)


def single_number(text: str) -> Number | None:
    """The number in a text that holds exactly one."""
    text = text.translate(NARROW)
    hits = NUMBER_OR_WORD.findall(text)
    if len(hits) == 1 and not FORMULA.search(text):
        return to_number(hits[0])
    return _rational(text) if len(text) <= LONGEST_NUMBER else None


def _rational(text: str) -> Number | None:
    """A text that is one fraction, mixed number or power of ten, and nothing else."""
    try:
        return rational(normalise(text))
    except TooLarge:
        return None


def to_number(text: str) -> Number | None:
    """A number as it is written, or a number word; exact."""
    if len(text) > LONGEST_NUMBER:
        return None
    if text.isdigit():
        return int(text)
    text = text.lower()
    if text in WORDS:
        return WORDS[text]
    mantissa, _, exponent = text.replace(",", "").replace("\u2212", "-").partition("e")
    if exponent and abs(int(exponent)) > LARGEST_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def _judge(
    sample: RewardSample, found: str | None, right: Callable[[Number, Number], bool]
) -> Score:
    golds = _golds(sample.golds)
    if not golds:
        return no_gold(sample)
    value = single_number(found or "")
    if value is None and found:
        return Score(kind="value", value=0.0, reason="not_one_number")
    return graded(found, value is not None and any(right(value, gold) for gold in golds))


@lru_cache(maxsize=4096)
def _golds(texts: tuple[str, ...]) -> tuple[Number, ...]:
    numbers = [single_number(text.rpartition("####")[2]) for text in texts]
    return tuple(number for number in numbers if number is not None)
