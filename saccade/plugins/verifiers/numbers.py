"""Counts and numbers: answers that hold exactly one number, compared exactly or nearly, and
readings from a chart, which are numbers or words.

>>> single_number("There are seven items")
7
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from saccade.plugins.verifiers.extract import NUMBER, Scope, answer_of
from saccade.plugins.verifiers.hedging import ASIDE, BOUND, BOUND_BEHIND, SCALE, TAKEN_BACK, unsettled
from saccade.plugins.verifiers.latex_normalise import NARROW, TEXT, TooLarge, normalise, tidy
from saccade.plugins.verifiers.math_tree import rational
from saccade.plugins.verifiers.peel import NUMERAL, numeral, peel_number
from saccade.plugins.verifiers.text_match import plain_text
from saccade.plugins.verifiers.units import PERCENT, Unit, is_unit, split_unit
from saccade.rewards.reward_sample import RewardSample, graded, no_gold
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

NUMBER_ORDER = ("answer_tag", "boxed", "answer_line", "whole")
GSM8K_ORDER = ("hash", "answer_tag", "boxed")
GSM8K_ORDERS = {"strict": ("hash",), "boxed": ("boxed",), "flexible": ("last_number",)}

NUMBER_OR_WORD = re.compile(rf"{NUMBER.pattern}|{NUMERAL}", re.IGNORECASE)
# One number in these is not their value.
FORMULA = re.compile(
    r"\\(?!circ|degree)[a-zA-Z]+|\^(?!\s*\{?\s*\\circ)|[\u221a\u03c0\u00b2\u00b3\u00b9\u2070-\u209f]"
    r"|[\u00bc-\u00be\u2150-\u215e]"
)
# Right before a number: a sign, a bound, a function, the rest of a larger number.
BEFORE = re.compile(
    rf"(?:\b(?:{SCALE}(?:\s+and)?|{BOUND}|sqrt|log|ln|exp)"
    r"|!=?|[-+/\u2010-\u2015<>\u2264\u2265\u2260\u00b1]|\\(?:[gl]eq?|[gl]t|neq?|pm)"
    r"|至[少多]|最[少多]|超过|[高低多少]于|[十百千万])\s*[($]?\s*\Z",
    re.IGNORECASE,
)
# Right behind it: more digits, a scale, a bound, an operator. Letters: see `_is_its_value`.
BEHIND = re.compile(
    rf"[\s-]*(?:and\s+an?\s+)?{SCALE}\b|,?\s*{BOUND_BEHIND}\b"
    r"|[.,]+\d|[_!+\u2030]|-[a-z]|\s(?-i:[kKMB])\b"
    r"|\s*(?:个?半|以[上下内]|[十百万亿兆多几]|千(?![克米瓦]))",
    re.IGNORECASE,
)
CONTRAST = re.compile(  # 7, not 8
    rf"(?<=\w),\s{{0,9}}(?:and\s+)?not\s+(?:{NUMBER.pattern}|{NUMERAL})(?=\s{{0,9}}(?:[.!]\s{{0,9}})?\Z)", re.IGNORECASE
)
NEAR = 40  # characters before a number that are looked at
LONGEST_NUMBER = 64  # characters; what is longer is no answer
LARGEST_EXPONENT = 300

Number = int | Fraction


def count(
    sample: RewardSample, *, tolerance: float = 0, order: Sequence[str] = NUMBER_ORDER, scope: Scope = "after_think"
) -> Score:
    """One integer in the answer, at most `tolerance` away from the gold."""

    def right(value: Number, gold: Number) -> bool:
        return value.denominator == 1 and -tolerance <= value - gold <= tolerance

    return _judge(sample, answer_of(sample, order, scope), right, percent=False)


def number(
    sample: RewardSample,
    *,
    rel_tol: float = 1e-6,
    decimals: int | None = None,
    order: Sequence[str] = NUMBER_ORDER,
    scope: Scope = "after_think",
) -> Score:
    """One real number, within `rel_tol` of the gold, or equal after rounding to `decimals`."""

    def right(value: Number, gold: Number) -> bool:
        if decimals is not None:
            return round(value, decimals) == round(gold, decimals)
        return near(value, gold, rel_tol)

    return _judge(sample, answer_of(sample, order, scope), right)


def relaxed(
    sample: RewardSample, *, rel_tol: float = 0.05, order: Sequence[str] = NUMBER_ORDER, scope: Scope = "after_think"
) -> Score:
    """ChartQA's score: within `rel_tol` of a gold that is a number, else the same text as it."""
    found = answer_of(sample, order, scope)
    value, text = _reading(found or ""), plain_text(found or "")
    golds = [(_reading(gold), plain_text(gold)) for gold in sample.golds]
    right = any(text == words if value is None or gold is None else near(value, gold, rel_tol) for gold, words in golds)
    return graded(found, right)


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
    if text.isdecimal() and len(text) <= LONGEST_NUMBER:
        return int(text)
    text = peel_number(text.translate(NARROW))
    value = _rational(text) if len(text) <= LONGEST_NUMBER else None
    if value is not None:
        return value
    text = CONTRAST.sub("", ASIDE.sub("", TEXT.sub(r"\1", text)))
    hits = list(NUMBER_OR_WORD.finditer(text))
    if len(hits) != 1 or FORMULA.search(text) or unsettled(text) or TAKEN_BACK.search(text):
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
    if (value := numeral(text)) is not None:
        return value
    mantissa, _, exponent = text.lower().replace(",", "").replace("\u2212", "-").partition("e")
    if exponent and abs(int(exponent)) > LARGEST_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def near(value: Number, gold: Number, rel_tol: float) -> bool:
    """Relative to the gold, so that 0 is met by 0 only."""
    allowed = Fraction(str(rel_tol)) * max(gold, -gold)
    return -allowed <= value - gold <= allowed


@lru_cache(maxsize=4096)
def _reading(text: str) -> Number | None:
    """A text that is a number and nothing else; p% is p/100, a currency is left out."""
    text = peel_number(text.translate(NARROW).replace("\\%", "%"))
    bare = text.removesuffix("%").strip(" $\u20ac\u00a3\u00a5")
    value = _rational(bare) if len(bare) <= LONGEST_NUMBER else None
    return Fraction(value, 100) if value is not None and text.endswith("%") else value


def _judge(
    sample: RewardSample, found: str | None, right: Callable[[Number, Number], bool], *, percent: bool = True
) -> Score:
    """`percent`: p% also stands for p."""
    golds = _golds(sample.golds)
    if not golds:
        return no_gold(sample)
    value = single_number(found or "")
    if value is None and found:
        return Score(kind="value", value=0.0, reason="not_one_number")
    if value is None:
        return graded(found, False)
    unit = _unit(found or "")
    fitting = [
        gold for gold, its in golds if unit == its or (None in (unit, its) and (percent or PERCENT not in (unit, its)))
    ]
    return graded(found, any(right(value, gold) for gold in fitting))


@lru_cache(maxsize=4096)
def _golds(texts: tuple[str, ...]) -> tuple[tuple[Number, Unit | None], ...]:
    texts = tuple(text.rpartition("####")[2] for text in texts)
    numbers = [(single_number(text), _unit(text)) for text in texts]
    return tuple((number, unit) for number, unit in numbers if number is not None)


def _unit(text: str) -> Unit | None:
    """What stands on both sides must be the same; nothing is converted here."""
    bare = text.isdecimal() or len(text) > LONGEST_NUMBER
    return None if bare else split_unit(tidy(peel_number(text)))[1]


ROWS = {each.__name__: Verifier(function=each) for each in (count, number, relaxed, gsm8k)}
