"""SGLang's engine and server through our protocol: against what its sources say, not against it."""

import sys
import time
from contextlib import closing
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from saccade import config
from saccade.engines import Settings, generate
from saccade.engines.builders import build
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.engines.sglang import sglang_transport
from saccade.recipes.engines import require_capabilities
from saccade.types import Message, Request, Sample, Sampling
from tests.engines import asked
from tests.engines.sglang.protocol import Core, engine_class, serve

NAME = "qwen2_5_vl"


@pytest.fixture
def core(load, family):
    return Core(load(NAME), family)


@pytest.fixture
def over_http(core, family):
    with serve(core) as url, closing(build(settings(family, args={"url": url}), family, model=True)) as engine:
        assert len(core.bodies.pop()["image_data"]) == 2  # it was asked about two pictures
        yield engine


@pytest.fixture
def in_process(core, family, monkeypatch):
    module = ModuleType("sglang")
    module.Engine, module.__spec__ = engine_class(core), ModuleSpec("sglang", None)
    monkeypatch.setitem(sys.modules, "sglang", module)
    for name in sglang_transport.ENVIRONMENT:
        monkeypatch.setenv(name, sglang_transport.ENVIRONMENT[name])
    engine = build(settings(family), family, model=True)
    started = core.told[0][1]
    assert started["enable_deterministic_inference"] and started["mem_fraction_static"] == 0.6
    assert started["mm_process_config"]["image"]["size"]["longest_edge"] == 1_003_520
    core.bodies.clear()
    yield engine
    engine.close()


@pytest.fixture(params=["over_http", "in_process"])
def engine(request):
    return request.getfixturevalue(request.param)


def settings(family, **changes):
    return Settings(engine="sglang", folder=family.path, dtype="float32", **changes)


@pytest.fixture(scope="module")
def requests(family, image):
    """0, 1 and 2 pictures, one of them larger than it is seen."""
    small = replace(image(140, 84, 2), max_pixels=6000)
    shown = ((), (image(84, 56, 1),), (small, image(56, 56, 3)))
    prompts = [family.render([Message(role="user", parts=(*s, "What?"))]) for s in shown]
    return [
        Request(
            key=f"{n}",
            ids=prompt.ids,
            media=prompt.media,
            sampling=Sampling(temperature=0.7, max_tokens=6, ignore_eos=True),
            noise=n + 1,
        )
        for n, prompt in enumerate(prompts)
    ]


def test_completions_are_those_of_the_same_weights(engine, trained, family, requests):
    wanted = generate(EmbeddedEngine(trained.model, family), requests)
    for ours, theirs in zip(wanted, generate(engine, requests), strict=True):
        assert theirs.ids.tolist() == ours.ids.tolist() and theirs.finish == "length"
        assert np.abs(theirs.logprobs - ours.logprobs).max() < 1e-4
        assert theirs.versions.tolist() == [0] * 6
    assert engine.pending == 0 and engine.poll() == []


def test_a_request_in_its_words(engine, core, family, requests):
    generate(engine, requests[2:])
    (body,) = core.bodies
    assert body["input_ids"].count(family.chat.placeholder) == 2 < len(requests[2].ids)
    assert all(image.startswith("data:image/png;base64,") for image in body["image_data"])
    assert len({*body["mm_hashes"]}) == 2 and body["return_logprob"]
    params = body["sampling_params"]
    assert params["no_stop_trim"] and params["ignore_eos"] and params["stop_token_ids"] == []
    assert params["sampling_seed"] == 3 and params["temperature"] == 0.7
    assert {int(i) for i in params["logit_bias"]} == set(np.flatnonzero(family.banned).tolist())


def test_ends_of_turns_and_stop_strings_stay_in_the_answer(engine, core, family, requests):
    (first,) = generate(engine, requests[:1])
    text = family.decode(first.ids[1:2])
    stopping = replace(requests[0].sampling, stop=(text,), ignore_eos=False)
    (stopped,) = generate(engine, [replace(requests[0], sampling=stopping)])
    assert stopped.finish == "stop" and text in family.decode(stopped.ids[-1:])
    eos = sorted(family.chat.eos_ids)
    assert core.bodies[-1]["sampling_params"]["stop_token_ids"] == eos


def test_the_probe_passes_and_nothing_stale_is_seen(engine, trained, image):
    found = probe(engine, trained, image)
    assert found.gap < 1e-5 and found.restored < 1e-5 and found.by_weight > 0.01


def probe(engine, trained, image):
    sample = Sample(id="a", messages=(Message(role="user", parts=(image(84, 56, 1), "What?")),))
    return asked.probe(engine, trained, [sample], sampling=Sampling(max_tokens=8))


def test_names_that_drift_are_refused_and_nothing_is_sampled_after(engine, trained, requests):
    odd = "model.visual.blocks.1.mlp.down_proj.weight"
    drifted = [(name + "_" * (name == odd), weight) for name, weight in trained.weights()]
    with pytest.raises(EnvironmentProblem, match=r"missing: visual\..*; not expected: visual\..*down_proj\.weight_ "):
        engine.update_weights(SimpleNamespace(weights=lambda: drifted), version=1)
    short = list(trained.weights())[:-1]
    with pytest.raises(EnvironmentProblem, match=r"missing: .*; not expected: none"):
        engine.update_weights(SimpleNamespace(weights=lambda: short), version=1)
    with pytest.raises(EnvironmentProblem, match="nothing more is sampled"):
        engine.submit(requests[0])
    engine.update_weights(trained, version=2)
    assert generate(engine, requests[:1])[0].versions.tolist() == [2] * 6


def test_sleep_and_wake_in_the_order_weights_hand_over_cache(engine, core, trained, requests):
    engine.sleeps = True  # in process, torch_memory_saver says so
    engine.update_weights(trained, version=1)
    core.told.clear()
    engine.sleep()
    generate(engine, requests[:1])
    kinds = [(what, told if what != "load" else None) for what, told in core.told]
    assert kinds == [
        ("release", ["kv_cache", "weights"]), ("resume", ["weights"]), ("load", None), ("flush", None),
        ("resume", ["kv_cache"]),
    ]  # fmt: skip


def test_a_request_that_is_aborted_while_it_waits(over_http, core, requests):
    core.waits = {}
    over_http.submit(requests[0])
    while not core.waits:
        time.sleep(0.01)
    over_http.abort("0")
    (done,) = over_http.poll()
    assert done.finish == "aborted" and len(done.ids) == 0 and over_http.pending == 0
    over_http.abort("0")  # of nobody: nothing happens
    assert [what for what, _ in core.told] == ["abort"]


def test_a_request_that_had_ended_before_it_was_aborted(over_http, core, requests):
    """Nothing may be asked behind its end."""
    over_http.submit(requests[0])
    over_http.abort("0")  # the server hears it and has it done nevertheless
    (done,) = over_http.poll()
    assert (done.finish, len(done.ids)) == ("length", requests[0].sampling.max_tokens)


def test_a_request_that_the_server_gave_up(over_http, core, requests):
    core.waits = {}
    over_http.submit(requests[0])
    while not core.waits:
        time.sleep(0.01)
    core.abort("")
    with pytest.raises(EnvironmentProblem, match="gave up request 0: Abort in waiting queue"):
        over_http.poll()


def test_pictures_that_are_expanded_differently(engine, core, requests):
    core.extra_tokens = 3
    with pytest.raises(EnvironmentProblem, match="expands images or text differently"):
        generate(engine, requests[1:2])


def test_what_the_server_says_of_an_error_is_passed_on(over_http, family, requests):
    bad = replace(requests[0], ids=np.append(requests[0].ids, family.chat.placeholder))
    with pytest.raises(EnvironmentProblem, match=r"\(400\): .*1 image placeholder"):
        generate(over_http, [bad])


def test_a_key_is_read_from_the_environment_and_no_proxy_sees_it(core, family, requests, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not asked for this machine
    with serve(core, key="secret") as url:
        args = {"url": url, "key": "MY_KEY"}
        with pytest.raises(EnvironmentProblem, match=r"\(401\): .*Unauthorized"):
            build(settings(family, args=args), family)
        monkeypatch.setenv("MY_KEY", "secret")
        assert len(generate(build(settings(family, args=args), family), requests[:1])) == 1


def test_nobody_there(family):
    with pytest.raises(EnvironmentProblem, match="no answer from"):
        build(settings(family, args={"url": "http://127.0.0.1:9"}), family)


def test_what_cannot_be_served_is_refused(engine, requests):
    first = replace(requests[0], sampling=Sampling(first=(2.0, 5)))
    with pytest.raises(ConfigError, match="draws every token alike"):
        engine.submit(first)
    with pytest.raises(ConfigError, match=r"raise data\.max_prompt_tokens"):
        engine.submit(replace(requests[0], sampling=Sampling(max_tokens=40_000)))
    assert engine.pending == 0 and not engine.capabilities().support
    options = {"engine": "sglang", "ahead": 1, "replicas": 1, "at_update": "keep_keys"}
    chosen = config.load({f"rollout.{name}": value for name, value in options.items()})
    with pytest.raises(
        ConfigError, match=r"at_update=keep_keys: sglang computes them again; use rollout\.at_update=interrupt"
    ):
        require_capabilities(chosen.rollout, engine)


def test_absent_or_too_old(family, monkeypatch):
    monkeypatch.setattr(sglang_transport, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="sglang is not installed; run: pip install"):
        build(settings(family), family)

    class Old:
        async def async_generate(self, input_ids=None, rid=None): ...

    module = ModuleType("sglang")
    module.Engine = Old
    monkeypatch.setitem(sys.modules, "sglang", module)
    monkeypatch.setattr(sglang_transport, "find_spec", lambda name: name)
    assert sglang_transport.problem().startswith("sglang has no image_data, mm_hashes")
