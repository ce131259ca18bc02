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
from saccade.rewards.spelling import NARROW, TEXT, TooLarge, normalise, tidy
from saccade.rewards.units import Unit, is_unit, split_unit
from saccade.rewards.wording import SCALE, unsettled
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
    r"\\(?!circ|degree)[a-zA-Z]+|\^(?!\s*\{?\s*\\circ)|[\u221a\u03c0\u00b2\u00b3\u00b9\u2070-\u209f]"
    r"|[\u00bc-\u00be\u2150-\u215e]"
)
# Right before a number: a sign, a bound, a function, the rest of a larger number.
BEFORE = re.compile(
    rf"(?:\b(?:{SCALE}(?:\s+and)?|at\s+(?:least|most)|(?:more|less|fewer|greater)\s+than|over|under"
    r"|above|below|beyond|up\s+to|half\s+of|twice|double|triple|sqrt|log|ln|exp)"
    r"|[-\u2010-\u2015<>\u2264\u2265\u2260\u00b1]|\\(?:[gl]eq?|[gl]t|neq?|pm)"
    r"|至[少多]|最[少多]|超过|[高低多少]于|[十百千万])\s*[($]?\s*\Z",
    re.IGNORECASE,
)
# Right behind it: more digits, a scale, a bound, an operator. Letters: see `_is_its_value`.
BEHIND = re.compile(
    rf"[\s-]*(?:and\s+an?\s+)?{SCALE}\b|\s*at\s+(?:least|most)\b|\s*(?:minimum|max(?:imum)?)\b"
    r"|[.,]+\d|[_!+\u2030]|-[a-z]|\s(?-i:[kKMB])\b"
    r"|\s*(?:个?半|以[上下内]|[十百万亿兆多几]|千(?![克米瓦]))",
    re.IGNORECASE,
)
NEAR = 40  # characters before a number that are looked at
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
    value = _rational(text) if len(text) <= LONGEST_NUMBER else None
    if value is not None:
        return value
    text = TEXT.sub(r"\1", text)
    hits = list(NUMBER_OR_WORD.finditer(text))
    if len(hits) != 1 or FORMULA.search(text) or unsettled(text):
        return None
    start, end = hits[0].span()
    stands_alone = _is_its_value(text[max(0, start - NEAR) : start], text[end:])
    return to_number(hits[0][0]) if stands_alone else None


def _is_its_value(before: str, behind: str) -> bool:
    """Whether a number means itself between these texts."""
    word = re.match(r"[A-Za-z]+", behind)  # 12kg, not 12th or 12k
    return not (BEFORE.search(before) or BEHIND.match(behind)) and (not word or is_unit(word[0]))


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
    if value is None:
        return graded(found, False)
    unit = _unit(found or "")
    fitting = [gold for gold, its in golds if unit is None or its is None or unit == its]
    return graded(found, any(right(value, gold) for gold in fitting))


@lru_cache(maxsize=4096)
def _golds(texts: tuple[str, ...]) -> tuple[tuple[Number, Unit | None], ...]:
    texts = tuple(text.rpartition("####")[2] for text in texts)
    numbers = [(single_number(text), _unit(text)) for text in texts]
    return tuple((number, unit) for number, unit in numbers if number is not None)


def _unit(text: str) -> Unit | None:
    """What stands on both sides must be the same; nothing is converted here."""
    return split_unit(tidy(text))[1] if len(text) <= LONGEST_NUMBER else None
