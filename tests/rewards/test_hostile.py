"""Mathematics, and responses that are written to hang, to overflow or to be executed."""

import gc
import gzip
import itertools
import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.plugins.reward_workers.pool import WorkerPool
from saccade.plugins.verifiers.maths import equivalent, math
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS


@pytest.fixture
def no_garbage():
    """To collect what thousands of tests before have left takes seconds."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def sample(response: str, answer: str) -> RewardSample:
    return RewardSample(id="a", response=response, answer=answer)


@pytest.mark.parametrize("answer", [
    "9^{9^{9^9}}", "1e99999", r"\binom{99999}{555}", "9" * 1900, "x" * 5000, "|x" * 40, "(x+y+z+w)^{40}",
    "(" * 30 + "1" + ",2)" * 30, r"\{1\pm" * 25 + "1" + r"\}" * 25,
])  # fmt: skip
def test_huge_expressions_are_refused_at_once(answer, no_garbage):
    math(sample(r"<answer>\frac{1}{2}</answer>", "5x"))  # imports what it needs
    start = time.thread_time()
    score = math(sample(f"<answer>{answer}</answer>", "5x"))
    assert (score.value, score.reason) == (0, "too_large")
    assert time.thread_time() - start < 1


COMMANDS = r"\frac \sqrt \{ \} \pm \sin \pi \cup \infty \\ \binom \lfloor \in \boxed{ ^\circ or 99999"
LONGER = [r"\text{ cm}", r"\begin{pmatrix}", r"\end{pmatrix}"]
PIECES = st.sampled_from([*"{}()[],129xyei^_-+/*!|%.=< &", *COMMANDS.split(), *LONGER])


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=20), st.lists(PIECES, max_size=8))
def test_any_text_gets_a_verdict(answer, gold):
    score = math(sample("<answer>" + "".join(answer) + "</answer>", "".join(gold)))
    assert score.kind in ("value", "abstain")


def test_competition_golds_equal_themselves_and_no_other(shared):
    with gzip.open(shared / "math500/math500.jsonl.gz", "rt") as lines:
        golds = sorted({json.loads(line)["answer"] for line in lines})
    some = random.Random(0).sample(golds, 150)
    assert [math(sample(f"\\boxed{{{gold}}}", gold)).value for gold in some] == [1] * len(some)
    assert [pair for pair in itertools.pairwise(some) if equivalent(*pair)] == []
    unread = [g for g in some if math(sample("<answer>-77777</answer>", g)).kind == "abstain"]
    assert all(re.search("[a-z]{4}", gold) for gold in unread) and len(unread) < 5  # words


N = 20_000
BODIES = {
    "braces": "{" * N, "boxes": r"\boxed{" * (N // 7), "balanced": "{" * N + "}" * N, "brackets": "[" * N + "]" * N,
    "objects": '{"objects_of_interest":[' * 900 + "[0,0,1,1]" + "]}" * 900,
    "many boxes": json.dumps([[i % 13, i % 7, i % 13 + 5, i % 7 + 9] for i in range(199)]), "power": "9**9**9",
    "tower": "9^{9^{9^9}}", "exponent": "1e" + "9" * N, "digits": "9" * N, "commas": "1," * N,
    "gap": "answer" + " " * N + "!", "letters": "A, " * N + "!", "fences": "```json\n[\n" * (N // 10),
    "tags": "<answer><think>" * (N // 15), "spaced tag": "<" + " " * N, "moves": "left," * N,
    "raised": "2" + "\u00b2" * N, "code": "__import__('pathlib').Path('executed').touch()",
}  # fmt: skip
GOLDS = {"iou": "[0,0,10,10]", "point": "[0,0,10,10]", "verdict": "A", "medical": "edema"}
ARGS = {
    "regex": {"pattern": "a+b"}, "overlong": {"buffer": 1, "limit": 4}, "length": {"target": 3}, "iou": {"mode": "set"},
    "sokoban": {"mode": "lmmr1"}, "model": {"path": "tiny:qwen2"}, "format:think_boxed": {"lenient": True},
}  # fmt: skip
ROW = {"level": "#####\n#@$.#\n#####", "bbox": [0, 0, 10, 10]}


def test_no_response_hangs_a_verifier(tmp_path, monkeypatch):
    """Each takes 0.2 s at most; 20 s are the wall time that only a regex which explodes needs."""
    monkeypatch.chdir(tmp_path)
    names = sorted({*VERIFIERS} - {"geo3k", "labels_recall", "token_recall", "format:counting"})
    with WorkerPool(workers=1, deadline=20) as pool:
        scores = {}
        for name, (kind, body) in itertools.product(names, BODIES.items()):
            sample = RewardSample(
                id="a", response=f"<think>a</think>\\boxed{{{body}}}<answer>{body}</answer>",
                answer=GOLDS.get(name, "5"), extra=ROW, choices=("a", "b"),
            )  # fmt: skip
            scores[name, kind] = pool.submit(name, sample, ARGS.get(name))
        found = {key: score.result() for key, score in scores.items()}
    assert {key: score.reason for key, score in found.items() if score.kind not in ("value", "abstain")} == {}
    assert not list(tmp_path.iterdir())


SIGNS = (
    *"7 a(){}[]*_`$.\\\n", "7.", "7,", "A ", "B. ", "(B) ", "A, ", "no ", "wait ", "twenty ",
    "option A ", "answer: ", ". answer", "\\text{", "the other ", "\\frac{",
)  # fmt: skip
TIMED = ("choice", "count", "number", "relaxed", "gsm8k", "exact", "avqa", "digit", "dapo_math", "math")


def test_the_time_for_a_run_of_one_sign_grows_with_its_length(no_garbage):
    for name in TIMED:  # imports what it needs
        VERIFIERS[name].function(RewardSample(id="a", response="<answer>7x</answer>", answer="5"))
    for sign in SIGNS:
        for end in (" x", "..."):
            for frame in ("<answer>7.{}</answer>", "Answer: B\n{}"):
                response = frame.format(sign * (1990 // len(sign)) + end)
                start = time.thread_time()
                for name in TIMED:
                    gold = "B" if name in ("choice", "avqa") else "5"
                    VERIFIERS[name].function(RewardSample(id="a", response=response, answer=gold))
                assert time.thread_time() - start < 0.5, (sign, end, frame)


def test_a_pattern_that_explodes_costs_its_sample_only():
    bomb = RewardSample(id="a", response=f"<answer>{'a' * 60}!</answer>")
    harmless = RewardSample(id="b", response="<answer>aaa</answer>")
    with WorkerPool(workers=1, deadline=10) as pool:
        scores = [pool.submit("regex", sample, {"pattern": "^(a+)+$"}) for sample in (bomb, harmless)]
        assert scores[0].result().reason == "timeout: no result after 1 s"
        assert scores[1].result().value == 1
