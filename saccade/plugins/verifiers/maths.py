r"""Whether two mathematical answers are equal, by six rules in a fixed order.

Equal spelling; exact rationals; units; assignments; containers; and for everything else, symbolic
equality by math-verify. An answer that cannot be parsed is never right; a gold that cannot be parsed
never makes a response wrong. The last rule may hang, so `math` runs in a worker process with a
deadline.

    >>> math(RewardSample(id="a", response=r"\boxed{2\sqrt{3}}", answer=r"\sqrt{12}")).value
    1.0
"""

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple

from saccade.plugins.verifiers import math_text, symbolic
from saccade.plugins.verifiers.extract import answering, score_of, unboxed
from saccade.plugins.verifiers.math_text import Node, TooLarge, Unparseable, compact, rational
from saccade.plugins.verifiers.numbers import PERCENT, Unit, split_unit
from saccade.plugins.verifiers.response_shape import check_think_boxed
from saccade.plugins.verifiers.wording import STRUCK, peel_number
from saccade.rewards.reward_sample import RewardSample, no_gold
from saccade.rewards.verifiers import Verifier
from saccade.types import Score

MATH_ORDER = ("answer_tag", "boxed", "answer_line")
DECIMAL_TOLERANCE = Fraction(1, 10**6)
MONEY = re.compile(r"\\?([$\u20ac\u00a3\u00a5])\s*(\d[\d.,]*)|(\d[\d.,]*)\s*([\u20ac\u00a3\u00a5])")  # not $12$
CURRENCIES = {"$": "dollars", "\u20ac": "euros", "\u00a3": "GBP", "\u00a5": "yen"}
DEGREE, RADIAN = (split_unit(f"1 {name}")[1] for name in ("degree", "radian"))
HUNDREDTH = Unit(dimensions=(), factor=Fraction(1, 100))


@answering(*MATH_ORDER)
def math(sample: RewardSample, found: str | None, *, gold_unparseable: str = "abstain") -> Score:
    """1 if the answer equals one of the golds. `gold_unparseable`: abstain, error, or string (compare as text)."""
    if gold_unparseable not in ("abstain", "string", "error"):
        raise ValueError(f"gold_unparseable is abstain, string or error, not {gold_unparseable!r}")
    verdicts = {_verdict(found, gold) for gold in sample.golds} if found else {"no_answer"}
    if verdicts <= {"gold_unparseable"} and gold_unparseable != "string":
        return replace(no_gold(sample), kind=gold_unparseable, extracted=found)  # type: ignore[arg-type]
    why = min(verdicts - {"gold_unparseable"}, default="wrong")
    return score_of(found, "right" in verdicts, why)


def equivalent(answer: str, gold: str, *, formulas: bool = True) -> bool:
    """Whether an answer equals the gold. Without `formulas` only rules one to five apply, which cannot hang."""
    return _verdict(answer, gold, formulas) == "right"


@lru_cache(maxsize=1024)  # members of a group often give the same answer
def _verdict(answer: str, gold: str, formulas: bool = True) -> str:
    """right | wrong | unparseable | too_large | gold_unparseable"""
    spelled = spelling(gold)
    if spelled and spelling(answer) == spelled:
        return "right"
    gold_read = _read_gold(gold, formulas)
    if gold_read is None:
        return "gold_unparseable"
    try:
        return "right" if _same(_read(answer), gold_read, formulas) else "wrong"
    except TooLarge:
        return "too_large"
    except Unparseable:
        return "unparseable"


def spelling(text: str) -> str:
    text = unboxed(text)
    if len(text) > math_text.LONGEST:
        return text
    spelled = compact(math_text.normalise(peel_number(text)))
    # Words are case-insensitive, variables are not.
    return spelled.casefold() if re.fullmatch(r"[A-Za-z]{2,}", spelled) else spelled


class _Reading(NamedTuple):
    tree: Node
    unit: Unit | None
    decimal: bool  # it has a decimal point


def _read(text: str) -> _Reading:
    text = peel_number(unboxed(text))
    if re.search(STRUCK, text):
        raise Unparseable("struck out, or negated")
    if money := MONEY.fullmatch(text):
        text = f"{money[2] or money[3]} {CURRENCIES[money[1] or money[4]]}"
    value, unit = split_unit(math_text.tidy(text))
    decimal = re.search(r"\.\d", value) is not None
    return _Reading(math_text.read(math_text.unwrap_text(value)), unit, decimal)


@lru_cache(maxsize=4096)
def _read_gold(text: str, formulas: bool) -> _Reading | None:
    try:
        reading = _read(text)
        for leaf in reading.tree.leaves() if formulas else ():
            if rational(leaf) is None:
                symbolic.formula(leaf)
    except (Unparseable, TooLarge):
        return None
    return reading


def _same(answer: _Reading, gold: _Reading, formulas: bool) -> bool:
    (left, unit, decimal), (right, gold_unit, gold_decimal) = answer, gold
    tolerance = DECIMAL_TOLERANCE if decimal or gold_decimal else Fraction(0)
    same = partial(_equal, same=partial(_equal_texts, tolerance=tolerance, formulas=formulas))
    if DEGREE in (unit, gold_unit):  # then the other one, if it contains pi and has no unit, is in radians
        unit = unit or (RADIAN if _has_pi(left) else None)
        gold_unit = gold_unit or (RADIAN if _has_pi(right) else None)
    if unit is not None and gold_unit is not None:
        if unit == gold_unit:
            return same(left, right)
        return unit.dimensions == gold_unit.dimensions and same(_scaled(left, unit), _scaled(right, gold_unit))
    # A unit on one side only is ignored; p% on one side only is p or p/100.
    return (
        same(left, right)
        or (unit == PERCENT and same(_scaled(left, HUNDREDTH), right))
        or (gold_unit == PERCENT and same(left, _scaled(right, HUNDREDTH)))
    )


def _has_pi(node: Node) -> bool:
    return any(r"\pi" in leaf for leaf in node.leaves())


def _scaled(node: Node, unit: Unit) -> Node:
    if node.kind != "leaf":
        return node
    value = rational(node.text)
    if value is not None and not unit.per_pi:
        return Node("leaf", text=str(value * unit.factor))
    scale = rf"\frac{{{unit.factor.numerator}}}{{{unit.factor.denominator}\pi^{{{unit.per_pi}}}}}"
    return Node("leaf", text=rf"({node.text}) \cdot {scale}")


def _equal(a: Node, b: Node, same: Callable[[str, str], bool]) -> bool:
    kinds, both_name = (a.kind, b.kind), a.name and a.name == b.name
    if kinds == ("leaf", "leaf") or (kinds == ("=", "=") and not both_name):
        return same(a.text, b.text)
    if a.name or b.name:  # compares x = 5 with 5, or with x = 5
        return _equal(a.items[1] if a.name else a, b.items[1] if b.name else b, same)
    if {*kinds} <= {"list", "{}"} or kinds == ("union", "union"):
        return all(any(_equal(x, y, same) for y in b.items) for x in a.items) and all(
            any(_equal(x, y, same) for x in a.items) for y in b.items
        )
    plain_tuples = {*kinds} <= {"()", "[]"} and len(b.items) > 2  # no interval
    if a.kind != b.kind and kinds != ("list", "()") and not plain_tuples:
        return False
    return len(a.items) == len(b.items) and all(map(partial(_equal, same=same), a.items, b.items))


def _equal_texts(a: str, b: str, tolerance: Fraction, formulas: bool) -> bool:
    if compact(a) == compact(b):
        return True
    x, y = rational(a), rational(b)
    if x is not None and y is not None:
        return math_text.near(x, y, tolerance)
    return formulas and symbolic.same(a, b, tolerance)


def geo3k(sample: RewardSample) -> Score:
    r"""0.9 for a right answer in `\boxed{}` plus 0.1 for the format; the part `accuracy` is the outcome."""
    answer = math(sample, order=("boxed",))
    if answer.kind != "value":
        return answer
    shape = float(check_think_boxed(sample))
    parts = {"accuracy": answer.value, "format": shape}
    return replace(answer, value=0.9 * answer.value + 0.1 * shape, parts=parts)


MATH = Verifier(function=math, isolated=True, deadline=3.0, prepare=symbolic.load)
ROWS = {"math": MATH, "geo3k": replace(MATH, function=geo3k)}
