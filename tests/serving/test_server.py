"""The endpoint of `saccade chat --serve`, spoken to as any client would."""

import base64
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.serving import http_server
from saccade.types import Message, Request, Sampling
from tests.endpoints import TOKEN, serving
from tests.endpoints import call as raw

NAME = "qwen2_5_vl"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def family(family_of):
    return family_of(NAME)


@pytest.fixture(scope="module")
def model(load):
    return load(NAME)


@pytest.fixture(scope="module")
def endpoint(model, family):
    with serving(model, family) as served:
        yield served


def call(endpoint, path, body=None, **headers):
    method = "GET" if body is None else "POST"
    status, _, text = raw(endpoint.url, method, f"/v1{path}", body, **headers)
    return status, json.loads(text)


def chat(endpoint, **body):
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 8} | body
    status, reply = call(endpoint, "/chat/completions", body)
    assert status == 200, reply
    return reply


def events(endpoint, path="/chat/completions", *, ended=True, **body):
    body = {"temperature": 0, "max_tokens": 8, "stream": True} | body
    _, headers, text = raw(endpoint.url, "POST", f"/v1{path}", body)
    assert headers.get_content_type() == "text/event-stream"
    lines = text.decode().split("\n\n")
    assert lines.pop() == "" and (lines[-1] == "data: [DONE]") == ended
    return [json.loads(line.removeprefix("data: ")) for line in lines[: -1 if ended else None]]


def shown(content):
    return {"messages": [{"role": "user", "content": content}]}


def connected(endpoint):
    host, port = endpoint.url.split("/")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_models(endpoint):
    status, reply = call(endpoint, "/models")
    assert status == 200 and [m["id"] for m in reply["data"]] == ["tiny"]
    assert call(endpoint, "/models/%74iny/") == (200, *reply["data"])
    status, reply = call(endpoint, "/models/gpt-4o")
    assert status == 404 and reply["error"]["code"] == "model_not_found"
    assert reply["error"]["param"] == "model" and "'tiny' is" in reply["error"]["message"]


def test_an_answer_is_the_engines(endpoint, model, family, image):
    media = image(84, 56, 4)
    url = "data:image/png;base64," + base64.b64encode(media.data).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    reply = chat(endpoint, messages=[{"role": "user", "content": content}], logprobs=True)
    rendered = family.render([Message(role="user", parts=(media, "What?"))])
    sampling = Sampling(temperature=0, max_tokens=8)
    request = Request(key="a", ids=rendered.ids, media=rendered.media, sampling=sampling)
    (here,) = generate(EmbeddedEngine(model, family), [request])
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == family.decode(here.ids)
    assert choice["finish_reason"] == here.finish
    shown = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert shown == pytest.approx(here.logprobs.tolist(), abs=1e-5)
    assert reply["usage"] == {
        "prompt_tokens": len(rendered),
        "completion_tokens": len(here.ids),
        "total_tokens": len(rendered) + len(here.ids),
    }


def test_choices_differ_and_a_seed_repeats_them(endpoint):
    neutral = {"presence_penalty": 0, "user": "me", "response_format": {"type": "text"}, "tools": None}
    options = {"n": 3, "temperature": 1.0, "seed": 11, **neutral}
    first, second = ([c["message"]["content"] for c in chat(endpoint, **options)["choices"]] for _ in range(2))
    assert first == second and len(set(first)) == 3
    assert chat(endpoint, **options | {"seed": 12})["choices"][0]["message"]["content"] != first[0]


def test_a_stream_is_the_answer_in_pieces(endpoint):
    body = {"messages": HELLO, "n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 20}
    whole = chat(endpoint, **body)
    *pieces, last = events(endpoint, **body, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert [p["choices"][0]["delta"].get("role") for p in pieces[:2]] == ["assistant"] * 2
    for index, choice in enumerate(whole["choices"]):
        mine = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == index]
        text = "".join(piece["delta"].get("content", "") for piece in mine)
        assert text == choice["message"]["content"]
        assert len(mine) > 4 and mine[-1]["finish_reason"] == choice["finish_reason"]


def test_completions_and_their_stream(endpoint):
    body = {"prompt": "one two", "temperature": 0, "max_tokens": 8}
    status, reply = call(endpoint, "/completions", body | {"logprobs": 1})
    (choice,) = reply["choices"]
    assert status == 200 and len(choice["logprobs"]["tokens"]) == 8
    assert choice["logprobs"]["text_offset"][:2] == [0, 1]
    pieces = events(endpoint, "/completions", prompt=["one two"])
    assert "".join(p["choices"][0]["text"] for p in pieces) == choice["text"]


def test_a_stop_string_is_cut_off_and_named(endpoint):
    body = {"messages": HELLO, "temperature": 1.0, "seed": 3, "max_tokens": 40}
    text = chat(endpoint, **body)["choices"][0]["message"]["content"]
    end = next(text[i : i + 2] for i in range(4, len(text)) if "\ufffd" not in text[i : i + 2])
    cut = chat(endpoint, **body, stop=[end, "never"])["choices"][0]
    assert cut["message"]["content"] == text[: text.index(end)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", end)
    pieces = events(endpoint, **body, stop=end)
    shown = "".join(p["choices"][0]["delta"].get("content", "") for p in pieces)
    assert shown == text[: text.index(end)]


def test_clients_share_the_engine(endpoint, monkeypatch):
    """Those who ask at once get what each would get alone."""
    bodies = [shown(f"say {i}") | {"max_tokens": 32, "ignore_eos": True} for i in range(6)]
    alone = [chat(endpoint, **body)["choices"] for body in bodies]
    widest = []
    engine, poll = endpoint.hub.engine, endpoint.hub.engine.poll
    monkeypatch.setattr(engine, "poll", lambda: (widest.append(engine.pending), poll())[1])
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda body: chat(endpoint, **body)["choices"], bodies))
    assert max(widest) > 1 and together == alone


def test_a_client_that_leaves_frees_the_engine_and_is_no_news(endpoint, capfd, monkeypatch):
    engine, aborted = endpoint.hub.engine, []
    poll, abort = engine.poll, engine.abort
    monkeypatch.setattr(engine, "poll", lambda: (time.sleep(0.01), poll())[1])  # so that it is not done before
    monkeypatch.setattr(engine, "abort", lambda key: (aborted.append(key), abort(key))[1])
    body = json.dumps({"messages": HELLO, "stream": True, "ignore_eos": True, "n": 4}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    head += f"\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n\r\n"
    with connected(endpoint) as connection:
        connection.sendall(head.encode() + body)
        assert b"200" in connection.recv(100)
    with connected(endpoint) as connection:
        connection.sendall(head.encode() + body[:9])  # gone in the middle of a request
    for _ in range(400):
        chat(endpoint, max_tokens=1)  # still answers, and nobody is left in the end
        if not endpoint.hub.engine.pending and not endpoint.hub._clients:
            break
    assert aborted and not endpoint.hub._clients and capfd.readouterr().err == ""


BAD = {
    "messages": [{"messages": []}, shown("long " * 2000)],
    "messages[0].role": [{"messages": [{"role": "judge", "content": "x"}]}],
    "messages[0].content": [shown(3)],
    "messages[0].content[0]": [shown(["x"])],
    "messages[0].content[0].type": [shown([{"type": "video"}])],
    "messages[0].content[0].text": [shown("\ud800"), shown([{"type": "text"}])],
    "messages[0].content[0].image_url": [shown([{"type": "image_url"}])],
    "messages[0].content[0].image_url.url": [
        shown([{"type": "image_url", "image_url": url}])
        for url in (
            {"url": "https://example.org/a.png"}, {"url": "file:///etc/passwd"}, "/etc/passwd",
            {"url": "data:image/png;base64,AAAA"}, {"url": "data:image/png;base64,%%"}, {},
        )
    ],
    "temperature": [{"temperature": -1}, {"temperature": "hot"}, {"temperature": True}],
    "max_tokens": [{"max_tokens": 0}, {"max_tokens": 65}],
    "stop": [{"stop": 3}, {"stop": ["x"] * 17}],
    "stop[0]": [{"stop": [""]}],
    "logprobs": [{"logprobs": True, "stream": True}],
    "top_logprobs": [{"top_logprobs": 5}],
    "tools": [{"tools": [{}]}],
}  # fmt: skip


def test_a_bad_field_is_named(endpoint):
    for field, body in [(field, body) for field, bodies in BAD.items() for body in bodies]:
        status, reply = call(endpoint, "/chat/completions", {"messages": HELLO} | body)
        assert status == 400 and reply["error"]["param"] == field, (body, reply)
        assert reply["error"]["type"] == "invalid_request_error" and reply["error"]["message"]


def test_a_bad_image_costs_its_request_only(endpoint, image):
    for damaged, count, words in ((True, 1, "cannot be decoded"), (False, 65, "65 images, at most 64")):
        data = bytearray(image(140, 84, 2).data or b"")
        data[len(data) // 2] ^= 0xFF * damaged
        url = "data:image/png;base64," + base64.b64encode(bytes(data)).decode()
        status, reply = call(endpoint, "/chat/completions", shown([{"type": "image_url", "image_url": url}] * count))
        assert status == 400 and words in reply["error"]["message"]
    chat(endpoint)


class Picky:
    """An engine that refuses some requests when they come, others when they are served."""

    def __init__(self, engine):
        self.engine, self.errors = engine, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request):
        if "early" in request.messages[0].text:
            raise ConfigError(f"{request.key}: not this one")
        if "late" in request.messages[0].text:
            self.errors.append(EnvironmentProblem("no answer"))
            self.errors[-1].request = request.key
        else:
            self.engine.submit(request)

    @property
    def pending(self):
        return self.engine.pending + len(self.errors)

    def poll(self):
        if self.errors:
            raise self.errors.pop()
        return self.engine.poll()


def test_what_an_engine_refuses_costs_its_client_only(endpoint):
    engine, endpoint.hub.engine = endpoint.hub.engine, Picky(endpoint.hub.engine)  # type: ignore
    for text, status in (("early", 400), ("late", 502)):
        asked = shown(text)
        assert call(endpoint, "/chat/completions", asked | {"n": 2})[0] == status
        pieces = events(endpoint, ended=False, **asked)
        assert pieces[-1]["error"]["message"] and chat(endpoint)["choices"]
    endpoint.hub.engine = engine
    assert not endpoint.hub._clients and not engine.pending


def test_a_stranger_is_turned_away_before_the_body_is_read(endpoint):
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n"
    with connected(endpoint) as connection:
        connection.sendall(f"{head}Authorization: Bearer no\r\n\r\n".encode())
        assert b" 401 " in connection.recv(100)
    big = shown("x" * 8_000_000)  # more than sockets hold
    assert call(endpoint, "/chat/completions", big, Authorization="Bearer no")[0] == 401


def test_what_is_no_request(endpoint):
    for path, body, headers, status in (
        ("/chat/completions", b"{broken", {}, 400),
        ("/chat/completions", [1], {}, 400),
        ("/chat/completions", b"[" * 100_000, {}, 400),
        ("/chat/completions", {"messages": HELLO}, {"Content_Type": "text/plain"}, 415),
        ("/chat/completions", {"messages": HELLO}, {"Content_Length": str(1 << 40)}, 413),
        ("/chat/completions", {"messages": HELLO, "model": "gpt"}, {}, 404),
        ("/embeddings", {}, {}, 404),
        ("/completions", {"prompt": "<|image_pad|>"}, {}, 400),
        ("/completions", {"prompt": ["a", "b"]}, {}, 400),
        ("/models", None, {"Authorization": "Bearer no"}, 401),
    ):
        assert call(endpoint, path, body, **headers)[0] == status, (path, body)


def test_without_a_token_only_this_machine_is_served(model, family):
    with serving(model, family, token="") as open_to_all:
        assert call(open_to_all, "/models", None, Authorization="")[0] == 200
        assert call(open_to_all, "/models", None, Host="evil.example")[0] == 403
        assert call(open_to_all, "/models", None, Host="[::1]:8000")[0] == 200
        assert raw(open_to_all.url, "OPTIONS", "/v1/models", Host="evil.example")[0] == 403


def test_methods_besides_get_and_post(endpoint):
    status, headers, body = raw(endpoint.url, "HEAD", "/")
    assert status == 200 and body == b"" and int(headers["Content-Length"]) > 0
    status, headers, body = raw(endpoint.url, "OPTIONS", "/v1/models")
    assert status == 405 and "Method Not Allowed" in json.loads(body)["error"]["message"]
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_a_client_that_falls_silent_is_let_go(model, family, monkeypatch):
    monkeypatch.setattr(http_server, "IDLE_TIMEOUT", 0.2)
    begun = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n"
    begun += f"Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n\r\n"
    with serving(model, family) as endpoint:
        for sent in (b"", b"GET /v1/mod", begun.encode()):
            with connected(endpoint) as connection:
                connection.sendall(sent)
                while connection.recv(1000):
                    pass
        assert chat(endpoint)


def test_the_other_loopback_address():
    app = http_server.json_app(http_server.Gate(token=""), lambda problem: {"error": str(problem)})
    with http_server.running(app, "::1", 0) as url:
        assert url.startswith("http://[::1]:")
        assert raw(url, "GET", "/nothing")[0] == 404
        port = int(url.rpartition(":")[2])
        with pytest.raises(EnvironmentProblem, match=f"--port {port}: ::1 cannot be listened on"):
            http_server.running(app, "::1", port).__enter__()
    with pytest.raises(ConfigError, match=r"--no-token: 0\.0\.0\.0 can be reached from other machines"):
        http_server.make_token("0.0.0.0", wanted=False)


def test_the_page_needs_no_token_and_fetches_nothing_from_elsewhere(endpoint):
    _, headers, text = raw(endpoint.url, "GET", "/", Authorization="")
    page, policy = text.decode(), headers["Content-Security-Policy"]
    assert "<textarea" in page and "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in policy and TOKEN not in page
