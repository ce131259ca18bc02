"""Accept processes that were started elsewhere (by Ray, Slurm or hand) into the run, and talk to them.

with Reception(28400, token, versions()) as reception:
    came = reception.arrivals(token, 8)
"""

import hashlib
import hmac
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from saccade.errors import EnvironmentProblem
from saccade.system.process import LOOK_EVERY, Channel, Ended, Process

log = logging.getLogger(__name__)

JOIN_LIMIT = 900.0  # seconds until all processes have connected: a cluster may have to start machines
HELLO_LIMIT = 10.0  # seconds for a process to identify itself
HELLO_BYTES = 1 << 16
END_LIMIT = 10.0  # seconds for a process to end by itself when its link is gone


@contextmanager
def accepting(port: int, greet: Callable[[socket.socket, Any], None]) -> Iterator[int]:
    """Listen on the port that this yields (0: any free one), and call `greet` for each connection in its own thread, so
    that a silent client blocks no other.
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
                server.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A process that has connected, and what it says about itself."""

    channel: Channel
    host: str
    local: int  # its index among the processes of its machine
    pid: int
    versions: Mapping[str, str]
    machine: str  # its `same_processes()`
    proof: str = ""  # to be sent to the process: proof that this run knows the token


def same_processes() -> str:
    """Equal where PIDs mean the same processes: host names may be equal, and containers have their own PIDs."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}" if boot.is_file() else ""


def prove(token: str, *said: str) -> str:
    """Proof of knowing the token without sending it (HMAC)."""
    return hmac.new(token.encode(), "\n".join(said).encode(), hashlib.sha256).hexdigest()


def introduce(channel: Channel, token: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Authenticate this process and the run to each other. Returns what the run tells the process to do."""
    mine = secrets.token_hex(16)
    channel.send({"nonce": mine})
    answer = channel.receive(HELLO_LIMIT)
    theirs = str(answer.row["nonce"]) if answer else ""
    channel.send({**about, "proof": prove(token, "process", mine, theirs)})
    told = channel.receive()
    assert told is not None
    if not hmac.compare_digest(str(told.row.pop("proof", "")), prove(token, "run", mine, theirs)):
        raise Ended("what answers there does not know the token")
    return told.row


class Link(Process):
    """The connection to a process that was started elsewhere; the process ends when the connection does."""

    def __init__(self, arrival: Arrival, module: str, log: Path) -> None:
        """Tell the process to run `module`."""
        super().__init__(arrival.channel)
        self._ended = threading.Event()
        self._process: psutil.Process | None = None  # if it is on this machine
        if arrival.machine and arrival.machine == same_processes():
            with suppress(psutil.Error):
                self._process = psutil.Process(arrival.pid)
        told = {"module": module, "log": str(log.absolute()), "cwd": os.getcwd(), "proof": arrival.proof}
        self.channel.send(told)

    def wait(self, seconds: float) -> None:
        """Wait until the receiving thread has seen the process end."""
        self._ended.wait(seconds)

    def kill(self) -> None:
        """Close the connection; on this machine also kill a process that is stopped or does not end by itself."""
        super().kill()
        process, self._process = self._process, None
        with suppress(psutil.Error):
            if process is not None and process.status() == psutil.STATUS_STOPPED:
                process.kill()
            elif process is not None and not self.gone:
                threading.Thread(target=_end, args=(process,), name="end").start()

    def close(self) -> None:
        self._ended.set()
        super().close()


def _end(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        try:
            process.wait(END_LIMIT)
        except psutil.TimeoutExpired:
            process.kill()


class Reception:
    """Accepts processes that know one of the expected tokens, and queues them by token."""

    def __init__(self, port: int, token: str, versions: Mapping[str, str]) -> None:
        """`versions`: those that a process must have."""
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
        """Disconnect processes that wait with this token, and refuse it from now on."""
        waiting = self.expected.pop(token)
        while not waiting.empty():
            waiting.get().channel.link.close()

    def arrivals(
        self, token: str, count: int, *, limit: float = JOIN_LIMIT, failed: Callable[[], None] = lambda: None
    ) -> list[Arrival]:
        """Wait for `count` more processes with this token; returns them sorted by host. `failed` may raise to stop."""
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
        """Queue a process that proves to know a token. Others may send anything, so every error refuses it."""
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(link, largest=HELLO_BYTES)
        try:
            block, mine = channel.receive(HELLO_LIMIT), secrets.token_hex(16)
            theirs = str(block.row["nonce"]) if block else ""
            channel.send({"nonce": mine})
            block = channel.receive(HELLO_LIMIT)
            hello = dict(block.row) if block else {}
            given, said = str(hello.pop("proof")), ("process", theirs, mine)
            [token] = [one for one in [*self.expected] if hmac.compare_digest(given, prove(one, *said))]
            arrival = Arrival(channel=channel, proof=prove(token, "run", theirs, mine), **hello)
            channel.largest = None
            self.expected[token].put(arrival)
            log.info(f"connected: process {arrival.pid} of {arrival.host}")
        except Exception:
            log.warning(f"a process on {address[0]} that does not belong to this run was refused")
            link.close()
