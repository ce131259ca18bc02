"""The embedded engine over time: turns of episodes, new weights, and a cache that grows and shrinks."""

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine, kv_cache
from saccade.types import Message
from tests.engines.asked import FREE, NAME, counted, drain, over_kept_keys, play, requests, same, too_small_for, turn


@pytest.mark.parametrize("kernels", [False, True])
def test_what_runs_keeps_its_keys_and_their_version_when_weights_change(load, family, prompts, kernels, request):
    if kernels:
        request.getfixturevalue("paged")
    before, model = load(NAME), load(NAME)
    engine = EmbeddedEngine(model, family, max_sequences=1)
    long, waits, after = requests(prompts[:1], repeats=3)
    idle = replace(*requests(prompts[1:2]), key="idle", episode="idle")
    long = replace(long, episode=long.key, sampling=replace(FREE, max_tokens=90))
    (said,) = generate(engine, [idle])
    for each in (long, waits):  # a prompt that is kept, and waits for the only slot
        engine.submit(each)
    for _ in range(2):
        engine.poll()
    count, held = len(engine.progress(long.key)), engine.scheduler.prefix_cache
    assert 0 < count < 80 and (not kernels or (held.prefixes and held.turns))  # there is one page else
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers" in name and weight.ndim > 1:
                weight.mul_(1.3)
    engine.update_weights(None, version=4)
    engine.submit(after)
    done = {answer.key: answer for answer in drain(engine)}
    kept = done[long.key]
    assert kept.versions.tolist() == [0] * 90
    mixed = over_kept_keys(family, (before, model), long, kept, count)
    assert np.abs(kept.logprobs - mixed).max() < 1e-4
    recomputed = over_kept_keys(family, (model, model), long, kept, count)
    assert np.abs(kept.logprobs - recomputed)[count:].max() > 0.05
    # Nothing that begins now reads what the old weights wrote: no shared prompt, no turn before it.
    fresh = EmbeddedEngine(model, family)
    assert not held.turns
    turns = [turn(one, answer, family, ("more",)) for one, answer in ((idle, said), (long, kept))]
    wanted = generate(fresh, [waits, after, *turns])
    for ours, theirs in zip([done[waits.key], done[after.key], *generate(engine, turns)], wanted, strict=True):
        same(ours, theirs)
        assert set(ours.versions.tolist()) == {4}


def test_longer_requests_find_fewer_pages_when_those_before_have_ended(model, family, prompts, monkeypatch):
    monkeypatch.setattr(kv_cache, "WHOLE_STEP", 16)
    engine = EmbeddedEngine(model, family)
    page = -(-(max(map(len, prompts[:2])) + 4) // 16) * 16
    budget = 6 * page * engine.cache.shape.bytes_per_token
    monkeypatch.setattr(kv_cache, "CPU_CACHE_BYTES", budget)
    short = [replace(r, episode=r.key) for r in requests(prompts[:2], replace(FREE, max_tokens=4), repeats=3)]
    long = [replace(r, key=f"9/{r.key}", sampling=replace(FREE, max_tokens=page + 16)) for r in short]
    for request in short:
        engine.submit(request)
    done = engine.poll()
    assert engine.cache.pages.count == 6
    for request in long:
        engine.submit(request)
    while engine.pending:
        done += engine.poll()
        assert sum(tensor.nbytes for tensor in (*engine.cache.keys, *engine.cache.values)) <= budget
    assert engine.cache.pages.count == 2
    wanted = generate(EmbeddedEngine(model, family), [*short, *long])
    for a, b in zip(sorted(done, key=lambda c: c.key), wanted, strict=True):
        same(a, b)


def test_prompts_that_memory_is_too_short_for_are_computed_in_turn(load, family, prompts):
    asked = requests(prompts)
    wanted = generate(EmbeddedEngine(load(NAME), family), asked)
    model, most = load(NAME), max(len(p) for p in prompts)
    too_small_for(model, most)
    engine = EmbeddedEngine(model, family)
    for ours, theirs in zip(generate(engine, asked), wanted, strict=True):
        same(ours, theirs)
    assert engine.scheduler.prefill_tokens <= sum(len(p) for p in prompts)
    too_small_for(model, most - 1)  # without kernels a prompt is computed whole
    with pytest.raises(torch.OutOfMemoryError):
        generate(EmbeddedEngine(model, family), asked)


def test_thousands_of_waiting_requests_are_aborted_at_once(model, family, prompts):
    """Each looked through all others: 5 s of a core for these."""
    engine = EmbeddedEngine(model, family, max_sequences=1)
    first, *asked = requests(prompts[:1], repeats=3)
    for number in range(1500):
        ids = np.concatenate([np.full(1000, 5), [number // 8, 5]])
        asked.append(replace(first, key=f"w{number}", ids=ids, media=()))
    for request in (first, *asked):
        engine.submit(request)
    engine.poll()
    began = time.thread_time()
    for request in asked:
        engine.abort(request.key)
    assert time.thread_time() - began < 2 and engine.pending == 1 + len(asked)
    done = drain(engine)
    assert {c.key: c.finish for c in done} == dict.fromkeys((r.key for r in asked), "aborted") | {first.key: "length"}
    assert not engine.scheduler.prefix_cache.prefixes and engine.cache.pages.free == engine.cache.pages.count


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
