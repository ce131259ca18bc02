"""Where processes that were started elsewhere connect to the run, and the links to them.

with Reception(28400, token, versions()) as reception:
    came = reception.arrivals(token, 8)
"""

import hmac
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import EnvironmentProblem
from saccade.system.process import LOOK_EVERY, Channel

log = logging.getLogger(__name__)

JOIN_LIMIT = 900.0  # seconds until the last process is there: a cluster may have to start machines
HELLO_LIMIT = 10.0  # seconds for a process to say who it is
HELLO_BYTES = 1 << 16


@contextmanager
def accepting(port: int, greet: Callable[[socket.socket, Any], None]) -> Iterator[int]:
    """Inside, whoever connects to the port that this yields is greeted in a thread: one that says nothing keeps nobody
    else waiting.
    """

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=greet, args=server.accept(), daemon=True).start()

    with socket.create_server(("", port)) as server:
        threading.Thread(target=accept, name="accept", daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # ends the thread that waits there


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A process that has connected, and what it says of itself."""

    channel: Channel
    host: str
    local: int  # which of the processes of its machine
    pid: int
    versions: Mapping[str, str]


class Link:
    """To a process that was started elsewhere, which ends when this does."""

    def __init__(self, channel: Channel, module: str, log: Path) -> None:
        """It becomes this module."""
        self.channel, self.receive = channel, channel.receive
        self._ended = threading.Event()
        channel.send({"module": module, "log": str(log.absolute()), "cwd": os.getcwd()})

    def exit_code(self) -> None:
        return None

    def wait(self, seconds: float) -> None:
        """Until the thread that receives has seen its end."""
        self._ended.wait(seconds)

    def kill(self) -> None:
        with suppress(OSError):
            self.channel.link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ended.set()
        self.kill()


class Reception:
    """Each process has a token of those that are expected."""

    def __init__(self, port: int, token: str, versions: Mapping[str, str]) -> None:
        """`versions`: those that it must have."""
        self.versions = versions
        self.expected: dict[str, queue.SimpleQueue[Arrival]] = {token: queue.SimpleQueue()}
        self._accepting = accepting(port, self._greet)
        self.port = self._accepting.__enter__()

    def __enter__(self) -> "Reception":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._accepting.__exit__(*exception)
        for token in list(self.expected):
            self.refuse(token)

    def refuse(self, token: str) -> None:
        """Whoever waits with this token, and whoever comes with it from now on."""
        waiting = self.expected.pop(token)
        while not waiting.empty():
            waiting.get().channel.link.close()

    def arrivals(
        self, token: str, count: int, *, limit: float = JOIN_LIMIT, failed: Callable[[], None] = lambda: None
    ) -> list[Arrival]:
        """The next processes with this token, in the order of hosts. `failed` raises if one will not come."""
        came: list[Arrival] = []
        end = time.monotonic() + limit
        while len(came) < count:
            with suppress(queue.Empty):
                came.append(self.expected[token].get(timeout=min(LOOK_EVERY, max(0.0, end - time.monotonic()))))
                if came[-1].versions != self.versions:
                    other = f"{came[-1].host} has {came[-1].versions}"
                    raise EnvironmentProblem(f"{other}, this machine {self.versions}; install alike")
                continue
            failed()
            if time.monotonic() > end:
                hosts = ", ".join(one.host for one in came) or "no machine"
                raise EnvironmentProblem(
                    f"{len(came)} of {count} processes connected within {limit:.0f} s, from {hosts}; "
                    "start the others, or lower run.gpus or rollout.replicas"
                )
        return sorted(came, key=lambda one: (one.host, one.local, one.pid))

    def _greet(self, link: socket.socket, address: Any) -> None:
        """Takes a process that knows a token. Others may send anything."""
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(link, largest=HELLO_BYTES)
        try:
            block = channel.receive(HELLO_LIMIT)
            hello = dict(block.row) if block else {}
            given = str(hello.pop("token")).encode()
            queues = [one for token, one in [*self.expected.items()] if hmac.compare_digest(given, token.encode())]
            arrival = Arrival(channel=channel, **hello)
            channel.largest = None
            queues[0].put(arrival)
            log.info(f"connected: process {arrival.pid} of {arrival.host}")
        except Exception:
            log.warning(f"a process on {address[0]} that does not belong to this run was refused")
            link.close()
