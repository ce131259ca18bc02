"""Does the reward know right from wrong? Asked before step 1, of rows whose answer is known.

On the raw outcome only: the gold, written in the response format, must score the maximum; an
empty response and the gold of a row with another answer must score the minimum. Shaping and
format terms play no part. A judge may err on a few: two golds that differ may mean the same.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from saccade.errors import SelfTestError
from saccade.rewards.combine import Scored, Term
from saccade.rewards.custom import split_name
from saccade.rewards.formats import FORMATS
from saccade.rewards.maths import equivalent
from saccade.rewards.numbers import single_number
from saccade.rewards.pool import CRASHED
from saccade.rewards.sample import RewardSample, reward_sample
from saccade.rewards.scorer import Scorer
from saccade.rewards.verifiers import VERIFIERS, Verifier
from saccade.types import Sample, Score

Kind = Literal["gold", "empty", "foreign"]
SHOWN = 5
CLOSE = 1e-6  # boxes are rounded on their way through frames
OWN = Verifier(function=lambda sample: Score(kind="abstain"))  # a function of the user
HANGS = 3  # timeouts or crashes in a row, after which nobody waits for more
SHARED = 0.5  # of the golds of other rows, where a place or a word can be right for several rows
MISJUDGED = 0.1  # share of known answers that a judge may get wrong


@dataclass(frozen=True, kw_only=True)
class Failure:
    sample_id: str
    case: Kind
    response: str
    scored: str  # value, or status with its reason
    expected: str

    def __str__(self) -> str:
        return (
            f"row {self.sample_id}: {self.case} response {self.response!r} "
            f"scored {self.scored}, expected {self.expected}"
        )


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    passed: bool
    rows: int  # rows that were tested
    failures: tuple[Failure, ...] = ()
    skipped: tuple[str, ...] = ()  # outcome terms that no row could test, and why
    ended: str = ""  # which function hung too often to be tested to the end


@dataclass(frozen=True, kw_only=True)
class _Case:
    kind: Kind
    sample: RewardSample
    term: Term


def self_test(
    scorer: Scorer, samples: Sequence[Sample], *, format: str, count: int = 32
) -> SelfTest:
    """Test the outcome term on up to `count` rows of each data source."""
    cases: list[_Case] = []
    skipped: list[str] = []
    for source in dict.fromkeys(sample.data_source for sample in samples):
        recipe = scorer.recipe(source)
        term = recipe.terms[recipe.outcome]
        rows = [s for s in samples if s.data_source == source and _gold(s, term)][:count]
        if not term.needs_answer or not rows:
            why = "no row has an answer" if term.needs_answer else "it needs no answer"
            skipped.append(f"{term.name} ({source}): {why}")
            continue
        for index, row in enumerate(rows):
            cases += _cases(row, rows[index + 1 :] + rows[:index], term, format)
    cases, scored, ended = _scored(scorer, cases)
    failures = _failures(cases, scored)
    rows_tested = sum(case.kind == "gold" for case in cases)
    return SelfTest(
        passed=not failures,
        rows=rows_tested,
        failures=tuple(failures),
        skipped=tuple(skipped),
        ended=ended,
    )


def _scored(scorer: Scorer, cases: Sequence[_Case]) -> tuple[list[_Case], list[Scored], str]:
    """The cases with their scores, and which function was given up. Built-in terms at once; of a
    function of the user more and more at a time, so that one that hangs does not take minutes.
    """
    sources = dict.fromkeys(case.sample.data_source for case in cases)
    own_of = {
        source: any(split_name(term.verifier) for term in scorer.recipe(source).terms)
        for source in sources
    }
    done = [case for case in cases if not own_of[case.sample.data_source]]
    scores, ended = scorer.score([case.sample for case in done]), ""
    for source in filter(own_of.get, sources):
        own = [case for case in cases if case.sample.data_source == source]
        found: list[Scored] = []
        while len(found) < len(own) and not ended:
            some = own[len(found) : 2 * len(found) or HANGS]
            found += scorer.score([case.sample for case in some])
            if _hangs(own, found):
                ended = (
                    f"The test was ended after {len(found)} of {len(own)} responses ({source}): "
                    f"{HANGS} in a row timed out or crashed.\n"
                )
        done, scores = done + own[: len(found)], scores + found
    return done, scores, ended


def _hangs(cases: Sequence[_Case], scored: Sequence[Scored]) -> bool:
    """Whether several in a row did, of all responses or of one kind."""
    hung = [
        (case.kind, s.reason_kind in ("timeout", CRASHED))
        for case, s in zip(cases, scored, strict=False)
    ]
    rows = [hung, *([pair for pair in hung if pair[0] == kind] for kind in get_args(Kind))]
    return any(
        all(bad for _, bad in row[start : start + HANGS])
        for row in rows
        for start in range(len(row) - HANGS + 1)
    )


def require(result: SelfTest, mode: Literal["strict", "warn", "off"]) -> None:
    """Stop, warn or do nothing when the test has failed."""
    if result.passed or mode == "off":
        return
    shown = "\n".join(f"  {failure}" for failure in result.failures[:SHOWN])
    message = (
        f"the reward misjudges known answers ({len(result.failures)} cases, {result.rows} rows):\n"
        f"{shown}\n{result.ended}"
        "Check that the verifier fits the answers and that prompt.format is where it looks "
        "(term args 'order'); set reward.self_test=warn to train all the same."
    )
    if mode == "strict":
        raise SelfTestError(message)
    logging.getLogger("saccade").warning(message)


def _cases(row: Sample, others: Sequence[Sample], term: Term, format: str) -> list[_Case]:
    render = FORMATS[format].render
    cases: list[_Case] = []

    def add(kind: Kind, response: str) -> None:
        length = len(response.split())
        cases.append(
            _Case(kind=kind, sample=reward_sample(row, response, length=length), term=term)
        )

    gold = _gold(row, term)
    add("gold", render(gold))
    add("empty", "")
    foreign = [text for other in others if _differs(text := _gold(other, term), row, gold)]
    if foreign:
        add("foreign", render(max(foreign, key=lambda text: _distance(text, gold))))
    return cases


def _gold(sample: Sample, term: Term) -> str:
    """A list of answers is alternatives, unless the verifier knows better."""
    right = VERIFIERS.get(term.verifier, OWN).right
    if right is not None:
        return right(reward_sample(sample, ""), **term.args) if sample.answer else ""
    if isinstance(sample.answer, tuple):
        return next(iter(sample.answer), "")
    return (sample.answer or "").rpartition("####")[2].strip()


def _differs(text: str, row: Sample, gold: str) -> bool:
    golds = row.answer if isinstance(row.answer, tuple) else (gold,)
    return not any(
        text.casefold() == g.casefold() or equivalent(text, g, formulas=False)
        for g in (*golds, gold)
    )


def _distance(text: str, gold: str) -> float:
    """Between numbers; verifiers with a tolerance need a foreign answer that is far away."""
    a, b = single_number(text), single_number(gold)
    return 0.0 if a is None or b is None else abs(float(a - b))


def _failures(cases: Sequence[_Case], scored: Sequence[Scored]) -> list[Failure]:
    ranges = {term: _range(term, cases, scored) for term in {case.term.verifier for case in cases}}
    failures: dict[tuple[str, Kind, bool], list[Failure]] = {}
    for case, result in zip(cases, scored, strict=True):
        low, high = ranges[case.term.verifier]
        wanted = high if case.kind == "gold" else low
        excused = result.outcome is None and result.status == "abstain" and case.kind != "gold"
        if not excused and (low == high or not _as_wanted(case, result.outcome, low, high)):
            value = f"{result.outcome:g}" if result.outcome is not None else result.status
            reason = f" ({result.reason})" if result.reason else ""
            failures.setdefault((case.term.verifier, case.kind, case.term.judged), []).append(
                Failure(
                    sample_id=case.sample.id,
                    case=case.kind,
                    response=case.sample.response,
                    scored=value + reason,
                    expected="right and wrong answers to differ" if low == high else f"{wanted:g}",
                )
            )
    asked = Counter((case.term.verifier, case.kind) for case in cases)
    return [
        failure
        for (verifier, kind, judged), some in failures.items()
        if len(some) > _tolerated(verifier, kind, judged) * asked[verifier, kind]
        for failure in some
    ]


def _as_wanted(case: _Case, outcome: float | None, low: float, high: float) -> bool:
    """Where an answer may be partly right, the gold of another row only falls short of the best."""
    if outcome is None:
        return False
    if case.kind == "foreign" and VERIFIERS.get(case.term.verifier, OWN).graded:
        return outcome < high - CLOSE
    return abs(outcome - (high if case.kind == "gold" else low)) <= CLOSE


def _tolerated(verifier: str, kind: str, judged: bool) -> float:
    """The share of known answers that may be scored otherwise."""
    if kind == "foreign" and VERIFIERS.get(verifier, OWN).graded:
        return SHARED
    return MISJUDGED if judged else 0.0


def _range(verifier: str, cases: Sequence[_Case], scored: Sequence[Scored]) -> tuple[float, float]:
    """Built-in outcomes are 0 or 1; of a function of the user we know what it has returned."""
    if split_name(verifier) is None:
        return 0.0, 1.0
    seen = [
        result.outcome
        for case, result in zip(cases, scored, strict=True)
        if case.term.verifier == verifier and result.outcome is not None
    ]
    return min(seen, default=0.0), max(seen, default=0.0)
