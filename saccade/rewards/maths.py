r"""Whether two mathematical answers are the same, by six rules in a fixed order.

Equal spelling; units; assignments; containers; values, exact for rationals and to thirty digits
otherwise. A text that cannot be read is never right, a gold that cannot be read never makes a
response wrong. Runs in a worker process: every step is bounded, and the deadline is there for
what the bounds have missed.

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

from saccade.rewards.evaluate import proportional, same_value
from saccade.rewards.extract import Scope, extract, last_boxed
from saccade.rewards.latex import Node, Unparseable, parse
from saccade.rewards.sample import RewardSample
from saccade.rewards.spelling import LONGEST, TooLarge, compact, normalise, tidy, unwrap_text
from saccade.rewards.units import PERCENT, Unit, split_unit
from saccade.types import Score

__all__ = ["equivalent", "math"]

MATH_ORDER = ("answer_tag", "boxed", "answer_line")
DECIMAL_TOLERANCE = Fraction(1, 10**6)
HUNDREDTH: Node = ("num", Fraction(1, 100))
SCALARS = {"num", "sym", "add", "mul", "div", "pow", "neg", "call"}


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


def equivalent(answer: str, gold: str) -> bool:
    """Whether an answer is right; a gold that cannot be read equals only its own spelling."""
    return _verdict(answer, gold) == "right"


def _verdict(answer: str, gold: str) -> str:
    """right | wrong | unparseable | too_large | gold_unparseable"""
    spelled = _spelling(gold)
    if spelled and _spelling(answer) == spelled:
        return "right"
    gold_read = _read_gold(gold)
    if gold_read is None:
        return "gold_unparseable"
    try:
        return "right" if _same(_read(answer), gold_read) else "wrong"
    except TooLarge:
        return "too_large"
    except (Unparseable, ZeroDivisionError):
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
    tree: Node
    unit: Unit | None
    decimal: bool  # a decimal point was seen


def _read(text: str) -> _Reading:
    value, unit = split_unit(tidy(_unboxed(text)))
    decimal = re.search(r"\.\d", value) is not None
    return _Reading(tree=parse(unwrap_text(value)), unit=unit, decimal=decimal)


@lru_cache(maxsize=4096)
def _read_gold(text: str) -> _Reading | None:
    try:
        reading = _read(text)
        return reading if _same(reading, reading) else None
    except (Unparseable, TooLarge, ZeroDivisionError):
        return None


def _unboxed(text: str) -> str:
    inner = last_boxed(text)
    return text if inner is None else inner


def _same(answer: _Reading, gold: _Reading) -> bool:
    left, right, unit, gold_unit = answer.tree, gold.tree, answer.unit, gold.unit
    tolerance = DECIMAL_TOLERANCE if answer.decimal or gold.decimal else Fraction(0)
    if unit is not None and gold_unit is not None:
        if unit.dimensions != gold_unit.dimensions:
            return False
        if unit.factor != gold_unit.factor:
            left, right = _scaled(left, parse(unit.factor)), _scaled(right, parse(gold_unit.factor))
        return _equal(left, right, tolerance)
    # A unit on one side only is dropped; p% on one side only is p or p/100.
    return (
        _equal(left, right, tolerance)
        or (unit == PERCENT and _equal(_scaled(left, HUNDREDTH), right, tolerance))
        or (gold_unit == PERCENT and _equal(left, _scaled(right, HUNDREDTH), tolerance))
    )


def _scaled(node: Node, factor: Node) -> Node:
    return ("mul", node, factor) if node[0] in SCALARS else node


def _equal(a: Node, b: Node, tolerance: Fraction) -> bool:
    kinds = (a[0], b[0])
    if kinds == ("assign", "assign") and a[1] == b[1]:
        return _equal(a[2], b[2], tolerance)
    if {*kinds} <= {"assign", "eq"}:
        return proportional(_difference(a), _difference(b))
    if "assign" in kinds:  # x = 5 against 5
        return _equal(a[2] if a[0] == "assign" else a, b[2] if b[0] == "assign" else b, tolerance)
    if a[0] in SCALARS and b[0] in SCALARS:
        return same_value(a, b, tolerance)
    if kinds == ("tuple", "tuple"):
        same_brackets = a[1:3] == b[1:3] or len(b[3]) > 2
        return same_brackets and _pairwise(a[3], b[3], tolerance)
    if kinds == ("list", "tuple"):  # the brackets were left out
        return b[1:3] == ("(", ")") and _pairwise(a[1], b[3], tolerance)
    if {*kinds} <= {"list", "set"} or kinds == ("union", "union"):
        return _unordered(a[1], b[1], tolerance)
    if kinds == ("matrix", "matrix"):
        return len(a[1]) == len(b[1]) and all(
            _pairwise(row, other, tolerance) for row, other in zip(a[1], b[1], strict=True)
        )
    return False


def _pairwise(a: Sequence[Node], b: Sequence[Node], tolerance: Fraction) -> bool:
    return len(a) == len(b) and all(_equal(x, y, tolerance) for x, y in zip(a, b, strict=True))


def _unordered(a: Sequence[Node], b: Sequence[Node], tolerance: Fraction) -> bool:
    return all(any(_equal(x, y, tolerance) for y in b) for x in a) and all(
        any(_equal(x, y, tolerance) for x in a) for y in b
    )


def _difference(node: Node) -> Node:
    left = ("sym", node[1]) if node[0] == "assign" else node[1]
    if left[0] not in SCALARS or node[2][0] not in SCALARS:
        raise Unparseable("an equation between containers")
    return ("add", left, ("neg", node[2]))
