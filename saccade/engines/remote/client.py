"""An engine that lives in a process of its own, as an engine.

A thread starts the process, fetches what finishes, and sees when the process dies; all else is
asked for by the caller's own thread. Requests are sent together when somebody polls.

    engine = launch(Settings(engine="embedded", folder="my-model", dtype="float32"), log=path)
    generate(engine, requests)
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

from saccade.engines import Capabilities, WeightSource
from saccade.engines.remote import wire
from saccade.engines.remote.process import GRACE, Died, Process, mended, tail
from saccade.engines.settings import Settings
from saccade.errors import EnvironmentProblem, SaccadeError
from saccade.media.blob_file import encoded
from saccade.types import Completion, Request

POLL_WAIT = 0.02  # seconds: the caller has signals and environments to look after
COLLECT_WAIT = 5.0  # seconds that the server holds back an answer when nothing finishes
ANSWER_LIMIT = 60.0  # seconds beyond that, then the process counts as dead
STEP_LIMIT = 1800.0  # seconds of one step of the engine, a first one with kernels to compile too
LARGEST_SUBMISSION = 256

READY = "ready"
Event = tuple["RemoteEngine", "str | list[Completion] | Exception"]
Events = queue.SimpleQueue[Event]


class RemoteEngine:
    """`events`, shared by several, tell when this one is ready, what has finished and why it ended.
    It is ready after the event READY.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        events: Events | None = None,
        answer_limit: float = ANSWER_LIMIT,
        beside_trainer: bool = True,
    ) -> None:
        self.version = 0
        self.settings, self.log, self.answer_limit = settings, log, answer_limit
        self.environment, self.beside_trainer = environment or {}, beside_trainer
        self.events: Events = queue.SimpleQueue() if events is None else events
        self.process: Process | None = None
        self.pending = 0
        self._unsent: list[Request] = []
        self._aborted: list[str] = []
        self._released: list[str] = []
        self._port: int | None = None
        self._asking: HTTPConnection | None = None
        self._closing = False
        self._keeper = threading.Thread(target=self._keep, name=f"engine {log.stem}", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        try:
            self.process = Process(self.settings, log=self.log, environment=self.environment)
            if self._closing:
                self.process.kill()
            self._port = self.process.port()
            self.events.put((self, READY))
            self._fetch(min(COLLECT_WAIT, self.answer_limit))
        except Exception as error:
            if not self._closing and not isinstance(error, SaccadeError):
                self.kill()
            self.events.put((self, error))
        if self.process is not None:
            self.process.dispose()

    def _fetch(self, wait: float) -> None:
        connection = self._connection(wait + self.answer_limit)
        order = json.dumps({"wait": wait}).encode()
        while True:
            done, health = wire.decode_completions(self._post(connection, "collect", order))
            if done:
                self.events.put((self, done))
            if health["busy_s"] > STEP_LIMIT:
                raise Died(f"its engine has not moved for {health['busy_s']:.0f} s")

    def _connection(self, limit: float) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self._port, timeout=limit)

    def _post(self, connection: HTTPConnection, path: str, body: bytes) -> bytes:
        assert self.process is not None
        try:
            headers = {"Authorization": f"Bearer {self.process.token}"}
            connection.request("POST", f"/{path}", body, headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, HTTPException) as error:
            raise Died(f"/{path}: {type(error).__name__}: {error}") from error
        if response.status == 422:
            raise mended(json.loads(data))
        if response.status == 409:
            raise wire.MissingFiles(*json.loads(data)["files"])
        if response.status != 200:
            raise Died(f"/{path} was answered with {response.status}: {data[:500]!r}")
        return data

    def _ask(self, path: str, content: Any = None, *, limit: float | None = None) -> Any:
        """What the caller's thread asks; one thing at a time."""
        limit = limit or self.answer_limit
        if self._asking is None:
            self._asking = self._connection(limit)
        self._asking.timeout = limit  # of the next connection, and of the one that is open
        if self._asking.sock is not None:
            self._asking.sock.settimeout(limit)
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return json.loads(self._post(self._asking, path, body))

    # -- the protocol --

    def submit(self, request: Request) -> None:
        self._unsent.append(request)
        self.pending += 1

    def abort(self, key: str) -> None:
        self._aborted.append(key)

    def release(self, episode: str) -> None:
        self._released.append(episode)

    @property
    def unsent(self) -> bool:
        return bool(self._unsent or self._aborted or self._released)

    def flush(self) -> None:
        """Send what has been queued here."""
        released, self._released = self._released, []
        if released:  # first: an episode may begin again under the same name
            self._ask("release", released)
        while self._unsent:
            batch = self._unsent[:LARGEST_SUBMISSION]
            self._submit(batch)
            del self._unsent[: len(batch)]
        aborted, self._aborted = self._aborted, []
        if aborted:
            self._ask("abort", aborted)

    def _submit(self, batch: list[Request]) -> None:
        body = wire.encode_requests(batch)
        try:
            self._ask("submit", body)
        except wire.MissingFiles as missing:
            media = [span.media for request in batch for span in request.media]
            media += [picture for one in media for picture in one.pictures]
            files = {wire.file_name(m): m for m in media if m.data is not None}
            for name in missing.args:
                self._ask(f"media/{quote(name, safe='')}", encoded(files[name]))
            self._ask("submit", body)

    def poll(self) -> list[Completion]:
        try:
            self.flush()
            done = self.heard(timeout=POLL_WAIT)
        except queue.Empty:
            return []
        except Died as death:
            raise self._problem(death) from death
        self.pending -= len(done)
        return done

    def heard(self, timeout: float | None = None) -> list[Completion]:
        """The next event of an engine that shares them with nobody."""
        _, event = self.events.get(timeout=timeout)
        if isinstance(event, Exception):
            raise event if isinstance(event, SaccadeError) else self._problem(event)
        return event if isinstance(event, list) else []

    def _problem(self, death: Exception) -> EnvironmentProblem:
        return EnvironmentProblem(f"{self.log.stem} died: {death}\n{tail(self.log)}")

    def update_weights(self, source: WeightSource, version: int) -> None:
        from saccade.engines.weights import shared

        with shared(source, turn=version) as copy:
            self.load(copy, version)

    def load(self, copy: Any, version: int) -> None:
        """From the shared copy, which others may read as well."""
        order = {"paths": copy.paths, "checksums": copy.checksums, "version": version}
        self._ask("weights", order, limit=STEP_LIMIT)
        self.version = version

    def sleep(self) -> None:
        self._ask("sleep", limit=STEP_LIMIT)

    def wake(self) -> None:
        self._ask("wake", limit=STEP_LIMIT)

    def capabilities(self) -> Capabilities:
        # Whatever an engine shares with a model of its own process, it is not the trainer's.
        return replace(Capabilities(**self._ask("capabilities")), shares_weights=False)

    def health(self) -> dict[str, Any]:
        return self._ask("health")

    def close(self) -> None:
        """In good order where that is possible."""
        self._closing = True
        if self._port is None:  # it is still starting
            self.kill()
            return
        try:
            self._ask("shutdown", limit=GRACE)
        except (Died, SaccadeError):
            self.kill()
        assert self.process is not None
        self.process.wait()

    def kill(self) -> None:
        self._closing = True
        if self.process is not None:
            self.process.kill()


def launch(settings: Settings, *, log: Path, **options: Any) -> RemoteEngine:
    """One engine, when it is ready."""
    engine = RemoteEngine(settings, log=log, **options)
    engine.heard()
    return engine
