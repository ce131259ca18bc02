"""The table of built-in verifiers: `f(sample, **args) -> Score`, and what the scorer must know.

`isolated` ones run in killable processes; the others are string checks of bounded cost and run in
place.

    >>> VERIFIERS["count"].function(RewardSample(id="a", response="seven", answer="7")).value
    1.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal

from saccade.plugins.reward_models.reward_model_term import model
from saccade.plugins.verifiers import symbolic
from saccade.plugins.verifiers.grounding import iou, point, right_boxes, right_point
from saccade.plugins.verifiers.hybrid import hybrid, judge
from saccade.plugins.verifiers.label_overlap import joined, labels_f1, labels_recall, token_f1, token_recall
from saccade.plugins.verifiers.maths import math
from saccade.plugins.verifiers.medical import medical
from saccade.plugins.verifiers.numbers import count, gsm8k, number, relaxed
from saccade.plugins.verifiers.short_answers import avqa, choice, dapo_math, digit, right_verdict, verdict
from saccade.plugins.verifiers.text_match import contains_one_of, exact, regex
from saccade.registry import Table
from saccade.rewards.response_formats import FORMATS, check_think_boxed
from saccade.rewards.reward_sample import RewardSample, no_gold
from saccade.rewards.reward_shaping import length, overlong, repetition, tool_use
from saccade.types import Sample, Score

MATH_DEADLINE = 3.0  # seconds
PATTERN_DEADLINE = 1.0
EMPTY = ("[]", "{}", "null")  # the JSON of an answer that a row does not have


@dataclass(frozen=True, kw_only=True)
class Verifier:
    function: Callable[..., Score]
    isolated: bool = False
    kind: Literal["outcome", "format", "shaping"] = "outcome"
    needs_answer: bool = True
    judged: bool = False  # what it leaves open goes to the judge
    learned: bool = False  # a model scores it, many samples at once
    deadline: float | None = None  # seconds, where it is shorter than reward.deadline
    prepare: Callable[[], object] | None = None  # slow imports, before the deadline counts
    graded: bool = False  # an answer may be partly right
    blank_counts: bool = False  # a blank gold is one: there is no label
    empty_modes: tuple[str, ...] = ()  # in these, [] is a gold: there is no box
    check_row: Callable[[Sample], None] | None = None  # raises ValueError for a row of no use
    right: Callable[..., str] | None = None  # the best answer to a row, where it is not its gold


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


def _mathematics(function: Callable[..., Score], **more: Any) -> Verifier:
    return Verifier(function=function, isolated=True, deadline=MATH_DEADLINE, prepare=symbolic.load, **more)


def has_gold(verifier: Verifier, sample: RewardSample, args: Mapping[str, Any]) -> bool:
    """Whether a row has something to compare an answer with; a mask is such a thing, too."""
    if verifier.blank_counts:
        return sample.answer is not None
    mode = args.get("mode")
    empty = () if mode in verifier.empty_modes else EMPTY
    return mode == "mask" or any(gold.strip() not in empty for gold in sample.golds)


def _with_gold(verifier: Verifier) -> Verifier:
    """Whatever the response and the arguments: where there is no gold, nothing is compared."""
    function = verifier.function

    @wraps(function)
    def verify(sample: RewardSample, **args: Any) -> Score:
        gold = has_gold(verifier, sample, args)
        return function(sample, **args) if gold else no_gold(sample)

    compares = verifier.needs_answer and not verifier.blank_counts
    return replace(verifier, function=verify) if compares else verifier


_TABLE = {
    "math": _mathematics(math),
    "choice": Verifier(function=choice, right=joined),
    "count": Verifier(function=count),
    "number": Verifier(function=number),
    "relaxed": Verifier(function=relaxed),
    "gsm8k": Verifier(function=gsm8k),
    "geo3k": _mathematics(geo3k),
    "exact": Verifier(function=exact),
    "contains_one_of": Verifier(function=contains_one_of),
    "regex": Verifier(  # a pattern may hang
        function=regex, isolated=True, needs_answer=False, deadline=PATTERN_DEADLINE
    ),
    "digit": Verifier(function=digit),
    "dapo_math": Verifier(function=dapo_math),
    "avqa": Verifier(function=avqa),
    "verdict": Verifier(function=verdict, right=right_verdict),
    "labels_f1": Verifier(function=labels_f1, graded=True, right=joined, blank_counts=True),
    "labels_recall": Verifier(function=labels_recall, graded=True, right=joined, blank_counts=True),
    "token_f1": Verifier(function=token_f1, graded=True),
    "token_recall": Verifier(function=token_recall, graded=True),
    "medical": Verifier(function=medical, graded=True, right=joined, blank_counts=True),
    "iou": Verifier(function=iou, graded=True, right=right_boxes, empty_modes=("set",)),
    "point": Verifier(function=point, graded=True, right=right_point),
    "model": Verifier(function=model, needs_answer=False, learned=True),
    "judge": Verifier(function=judge, judged=True),
    "hybrid": _mathematics(hybrid, judged=True),
    **{f"format:{name}": _format(form.check) for name, form in FORMATS.items() if form.check},
    "overlong": Verifier(function=overlong, kind="shaping", needs_answer=False),
    "repetition": Verifier(function=repetition, kind="shaping", needs_answer=False),
    "length": Verifier(function=length, kind="shaping", needs_answer=False),
    "tool_use": Verifier(function=tool_use, kind="shaping", needs_answer=False),
}


def _adapted(name: str, found: Verifier | Callable[..., Score | float]) -> Verifier:
    """A row of a plugin. A plain function of an installed package may hang, so it is killable; it
    may return a number.
    """
    if isinstance(found, Verifier):
        return _with_gold(found)

    @wraps(found)
    def verify(sample: RewardSample, **args: Any) -> Score:
        given = found(sample, **args)
        return given if isinstance(given, Score) else Score(kind="value", value=float(given))

    return _with_gold(Verifier(function=verify, isolated=True))


VERIFIERS: Table[Verifier] = Table("verifiers", {name: _with_gold(row) for name, row in _TABLE.items()}, _adapted)
