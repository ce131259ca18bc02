"""The tables of verifiers and of response formats. Their rows are in plugins, imported when a config names them.

A verifier is `f(sample, **args) -> Score` with properties that the scorer reads. `isolated` ones run in processes that
can be killed; the others are string checks of bounded cost and run in place.

    >>> VERIFIERS["count"].function(RewardSample(id="a", response="seven", answer="7")).value
    1.0
    >>> FORMATS["think_boxed"].render("4")
    '<think>The answer is known.</think> \\\\boxed{4}'
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Protocol

from saccade.registry import Table
from saccade.rewards.combine import Kind, Pending
from saccade.rewards.reward_sample import RewardSample, no_gold
from saccade.types import Sample, Score

DEFAULT_NAME = "compute_score"  # default name of a function in a file
DEADLINE_OPTION = "reward.deadline"  # the option that the reason of a timeout names
EMPTY = ("[]", "{}", "null")  # JSON of a missing answer
FOLLOWED, BROKEN = Score(kind="value", value=1.0), Score(kind="value", value=0.0, reason="format")


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    order: tuple[str, ...]  # extractors that find the answer
    render: Callable[[str], str]  # writes an answer in this shape
    check: Callable[..., bool] | None = None  # check(sample, **options)


@dataclass(frozen=True, kw_only=True)
class Verifier:
    function: Callable[..., Score]
    isolated: bool = False
    kind: Kind = "outcome"
    needs_answer: bool = True
    uses_judge: bool = False  # the judge scores samples that the function leaves open
    uses_model: bool = False  # scored by a model, in batches
    deadline: float | None = None  # seconds, where it is shorter than reward.deadline
    prepare: Callable[[], object] | None = None  # does slow imports before the deadline starts
    partial_credit: bool = False  # an answer may be partly right
    blank_counts: bool = False  # a blank gold is valid: there is no label
    empty_modes: tuple[str, ...] = ()  # modes in which [] is a valid gold: there is no box
    check_row: Callable[[Sample], None] | None = None  # raises ValueError for an unusable row
    best_answer: Callable[..., str] | None = None  # makes the best answer to a row, if that is not its gold


def split_name(verifier: str) -> tuple[str, str] | None:
    """`file.py:name` as (file, name); None when it is no file."""
    match = re.fullmatch(r"(.+\.py)(?::(\w+))?", verifier)
    return (match[1], match[2] or DEFAULT_NAME) if match else None


class Service(Protocol):
    """Scores a term elsewhere; shared by terms of the same verifier and arguments."""

    def check(self) -> None:
        """Raises, before the first sample, an error that would affect all samples."""

    def check_media(self, kinds: Collection[str]) -> None:
        """Refuses kinds of media that it would not receive."""

    def submit(self, sample: RewardSample) -> Pending:
        """Score a sample; thread-safe. A future holds a score, never an exception."""

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call."""

    def close(self) -> None:
        """Close it; pending futures get an error score."""


def has_gold(verifier: Verifier, sample: RewardSample, args: Mapping[str, Any]) -> bool:
    """Whether a row has a gold to compare an answer with; with mode=mask the mask is the gold."""
    if verifier.blank_counts:
        return sample.answer is not None
    mode = args.get("mode")
    empty = () if mode in verifier.empty_modes else EMPTY
    return mode == "mask" or any(gold.strip() not in empty for gold in sample.golds)


def _row_of(name: str, found: Any) -> Any:
    """The row of this name, if the plugin exports a mapping of its rows."""
    return found[name.removeprefix("format:")] if isinstance(found, Mapping) else found


def _row(name: str, found: Any) -> Verifier:
    """Adapt an object of a plugin to a Verifier. A plain function of an installed package may hang, so it is isolated;
    it may return a number. Without a gold the score is an abstention, whatever the response and the arguments.
    """
    found = _row_of(name, found)
    if isinstance(found, ResponseFormat):
        check = found.check
        assert check is not None, name

        @wraps(check)
        def follows_format(sample: RewardSample, **options: Any) -> Score:
            return FOLLOWED if check(sample, **options) else BROKEN

        return Verifier(function=follows_format, kind="format", needs_answer=False)
    verifier = found if isinstance(found, Verifier) else Verifier(function=found, isolated=True)
    if not verifier.needs_answer:
        return verifier

    @wraps(verifier.function)
    def verify(sample: RewardSample, **args: Any) -> Score:
        if not verifier.blank_counts and not has_gold(verifier, sample, args):
            return no_gold(sample)
        given = verifier.function(sample, **args)
        return given if isinstance(given, Score) else Score(kind="value", value=float(given))

    return replace(verifier, function=verify)


VERIFIERS: Table[Verifier] = Table("verifiers", {}, _row)
FORMATS: Table[ResponseFormat] = Table("formats", {}, _row_of)
SERVICES: Table[Callable[..., Service]] = Table("services", {})  # called with the reward section, a term's arguments
