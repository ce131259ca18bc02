from __future__ import annotations

from typing import Any

import pytest

from saccade.rewards.sample import RewardSample
from saccade.rewards.verifiers import VERIFIERS

ARGS: dict[str, list[dict[str, Any]]] = {
    "math": [{}, *({"gold_unparseable": kind} for kind in ("string", "error"))],
    "hybrid": [{}, {"rule": "math", "options": {"gold_unparseable": "string"}}],
}
COMPARING = [name for name, row in VERIFIERS.items() if row.needs_answer]


@pytest.mark.parametrize("name", COMPARING)
def test_no_gold_is_no_verdict(name: str) -> None:
    counts = VERIFIERS[name].blank_counts
    for answer in (None,) if counts else (None, "", " \n", (), ("",), ("", " ")):
        for response in ("", "<answer></answer>", "<answer>7</answer>", r"\boxed{7}", "Answer: B"):
            sample = RewardSample(id="a", response=response, answer=answer, choices=("a", "b"))
            for args in ARGS.get(name, [{}]):
                assert VERIFIERS[name].function(sample, **args).kind == "abstain"


def test_which_verifiers_take_a_blank_gold_for_an_answer() -> None:
    counting = {name for name, row in VERIFIERS.items() if row.blank_counts}
    assert counting == {"labels_f1", "labels_recall", "medical"}
    assert len(COMPARING) == 22
