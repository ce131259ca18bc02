"""The table of built-in verifiers: `f(sample, **args) -> Score`, and what the scorer must know.

`isolated` ones run in killable processes; the others are string checks of bounded cost and run in
place.

    >>> VERIFIERS["count"].function(RewardSample(id="a", response="seven", answer="7")).value
    1.0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

from saccade.rewards import symbolic
from saccade.rewards.choice import choice
from saccade.rewards.extract import Scope, answer_of
from saccade.rewards.formats import FORMATS, check_think_boxed
from saccade.rewards.maths import math
from saccade.rewards.numbers import count, gsm8k, number
from saccade.rewards.sample import RewardSample, graded, no_gold
from saccade.rewards.shaping import length, overlong, repetition
from saccade.types import Score

__all__ = ["VERIFIERS", "Verifier"]

MATH_DEADLINE = 3.0  # seconds
TEXT_ORDER = ("answer_tag",)
SHORTEST = 2  # characters; a shorter gold is found in almost any text


@dataclass(frozen=True, kw_only=True)
class Verifier:
    function: Callable[..., Score]
    isolated: bool = False
    kind: Literal["outcome", "format", "shaping"] = "outcome"
    needs_answer: bool = True
    deadline: float | None = None  # seconds, where it is shorter than reward.deadline
    prepare: Callable[[], object] | None = None  # slow imports, before the deadline counts


def exact(
    sample: RewardSample,
    *,
    order: Sequence[str] = TEXT_ORDER,
    scope: Scope = "after_think",
    ignore_case: bool = True,
) -> Score:
    """The same text as the gold, up to white space, a final period and case."""
    golds = {_plain(gold, ignore_case) for gold in sample.golds} - {""}
    found = answer_of(sample, order, scope)
    return graded(found, _plain(found or "", ignore_case) in golds) if golds else no_gold(sample)


def contains_one_of(
    sample: RewardSample,
    *,
    order: Sequence[str] = TEXT_ORDER,
    scope: Scope = "after_think",
    ignore_case: bool = True,
) -> Score:
    """The answer holds one of the golds, not as a part of a longer word or number."""
    golds = [_plain(gold, ignore_case) for gold in sample.golds]
    if min(map(len, golds), default=0) < SHORTEST:
        return no_gold(sample)
    found = answer_of(sample, order, scope)
    either = rf"(?<![a-zA-Z0-9])(?:{'|'.join(map(re.escape, golds))})(?![a-zA-Z0-9])"
    return graded(found, re.search(either, _plain(found or "", ignore_case)) is not None)


def regex(
    sample: RewardSample,
    *,
    pattern: str,
    order: Sequence[str] = TEXT_ORDER,
    scope: Scope = "after_think",
) -> Score:
    """The pattern is found in the answer."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r}: {error}") from None
    found = answer_of(sample, order, scope)
    return graded(found, compiled.search(found or "") is not None)


def _plain(text: str, ignore_case: bool) -> str:
    text = re.sub(r"\s+", " ", text).strip().removesuffix(".").strip()
    return text.casefold() if ignore_case else text


def geo3k(sample: RewardSample) -> Score:
    r"""0.9 for the right `\boxed{}` and 0.1 for the shape; the part `accuracy` is the outcome."""
    answer = math(sample, order=("boxed",))
    if answer.kind != "value":
        return answer
    shape = float(check_think_boxed(sample))
    return Score(
        kind="value",
        value=0.9 * answer.value + 0.1 * shape,
        reason=answer.reason,
        parts={"accuracy": answer.value, "format": shape},
        extracted=answer.extracted,
    )


KEPT, BROKEN = Score(kind="value", value=1.0), Score(kind="value", value=0.0, reason="format")


def _format(check: Callable[..., bool]) -> Verifier:
    @wraps(check)
    def verify(sample: RewardSample, **options: Any) -> Score:
        return KEPT if check(sample, **options) else BROKEN

    return Verifier(function=verify, kind="format", needs_answer=False)


def _mathematics(function: Callable[..., Score]) -> Verifier:
    return Verifier(function=function, isolated=True, deadline=MATH_DEADLINE, prepare=symbolic.load)


VERIFIERS: dict[str, Verifier] = {
    "math": _mathematics(math),
    "choice": Verifier(function=choice),
    "count": Verifier(function=count),
    "number": Verifier(function=number),
    "gsm8k": Verifier(function=gsm8k),
    "geo3k": _mathematics(geo3k),
    "exact": Verifier(function=exact),
    "contains_one_of": Verifier(function=contains_one_of),
    "regex": Verifier(function=regex, isolated=True, needs_answer=False),  # a pattern may hang
    **{f"format:{name}": _format(form.check) for name, form in FORMATS.items() if form.check},
    "overlong": Verifier(function=overlong, kind="shaping", needs_answer=False),
    "repetition": Verifier(function=repetition, kind="shaping", needs_answer=False),
    "length": Verifier(function=length, kind="shaping", needs_answer=False),
}
