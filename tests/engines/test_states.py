"""Decoders with recurrent layers in an engine with kernels: it draws what it draws without them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.config import LoraConfig
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine, kv_cache
from saccade.engines.embedded.scheduler import Scheduler
from saccade.models import lora
from saccade.models.load import load_model
from tests.engines.asked import count_evictions, same, support_of
from tests.engines.decoders import asked, build


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    family, _ = build("qwen3_5_text", tmp_path_factory.mktemp("states"))
    return family, load_model(family, dtype=torch.float32, device=torch.device("cpu"))


def answers_of(model, family, questions, kernels, monkeypatch):
    monkeypatch.setattr(kv_cache, "use_kernels", lambda shape: kernels)
    engine = EmbeddedEngine(model, family)
    return engine, generate(engine, questions)


def agree(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        same(one, other)
        assert support_of(one) == support_of(other)


def next_turn(family, questions, answers):
    added = np.random.default_rng(1).choice(np.flatnonzero(~family.banned), 3)
    return [
        replace(q, ids=np.concatenate([q.ids, a.ids, added]), first_index=q.first_index + len(a.ids))
        for q, a in zip(questions, answers, strict=True)
    ]


@pytest.mark.parametrize("room", [99, 4])
def test_branches_and_turns_begin_with_states(made, paged, monkeypatch, room):
    """Also where few find room: what was taken away is computed again."""
    family, model = made
    questions = asked(family, lengths=(5, 16, 37), repeats=3, max_tokens=32)
    engine = EmbeddedEngine(model, family)
    monkeypatch.setattr(kv_cache, "use_kernels", lambda shape: False)
    monkeypatch.setattr(kv_cache, "POOL_STEP", 1)
    plain, cache, lost = EmbeddedEngine(model, family), engine.cache, count_evictions(engine)
    paged.budget = room * (cache.shape.state_bytes + 4 * cache.bytes_per_page)
    for _ in range(2):
        got = generate(engine, questions)
        agree(got, generate(plain, questions))
        questions = next_turn(family, questions, got)
    assert (cache.state_rows < len(questions)) == (sum(lost) > 0) == (room == 4)
    engine.scheduler.prefix_cache.drop_all()
    assert len(cache.states.free) == cache.state_rows and cache.pages.free == cache.pages.count


@pytest.mark.parametrize("kernels", [False, True])
def test_answers_that_were_interrupted_share_the_states_of_their_opening(made, paged, monkeypatch, kernels):
    family, model = made
    questions = asked(family, lengths=(16, 37), repeats=3, max_tokens=12)
    _, whole = answers_of(model, family, questions, kernels, monkeypatch)
    begun = [
        replace(
            q, ids=np.concatenate([q.ids, a.ids[:n]]), first_index=n, opening=len(q.ids),
            sampling=replace(q.sampling, max_tokens=12 - n))
        for n, q, a in zip((0, 3, 7) * 2, questions, whole, strict=True)
    ]  # fmt: skip
    engine, got = answers_of(model, family, begun, kernels, monkeypatch)
    for one, all_of_it in zip(got, whole, strict=True):
        assert one.ids.tolist() == all_of_it.ids[-len(one.ids) :].tolist()
    engine.scheduler.prefix_cache.drop_all()
    assert len(engine.cache.states.free) == engine.cache.state_rows


def test_a_turn_behind_a_stop_string_is_computed_again(made, paged, monkeypatch):
    """The device drew on behind it, so its state has read too much."""
    family, model = made
    questions = asked(family, repeats=1)
    _, free = answers_of(model, family, questions, True, monkeypatch)
    stop = family.chat.decode(free[0].ids[5:7], special=True)
    questions = [replace(q, sampling=replace(q.sampling, stop=(stop,))) for q in questions]
    engine, got = answers_of(model, family, questions, True, monkeypatch)
    plain, wanted = answers_of(model, family, questions, False, monkeypatch)
    agree(got, wanted)
    kept, all_of_them = (set(each.scheduler.prefix_cache.turns) for each in (engine, plain))
    assert got[0].finish == "stop" and all_of_them - kept == {questions[0].episode}
    questions = next_turn(family, questions, got)
    agree(generate(engine, questions), generate(plain, questions))


def test_a_state_that_read_a_token_for_which_there_was_no_room_is_computed_again(made, paged, monkeypatch):
    from saccade.plugins.gpu import graphs

    family, model = made
    again, evict = [], Scheduler._evict
    monkeypatch.setattr(Scheduler, "_evict", lambda self, sequence: again.append(evict(self, sequence)))
    questions = asked(family, top_p=0.9, support=True, max_tokens=6)
    _, wanted = answers_of(model, family, questions, False, monkeypatch)
    monkeypatch.setattr(graphs, "KEPT", 1)  # as many as one sequence needs, then
    _, got = answers_of(model, family, questions, True, monkeypatch)
    agree(got, wanted)
    assert again


def test_idle_rows_change_no_state_and_graphs_outlive_it(made, paged):
    family, model = made
    questions = asked(family)
    engine = EmbeddedEngine(model, family)
    first, states = generate(engine, questions), engine.cache.states
    before, addresses = {key: kept.clone() for key, kept in states.kept.items()}, dict(states.addresses)
    engine.graphs._rest()
    engine.graphs._step((8, False, 1))
    assert len(before) == 4 and all(torch.equal(kept, before[key]) for key, kept in states.kept.items())
    engine.sleep()
    assert engine.cache.states is states and not states.bytes
    engine.wake()
    agree(generate(engine, questions), first)
    for key, kept in states.kept.items():
        assert states.addresses[key] is addresses[key] and int(addresses[key]) == kept.data_ptr()


def test_adapters_on_recurrent_layers_are_followed(made, paged, monkeypatch):
    pytest.importorskip("peft")
    family, _ = made
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    lora.add(model, family, LoraConfig(rank=4), seed=0)
    for adapter in lora.adapters(model).values():
        adapter.data += 0.1 * torch.randn(adapter.shape, generator=torch.Generator().manual_seed(len(adapter)))
    questions = asked(family, repeats=1)
    engine, got = answers_of(model, family, questions, True, monkeypatch)
    _, wanted = answers_of(model, family, questions, False, monkeypatch)
    agree(got, wanted)
    assert len(engine.projections.adapters) == 2 * 5 + 4  # of what reads one input
