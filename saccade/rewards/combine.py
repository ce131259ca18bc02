"""Combine the scores of the terms into one reward, then add the shaping terms.

How a term was scored does not matter here; scaling and clipping of rewards belong to training. The raw outcome stays
separate: filters and accuracy read it, never the reward.

    >>> combined = COMBINATIONS["min"]
    >>> combined([(1.0, 1.0), (0.5, 1.0)])
    0.5
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from saccade.rewards.reward_sample import RewardSample
from saccade.types import Score

DROP_GROUP = "drop_group"  # kind of reason that also excludes the other members of the group
DROPPED = f"{DROP_GROUP}: another member could not be scored"  # the reason of those members
NOT = "not "  # before the name of a term in a condition
TIMES_OUTCOME = "times_outcome"  # key in a score's info: its value is multiplied by the raw outcome


Pending = Score | Future[Score]
Kind = Literal["outcome", "format", "shaping"]


@dataclass(frozen=True, kw_only=True)
class Term:
    """A verifier with its arguments. `submit` starts scoring a sample: in place, in a worker process, or by a judge,
    model or service; its futures never hold an exception.
    """

    name: str
    verifier: str
    weight: float
    kind: Kind
    args: Mapping[str, Any]
    needs_answer: bool = True
    function: Callable[..., Score] | None = None  # None: it is scored in another process
    uses_judge: bool = False  # the judge scores samples that the function leaves open
    uses_model: bool = False  # scored by a model, in batches
    when: str = ""  # TERM, or not TERM: counts only if that term's value is above 0, or is not
    submit: Callable[[RewardSample], Pending] = None  # type: ignore[assignment]  # set by the Scorer


@dataclass(frozen=True, kw_only=True)
class RewardRecipe:
    """The terms that score the rows of one data source, and how they combine."""

    terms: tuple[Term, ...]
    outcome: int  # index of the term that counts as accuracy
    combination: str = "weighted_sum"  # key of COMBINATIONS
    gate: int | None = None  # index of the term that must be positive
    renormalise: bool = False


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The verdict on one episode. `reason` begins with its kind, such as `timeout: …`."""

    status: Literal["ok", "error", "abstain"]
    reward: float | None = None  # combined and shaped
    outcome: float | None = None  # raw value of the outcome term
    parts: Mapping[str, float] = field(default_factory=dict)  # raw value of every term
    extracted: str | None = None
    reason: str = ""

    @property
    def reason_kind(self) -> str:
        """The kind of reason, for counting: timeout, raised, none, nan, no_answer …"""
        return self.reason.partition(":")[0]


Weighted = Sequence[tuple[float, float]]  # (value, weight)


COMBINATIONS: dict[str, Callable[[Weighted], float]] = {
    "weighted_sum": lambda values: sum([value * weight for value, weight in values]),
    "product": lambda values: math.prod(value * weight for value, weight in values),
    "min": lambda values: min(value * weight for value, weight in values),
}


def combine(recipe: RewardRecipe, scores: Sequence[Score]) -> Scored:
    """Combine the scores of one episode: any error is an error, else any abstention is one, unless renormalised."""
    outcome = scores[recipe.outcome]
    raw = None
    if outcome.kind == "value":
        accuracy = next((name for name in ("accuracy", "accuracy_normalized") if name in outcome.parts), "")
        raw = outcome.parts.get(accuracy, outcome.value)
    pairs = [
        (term, replace(score, value=score.value * (raw or 0.0)) if TIMES_OUTCOME in (score.info or ()) else score)
        for term, score in zip(recipe.terms, scores, strict=True)
    ]
    reached = {term.name: score.value > 0 for term, score in pairs if score.kind == "value"}
    out = {t.name for t in recipe.terms if t.when and reached.get(t.when.removeprefix(NOT)) is t.when.startswith(NOT)}
    out |= {t.name for t in recipe.terms if t.when and t.when.removeprefix(NOT) not in reached}
    parts = {term.name: 0.0 if term.name in out else score.value for term, score in pairs if score.kind == "value"}
    gate = None if recipe.gate is None else pairs[recipe.gate][1]
    pairs = [(term, score) for term, score in pairs if term.name not in out]
    error, abstention = _first(pairs, "error"), _first(pairs, "abstain")
    reward = None if error or (abstention and not recipe.renormalise) else _reward(recipe, pairs, gate)
    if reward is None:
        return Scored(status="error" if error else "abstain", outcome=raw, parts=parts, reason=error or abstention)
    return Scored(
        status="ok", reward=reward, outcome=raw, parts=parts, extracted=outcome.extracted, reason=outcome.reason
    )


Pairs = Sequence[tuple[Term, Score]]


def _reward(recipe: RewardRecipe, pairs: Pairs, gate: Score | None) -> float | None:
    """The reward of the terms that have a value, weights rescaled; None if none is left, or the gate has no value."""
    judging = [(term.weight, score) for term, score in pairs if term.kind != "shaping"]
    values = [(score.value, weight) for weight, score in judging if score.kind == "value"]
    if len(values) < len(judging):
        whole, rest = sum(weight for weight, _ in judging), sum(weight for _, weight in values)
        if not rest:
            return None
        values = [(value, weight * whole / rest) for value, weight in values]
    if gate is not None and gate.kind != "value":
        return None
    shaped = [term.weight * score.value for term, score in pairs if term.kind == "shaping" and score.kind == "value"]
    shaping = sum(shaped, 0.0)
    return shaping if gate is not None and gate.value <= 0 else COMBINATIONS[recipe.combination](values) + shaping


def drops_group(reasons: Iterable[str]) -> bool:
    """Whether the reason of any member excludes the whole group."""
    return any(reason.startswith(f"{DROP_GROUP}:") for reason in reasons)


def _first(pairs: Pairs, kind: str) -> str:
    """The reason of the first score of this kind, as `kind: term: detail`; empty if there is none."""
    for term, score in pairs:
        if score.kind == kind:
            reason, _, detail = (score.reason or kind).partition(":")
            return f"{reason}: {term.name}: {detail.strip()}".removesuffix(": ")
    return ""
