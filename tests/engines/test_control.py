"""The embedded engine over time: aborts, new weights, sleep, and a cache that grows and shrinks."""

from dataclasses import replace

import pytest
import torch

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine, kv_cache
from tests.engines.asked import FREE, NAME, drain, requests, same, too_small_for, turn


def test_versions_are_recorded_per_token_and_idle_caches_dropped(load, family, prompts, image):
    model = load(NAME)
    engine = EmbeddedEngine(model, family)
    first, second = requests(prompts[:2])
    (answer,) = generate(engine, [replace(first, episode="e")])
    assert answer.versions.tolist() == [0] * 8
    engine.submit(second)
    for _ in range(3):
        engine.poll()
    with torch.no_grad():
        model.model.language_model.layers[0].mlp.up_proj.weight.mul_(1.5)
    engine.update_weights(None, version=4)
    assert not engine.scheduler.prefix_cache.turns
    done = drain(engine)
    assert done[0].versions.tolist() == [0] * 3 + [4] * 5
    # The next turn of the idle episode reads nothing that the old weights wrote.
    request = turn(replace(first, episode="e"), answer, family, ("more",))
    (again,) = generate(engine, [request])
    same(again, generate(EmbeddedEngine(model, family), [request])[0])


def _bytes(cache):
    return sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))


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
        assert _bytes(engine.cache) <= budget
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
