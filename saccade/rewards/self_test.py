"""Does the reward know right from wrong? Asked before step 1, of rows whose answer is known.

On the raw outcome only: the gold, written in the response format, must score the maximum; an
empty response and the gold of a row with another answer must score the minimum, and few of them
may be abstained from. Of other terms only those count that fail most of the time. A judge may err
on a few: two golds that differ may mean the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Literal, get_args

from saccade.errors import SelfTestError
from saccade.rewards.combine import RewardRecipe, Scored, Term
from saccade.rewards.maths import equivalent
from saccade.rewards.misjudged import Case, Failure, Kind, failures_of
from saccade.rewards.numbers import single_number
from saccade.rewards.pool import CRASHED
from saccade.rewards.response_formats import FORMATS
from saccade.rewards.reward_sample import reward_sample
from saccade.rewards.scorer import Scorer
from saccade.rewards.user_functions import LATE, split_name
from saccade.rewards.verifiers import VERIFIERS, has_gold
from saccade.types import Sample

SHOWN = 5
HANGS = 3  # timeouts or crashes in a row, after which nobody waits for more


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    passed: bool
    rows: int  # rows that were tested
    failures: tuple[Failure, ...] = ()
    skipped: tuple[str, ...] = ()  # outcome terms that no row could test, and why
    ended: str = ""  # which function hung too often to be tested to the end
    format: str = ""  # in which golds were written


def self_test(
    scorer: Scorer, samples: Sequence[Sample], *, format: str, count: int = 32
) -> SelfTest:
    """Test the outcome term on up to `count` rows of each data source. Where the user's own words
    ask for an answer (prompt.format=none), a function of theirs may read the bare one, or tags.
    """
    result = _test(scorer, samples, format, count, tagged=set())
    failed = {f.verifier for f in result.failures if f.case.kind == "gold" and not f.broken}
    own = set(filter(split_name, failed))
    if format != "none" or not own:
        return result
    again = _test(scorer, samples, format, count, tagged=own)
    return again if again.passed else result


def _test(
    scorer: Scorer, samples: Sequence[Sample], format: str, count: int, *, tagged: Set[str]
) -> SelfTest:
    cases: list[Case] = []
    skipped: list[str] = []
    for source in dict.fromkeys(sample.data_source for sample in samples):
        recipe = scorer.recipe(source)
        term = recipe.terms[recipe.outcome]
        rows = [s for s in samples if s.data_source == source and _gold(s, term)][:count]
        if not term.needs_answer or not rows:
            why = "no row has an answer" if term.needs_answer else "it needs no answer"
            skipped.append(f"{term.name} ({source}): {why}")
            continue
        plain = format == "none" and split_name(term.verifier) and term.verifier not in tagged
        render = FORMATS["direct" if plain else format].render
        for index, row in enumerate(rows):
            cases += _cases(row, rows[index + 1 :] + rows[:index], recipe, render)
    cases, scored, ended = _scored(scorer, cases)
    failures = failures_of(list(zip(cases, scored, strict=True)), format)
    rows_tested = sum(case.kind == "gold" for case in cases)
    return SelfTest(
        passed=not failures,
        rows=rows_tested,
        failures=tuple(failures),
        skipped=tuple(skipped),
        ended=ended,
        format=format,
    )


def _scored(scorer: Scorer, cases: Sequence[Case]) -> tuple[list[Case], list[Scored], str]:
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


def _hangs(cases: Sequence[Case], scored: Sequence[Scored]) -> bool:
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
    broken = any(failure.broken for failure in result.failures)
    message = (
        f"the reward {'fails on' if broken else 'misjudges'} known answers "
        f"({sum(f.cases for f in result.failures)} cases, {result.rows} rows):\n"
        f"{shown}\n{result.ended}{_remedy(shown) if broken else _advice(result)}".rstrip()
    )
    if mode == "strict":
        raise SelfTestError(message)
    logging.getLogger("saccade").warning(message)


def _remedy(shown: str) -> str:
    if LATE in shown:
        return f"Raise {LATE}; what takes long once, such as an import, belongs above the function."
    return "Mend what fails: it would fail in training, too."


def _advice(result: SelfTest) -> str:
    warn = "reward.self_test=warn trains all the same."
    if all(failure.advised for failure in result.failures):
        return warn
    if not any(split_name(failure.verifier) for failure in result.failures):
        how = "term args 'order'"
    elif result.format == "none":
        how = "golds were tried bare and in <answer> tags"
    else:
        how = "for a function that compares the bare response: prompt.format=direct"
    return (
        "Check that the verifier fits the answers and looks where prompt.format="
        f"{result.format} puts them ({how}); {warn}"
    )


def _cases(
    row: Sample, others: Sequence[Sample], recipe: RewardRecipe, render: Callable[[str], str]
) -> list[Case]:
    cases: list[Case] = []
    term = recipe.terms[recipe.outcome]

    def add(kind: Kind, response: str) -> None:
        length = len(response.split())
        seen = reward_sample(row, response, length=length, token_ids=[0] * length)
        cases.append(Case(kind=kind, sample=seen, recipe=recipe))

    gold = _gold(row, term)
    add("gold", render(gold))
    add("empty", "")
    foreign = [text for other in others if _differs(text := _gold(other, term), row, gold)]
    if foreign:
        add("foreign", render(max(foreign, key=lambda text: _distance(text, gold))))
    return cases


def _gold(sample: Sample, term: Term) -> str:
    """A list of answers is alternatives, unless the verifier knows better."""
    verifier, seen = VERIFIERS.get(term.verifier), reward_sample(sample, "")
    if verifier and not has_gold(verifier, seen, term.args):
        return ""
    if verifier and verifier.right is not None:
        return verifier.right(seen, **term.args) if sample.answer else ""
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
