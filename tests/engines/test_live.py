"""Episodes of several turns in the embedded engine: what is kept, and when it is computed again."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.types import Message
from tests.engines.asked import FREE, counted, play, requests, same, turn


def test_a_live_episode_computes_only_what_is_new(model, family, prompts, image):
    engine = EmbeddedEngine(model, family)
    (request,) = requests(prompts[1:2])
    with counted(model) as calls:
        played = play(engine, family, image, replace(request, episode="e"), 4)
    firsts = [calls[i] for i in range(0, len(calls), FREE.max_tokens)]
    lengths = [len(r.ids) for r, _ in played]
    # The last sampled token of a turn is not in the cache yet.
    new = [b - a - FREE.max_tokens + 1 for a, b in pairwise(lengths)]
    assert firsts == [(lengths[0], 1), (new[0], 0), (new[1], 1), (new[2], 0)]
    for asked, answer in played:
        (fresh,) = generate(EmbeddedEngine(model, family), [replace(asked, episode=None)])
        same(fresh, answer)
    assert len(engine.scheduler.prefix_cache.turns) == 1
    engine.release("e")
    engine.release("e")  # twice is harmless
    assert not engine.scheduler.prefix_cache.turns
    assert engine.cache.pages.free == engine.cache.pages.count


def test_live_and_fresh_requests_are_admitted_together_and_computed_apart(model, family, prompts, image):
    engine = EmbeddedEngine(model, family)
    asked = [replace(r, episode=f"e{i}") for i, r in enumerate(requests(prompts[:3]))]
    answers = generate(engine, asked)
    second = [
        turn(request, answer, family, (image(56, 56, 5), "and?"))
        for request, answer in zip(asked, answers, strict=True)
    ]
    mixed = [*second[:2], *requests(prompts[3:])]
    mixed = [replace(request, key=f"m{i}") for i, request in enumerate(mixed)]
    with counted(model) as calls:
        got = generate(engine, mixed)
    new = [len(b.ids) - len(a.ids) - FREE.max_tokens + 1 for a, b in zip(asked[:2], second[:2], strict=True)]
    assert calls[:3] == [(len(mixed[2].ids), 3), (sum(new), 2), (3, 0)]
    for request, answer in zip(mixed, got, strict=True):
        (fresh,) = generate(EmbeddedEngine(model, family), [replace(request, episode=None)])
        same(fresh, answer)


def test_an_episode_that_lost_its_slot_gives_the_same(model, family, prompts, image):
    engine = EmbeddedEngine(model, family, max_sequences=1)
    states = [replace(r, episode=f"e{i}") for i, r in enumerate(requests(prompts[:2]))]
    for number in range(3):
        for i, request in enumerate(states):
            (answer,) = generate(engine, [request])
            (fresh,) = generate(EmbeddedEngine(model, family), [replace(request, episode=None)])
            same(fresh, answer)
            states[i] = turn(request, answer, family, (image(56, 56, number), "go on"))
    assert engine.cache.pages.count == 1 and list(engine.scheduler.prefix_cache.turns) == ["e1"]


@pytest.mark.parametrize("changes", ["ids", "picture"])
def test_a_conversation_that_was_rewritten_is_computed_again(model, family, image, changes):
    engine = EmbeddedEngine(model, family)
    first, other = (family.render([Message(role="user", parts=(image(56, 56, n), "x"))]) for n in range(2))
    (request,) = requests([first], replace(FREE, temperature=0.0))
    request = replace(request, episode="e")
    (answer,) = generate(engine, [request])
    ids = np.concatenate([request.ids, answer.ids, [4]])
    if changes == "ids":
        ids[len(request.ids) - 1] = 7
    changed = replace(request, ids=ids, media=other.media if changes == "picture" else request.media)
    (got,) = generate(engine, [changed])
    (fresh,) = generate(EmbeddedEngine(model, family), [replace(changed, episode=None)])
    same(fresh, got)
    assert len(engine.scheduler.prefix_cache.turns) == 1
