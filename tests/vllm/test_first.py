"""First tokens with settings of their own, in an engine that was built for them."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from saccade.engines import generate

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(scope="module")
def settings(settings):
    return replace(settings, first_tokens=True)


def test_the_first_token_may_have_settings_of_its_own(engine, twin, ask, gap):
    greedy = generate(twin, [ask("a", 1, temperature=0.0)])[0].ids
    requests = [ask("a", 1, noise=n, first=(9.0, 1)) for n in range(4)]
    requests = [replace(request, key=f"{n}") for n, request in enumerate(requests)]
    answers = generate(engine, requests)
    assert {int(a.ids[0]) for a in answers} == {int(greedy[0])}
    assert all(a.logprobs[0] == 0 for a in answers)
    assert len({tuple(a.ids) for a in answers}) == 4  # and only the first
    hot = [replace(r, sampling=replace(r.sampling, first=(9.0, -1))) for r in requests]
    heads = [replace(a, ids=a.ids[:1], logprobs=a.logprobs[:1], versions=a.versions[:1]) for a in generate(engine, hot)]
    assert gap(hot, heads, 9.0) < 1e-4
    late = generate(engine, [replace(requests[0], first_index=3)])[0]
    assert late.logprobs[0] < 0


def test_the_others_are_drawn_as_without(engine, family, ask, gap):
    requests = [ask(f"{n}", n % 4, noise=n + 1, temperature=0.7) for n in range(8)]
    answers = generate(engine, requests)
    assert gap(requests, answers, 0.7) < 1e-4
    assert not family.banned[np.concatenate([a.ids for a in answers])].any()
