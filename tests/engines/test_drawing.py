"""First tokens of truncated sampling, few rows at a time."""

from dataclasses import replace

import numpy as np
import pytest

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine, drawing
from saccade.types import Message, Request, Sampling


@pytest.mark.parametrize("rows", [1, 2])
def test_sorting_few_rows_at_a_time_changes_nothing(load, family_of, monkeypatch, rows):
    model, family = load("qwen2"), family_of("qwen2")
    ids = family.render([Message(role="user", parts=("Why?",))]).ids
    cut = Sampling(top_k=4, support=True, max_tokens=3, ignore_eos=True)
    asked = [
        Request(
            key=str(i), ids=ids[: 3 + i % 2], sampling=cut if i else replace(cut, top_k=9), noise=i
        )
        for i in range(6)
    ]
    whole = generate(EmbeddedEngine(model, family, max_sequences=6), asked)
    monkeypatch.setattr(drawing, "SORTED", rows)
    apart = generate(EmbeddedEngine(model, family, max_sequences=6), asked)
    for a, b in zip(whole, apart, strict=True):
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.logprobs, b.logprobs)
        assert [len(kept) for kept in a.support] == [4 if a.key != "0" else 9] * 3
        assert all(map(np.array_equal, a.support, b.support))
