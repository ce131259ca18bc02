"""The engine with kernels gives what it gives without: tokens, log-probs, supports and ends."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine, kv_cache, scheduler
from saccade.errors import ConfigError, TrainingError
from saccade.plugins.gpu import decode_state
from saccade.types import Message, Sampling
from tests.engines.asked import count_evictions, counted, drain, support_of, too_small_for
from tests.engines.asked import requests as requests_for
from tests.engines.asked import same as same_completion

FREE = Sampling(temperature=1.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(family, image):
    pictures = [image(56, 56, 1), image(140, 84, 2), image(84, 56, 3)]
    return [family.render([Message(role="user", parts=(*pictures[:n], f"What are these {n}?" * n))]) for n in range(4)]


def requests(prompts, sampling=FREE, repeats=3):
    return requests_for(prompts, sampling, repeats)


@pytest.fixture(scope="module")
def plain(model, family):
    """What an engine without kernels answers."""
    known = {}

    def answer(asked):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_cache, "use_kernels", lambda shape: False)
            new = [r for r in asked if _identity(r) not in known]
            engine = EmbeddedEngine(model, family)
            done = generate(engine, [replace(r, episode=None) for r in new])
            known.update(zip(map(_identity, new), done, strict=True))
        return [known[_identity(r)] for r in asked]

    return answer


def _identity(request):
    media = tuple(span.media.key for span in request.media)
    return (request.key, request.ids.tobytes(), media, request.sampling, request.first_index)


def same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        same_completion(a, b)
        assert support_of(a) == support_of(b)


def empty(engine):
    """Every page and every slot is free again."""
    pages, scheduler = engine.cache.pages, engine.scheduler
    slots = len(engine.cache.free_slots) == engine.cache.slots
    return pages.free == pages.count > 0 and slots and not (scheduler.waiting or scheduler.jobs)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"temperature": 0.0}, {"top_p": 0.8, "support": True}, {"first": (5.0, 20), "top_k": 9, "support": True},
        {"ignore_eos": False}, {"stop": ("e", "zz", "ab")},
    ],
)  # fmt: skip
def test_answers_are_those_without_kernels(model, family, prompts, paged, plain, changes):
    asked = requests(prompts, replace(FREE, **changes))
    wanted = plain(asked)
    engine = EmbeddedEngine(model, family)
    same(generate(engine, asked), wanted)
    assert engine.cache.kernels and empty(engine)
    shuffled = [asked[i] for i in np.random.default_rng(0).permutation(len(asked))]
    few = EmbeddedEngine(model, family, max_sequences=5)
    same(sorted(generate(few, shuffled), key=lambda c: c.key), wanted)
    assert empty(few) and not few.scheduler.prefix_cache.prefixes


def test_settings_mix_in_one_batch(model, family, prompts, paged, plain):
    kinds = [FREE, replace(FREE, temperature=0.0), replace(FREE, top_k=2, max_tokens=5)]
    kinds += [replace(FREE, top_p=0.6, support=True), replace(FREE, temperature=0.0, top_k=4)]
    asked = [
        replace(r, sampling=kind, key=f"{r.key}/{i}") for i, kind in enumerate(kinds) for r in requests(prompts[:2])
    ]
    same(generate(EmbeddedEngine(model, family), asked), plain(asked))


def test_a_sequence_without_room_for_what_it_keeps_goes_on_later(model, family, prompts, paged, plain, monkeypatch):
    from saccade.plugins.gpu import graphs

    monkeypatch.setattr(graphs, "KEPT", 1)  # as many as one sequence needs, then
    asked = requests(prompts[:2], replace(FREE, top_p=0.9, support=True, max_tokens=6), repeats=2)
    engine = EmbeddedEngine(model, family)
    waits = []
    read = engine._read

    def noted(ready):
        read(ready)
        waits.append(int((engine.graphs.ids[0, : len(ready)] < 0).sum()))

    engine._read = noted
    same(generate(engine, asked), plain(asked))
    assert sum(waits) and empty(engine)


def test_support_ends_where_a_stop_string_ends(model, family, prompts, paged, plain):
    cut = replace(FREE, top_k=9, support=True)
    free = generate(EmbeddedEngine(model, family), requests(prompts, cut))
    stop = family.chat.decode(free[0].ids[5:7], special=True)  # in the middle of a burst
    asked = requests(prompts, replace(cut, stop=(stop,)))
    done = generate(EmbeddedEngine(model, family), asked)
    same(done, plain(asked))
    assert all(len(c.support) == len(c.ids) for c in done)
    assert any(c.finish == "stop" for c in done)


def test_a_step_at_rest_touches_no_page(model, family, prompts, paged):
    """For fewer rows than the last burst had, as before a graph is captured, and after the pool was given back."""
    engine = EmbeddedEngine(model, family)
    generate(engine, requests(prompts[:1], replace(FREE, max_tokens=4), repeats=24))
    assert engine.graphs.prefix_groups.any()  # rows up to the last share a prompt
    pools = [tensor.clone() for tensor in (*engine.cache.keys, *engine.cache.values)]
    engine.graphs._rest()
    engine.graphs._step((8, False, 1))
    assert not engine.graphs.prefix_groups.any() and not engine.graphs.state[decode_state.SHARED].any()
    for before, now in zip(pools, (*engine.cache.keys, *engine.cache.values), strict=True):
        assert torch.equal(before.view(torch.int32), now.view(torch.int32))  # NaN, too
    assert (engine.graphs.ids[0, :8] == -1).all()


def test_the_host_looks_every_few_steps(load, family, prompts, paged):
    model = load("qwen2_5_vl")
    for changes, polls in (({}, 3), ({"ignore_eos": False}, 6)):
        engine = EmbeddedEngine(model, family)
        for request in requests(prompts[:1], replace(FREE, max_tokens=70, **changes), repeats=2):
            engine.submit(request)
        banned = torch.from_numpy(np.isin(np.arange(family.vocabulary), list(family.chat.eos_ids)))
        engine.banned = engine.graphs.banned = banned  # so that nothing ends early
        count = 0
        while engine.pending:
            engine.poll()
            count += 1
        assert count == polls, changes


@pytest.mark.parametrize("kernels", [True, False])
def test_log_probs_that_are_no_numbers_end_it_where_nobody_trains(load, family, prompts, paged, kernels, monkeypatch):
    monkeypatch.setattr(kv_cache, "use_kernels", lambda shape: kernels)
    model = load("qwen2_5_vl")
    named = model.named_parameters()
    name, weight = next((n, p) for n, p in named if "layers.0.mlp.down_proj" in n)
    weight.data[0, 0] = torch.nan
    asked = requests(prompts[:1], repeats=2)
    (first, _) = generate(EmbeddedEngine(model, family), asked)
    assert len(first.ids) == 12 and np.isnan(first.logprobs).all()  # a trainer skips its update
    engine = EmbeddedEngine(model, family, check_nan=True)
    with pytest.raises(TrainingError, match=f"log-probs are not finite, because {name} holds NaN"):
        generate(engine, asked)
    assert all(s.sampled <= 1 for s in engine.scheduler.running.values())  # at the first look
    weight.data.fill_(3e38)
    with pytest.raises(TrainingError, match="although all weights are"):
        generate(EmbeddedEngine(model, family, check_nan=True), asked)


def test_a_prompt_is_computed_once_however_late_its_members_come(load, family, prompts, paged):
    model = load("qwen2_5_vl")
    asked = requests(prompts, repeats=4)
    engine = EmbeddedEngine(model, family, max_sequences=3)
    with counted(model) as calls:
        generate(engine, asked)
    assert sum(tokens for tokens, _ in calls if tokens != 8) == sum(len(p) for p in prompts)  # 8: decode steps
    assert sum(images for _, images in calls) == 0 + 1 + 2 + 3
    assert empty(engine)


def test_long_prompts_are_computed_in_pieces(load, family, prompts, paged, plain, monkeypatch):
    budget = 7
    asked = requests(prompts)
    wanted = plain(asked)
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", budget)
    model = load("qwen2_5_vl")
    engine = EmbeddedEngine(model, family)
    with counted(model) as calls:
        same(generate(engine, asked), wanted)
    longest = max(span.length for p in prompts for span in p.media)
    assert sum(images for _, images in calls) == 6 and max(tokens for tokens, _ in calls) <= budget + longest
    assert empty(engine)


def test_prompts_that_memory_is_too_short_for_are_halved(load, family, prompts, paged, plain):
    asked = requests(prompts)
    wanted = plain(asked)
    model = load("qwen2_5_vl")
    longest = max(span.length for p in prompts for span in p.media)
    too_small_for(model, longest + 3)
    engine = EmbeddedEngine(model, family)
    same(generate(engine, asked), wanted)
    assert engine.scheduler.prefill_tokens <= longest + 3 and empty(engine)
    engine.sleep()
    assert engine.scheduler.prefill_tokens == scheduler.PREFILL_TOKENS


@pytest.mark.parametrize("running, most_waits", [(8, 0), (3, scheduler.PATIENCE)])
def test_decoding_goes_on_between_the_pieces(model, family, prompts, paged, monkeypatch, running, most_waits):
    """Few that decode wait for one that comes, but not until the end of a long prompt."""
    from saccade.plugins.gpu import graphs

    monkeypatch.setattr(graphs, "MAX_BURST", 2)
    engine = EmbeddedEngine(model, family)
    for request in requests(prompts[:1], replace(FREE, max_tokens=1000), repeats=running):
        engine.submit(request)
    engine.poll()
    engine.scheduler.prefill_tokens = 10
    (late,) = requests(prompts[3:], repeats=1)
    engine.submit(replace(late, key="late"))
    grown = []
    while "late" not in engine.scheduler.running or not engine.scheduler.running["late"].ready:
        before = sum(s.sampled for s in engine.scheduler.running.values())
        engine.poll()
        grown.append(sum(s.sampled for s in engine.scheduler.running.values()) - before)
    assert len(grown) > scheduler.PATIENCE + 1
    turns = [new > 0 for new in grown[:-1]]  # with the last one it draws its own first token
    assert turns == [n % (most_waits + 1) == most_waits for n in range(len(turns))]


def test_a_request_after_new_weights_shares_nothing_with_those_before(load, family, prompts, paged, monkeypatch):
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 16)
    model = load("qwen2_5_vl")
    (asked,) = requests(prompts[3:], replace(FREE, temperature=0.0), repeats=1)
    engine = EmbeddedEngine(model, family, max_sequences=1)
    engine.submit(asked)
    engine.submit(replace(asked, key="waited"))  # there is one slot
    engine.poll()  # computes a part of its prompt
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers" in name and weight.ndim > 1:
                weight.mul_(1.7)
    engine.update_weights(None, version=1)
    engine.submit(replace(asked, key="after"))
    done = {c.key: c for _ in range(100) for c in engine.poll()}
    after = [done["after"]]
    assert done["waited"].ids.tolist() == done["after"].ids.tolist() == done[asked.key].ids.tolist()
    assert done[asked.key].versions.tolist() == [1] * 12  # its prompt was half computed: it is computed again
    fresh = EmbeddedEngine(model, family)
    fresh.update_weights(None, version=1)
    same(after, generate(fresh, [replace(asked, key="after")]))
    assert after[0].versions.tolist() == [1] * 12


def test_sequences_that_lose_their_pages_go_on_with_the_same_tokens(model, family, prompts, paged, plain):
    asked = requests(prompts, replace(FREE, max_tokens=24))
    wanted = plain(asked)
    engine = EmbeddedEngine(model, family)
    paged.budget = 11 * engine.cache.bytes_per_page
    lost = count_evictions(engine)
    same(generate(engine, asked), wanted)
    assert sum(lost) > 0 and engine.cache.pages.count == 11 and empty(engine)


def test_rests_of_answers_wait_for_pages(model, family, prompts, paged, plain):
    """A group begins with one opening, but there is room for the answers of few."""
    asked = requests(prompts[1:3], replace(FREE, max_tokens=60), repeats=4)
    wanted = plain(asked)
    begun = [
        replace(
            r, ids=np.concatenate([r.ids, w.ids[:40]]), first_index=40, opening=len(r.ids),
            sampling=replace(r.sampling, max_tokens=20))
        for r, w in zip(asked, wanted, strict=True)
    ]  # fmt: skip
    engine = EmbeddedEngine(model, family, max_sequences=6)
    paged.budget = 14 * engine.cache.bytes_per_page
    evicted, evict = [], engine.scheduler._evict
    engine.scheduler._evict = lambda sequence: evicted.append(evict(sequence))
    for one, whole in zip(generate(engine, begun), wanted, strict=True):
        assert one.ids.tolist() == whole.ids[40:].tolist()
        assert np.abs(one.logprobs - whole.logprobs[40:]).max() < 1e-5
    assert evicted and engine.cache.pages.count == 14 and empty(engine)
    for request in begun:
        engine.submit(request)
    while not engine.scheduler.jobs:
        engine.poll()
    for request in begun:  # while the opening is read, or what follows it
        engine.abort(request.key)
    assert {c.finish for c in drain(engine)} == {"aborted"} and empty(engine)


def test_a_request_larger_than_the_memory_is_refused_alone(model, family, prompts, paged, plain):
    small, large, other = requests(prompts[:1])
    wanted = plain([small, other])
    engine = EmbeddedEngine(model, family)
    paged.budget = 3 * engine.cache.bytes_per_page
    engine.submit(small)
    engine.submit(replace(large, sampling=replace(FREE, max_tokens=60)))
    engine.submit(other)
    with pytest.raises(ConfigError, match=r"room for the keys and values of 48.*max_tokens") as told:
        engine.poll()
    assert told.value.request == large.key
    done = drain(engine)
    same(done, wanted)
    assert empty(engine)


def test_turns_continue_from_their_pages(load, family, prompts, paged, plain):
    model = load("qwen2_5_vl")
    engine = EmbeddedEngine(model, family, max_sequences=6)
    states = [replace(r, episode=r.key) for r in requests(prompts, repeats=2)]
    for _ in range(3):
        wanted = plain(states)
        with counted(model) as calls:
            answers = generate(engine, states)
        same(answers, wanted)
        states = [
            replace(r, ids=np.concatenate([r.ids, a.ids, [7, 8, 9]]), first_index=r.first_index + len(a.ids))
            for r, a in zip(states, answers, strict=True)
        ]
    assert not any(images for _, images in calls)  # of the third turn: they are in the pages
    assert sum(tokens for tokens, _ in calls if tokens != 8) <= 4 * len(states)
    for state in states:
        engine.release(state.episode)
    assert empty(engine)


def test_aborted_at_every_stage(model, family, prompts, paged):
    engine = EmbeddedEngine(model, family, max_sequences=4)
    asked = requests(prompts, replace(FREE, max_tokens=200))
    for request in asked:
        engine.submit(request)
    done = engine.poll() + engine.poll()
    running = list(engine.scheduler.running)
    waiting = list(engine.scheduler.waiting)
    assert not done and len(running) == 4 and len(waiting) == 8
    for key in (running[0], waiting[0], "unknown"):
        engine.abort(key)
    done = {c.key: c for c in engine.poll()}
    assert done[running[0]].finish == done[waiting[0]].finish == "aborted"
    assert len(done[running[0]].ids) > 10 and not len(done[waiting[0]].ids)
    while engine.pending:
        for key in [*engine.scheduler.running, *engine.scheduler.waiting]:
            engine.abort(key)
        engine.poll()
    assert empty(engine)


def test_what_ends_behind_its_prompt_is_not_aborted(model, family, prompts, paged):
    """One that is aborted while its prompt is read draws a token: if that is an end, nothing may be asked behind it."""
    end = min(family.chat.eos_ids)
    engine = EmbeddedEngine(model, replace(family, banned=np.arange(len(family.banned)) != end))
    engine.scheduler.prefill_tokens = 16
    request = requests(prompts[1:2], replace(FREE, ignore_eos=False))[0]
    engine.submit(request)
    assert not engine.poll() and engine.scheduler.jobs
    engine.abort(request.key)
    (done,) = drain(engine)
    assert (done.finish, done.ids.tolist()) == ("stop", [end]) and empty(engine)


def test_an_evicted_sequence_can_be_aborted(model, family, prompts, paged):
    engine = EmbeddedEngine(model, family)
    paged.budget = 14 * engine.cache.bytes_per_page
    for request in requests(prompts, replace(FREE, max_tokens=32)):
        engine.submit(request)
    done = []
    while not engine.scheduler.evicted:
        done += engine.poll()
    key, sampled = engine.scheduler.evicted[0].request.key, engine.scheduler.evicted[0].sampled
    engine.abort(key)
    done += engine.poll()
    (aborted,) = (c for c in done if c.key == key)
    assert aborted.finish == "aborted" and len(aborted.ids) == sampled
    drain(engine)
    assert empty(engine)


@pytest.mark.parametrize("kernels", [True, False])
def test_sleep_frees_the_pool(model, family, prompts, paged, plain, monkeypatch, kernels):
    monkeypatch.setattr(kv_cache, "use_kernels", lambda shape: kernels)
    asked = [replace(r, episode=r.key) for r in requests(prompts)]
    wanted = plain(asked)
    engine = EmbeddedEngine(model, family)
    same(generate(engine, asked), wanted)
    assert engine.cache.keys and engine.scheduler.prefix_cache.turns
    engine.sleep()
    assert not (engine.cache.keys or engine.scheduler.prefix_cache.turns or engine.outputs.rows.size)
    engine.wake()
    same(generate(engine, asked), wanted)


@pytest.mark.parametrize("kernels", [True, False])
def test_the_pool_grows_while_sequences_run(model, family, prompts, paged, plain, monkeypatch, kernels):
    monkeypatch.setattr(kv_cache, "use_kernels", lambda shape: kernels)
    monkeypatch.setattr(kv_cache, "POOL_STEP", 1)
    short, *others = requests(prompts)
    long = [replace(r, sampling=replace(FREE, max_tokens=40)) for r in others]
    wanted = plain([short, *long])
    engine = EmbeddedEngine(model, family)
    engine.submit(short)
    engine.poll()
    small = engine.cache.pages.count
    for request in long:
        engine.submit(request)
    done = drain(engine)
    assert engine.cache.pages.count > small
    same(sorted(done, key=lambda c: c.key), sorted(wanted, key=lambda c: c.key))
    assert empty(engine)
