"""Endpoints on loopback: the real server over a tiny model, and one that follows a script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from email.message import Message
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from saccade.config import DataConfig
from saccade.engines.embedded import EmbeddedEngine
from saccade.models.families import Family
from saccade.plugins.serving.chat_endpoint import Served, chat_app
from saccade.plugins.serving.engine_hub import Hub
from saccade.plugins.serving.http_server import running
from saccade.types import Sampling

TOKEN = "sesame"


@dataclass(kw_only=True)
class Endpoint:
    url: str
    asked: list[Any] = field(default_factory=list)  # one entry for each request
    hub: Hub | None = None


@contextmanager
def serving(model: Any, family: Family, *, token: str = TOKEN) -> Iterator[Endpoint]:
    """`saccade chat --serve` in threads of this process."""
    hub = Hub(EmbeddedEngine(model, family))
    endpoint = Endpoint(url="", hub=hub)
    ask = hub.ask

    def counted(requests: Any, *, stream: bool = False) -> Any:
        endpoint.asked.append(requests)
        return ask(requests, stream=stream)

    hub.ask = counted  # type: ignore[method-assign]
    served = Served(family=family, model="tiny", sampling=Sampling(max_tokens=64), data=DataConfig(), logprobs=True)
    driver = threading.Thread(target=hub.run)
    driver.start()
    with running(chat_app(hub, served, token=token), "127.0.0.1", 0) as address:
        endpoint.url = f"{address}/v1"
        try:
            yield endpoint
        finally:
            hub.close()
            driver.join()


def call(address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Message, bytes]:
    """Status, headers and body of a reply. Headers are written with _ for -; empty ones are left out."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    head = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    head |= {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(HTTPConnection(address.split("/")[2], timeout=30)) as connection:
        connection.request(method, path, data, {k: v for k, v in head.items() if v})
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()


@dataclass(frozen=True, kw_only=True)
class Says:
    """The scripted server's reply to one request, `after` so many seconds."""

    status: int = 200
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    after: float = 0.0


def chat_answer(text: str, **more: Any) -> Says:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 7}
    return Says(body={"choices": [choice], "usage": usage} | more)


@contextmanager
def scripted(script: Sequence[Says] | Callable[[dict[str, Any]], Says], *, port: int = 0) -> Iterator[Endpoint]:
    """A server that answers requests in the order of the script, or by a function of the request's body."""
    endpoint, lines, lock = (Endpoint(url=""), iter(() if callable(script) else script), threading.Lock())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            seen = {"path": self.path, "headers": dict(self.headers), "body": body}
            with lock:
                endpoint.asked.append(seen | {"at": time.monotonic()})
                says = None if callable(script) else next(lines)
            says = says or script(body)  # type: ignore[operator]
            time.sleep(says.after)
            data = says.body if isinstance(says.body, bytes) else json.dumps(says.body).encode()
            self.send_response(says.status)
            for name, value in (*says.headers, ("Content-Length", str(len(data)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients give up
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.05))
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def shown_to_judge(body: dict[str, Any]) -> tuple[str, str]:
    """The reference and the answer in a request to a judge."""
    content = body["messages"][0]["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    return tuple(  # type: ignore[return-value]
        text.partition(f"<{tag}>\n")[2].partition(f"\n</{tag}>")[0] for tag in ("reference", "answer-to-grade")
    )


def fair_judge(body: dict[str, Any]) -> Says:
    reference, answer = (text.casefold() for text in shown_to_judge(body))
    return chat_answer("They agree.\nScore: 1" if reference == answer else "They differ.\nScore: 0")
