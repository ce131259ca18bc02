"""Self-test of the rewards before step 1: do they tell known right answers from known wrong ones?

Tests the raw outcome term: the gold answer, written in the response format, must score the maximum; an
empty response and the gold of a row with another answer must score the minimum, with few abstentions.
Then the combined reward: it must be higher for the gold than for the wrong answer.
Other terms fail the test only if they raise errors most of the time. A judge may err on a few responses,
as two different golds may mean the same.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from saccade.config import PromptConfig
from saccade.errors import SelfTestError
from saccade.plugins.reward_workers.pool import CRASHED
from saccade.plugins.verifiers.maths import equivalent
from saccade.plugins.verifiers.numbers import single_number
from saccade.rewards.combine import RewardRecipe, Scored, Term
from saccade.rewards.reward_sample import RewardSample, reward_sample
from saccade.rewards.scorer import Scorer
from saccade.rewards.verifiers import DEADLINE_OPTION, FORMATS, SERVICES, VERIFIERS, has_gold, split_name
from saccade.types import Sample

SHOWN = 5  # most failures that a message lists
HANGS = 3  # timeouts or crashes after which the test ends
SCORE_TOLERANCE = 1e-6  # tolerance of scores: boxes are rounded when they are converted between coordinate frames
FOREIGN_TOLERANCE = 0.5  # tolerated share of foreign golds for a graded verifier: a box or word may fit several rows
JUDGE_TOLERANCE = 0.1  # share of known answers that a judge may get wrong
TOLERANCE = 0.5  # tolerated share of foreign golds with abstention, and of responses on which another term fails

Mode = Literal["strict", "warn"]
Kind = Literal["gold", "empty", "foreign"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A response that is known to be right or wrong, and its score."""

    kind: Kind
    sample: RewardSample
    recipe: RewardRecipe
    scored: Scored

    @property
    def term(self) -> Term:
        return self.recipe.terms[self.recipe.outcome]

    def __str__(self) -> str:
        return f"{self.kind} response {self.sample.response!r}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    verifier: str
    case: Case  # the first failing case
    text: str
    cases: int = 1  # number of failing cases
    broken: bool = False  # the verifier raised, timed out, or returned no number
    advised: bool = False  # the text says how to fix it


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    passed: bool
    rows: int  # rows that were tested
    failures: tuple[Failure, ...] = ()
    skipped: tuple[str, ...] = ()  # outcome terms that no row could test, and why
    ended: str = ""  # why the test was stopped early; empty: it was not
    format: str = ""  # the response format of the golds


Unscored = tuple[Kind, RewardSample, RewardRecipe]  # a case without its score
Cases = Sequence[Case]


def self_test(scorer: Scorer, samples: Sequence[Sample], *, format: str, count: int = 32) -> SelfTest:
    """Test the outcome term on up to `count` rows of each data source. With prompt.format=none the format is unknown:
    a user's function passes if it reads golds that are bare or in tags.
    """
    result = _test(scorer, samples, format, count, tagged=set())
    failed = {f.verifier for f in result.failures if f.case.kind == "gold" and not f.broken}
    users = set(filter(split_name, failed))
    if format != "none" or not users:
        return result
    again = _test(scorer, samples, format, count, tagged=users)
    return again if again.passed else result


def check_known_answers(scorer: Scorer, samples: Sequence[Sample], *, prompt: PromptConfig, mode: Mode) -> None:
    for result in known_answers_by_format(scorer, samples, prompt):
        require(result, mode)


def known_answers_by_format(scorer: Scorer, samples: Sequence[Sample], prompt: PromptConfig) -> Iterator[SelfTest]:
    """One test per response format that the data sources have."""
    formats: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        formats[str(prompt.of(sample.data_source).format)].append(sample)
    for style, of_style in formats.items():
        yield self_test(scorer, of_style, format=style)


def require(result: SelfTest, mode: Mode) -> None:
    """If the test failed, raise SelfTestError (`strict`) or log a warning."""
    if result.passed:
        return
    shown = "\n".join(f"  {failure.text}" for failure in result.failures[:SHOWN])
    broken = any(failure.broken for failure in result.failures)
    message = (
        f"the reward {'fails on' if broken else 'misjudges'} known answers "
        f"({sum(f.cases for f in result.failures)} cases, {result.rows} rows):\n"
        f"{shown}\n{result.ended}{_advice(result, shown, broken)}".rstrip()
    )
    if mode == "strict":
        raise SelfTestError(message)
    logging.getLogger("saccade").warning(message)


def _advice(result: SelfTest, shown: str, broken: bool) -> str:
    if broken and DEADLINE_OPTION in shown:
        return f"Raise {DEADLINE_OPTION}; what takes long once, such as an import, belongs above the function."
    if broken:
        return "Fix what fails: it would fail in training, too."
    warn = "reward.self_test=warn goes on all the same."
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


# -- known answers ---------------------------------------------------------------------------------


def _test(scorer: Scorer, samples: Sequence[Sample], format: str, count: int, *, tagged: Set[str]) -> SelfTest:
    asked: list[Unscored] = []
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
        golds = [_gold(row, term) for row in rows]
        for index, row in enumerate(rows):
            asked += _cases(row, golds[index:] + golds[:index], recipe, render)
    cases, ended = _scored(scorer, asked)
    found, tested = tuple(_failures(cases, format)), sum(case.kind == "gold" for case in cases)
    return SelfTest(passed=not found, rows=tested, failures=found, skipped=tuple(skipped), ended=ended, format=format)


def _cases(row: Sample, texts: Sequence[str], recipe: RewardRecipe, render: Callable[[str], str]) -> Iterator[Unscored]:
    """The cases of a row. `texts`: the golds of all rows, starting with this row's."""
    gold = texts[0]
    responses: dict[Kind, str] = {"gold": render(gold), "empty": ""}
    golds = {gold, *(row.answer if isinstance(row.answer, tuple) else ())}
    foreign = [
        text
        for text in dict.fromkeys(texts)
        if not any(text.casefold() == own.casefold() or equivalent(text, own, formulas=False) for own in golds)
    ]
    if foreign:  # the most distant one, as some verifiers have a tolerance
        responses["foreign"] = render(max(foreign, key=lambda text: _distance(text, gold)))
    for kind, response in responses.items():
        length = len(response.split())
        yield kind, reward_sample(row, response, length=length, token_ids=[0] * length), recipe


def _gold(sample: Sample, term: Term) -> str:
    """A right answer to a row; of a list the first, unless the verifier builds one from it (`best_answer`)."""
    verifier, seen = VERIFIERS.get(term.verifier), reward_sample(sample, "")
    if verifier and not has_gold(verifier, seen, term.args):
        return ""
    if verifier and verifier.best_answer is not None:
        return verifier.best_answer(seen, **term.args) if sample.answer else ""
    if isinstance(sample.answer, tuple):
        return next(iter(sample.answer), "")
    return (sample.answer or "").rpartition("####")[2].strip()


def _distance(text: str, gold: str) -> float:
    a, b = single_number(text), single_number(gold)
    return 0.0 if a is None or b is None else abs(float(a - b))


def _scored(scorer: Scorer, asked: Sequence[Unscored]) -> tuple[list[Case], str]:
    """Score the cases; returns (cases, why some are missing). Users' functions come first, in batches that double, so
    that a function that hangs is noticed early.
    """

    def users(recipe: RewardRecipe) -> bool:
        return any(split_name(term.verifier) for term in recipe.terms)

    asked = sorted(asked, key=lambda one: not users(one[2]))
    cases: list[Case] = []
    while len(cases) < len(asked):
        some = asked[len(cases) : (2 * len(cases) or HANGS) if users(asked[len(cases)][2]) else None]
        scores = scorer.score([sample for _, sample, _ in some])
        cases += [Case(kind=k, sample=s, recipe=r, scored=got) for (k, s, r), got in zip(some, scores, strict=True)]
        hung = sum(case.scored.reason_kind in ("timeout", CRASHED) for case in cases)
        if hung >= max(HANGS, len(cases) / 3):
            count = f"{len(cases)} of {len(asked)} responses"
            return cases, f"The test was ended after {count}: {hung} of them timed out or crashed.\n"
    return cases, ""


# -- failures --------------------------------------------------------------------------------------


def _failures(cases: Cases, format: str) -> list[Failure]:
    """All failures: one per verifier for errors and abstentions, one per row for wrong scores."""
    by_verifier: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_verifier[case.term.verifier].append(case)
    failures = _broken(cases)
    broken = {failure.verifier for failure in failures}
    for verifier, own in by_verifier.items():
        abstaining = _abstaining(verifier, own)
        failures += abstaining
        if not (abstaining or verifier in broken) or split_name(verifier) is None:
            failures += _misjudged(verifier, own, format)
    sources = dict.fromkeys(case.sample.data_source for case in cases)
    parts = [[case for case in cases if case.sample.data_source == source] for source in sources]
    return failures or [failure for part in parts for failure in _unrewarded(part)]


def _called(verifier: str) -> str:
    users = split_name(verifier)
    return f"{Path(users[0]).name}:{users[1]}" if users else verifier


def _broken(cases: Cases) -> list[Failure]:
    """Terms with errors: outcome terms with any (judges: over JUDGE_TOLERANCE), other terms with over TOLERANCE."""
    found: dict[tuple[str, str], list[tuple[Case, str]]] = defaultdict(list)
    rows: dict[str, set[str]] = defaultdict(set)
    for case in cases:
        for term in case.recipe.terms:
            rows[term.verifier].add(case.sample.id)
        if case.scored.status == "error":
            kind, _, rest = case.scored.reason.partition(": ")
            name, _, detail = rest.partition(": ")
            term = next((t for t in case.recipe.terms if t.name == name), case.term)
            found[term.verifier, kind].append((case, detail or rest))
    outcomes = Counter(case.term.verifier for case in cases)
    failures = []
    for (verifier, kind), some in found.items():
        case, detail = some[0]
        of = outcomes[verifier]
        tolerated = (JUDGE_TOLERANCE if case.term.uses_judge else 0.0) if of else TOLERANCE
        if len(some) > tolerated * (of or len(cases)):
            does = " raised " if kind == "raised" else f": {kind}: "
            hit = len({case.sample.id for case, _ in some})
            text = (
                f"{_called(verifier)}{does}{detail}, on {hit} of {len(rows[verifier])} rows, first on "
                f"the {case} to row {case.sample.id}"
            )
            failures.append(Failure(verifier=verifier, case=case, text=text, cases=len(some), broken=True))
    return failures


def _abstaining(verifier: str, cases: Cases) -> list[Failure]:
    """A failure if the verifier abstains too often from golds or from wrong answers."""
    silent = [case for case in cases if case.scored.outcome is None and case.scored.status != "error"]
    asked, lost = (Counter(case.kind for case in some) for some in (cases, silent))
    tolerated = JUDGE_TOLERANCE if cases[0].term.uses_judge else 0.0
    if lost["gold"] <= tolerated * asked["gold"] and lost["foreign"] <= TOLERANCE * asked["foreign"]:
        return []
    first = next(case for case in silent if case.kind != "empty")
    begins, ends = f"{_called(verifier)} abstains ({first.scored.reason})", ""
    unreadable = first.scored.reason.startswith("gold_unparseable") and split_name(verifier) is None
    if unreadable:
        begins = f"{verifier} cannot read these golds, such as {first.sample.answer!r}; it abstains"
        ends = f"; {_fitting(verifier, cases)}"
    text = (
        f"{begins} from the right answer of {lost['gold']} of {asked['gold']} rows and from a "
        f"wrong answer of {lost['foreign']} of {asked['foreign']}, first in row "
        f"{first.sample.id}, which teaches nothing{ends}"
    )
    count = lost["gold"] + lost["foreign"]
    return [Failure(verifier=verifier, case=first, text=text, cases=count, advised=unreadable)]


def _fitting(verifier: str, cases: Cases) -> str:
    """Advice: a verifier or format that fits these golds."""
    numbers = [single_number(gold) is not None for case in cases for gold in case.sample.golds]
    if verifier == "choice" and any(case.sample.choices for case in cases):
        return "where rows list their choices, write the letter of one (A is the first), or its text"
    if verifier in ("iou", "point"):
        return "write them as boxes, such as [10, 20, 50, 80]"
    if verifier == "number" and any(numbers):
        return "set reward.terms=[relaxed], which compares numbers within 5 % and others as text"
    if all(numbers):
        return "set reward.terms=[number], which compares numbers"
    mixed = "; with formulas among them [{verifier: math, args: {gold_unparseable: string}}]"
    return "set reward.terms=[exact], which compares the text" + mixed * (verifier == "math")


def _misjudged(verifier: str, cases: Cases, format: str) -> list[Failure]:
    values = [case.scored.outcome for case in cases if case.scored.outcome is not None]
    low, high = 0.0, 1.0
    if split_name(verifier) is not None:  # the range of a user's function is unknown: use the values it returned
        low, high = min(values), max(values)
    if low == high:
        text = f"{_called(verifier)} scores {low:g} for all {len(values)} responses, right or wrong"
        return [Failure(verifier=verifier, case=cases[0], text=text, cases=len(values))]
    known, failures = VERIFIERS.get(verifier), list[Failure]()
    for kind in get_args(Kind):
        asked = [case for case in cases if case.kind == kind]
        wanted = high if kind == "gold" else low
        partly = kind == "foreign" and known is not None and known.partial_credit  # then scores below the best pass
        tolerated = FOREIGN_TOLERANCE if partly else JUDGE_TOLERANCE if cases[0].term.uses_judge else 0.0
        how = f" (as prompt.format={format} has it)" if kind == "gold" else ""
        wrong = []
        for case in asked:
            got, reason = case.scored.outcome, case.scored.reason
            if got is None or abs(got - wanted) <= SCORE_TOLERANCE or (partly and got < high - SCORE_TOLERANCE):
                continue
            why = f" ({reason})" if reason else ""
            text = f"row {case.sample.id}: {case}{how} scored {got:g}{why}, expected {wanted:g}"
            wrong.append(Failure(verifier=verifier, case=case, text=text))
        failures += wrong if len(wrong) > tolerated * len(asked) else []
    return failures


def _unrewarded(cases: Cases) -> Iterator[Failure]:
    """A failure if the combined reward of a source is not higher for most right answers than for wrong ones, though the
    outcome is. Shaping and learned scores may do that; a closed gate or a factor of 0 may make both equal.
    """
    recipe, term = cases[0].recipe, cases[0].term
    if any(one.kind == "shaping" or one.uses_model or one.verifier in SERVICES for one in recipe.terms):
        return
    right, wrong = ({c.sample.id: c.scored for c in cases if (c.kind == "gold") is gold} for gold in (True, False))
    pairs = [(right[id], scored) for id, scored in wrong.items()]  # of two wrong ones the foreign, which comes last
    known = [(a, b) for a, b in pairs if a.status == b.status == "ok" and (a.outcome or 0.0) > (b.outcome or 0.0)]
    least = SCORE_TOLERANCE if recipe.gate is None and recipe.combination == "weighted_sum" else 0.0
    lost = [(a.reward, b.reward) for a, b in known if (a.reward or 0.0) < (b.reward or 0.0) + least]
    if len(lost) > TOLERANCE * len(known):
        text = (
            f"a right answer gets the reward {lost[0][0]:g} and a wrong one {lost[0][1]:g} on {len(lost)} of "
            f"{len(known)} rows ({', '.join(f'{one.name}: weight {one.weight:g}' for one in recipe.terms)}); give "
            f"{term.name} a weight above 0 that outweighs the others, such as 1"
        )
        yield Failure(verifier=term.verifier, case=cases[0], text=text, cases=len(lost), advised=True)
