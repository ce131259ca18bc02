from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.plugins.verifiers import symbolic
from saccade.plugins.verifiers.maths import equivalent, math
from saccade.rewards.reward_sample import RewardSample


def sample(response: str, answer: str | tuple[str, ...] | None) -> RewardSample:
    return RewardSample(id="a", response=response, answer=answer)


def test_without_formulas_numbers_units_and_structure_decide():
    for answer, gold in [("100 cm", "1 m"), (r"\frac12", "50%"), (r"\{1,2\}", r"\{2,1.0\}")]:
        assert equivalent(answer, gold, formulas=False)
    assert not equivalent(r"2\sqrt3", r"\sqrt{12}", formulas=False)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}",
        "(9^{999})!",
        "1e99999",
        r"\binom{99999}{555}",
        "9" * 1900,
        "(" * 1000 + "1" + ")" * 1000,
        "(" * 30 + "1" + ",2)" * 30,
        r"\{1\pm" * 25 + "1" + r"\}" * 25,
        "1+" * 900 + "1",
        "x" * 5000,
        "|x" * 40,
        "(x+y+z+w)^{40}",
    ],
)
def test_huge_expressions_are_refused_at_once(answer):
    symbolic.load()
    start = time.process_time()
    score = math(sample(f"<answer>{answer}</answer>", "5x"))
    assert (score.value, score.reason) == (0, "too_large")
    assert time.process_time() - start < 1


SIGNS = "{}()[],129xyei^_-+/*!|%.=< &"
COMMANDS = r"\frac \sqrt \{ \} \pm \sin \pi \cup \infty \\ \binom \lfloor \in \boxed{ ^\circ or 99999"
LONGER = [r"\text{ cm}", r"\begin{pmatrix}", r"\end{pmatrix}"]
PIECES = st.sampled_from([*SIGNS, *COMMANDS.split(), *LONGER])


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=20), st.lists(PIECES, max_size=8))
def test_any_text_gets_a_verdict(answer, gold):
    score = math(sample("<answer>" + "".join(answer) + "</answer>", "".join(gold)))
    assert score.kind in ("value", "abstain")


def test_competition_golds_equal_themselves_and_no_other(shared):
    with gzip.open(shared / "math500/math500.jsonl.gz", "rt") as lines:
        golds = sorted({json.loads(line)["answer"] for line in lines})
    assert [math(sample(f"\\boxed{{{gold}}}", gold)).value for gold in golds] == [1] * len(golds)
    assert equivalent(r"10,\!080", "10080")
    some = random.Random(0).sample(golds, 150)
    assert [pair for pair in itertools.pairwise(some) if equivalent(*pair)] == []
    unread = [g for g in some if math(sample("<answer>-77777</answer>", g)).kind == "abstain"]
    assert all(re.search("[a-z]{4}", gold) for gold in unread) and len(unread) < 5  # words
