import json

import pytest

from saccade.plugins.verifiers.extract import answer_of, extract
from saccade.rewards.reward_sample import RewardSample, to_json

MATH = ("answer_tag", "boxed", "answer_line")


@pytest.mark.parametrize(
    ("response", "order", "found"),
    [
        ("<answer>1</answer> no: <answer>2</answer>", MATH, "2"),
        ("<answer>1</answer><answer>2", MATH, "1"),
        (r"<answer>so \boxed{\frac{1}{2}}</answer>", MATH, r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{\{2\}}", MATH, r"\{2\}"),
        (r"\boxed{1} and \boxed{2", MATH, "1"),
        (r"\boxed{\boxed{5}}", MATH, "5"),
        (r"\boxed{}", MATH, ""),
        ("steps\n**Final answer:** 12", MATH, "12"),
        ("Answer: 3\nAnswer: $4$", MATH, "$4$"),
        ("my answer: is late", ("answer_line",), None),
        ("Answer: 3" + "\nfurther" * 60, MATH, None),
        ("so #### 72\n", ("hash",), "72"),
        ("it is 7, not 8.5", ("last_number",), "8.5"),
        ("The answer is (B).", ("letter",), "B"),
        ("(A) or (B)", ("letter",), None),
        ("  cat ", ("whole",), "cat"),
    ],
)
def test_order_and_places(response, order, found):
    assert extract(response, order) == found


@pytest.mark.parametrize(
    ("response", "prefilled", "found"),
    [
        ("<think><answer>1</answer></think><answer>2</answer>", False, "2"),
        ("<think><answer>1</answer></think>", False, None),
        ("<answer>1</answer>", True, None),
        ("a thought</think><answer>1</answer>", True, "1"),
        ("<think>a</think><think>b<answer>1</answer>", False, None),
    ],
)
def test_scope_is_what_follows_the_last_closed_thought(response, prefilled, found):
    assert extract(response, MATH, think_prefilled=prefilled) == found
    assert extract("<think><answer>1</answer>", MATH, scope="all") == "1"


def test_an_answer_of_several_turns_stands_in_the_last_one():
    turns = ("<answer>3</answer> wait", "<think>so</think><answer>7</answer>")
    for given, found in ((turns, "7"), ((*turns, "hm"), None), ((), "7"), (("x",), "7")):
        sample = RewardSample(id="a", response="".join(turns), turns=given)
        assert answer_of(sample, ["answer_tag"], "after_think") == found
        sent = RewardSample(**json.loads(to_json(sample, brief=True)))
        assert answer_of(sent, ["answer_tag"], "after_think") == found


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ('<think>Look.</think><grounding>{"bbox_2d": [0, 0.5, 1, 1]}</grounding>', None),
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>', None),
        ('<grounding>{"bbox_2d": [0, 0.5', None),
        ("<grounding>[1] <answer>7</answer>", "7"),
    ],
)
def test_a_call_is_no_answer(last, found):
    for turns in ((last,), ("I see 99.", last)):
        sample = RewardSample(id="a", response="\n".join(turns), turns=turns)
        assert answer_of(sample, ("answer_tag", "last_number"), "after_think") == found
