"""What is wrong with the scores of known answers: once for all rows where there is no value, row by
row where it is the wrong one. Scores nothing itself.

    >>> called("/home/me/rewards/mine.py:close")
    'mine.py:close'
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.rewards.combine import RewardRecipe, Scored, Term
from saccade.rewards.numbers import single_number
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.user_functions import split_name
from saccade.rewards.verifiers import VERIFIERS, Verifier
from saccade.types import Score

Kind = Literal["gold", "empty", "foreign"]
OWN = Verifier(function=lambda sample: Score(kind="abstain"))  # a function of the user
CLOSE = 1e-6  # boxes are rounded on their way through frames
SHARED = 0.5  # of the golds of other rows, where a place or a word can be right for several rows
MISJUDGED = 0.1  # share of known answers that a judge may get wrong
MOST = 0.5  # share of responses that may go without a verdict, or without a value of another term
BOXES = "write them as boxes, such as [10, 20, 50, 80]"


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: Kind
    sample: RewardSample
    recipe: RewardRecipe

    @property
    def term(self) -> Term:
        return self.recipe.terms[self.recipe.outcome]

    def __str__(self) -> str:
        return f"{self.kind} response {self.sample.response!r}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    verifier: str
    case: Case  # the first of them
    text: str
    cases: int = 1
    broken: bool = False  # no value and no abstention: it raised, hung, or returned no number
    advised: bool = False  # the text says what would work

    def __str__(self) -> str:
        return self.text


Pairs = Sequence[tuple[Case, Scored]]


def failures_of(pairs: Pairs, format: str) -> list[Failure]:
    """`format` is named where the gold is misjudged: it says how it was written."""
    by_verifier: dict[str, list[tuple[Case, Scored]]] = defaultdict(list)
    for case, scored in pairs:
        by_verifier[case.term.verifier].append((case, scored))
    failures = _broken(pairs)
    broken = {failure.verifier for failure in failures}
    for verifier, own in by_verifier.items():
        unread = _unread(verifier, own)
        failures += unread
        if not (unread or verifier in broken) or split_name(verifier) is None:
            failures += _misjudged(verifier, own, format)
    return failures


def called(verifier: str) -> str:
    own = split_name(verifier)
    return f"{Path(own[0]).name}:{own[1]}" if own else verifier


def _broken(pairs: Pairs) -> list[Failure]:
    """Terms that gave an error: the outcome on any response, others on most."""
    found: dict[tuple[str, str], list[tuple[Case, str]]] = defaultdict(list)
    rows: dict[str, set[str]] = defaultdict(set)
    for case, scored in pairs:
        for term in case.recipe.terms:
            rows[term.verifier].add(case.sample.id)
        if scored.status == "error":
            kind, _, rest = scored.reason.partition(": ")
            name, _, detail = rest.partition(": ")
            term = next((t for t in case.recipe.terms if t.name == name), case.term)
            found[term.verifier, kind].append((case, detail or rest))
    outcomes = Counter(case.term.verifier for case, _ in pairs)
    failures = []
    for (verifier, kind), some in found.items():
        case, detail = some[0]
        of = outcomes[verifier]
        tolerated = (MISJUDGED if case.term.judged else 0.0) if of else MOST
        if len(some) <= tolerated * (of or len(pairs)):
            continue
        does = " raised " if kind == "raised" else f": {kind}: "
        hit = len({case.sample.id for case, _ in some})
        text = (
            f"{called(verifier)}{does}{detail}, on {hit} of {len(rows[verifier])} rows, first on "
            f"the {case} to row {case.sample.id}"
        )
        failures.append(
            Failure(verifier=verifier, case=case, text=text, cases=len(some), broken=True)
        )
    return failures


def _unread(verifier: str, pairs: Pairs) -> list[Failure]:
    """Too many abstentions, from the gold or from a wrong answer, say nothing of either."""
    silent = [case for case, s in pairs if s.outcome is None and s.status != "error"]
    asked = Counter(case.kind for case, _ in pairs)
    lost = Counter(case.kind for case in silent)
    judged = any(case.term.judged for case, _ in pairs)
    tolerated = MISJUDGED if judged else 0.0
    if lost["gold"] <= tolerated * asked["gold"] and lost["foreign"] <= MOST * asked["foreign"]:
        return []
    first = next(case for case in silent if case.kind != "empty")
    why = next(s.reason for case, s in pairs if case is first)
    unreadable = why.startswith("gold_unparseable") and split_name(verifier) is None
    begins, ends = f"{called(verifier)} abstains ({why})", ""
    if unreadable:
        begins = (
            f"{called(verifier)} cannot read these golds, such as {first.sample.answer!r}; it "
            "abstains"
        )
        ends = f"; {_fitting(verifier, [case for case, _ in pairs])}"
    text = (
        f"{begins} from the right answer of {lost['gold']} of {asked['gold']} rows and from a "
        f"wrong answer of {lost['foreign']} of {asked['foreign']}, first in row "
        f"{first.sample.id}, which teaches nothing{ends}"
    )
    cases = lost["gold"] + lost["foreign"]
    return [Failure(verifier=verifier, case=first, text=text, cases=cases, advised=unreadable)]


def _fitting(verifier: str, cases: Sequence[Case]) -> str:
    """What would read these golds."""
    if verifier in ("iou", "point"):
        return BOXES
    golds = [gold for case in cases for gold in case.sample.golds]
    numbers = [single_number(gold) is not None for gold in golds]
    if verifier == "number" and any(numbers):
        return (
            "set reward.terms=[relaxed], which compares numbers within 5 % and other golds as text"
        )
    name, what = ("number", "numbers") if all(numbers) else ("exact", "the text")
    text = f"set reward.terms=[{name}], which compares {what}"
    if verifier == "math" and not all(numbers):
        text += "; with formulas among them [{verifier: math, args: {gold_unparseable: string}}]"
    return text


def _misjudged(verifier: str, pairs: Pairs, format: str) -> list[Failure]:
    values = [scored.outcome for _, scored in pairs if scored.outcome is not None]
    low, high = 0.0, 1.0
    if split_name(verifier) is not None:  # we know only what it has returned
        low, high = min(values), max(values)
    if low == high:
        text = f"{called(verifier)} scores {low:g} for all {len(values)} responses, right or wrong"
        return [Failure(verifier=verifier, case=pairs[0][0], text=text, cases=len(values))]
    failures: dict[Kind, list[Failure]] = defaultdict(list)
    for case, scored in pairs:
        if scored.outcome is None or _as_wanted(case, scored.outcome, low, high):
            continue
        reason = f" ({scored.reason})" if scored.reason else ""
        how = f" (as prompt.format={format} has it)" if case.kind == "gold" else ""
        text = (
            f"row {case.sample.id}: {case}{how} scored {scored.outcome:g}{reason}, "
            f"expected {high if case.kind == 'gold' else low:g}"
        )
        failures[case.kind].append(Failure(verifier=verifier, case=case, text=text))
    asked = Counter(case.kind for case, _ in pairs)
    return [
        failure
        for kind, some in failures.items()
        if len(some) > _tolerated(some[0].case) * asked[kind]
        for failure in some
    ]


def _as_wanted(case: Case, outcome: float, low: float, high: float) -> bool:
    """Where an answer may be partly right, the gold of another row only falls short of the best."""
    if case.kind == "foreign" and VERIFIERS.get(case.term.verifier, OWN).graded:
        return outcome < high - CLOSE
    return abs(outcome - (high if case.kind == "gold" else low)) <= CLOSE


def _tolerated(case: Case) -> float:
    """The share of known answers that may be scored otherwise."""
    if case.kind == "foreign" and VERIFIERS.get(case.term.verifier, OWN).graded:
        return SHARED
    return MISJUDGED if case.term.judged else 0.0
