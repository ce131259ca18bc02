"""The HTTP engine over `saccade chat --serve` with a tiny model: it answers as the engine there."""

import threading
from concurrent.futures import wait

import numpy as np
import pytest

from saccade.config.schema import HttpConfig
from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError
from saccade.plugins.engines.http import HttpEngine
from saccade.plugins.engines.http_family import endpoint_family
from saccade.plugins.judges.http_client.chat_client import ChatClient
from saccade.types import Message, Request, Sampling
from tests.endpoints import TOKEN, Says, chat_answer, scripted, serving
from tests.engines.asked import drain

GREEDY = Sampling(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def endpoint(model, family):
    with serving(model, family) as served:
        yield served


@pytest.fixture
def connect(monkeypatch):
    monkeypatch.setenv("SACCADE_TEST_KEY", TOKEN)
    engines = []

    def connected(endpoint, **options):
        http = HttpConfig(url=endpoint.url, key="SACCADE_TEST_KEY", retries=0, **options)
        engines.append(HttpEngine(ChatClient(http), endpoint_family(endpoint.url)))
        return engines[-1]

    yield connected
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def talks(image):
    shown = [image(56, 56, 1), image(140, 84, 2), image(84, 56, 3)]
    return [(Message(role="user", parts=(*shown[:n], f"What are these {n}?")),) for n in range(4)]


def asked(messages, sampling, key, noise=0):
    return Request(key=key, ids=np.zeros(0, np.int64), messages=messages, sampling=sampling, noise=noise)


def texts(engine, completions):
    return [engine._texts.decode(completion.ids) for completion in completions]


def test_greedy_answers_are_those_of_the_embedded_engine(endpoint, connect, talks, model, family):
    engine = connect(endpoint, concurrency=4)
    there = generate(engine, [asked(t, GREEDY, str(i)) for i, t in enumerate(talks)])
    rendered = [family.render(talk) for talk in talks]
    requests = [Request(key=str(i), ids=r.ids, media=r.media, sampling=GREEDY) for i, r in enumerate(rendered)]
    here = generate(EmbeddedEngine(model, family), requests)
    assert texts(engine, there) == [family.decode(c.ids) for c in here]
    assert [(len(c.ids), c.finish) for c in there] == [(len(c.ids), c.finish) for c in here]
    assert all(np.isnan(c.logprobs).all() for c in there)
    counters = engine.client.counters
    assert counters["response_tokens"] == sum(len(c.ids) for c in here)
    assert counters["prompt_tokens"] == sum(len(r) for r in rendered)
    assert engine.client.model == "tiny" and counters["sent"] == 5  # the list of models, four answers


def test_a_stop_string_stays_in_the_response(endpoint, connect, talks):
    engine = connect(endpoint)
    hot = Sampling(temperature=1.0, max_tokens=40)
    (whole,) = texts(engine, generate(engine, [asked(talks[2], hot, "a")]))
    letter = next(c for c in whole if c.isascii())
    stopping = Sampling(temperature=1.0, max_tokens=40, stop=(letter,))
    (done,) = generate(engine, [asked(talks[2], stopping, "b")])
    assert texts(engine, [done]) == [whole[: whole.index(letter) + 1]] and done.finish == "stop"


def test_completions(endpoint, connect, talks, model, family):
    engine = connect(endpoint, api="completions")
    (done,) = generate(engine, [asked(talks[0], GREEDY, "a")])
    ids = family.chat.tokenizer.encode("user: What are these 0?\nassistant:")
    (here,) = generate(EmbeddedEngine(model, family), [Request(key="a", ids=np.array(ids), sampling=GREEDY)])
    assert texts(engine, [done]) == [family.decode(here.ids)]


def test_as_many_requests_are_under_way_as_allowed():
    together = threading.Barrier(8)  # no answer before eight have asked

    def script(body):
        together.wait(timeout=30)
        return chat_answer("x")

    with scripted(script) as endpoint:
        http = HttpConfig(url=endpoint.url, model="m", concurrency=8)
        engine = HttpEngine(ChatClient(http), endpoint_family(endpoint.url))
        talk = (Message(role="user", parts=("x",)),)
        done = generate(engine, [asked(talk, GREEDY, str(i), noise=i) for i in range(16)])
        engine.close()
    assert [completion.key for completion in done] == [str(i) for i in range(16)]


def test_what_was_aborted_comes_back_empty_and_once(endpoint, connect, talks):
    engine = connect(endpoint, concurrency=1)
    for i in range(4):
        engine.submit(asked(talks[0], GREEDY, str(i)))
    for key in ("0", "2", "2"):
        engine.abort(key)
    done = drain(engine)
    ends = {c.key: (c.finish, len(c.ids)) for c in done}
    assert len(done) == 4 and ends["0"] == ends["2"] == ("aborted", 0)
    assert ends["1"] == ends["3"] and ends["1"][1] > 0


def test_a_refusal_costs_its_request_only(connect, talks):
    """What was answered beside it, and what is asked after it, comes back."""
    refused = Says(status=400, body={"error": {"message": "no"}}, after=0.2)

    def script(body):
        return refused if body["messages"][0]["content"] == "bad" else chat_answer("fine")

    with scripted(script) as endpoint:
        engine = connect(endpoint, model="m", concurrency=2)
        for text in ("good", "bad"):
            talk = (Message(role="user", parts=(text,)),)
            engine.submit(asked(talk, GREEDY, text))
        wait(engine._open.values())
        with pytest.raises(ConfigError, match=r"bad: .*status 400") as caught:
            engine.poll()
        assert caught.value.request == "bad" and engine.pending == 1
        engine.submit(asked(talks[0], GREEDY, "next"))
        done = drain(engine)
    assert [c.key for c in done] == ["good", "next"] and texts(engine, done) == ["fine"] * 2


def test_an_endpoint_takes_no_weights_and_gives_no_log_probs(endpoint, connect):
    engine = connect(endpoint)
    assert not engine.capabilities().logprobs
    with pytest.raises(ConfigError, match=r"rollout\.engine=embedded"):
        engine.update_weights(None, 1)
