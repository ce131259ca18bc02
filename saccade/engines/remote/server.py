"""An engine in a process of its own, behind HTTP on loopback. A client starts it:

    $ python -m saccade.engines.remote.server

The first line of standard input holds settings and token; the first line of standard output holds
the port, or why there is none. Standard input stays open: when it closes, the client is gone and
this process ends. One thread, the main one, drives the engine; those of HTTP only queue. Whatever
is printed goes to standard error.
"""

from __future__ import annotations

import ctypes
import hmac
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from saccade.engines import Engine
from saccade.engines.builders import build
from saccade.engines.remote import wire
from saccade.engines.settings import Settings
from saccade.errors import EnvironmentProblem, SaccadeError
from saccade.models.families import Family, load_family
from saccade.types import Completion, Request

LARGEST_BODY = 256 << 20
KEPT_FILES = 1 << 30  # bytes of images
PARENT_EVERY = 1.0  # seconds between two looks at who the parent is
LONGEST_WAIT = 30.0  # seconds that a client may wait for completions
DEATH_SIGNAL = 1  # of prctl


class BadRequest(ValueError):
    """Bytes that mean nothing here."""


class Worker:
    """The engine and its queue."""

    def __init__(self, engine: Engine, family: Family) -> None:
        self.engine, self.family = engine, family
        self.files: OrderedDict[str, bytes] = OrderedDict()  # oldest first
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._done: list[Completion] = []
        self._keys: set[str] = set()  # asked for and not collected yet
        self._error: SaccadeError | None = None
        self._working_since: float | None = None
        self._unsure = False  # the weights may be half those of one version
        self._ended = False

    # -- for the thread of the engine --

    def run(self) -> None:
        while not self._ended:
            idle = self._unsure or self._error is not None or not self.engine.pending
            for work in self._ordered(wait=idle):
                self._do(work)
            if self.engine.pending and not self._unsure and self._error is None:
                self._do(self._advance)

    def _ordered(self, *, wait: bool) -> list[Callable[[], None]]:
        orders = [self._inbox.get()] if wait else []
        while not self._inbox.empty():
            orders.append(self._inbox.get())
        return orders

    def _do(self, work: Callable[[], None]) -> None:
        """What a user can mend is told to the client; anything else ends the process."""
        self._working_since = time.monotonic()
        try:
            work()
        except SaccadeError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        self._working_since = None

    def _advance(self) -> None:
        done = self.engine.poll()
        if done:
            with self._changed:
                self._done += done
                self._changed.notify_all()

    # -- for the threads of HTTP --

    def submit(self, requests: list[Request]) -> None:
        keys = {request.key for request in requests}
        with self._changed:
            if self._unsure:
                raise EnvironmentProblem("the last update of weights failed: there are none to use")
            if len(keys) < len(requests) or keys & self._keys:
                raise BadRequest("a key that is in work already")
            self._keys |= keys
        for request in requests:
            self._inbox.put(lambda request=request: self.engine.submit(request))  # type: ignore[misc]

    def collect(self, wait: float) -> list[Completion]:
        """What has finished since the last call; waits for the first of them."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._error, timeout=wait)
            if self._error is not None:
                raise self._error
            done, self._done = self._done, []
            self._keys -= {completion.key for completion in done}
        return done

    def queue(self, work: Callable[[], None]) -> None:
        self._inbox.put(work)

    def call(self, function: Callable[[], Any]) -> Any:
        """Have the engine's thread do it; its result or its error comes back here."""
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, SaccadeError):
                    raise

        self._inbox.put(work)
        return future.result()

    def update_weights(self, paths: list[str], checksums: Mapping[str, int], version: int) -> None:
        from saccade.engines.weights import Mapped, load_by_name, require_checksums

        engine, source = self.engine, Mapped(paths)
        self._unsure = True
        require_checksums(source.weights(), checksums)
        if engine.capabilities().shares_weights:  # with a model that nobody else writes to
            load_by_name(engine.model, source)  # type: ignore[attr-defined]
            require_checksums(engine.model.named_parameters(), checksums)  # type: ignore[attr-defined]
        engine.update_weights(source, version)
        self._unsure = False

    def forget_files(self) -> None:
        """Between two submissions only: those of the next one are all kept until it comes."""
        while sum(map(len, self.files.values())) > KEPT_FILES:
            self.files.popitem(last=False)

    def health(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        gpu = torch is not None and torch.cuda.is_initialized()
        since = self._working_since
        return {
            "version": self.engine.version,
            "pending": len(self._keys),
            "busy_s": 0.0 if since is None else time.monotonic() - since,
            "host_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "gpu_gb": torch.cuda.memory_reserved() / 2**30 if gpu else 0.0,  # type: ignore[union-attr]
        }

    def end(self) -> None:
        self._ended = True


# -- HTTP ------------------------------------------------------------------------------------------


def _read(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except wire.MissingFiles:
        raise
    except Exception as error:  # foreign bytes may be wrong in any way
        raise BadRequest(f"{type(error).__name__}: {error}") from error


def _json(body: bytes, kind: type) -> Any:
    value = _read(lambda: json.loads(body))
    if not isinstance(value, kind):
        raise BadRequest(f"a JSON {kind.__name__} is expected")
    return value


def _submit(worker: Worker, body: bytes) -> None:
    vocabulary = worker.family.vocabulary
    worker.submit(
        _read(lambda: wire.decode_requests(body, files=worker.files, vocabulary=vocabulary))
    )
    worker.forget_files()


def _collect(worker: Worker, body: bytes) -> bytes:
    wait = _read(lambda: min(float(json.loads(body)["wait"]), LONGEST_WAIT))
    done = worker.collect(wait)
    return wire.encode_completions(done, worker.health())


def _abort(worker: Worker, body: bytes) -> None:
    for key in map(str, _json(body, list)):
        worker.queue(lambda key=key: worker.engine.abort(key))  # type: ignore[misc]


def _release(worker: Worker, body: bytes) -> None:
    for name in map(str, _json(body, list)):
        worker.queue(lambda name=name: worker.engine.release(name))  # type: ignore[misc]


def _weights(worker: Worker, body: bytes) -> None:
    order = _json(body, dict)
    paths, checksums, version = _read(
        lambda: (list(map(str, order["paths"])), dict(order["checksums"]), int(order["version"]))
    )
    worker.call(lambda: worker.update_weights(paths, checksums, version))


ROUTES: Mapping[str, Callable[[Worker, bytes], Any]] = {
    "submit": _submit,
    "collect": _collect,
    "abort": _abort,
    "release": _release,
    "weights": _weights,
    "sleep": lambda worker, body: worker.call(worker.engine.sleep),
    "wake": lambda worker, body: worker.call(worker.engine.wake),
    "health": lambda worker, body: worker.health(),
    "capabilities": lambda worker, body: asdict(worker.call(worker.engine.capabilities)),
    "shutdown": lambda worker, body: worker.queue(worker.end),
}


def answer(worker: Worker, path: str, body: bytes) -> tuple[int, Any]:
    """Status and body; anything but bytes is sent as JSON."""
    name, _, rest = path.strip("/").partition("/")
    try:
        if name == "media" and rest:
            worker.files[unquote(rest)] = body
            return 200, None
        if name not in ROUTES or rest:
            return 404, {"message": f"there is no {path}; there are {', '.join(ROUTES)}"}
        return 200, ROUTES[name](worker, body)
    except wire.MissingFiles as missing:
        return 409, {"files": missing.args}
    except BadRequest as error:
        return 400, {"message": str(error)}
    except SaccadeError as error:
        return 422, told(error)


def told(error: SaccadeError) -> dict[str, str]:
    known = (kind for kind in type(error).__mro__ if kind.__module__ == SaccadeError.__module__)
    return {"kind": next(known).__name__, "message": str(error)}


def handler(worker: Worker, token: str) -> type[BaseHTTPRequestHandler]:
    wanted = f"Bearer {token}".encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "0")
            if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), wanted):
                self._reply(401, {"message": "a wrong token"}, close=True)
            elif not length.isdecimal() or int(length) > LARGEST_BODY:
                message = f"a body of at most {LARGEST_BODY} bytes is expected"
                self._reply(400, {"message": message}, close=True)
            else:
                self._reply(*answer(worker, self.path, self.rfile.read(int(length))))

        do_GET = do_POST

        def _reply(self, status: int, content: Any, *, close: bool = False) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.close_connection |= close  # what was sent is not read
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


# -- the process -----------------------------------------------------------------------------------


def main() -> None:
    orders, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    order = json.loads(orders.readline())
    end_with(order["parent"], orders)

    def say(line: Mapping[str, Any]) -> None:
        replies.write(json.dumps(line).encode() + b"\n")
        replies.close()

    try:
        engine, family = make(Settings(**order["settings"]))
    except SaccadeError as error:
        say(told(error))
        sys.exit(error.exit_code)
    worker = Worker(engine, family)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(worker, order["token"]))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say({"port": server.server_address[1]})
    worker.run()
    engine.close()


def make(settings: Settings) -> tuple[Engine, Family]:
    family = load_family(
        settings.folder,
        name=settings.family,
        chat_template=settings.chat_template,
        trust_remote_code=settings.trust_remote_code,
    )
    return build(settings, family), family


def end_with(parent: int, lifeline: Any) -> None:
    """Never outlive the client, however it ends. The kernel ends this process even while it hangs;
    the threads do so where the kernel cannot, and take along what this process has started.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)

    def end() -> None:
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def listen() -> None:
        lifeline.read()
        end()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_EVERY)
        end()

    for watch in (listen, look):
        threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
