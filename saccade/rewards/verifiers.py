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

from saccade.rewards.choice import choice
from saccade.rewards.extract import Scope, extract
from saccade.rewards.formats import FORMATS, check_think_boxed
from saccade.rewards.maths import math
from saccade.rewards.numbers import count, gsm8k, number
from saccade.rewards.sample import RewardSample
from saccade.rewards.shaping import length, overlong, repetition
from saccade.types import Score

__all__ = ["VERIFIERS", "Verifier"]

MATH_DEADLINE = 3.0  # seconds; its steps are bounded, so this is a last resort


@dataclass(frozen=True, kw_only=True)
class Verifier:
    function: Callable[..., Score]
    isolated: bool = False
    kind: Literal["outcome", "format", "shaping"] = "outcome"
    needs_answer: bool = True
    deadline: float | None = None  # seconds, where it is shorter than reward.deadline


def exact(
    sample: RewardSample,
    *,
    order: Sequence[str] = ("answer_tag",),
    scope: Scope = "after_think",
    ignore_case: bool = True,
) -> Score:
    """The same text as the gold, up to white space, a final period and case."""

    def plain(text: str) -> str:
        text = re.sub(r"\s+", " ", text).strip().removesuffix(".").strip()
        return text.casefold() if ignore_case else text

    golds = {plain(gold) for gold in sample.golds} - {""}
    if not golds:
        return Score(kind="abstain", reason=f"gold_unparseable: {sample.answer!r}")
    found = extract(
        sample.response,
        order,
        scope=scope,
        think_prefilled=sample.think_prefilled,
        choices=sample.choices,
    )
    if not found:
        return Score(kind="value", value=0.0, reason="no_answer")
    right = plain(found) in golds
    return Score(kind="value", value=float(right), reason="" if right else "wrong", extracted=found)


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


VERIFIERS: dict[str, Verifier] = {
    "math": Verifier(function=math, isolated=True, deadline=MATH_DEADLINE),
    "choice": Verifier(function=choice),
    "count": Verifier(function=count),
    "number": Verifier(function=number),
    "gsm8k": Verifier(function=gsm8k),
    "geo3k": Verifier(function=geo3k, isolated=True, deadline=MATH_DEADLINE),
    "exact": Verifier(function=exact),
    **{f"format:{name}": _format(form.check) for name, form in FORMATS.items() if form.check},
    "overlong": Verifier(function=overlong, kind="shaping", needs_answer=False),
    "repetition": Verifier(function=repetition, kind="shaping", needs_answer=False),
    "length": Verifier(function=length, kind="shaping", needs_answer=False),
}
