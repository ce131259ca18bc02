"""Verdicts of the verifiers of suites against those of official scorers, on crafted responses.

`official_verdicts.jsonl` holds what the scorers named in docs/evaluation.md said, once; null where they draw an option
at random or ask a model. `why` names the reason of a difference.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from saccade.config import RewardConfig
from saccade.plugins.suites.suites import SUITES
from saccade.rewards.resolve import resolve_recipes
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS

ROWS = [json.loads(line) for line in Path(__file__).with_name("official_verdicts.jsonl").open(encoding="utf-8")]
SUITE = {
    "choice": "vstar", "chartqa": "chartqa", "mathvista": "mathvista", "mmmu_open": "mmmu", "tabmwp": "tabmwp",
    "gsm8k": "gsm8k", "aime": "aime24", "mathvision": "mathvision", "count": "superclevr", "math_verify": "math500",
    "anls": "docvqa", "mathruler": "geometry3k", "verdict": "vl_rewardbench",
}  # fmt: skip
REASONS = {
    "place": "we read tags, boxes and answer lines that the official pattern does not know",
    "spelling": "we read units, words, signs and LaTeX of the same number or text",
    "commas": "we read commas between thousands, and only there",
    "value": "we compare formulas, the official rule their texts",
    "letters": "the official pattern takes the first or last capital that it finds, and reads no words",
    "brackets": "that of GPQA wants brackets around a letter or a colon before it",
    "reader": "where its pattern finds nothing, that of VL-RewardBench asks a model",
    "guess": "where it finds no letter, the official scorer draws an option",
    "hedge": "several answers, or one that is denied or taken back, are no answer here",
    "denial": "a sentence that denies one option and names another is no answer here",
    "contradiction": "a letter with the words of another option is no answer here",
    "alone": "without a mark we want the answer alone, not at the end of a sentence",
    "last": "of several answers we take the last",
    "about": "we read a number behind about",
    "cut": "the official scorer cuts decimals off where a whole number is asked for",
    "float": "the official scorer rounds floats, so that 1.15 becomes 1.1",
}


def officials(row):
    said = row["official"]
    return said if isinstance(said, dict) else {row["kind"]: said}


@pytest.fixture(scope="module")
def recipes():
    by_source = {kind: SUITES[suite].verifier for kind, suite in SUITE.items()}
    return resolve_recipes(RewardConfig(by_source=by_source), "none", 100, None)[0]


@pytest.mark.parametrize("kind", SUITE)
def test_verdicts_are_those_of_the_official_scorer_but_for_listed_reasons(kind, recipes):
    term, rows = recipes[kind].terms[0], [row for row in ROWS if row["kind"] == kind]
    assert len(rows) >= 50
    for row in rows:
        given = {"choices": row.get("choices", ()), "extra": row.get("extra", {})}
        sample = RewardSample(id="a", response=row["response"], answer=row["gold"], **given)
        score = VERIFIERS[term.verifier].function(sample, **term.args)
        assert (score.kind, score.parts.get("accuracy", score.value)) == ("value", row["ours"]), row
        assert ("why" in row) == any(said != row["ours"] for said in officials(row).values()), row


STATED = [json.loads(line) for line in Path(__file__).with_name("stated_results.jsonl").open(encoding="utf-8")]


@pytest.mark.parametrize("row", STATED, ids=lambda row: row["response"][-40:])
def test_a_sentence_that_states_a_result_is_read_and_one_that_doubts_is_not(row, recipes):
    term, given = (
        recipes["mathvista"].terms[0],
        {"choices": row.get("choices", ()), "extra": {"precision": row["decimals"]}},
    )
    sample = RewardSample(id="a", response=row["response"], answer=row["gold"], **given)
    assert VERIFIERS["typed"].function(sample, **term.args).value == row["right"]


def test_the_docs_say_how_often_they_differ_and_why():
    docs = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    counted: dict[str, Counter[str]] = {}
    for row in ROWS:
        for scorer, said in officials(row).items():
            kind = "drawn" if said is None else "alike" if said == row["ours"] else "ours" if row["ours"] else "theirs"
            counted.setdefault(f"{row['kind']}, {scorer}" if scorer != row["kind"] else scorer, Counter())[kind] += 1
    for scorer, n in counted.items():
        line = f"| {scorer} | {n.total()} | {n['alike']} | {n['ours']} | {n['theirs']} | {n['drawn']} |"
        assert line in docs, line
    assert {row["why"] for row in ROWS if "why" in row} == REASONS.keys()
    for reason in REASONS.values():
        assert reason in " ".join(docs.split()), reason
