r"""Whether two mathematical answers are the same, by six rules in a fixed order.

Equal spelling; exact rationals; units; assignments; containers; and for what is then left, the
symbolic equality of math-verify. A text that cannot be read is never right, a gold that cannot be
read never makes a response wrong. The last rule may hang: `math` runs in a worker process with a
deadline.

    >>> math(RewardSample(id="a", response=r"\boxed{2\sqrt{3}}", answer=r"\sqrt{12}")).value
    1.0
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from saccade.rewards import symbolic
from saccade.rewards.extract import Scope, extract, last_boxed
from saccade.rewards.reading import Group, Tree, leaves, name_of, rational, read
from saccade.rewards.sample import RewardSample
from saccade.rewards.spelling import (
    LONGEST,
    TooLarge,
    Unparseable,
    compact,
    normalise,
    tidy,
    unwrap_text,
)
from saccade.rewards.units import PERCENT, Unit, split_unit
from saccade.types import Score

__all__ = ["equivalent", "math"]

MATH_ORDER = ("answer_tag", "boxed", "answer_line")
DECIMAL_TOLERANCE = Fraction(1, 10**6)
HUNDREDTH = Unit(dimensions=(), factor=Fraction(1, 100))


def math(
    sample: RewardSample,
    *,
    order: Sequence[str] = MATH_ORDER,
    scope: Scope = "after_think",
    gold_unparseable: Literal["abstain", "string", "error"] = "abstain",
) -> Score:
    """1 when the answer equals one of the golds."""
    if gold_unparseable not in ("abstain", "string", "error"):
        raise ValueError(f"gold_unparseable is abstain, string or error, not {gold_unparseable!r}")
    found = extract(sample.response, order, scope=scope, think_prefilled=sample.think_prefilled)
    if not found:
        return Score(kind="value", value=0.0, reason="no_answer")
    verdicts = {_verdict(found, gold) for gold in sample.golds}
    if "right" in verdicts:
        return Score(kind="value", value=1.0, extracted=found)
    wrong = verdicts - {"gold_unparseable"}
    if wrong or gold_unparseable == "string":
        return Score(kind="value", value=0.0, reason=min(wrong, default="wrong"), extracted=found)
    reason = f"gold_unparseable: {sample.answer!r}"
    return Score(kind=gold_unparseable, reason=reason, extracted=found)


def equivalent(answer: str, gold: str, *, formulas: bool = True) -> bool:
    """Whether an answer is right. Without `formulas` only spelling, numbers and structure count,
    which is quick and safe in any process."""
    return _verdict(answer, gold, formulas) == "right"


def _verdict(answer: str, gold: str, formulas: bool = True) -> str:
    """right | wrong | unparseable | too_large | gold_unparseable"""
    spelled = _spelling(gold)
    if spelled and _spelling(answer) == spelled:
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


def _spelling(text: str) -> str:
    text = _unboxed(text)
    if len(text) > LONGEST:
        return text
    spelled = compact(normalise(text))
    # A word is the same in any case, a variable is not.
    return spelled.casefold() if re.fullmatch(r"[A-Za-z]{2,}", spelled) else spelled


@dataclass(frozen=True, kw_only=True)
class _Reading:
    tree: Tree
    unit: Unit | None
    decimal: bool  # a decimal point was seen


def _read(text: str) -> _Reading:
    value, unit = split_unit(tidy(_unboxed(text)))
    decimal = re.search(r"\.\d", value) is not None
    return _Reading(tree=read(unwrap_text(value)), unit=unit, decimal=decimal)


@lru_cache(maxsize=4096)
def _read_gold(text: str, formulas: bool) -> _Reading | None:
    try:
        reading = _read(text)
        for leaf in leaves(reading.tree) if formulas else ():
            if rational(leaf) is None:
                symbolic.formula(leaf)
    except (Unparseable, TooLarge):
        return None
    return reading


def _unboxed(text: str) -> str:
    inner = last_boxed(text)
    return text if inner is None else inner


@dataclass(frozen=True, kw_only=True)
class _Rules:
    tolerance: Fraction
    formulas: bool


def _same(answer: _Reading, gold: _Reading, formulas: bool) -> bool:
    left, right, unit, gold_unit = answer.tree, gold.tree, answer.unit, gold.unit
    tolerance = DECIMAL_TOLERANCE if answer.decimal or gold.decimal else Fraction(0)
    rules = _Rules(tolerance=tolerance, formulas=formulas)
    if unit is not None and gold_unit is not None:
        if unit.dimensions != gold_unit.dimensions:
            return False
        if unit != gold_unit:
            left, right = _scaled(left, unit), _scaled(right, gold_unit)
        return _equal(left, right, rules)
    # A unit on one side only is dropped; p% on one side only is p or p/100.
    return (
        _equal(left, right, rules)
        or (unit == PERCENT and _equal(_scaled(left, HUNDREDTH), right, rules))
        or (gold_unit == PERCENT and _equal(left, _scaled(right, HUNDREDTH), rules))
    )


def _scaled(tree: Tree, unit: Unit) -> Tree:
    if isinstance(tree, Group):
        return tree
    value = rational(tree)
    if value is not None and not unit.per_pi:
        return str(value * unit.factor)
    top, bottom = unit.factor.as_integer_ratio()
    return rf"({tree}) \cdot \frac{{{top}}}{{{bottom} \pi^{{{unit.per_pi}}}}}"


def _equal(a: Tree, b: Tree, rules: _Rules) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return _equal_leaves(a, b, rules)
    names = name_of(a), name_of(b)
    if names[0] and names[0] == names[1]:
        return _equal(_value(a), _value(b), rules)
    kinds = (a.kind if isinstance(a, Group) else "", b.kind if isinstance(b, Group) else "")
    if kinds == ("=", "="):
        return rules.formulas and symbolic.proportional(_sides(a), _sides(b))
    if names[0] or names[1]:  # x = 5 against 5
        return _equal(_value(a) if names[0] else a, _value(b) if names[1] else b, rules)
    if not (isinstance(a, Group) and isinstance(b, Group)):
        return False
    if kinds == ("list", "()"):  # the brackets were left out
        return _pairwise(a, b, rules)
    if {*kinds} <= {"list", "{}"} or kinds == ("union", "union"):
        return _within(a, b, rules) and _within(b, a, rules)
    brackets = {*kinds} <= {"()", "[]"} and len(b.items) > 2  # not an interval
    return (kinds[0] == kinds[1] or brackets) and _pairwise(a, b, rules)


def _equal_leaves(a: str, b: str, rules: _Rules) -> bool:
    if compact(a) == compact(b):
        return True
    x, y = rational(a), rational(b)
    if x is None or y is None:
        return rules.formulas and symbolic.same(a, b, rules.tolerance)
    whole = x.denominator == y.denominator == 1  # 1000000.0 is not 1000001
    return x == y or (not whole and abs(x - y) <= rules.tolerance * abs(y))


def _pairwise(a: Group, b: Group, rules: _Rules) -> bool:
    return len(a.items) == len(b.items) and all(
        _equal(x, y, rules) for x, y in zip(a.items, b.items, strict=True)
    )


def _within(a: Group, b: Group, rules: _Rules) -> bool:
    return all(any(_equal(x, y, rules) for y in b.items) for x in a.items)


def _value(tree: Tree) -> Tree:
    assert isinstance(tree, Group)
    return tree.items[1]


def _sides(tree: Tree) -> tuple[str, str]:
    assert isinstance(tree, Group)
    left, right = tree.items
    if not (isinstance(left, str) and isinstance(right, str)):
        raise Unparseable("an equation between containers")
    return left, right
