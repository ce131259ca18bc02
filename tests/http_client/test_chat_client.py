"""The client against a server that misbehaves on purpose; requests, replies and images of both kinds of endpoints."""

import base64
import io
import json
import socket
import threading
import time
from dataclasses import replace
from email.utils import formatdate
from typing import Any

import numpy as np
import pytest
from jinja2 import Template
from PIL import Image

from saccade.config.schema import HttpConfig
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.media.images import ImageError, crop, decode, open_media
from saccade.models.chat import PLAIN_TEMPLATE
from saccade.plugins.engines.http_family import endpoint_family
from saccade.plugins.judges.http_client import sender as http_client
from saccade.plugins.judges.http_client.chat_client import APIS, ChatClient, encode, read_answer, settings
from saccade.types import Media, Message, Sampling
from tests.endpoints import Endpoint, Says, chat_answer, scripted

QUESTION = (Message(role="user", parts=("How many?",)),)
GREEDY = Sampling(temperature=0, max_tokens=16)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)


def client(endpoint: Endpoint, **options: Any) -> ChatClient:
    return ChatClient(HttpConfig(url=endpoint.url, model="m", **options))


def test_an_answer_with_its_usage():
    with scripted([chat_answer("four")]) as endpoint:
        http = HttpConfig(url=endpoint.url, model="m", price=(2.0, 10.0))
        asking = ChatClient(http, fields={"max_tokens": None, "max_completion_tokens": 5})
        answer = asking.ask(QUESTION, Sampling(temperature=0.5, top_p=0.9, stop=("x",)), 7)
    assert (answer.text, answer.finish) == ("four", "stop")
    assert (answer.usage["prompt"], answer.usage["response"]) == (100, 7)
    assert endpoint.asked[0]["path"] == "/v1/chat/completions"
    assert endpoint.asked[0]["body"] == {
        "model": "m",
        "messages": [{"role": "user", "content": "How many?"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 5,  # fields of one's own; null removes one
        "seed": 7,
        "stop": ["x"],
    }
    assert asking.expenses() == (
        "1 requests sent (0 of them again), 0 answers from the cache; 100 prompt and 7 response tokens, cost 0.0003"
    )


@pytest.mark.parametrize("trouble", [
    [Says(status=500, body="oh"), Says(body=b"{broken")],
    [Says(status=429, headers=(("Retry-After", "soon"),)), Says(body={"choices": []})],
    [Says(body={}, after=20.0), Says(status=503)],
], ids=["5xx", "429", "hang"])  # fmt: skip
def test_what_may_pass_is_tried_again(trouble):
    with scripted([*trouble, chat_answer("four")]) as endpoint:
        asking = client(endpoint, timeout=1.0)
        assert asking.ask(QUESTION, GREEDY, 0).text == "four"
    assert (asking.counters["sent"], asking.counters["repeated"]) == (3, 2)
    assert len({json.dumps(asked["body"]) for asked in endpoint.asked}) == 1


def test_retry_after_holds_everybody_back():
    script = [Says(status=429, headers=(("Retry-After", "0.4"),)), *[chat_answer("four")] * 2]
    with scripted(script) as endpoint:
        asking = client(endpoint)
        asking.ask(QUESTION, GREEDY, 0)
        asking.ask(QUESTION, GREEDY, 1)
        first, second, third = (asked["at"] for asked in endpoint.asked)
    assert second - first >= 0.4 and third >= second
    a_date = http_client.seconds_of(formatdate(time.time() + 60, usegmt=True))
    assert 50 < a_date <= 60 and http_client.seconds_of("soon") == 0


def test_it_gives_up_after_all_retries_with_the_last_words():
    with scripted([Says(status=500, body="out of cheese")] * 3) as endpoint:
        asking = client(endpoint, retries=2)
        with pytest.raises(EnvironmentProblem, match=r"3 attempts.*status 500.*out of cheese"):
            asking.ask(QUESTION, GREEDY, 0)
    with pytest.raises(EnvironmentProblem, match="Connection refused"):  # it is gone now
        client(endpoint, retries=0).ask(QUESTION, GREEDY, 0)


def test_a_deadline_ends_attempts_and_pauses():
    for trouble in (Says(body={}, after=30), Says(status=429, headers=(("Retry-After", "30"),))):
        with scripted([trouble] * 9) as endpoint:
            asking = client(endpoint)
            with pytest.raises(EnvironmentProblem, match="no answer in time"):
                asking.ask(QUESTION, GREEDY, 0, until=time.monotonic() + 0.5)


def test_an_answer_that_trickles_is_given_up():
    """Every byte would start the timeout of a socket anew."""
    done = threading.Event()

    def trickle(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not done.wait(0.05):
            connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: trickle(server.accept()[0]), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        asking = ChatClient(HttpConfig(url=url, model="m", retries=0, timeout=0.5))
        with pytest.raises(EnvironmentProblem, match="took too long"):
            asking.ask(QUESTION, GREEDY, 0)
        done.set()


@pytest.mark.parametrize(("field", "option"), [("max_tokens", "rollout.max_tokens"), ("top_p", "rollout.http.url")])
def test_a_refusal_is_not_repeated_and_names_field_and_option(field, option):
    error = {"error": {"message": "must be below 2", "param": field}}
    with scripted([Says(status=400, body=error)]) as endpoint:
        asking = client(endpoint)
        with pytest.raises(ConfigError, match=f"^{option}: .*status 400 about '{field}': must be"):
            asking.ask(QUESTION, GREEDY, 0)
    assert asking.counters["sent"] == 1


def test_a_redirect_is_not_followed():
    elsewhere = Says(status=302, body="gone", headers=(("Location", "http://127.0.0.1:9/"),))
    with scripted([elsewhere]) as endpoint, pytest.raises(ConfigError, match="status 302"):
        client(endpoint).ask(QUESTION, GREEDY, 0)


def test_the_key_is_sent_and_told_to_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret-123")
    wrong = Says(status=401, body={"error": {"message": "Incorrect API key: sk-secret-123"}})
    with scripted([chat_answer("four"), wrong]) as endpoint:
        asking = client(endpoint, key="MY_KEY", cache=str(tmp_path))
        asking.ask(QUESTION, GREEDY, 0)
        with pytest.raises(ConfigError) as refused:
            asking.ask(QUESTION, GREEDY, 1)
    assert endpoint.asked[0]["headers"]["Authorization"] == "Bearer sk-secret-123"
    assert str(refused.value).startswith("rollout.http.key") and "***" in str(refused.value)
    stored = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert "secret" not in str(refused.value) + stored + repr(asking.http)
    with pytest.raises(ConfigError, match=r"rollout\.http\.key: no environment") as refused:
        client(endpoint, key="ABC123")  # perhaps the key itself
    assert "ABC123" not in str(refused.value)


def test_the_pace_is_kept():
    with scripted([chat_answer("x")] * 4) as endpoint:
        asking = client(endpoint, per_minute=600)
        began = time.monotonic()
        for seed in range(4):
            asking.ask(QUESTION, GREEDY, seed)
        assert time.monotonic() - began >= 0.3  # however long each request is on its way


@pytest.fixture
def counting():
    numbers = iter(range(1000))
    with scripted(lambda body: chat_answer(f"answer {next(numbers)}")) as endpoint:
        yield endpoint


def test_nothing_is_asked_twice_and_what_an_answer_depends_on_is_in_the_key(counting, tmp_path, image):
    shown = [(Message(role="user", parts=(image(56, 56, s), "How many?")),) for s in (1, 2)]
    variants: list[tuple[str, Any, Sampling, int]] = [
        ("m", QUESTION, GREEDY, 0),
        ("m", QUESTION, GREEDY, 1),
        ("m", QUESTION, Sampling(temperature=1, max_tokens=16), 0),
        ("m", shown[0], GREEDY, 0),
        ("m", shown[1], GREEDY, 0),
        ("other", QUESTION, GREEDY, 0),
    ]
    answers = []
    for model, messages, sampling, seed in variants * 2:
        http = HttpConfig(url=counting.url, model=model, cache=str(tmp_path))
        answers.append(ChatClient(http).ask(messages, sampling, seed))
    assert len(counting.asked) == len(variants) and answers[: len(variants)] == answers[len(variants) :]


def test_a_damaged_file_is_written_again(counting, tmp_path):
    asking = client(counting, cache=str(tmp_path))
    asking.ask(QUESTION, GREEDY, 0)
    (file,) = tmp_path.rglob("*.json")
    for damage in (b"", b'{"answer": {"te', b'{"answer": {"text": "x"}}', b"\xff\xfe"):
        file.write_bytes(damage)
        asking.ask(QUESTION, GREEDY, 0)
        asking.ask(QUESTION, GREEDY, 0)
    assert len(counting.asked) == 5 and asking.counters["cached"] == 4
    assert [path.suffix for path in tmp_path.rglob("*.*")] == [".json"]


def test_an_answer_without_usage_is_estimated_and_said():
    with scripted([chat_answer("x" * 10, usage=None)]) as endpoint:
        asking = client(endpoint)
        assert asking.ask(QUESTION, GREEDY, 0).usage["response"] == 3
    assert asking.expenses().endswith("of 1 answers: estimated")


def test_pauses_grow_from_one_second_to_thirty(monkeypatch):
    monkeypatch.undo()
    asking, waits = http_client.Sender(http_client.Target(urls=["http://a"], section="a")), []
    monkeypatch.setattr(asking, "_wait", lambda url, seconds, until: waits.append(seconds))
    for attempt in range(12):
        asking._pause("http://a", attempt, 0.0, 0.0)
    assert 1 <= waits[0] < 2 and waits == sorted(waits) and waits[-1] == 30


SAMPLING = Sampling(temperature=0.5, max_tokens=9, stop=("END",), top_k=5)


def talk(media: Media) -> tuple[Message, ...]:
    return (Message(role="system", parts=("Be brief.",)), Message(role="user", parts=(media, "How many?")))


def test_images_travel_as_data_urls(image):
    body = APIS["chat"][1](talk(image()), encode) | settings(SAMPLING, 3)
    part = body["messages"][1]["content"][0]
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert open_media(base64.b64decode(data)).hash == image().hash  # byte by byte
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["top_k"] == 5 and body["stop"] == ["END"] and body["seed"] == 3


def test_completions_ask_as_a_folder_without_a_template(image):
    messages = (*talk(image())[:1], Message(role="user", parts=("How many?",)))
    body = APIS["completions"][1](messages, encode)
    plain = [{"role": m.role, "content": m.text} for m in messages]
    template = Template(PLAIN_TEMPLATE)
    assert body["prompt"] == template.render(messages=plain, add_generation_prompt=True)
    for section in ("rollout.http", "reward.judge"):
        asking = ChatClient(HttpConfig(url="http://127.0.0.1:1/v1", model="m", api="completions"), section=section)
        with pytest.raises(ConfigError, match=rf"^{section}.api: .*; try {section}.api=chat"):
            asking.ask(talk(image()), SAMPLING, 3)


def test_a_stop_string_is_put_back_where_the_endpoint_names_it():
    choice = {"message": {"content": "4 "}, "finish_reason": "stop", "stop_reason": "END"}
    assert read_answer({"choices": [choice]}, SAMPLING).text == "4 END"
    choice["stop_reason"] = 151645  # an end-of-turn id
    assert read_answer({"choices": [choice]}, SAMPLING).text == "4 "
    choice = {"message": {"content": None}, "finish_reason": "length"}
    answer = read_answer({"choices": [choice]}, SAMPLING)
    assert (answer.text, answer.finish) == ("", "length")


def test_a_response_counts_the_tokens_that_were_used(image):
    family = endpoint_family("http://127.0.0.1:9/v1")
    rendered = family.render(talk(image()))
    assert len(rendered) == 1 and len(rendered.media) == 1  # one place for the image, no more
    texts = family.chat.tokenizer
    one, other = texts.record("four apples", tokens=3), texts.record("", tokens=0)
    assert len(one) == 3 and family.decode(one) == "four apples"
    assert len(other) == 1 and family.decode(np.concatenate([other, one])) == "four apples"


def test_what_is_no_image_is_refused_by_name(image):
    with pytest.raises(ImageError, match="sent images, and no audio"):
        encode(replace(image(56, 56), kind="audio"))


def pixels(media: Media) -> np.ndarray:
    data = base64.b64decode(encode(media)[1])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_what_is_large_a_crop_or_turned_is_written_anew(image, tmp_path):
    assert pixels(replace(image(200, 100), max_pixels=5000)).shape == (50, 100, 3)
    part = crop(image(100, 80), (10, 20, 60, 70))
    assert np.array_equal(pixels(part), decode(part))
    turned = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "a.jpg", exif=exif)
    media = open_media(tmp_path / "a.jpg")
    assert np.array_equal(pixels(media), decode(media)) and media.height == 60


def test_each_image_is_encoded_once(image):
    encode.cache_clear()
    for _ in range(3):
        assert encode(image(56, 56, 1)) != encode(image(56, 56, 2))
    assert encode.cache_info().misses == 2
