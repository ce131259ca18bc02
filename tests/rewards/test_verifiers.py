from __future__ import annotations

from typing import Any

import pytest

from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS

ARGS: dict[str, list[dict[str, Any]]] = {
    "math": [{}, *({"gold_unparseable": kind} for kind in ("string", "error"))],
    "hybrid": [{}, {"rule": "math", "options": {"gold_unparseable": "string"}}],
}
COMPARING = [name for name, row in VERIFIERS.items() if row.needs_answer]


@pytest.mark.parametrize("name", COMPARING)
def test_no_gold_is_no_verdict(name: str) -> None:
    counts = VERIFIERS[name].blank_counts
    blank = ("", " \n", (), ("",), ("", " "), "[]", "{}", "null", ("[]", ""))
    for answer in (None,) if counts else (None, *blank):
        for response in ("", "<answer></answer>", "<answer>7</answer>", r"\boxed{7}", "Answer: B"):
            sample = RewardSample(id="a", response=response, answer=answer, choices=("a", "b"))
            for args in ARGS.get(name, [{}]):
                assert VERIFIERS[name].function(sample, **args).kind == "abstain"


def test_an_empty_list_is_a_gold_where_it_says_that_there_is_no_box() -> None:
    empty = RewardSample(id="a", response="<answer>[]</answer>", answer="[]")
    assert VERIFIERS["iou"].function(empty, mode="set").value == 1
    assert VERIFIERS["iou"].function(empty).kind == "abstain"
    assert VERIFIERS["labels_f1"].function(empty).value == 1


def test_which_verifiers_take_a_blank_gold_for_an_answer() -> None:
    counting = {name for name, row in VERIFIERS.items() if row.blank_counts}
    assert counting == {"labels_f1", "labels_recall", "medical"}
    assert len(COMPARING) == 22
