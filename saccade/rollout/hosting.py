"""Where environments live: built-in ones in this process, those of the user in processes of their
own.

Each episode of a user's environment is a fork of one host process that has imported the user's
file (`host.py`). A call is a line of JSON there and a line back; nobody waits for it: the collector
asks now and then. A call that takes too long costs its process, and with it one episode. At most
`env.processes` live at a time, further episodes wait for their reset.

    make = environments(config.env, order=("answer_tag",), think_prefilled=False)
    environment = make()
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from saccade.config import EnvConfig
from saccade.environments import Environment, Step, build, instruction, is_own, problems
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.own import show_output
from saccade.rollout import wire
from saccade.rollout.host import setting_of
from saccade.types import Message, Sample


class Failed(Exception):
    """An environment raised, or its process ended; the text says what and where."""


START_LIMIT = 120.0  # seconds for the host to import the user's file
LONGEST_REPLY = 64 << 20  # bytes, pictures included


def environments(
    env: EnvConfig,
    *,
    order: Sequence[str],
    think_prefilled: bool = False,
    role: str = "user",
    unit: int = 28,
) -> Callable[[], Environment]:
    """What makes an environment for each episode. `order`: where answers stand; `role`: in which
    the model reads what a tool says; `unit`: pixels of a side that it sees as one token.
    """
    require(env)
    plain = {"order": tuple(order), "think_prefilled": think_prefilled, "role": role, "unit": unit}
    if is_own(env):
        host = _host(env.model_dump_json())
        return lambda: Hosted(host, plain)  # type: ignore[return-value]
    setting = setting_of(plain)
    return lambda: build(env, setting)


def require(env: EnvConfig) -> None:
    found = list(problems(env))
    if found:
        raise ConfigError("\n".join(found))


def explanation(env: EnvConfig) -> str:
    """What the prompt says about the environment and its tools."""
    require(env)
    return instruction(env, _host(env.model_dump_json()).tools if env.tools else {})


@cache
def _host(env: str) -> Host:
    return Host(EnvConfig.model_validate_json(env))


class Host:
    """The process that has imported the user's file. It stays until this process ends."""

    def __init__(self, env: EnvConfig) -> None:
        self.env = env
        self.live: weakref.WeakSet[Hosted] = weakref.WeakSet()
        package_root = str(Path(__file__).resolve().parents[2])
        search = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "saccade.rollout.host"],
                stdin=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the parent only
                env={**os.environ, "PYTHONPATH": search},
            )
        self.shown = show_output(self.process, f"env.name={env.name}")
        atexit.register(self.close)
        self.control.sendall(env.model_dump_json().encode() + b"\n")
        self.control.settimeout(START_LIMIT)
        try:
            with self.control.makefile("rb") as lines:
                ready = json.loads(lines.readline() or b'{"failed": "its process ended"}')
        except TimeoutError:
            ready = {"failed": f"its file was not imported after {START_LIMIT:g} s"}
        if "failed" in ready:
            self.close()
            own = f"env.name={env.name}" if not env.tools else f"env.tools={list(env.tools)}"
            reason = ready["failed"]
            raise ConfigError(reason if reason.startswith("env.") else f"{own}: {reason}")
        self.tools: Mapping[str, str] = ready["tools"]

    def fork(self) -> socket.socket:
        """The socket of a new process."""
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [b"+"], [theirs.fileno()])
            except BrokenPipeError:
                raise EnvironmentProblem(
                    f"the process that hosts {self.env.name} ended with code {self.process.wait()}"
                ) from None
        return mine

    def close(self) -> None:
        for hosted in list(self.live):
            hosted.end()
        self.control.close()
        if self.process.poll() is None:  # it leads a session
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.shown.join(timeout=1)
        atexit.unregister(self.close)


class Hosted:
    """An environment in another process: its methods return what is still pending."""

    def __init__(self, host: Host, setting: Mapping[str, Any]) -> None:
        self.host, self.setting = host, setting
        self.channel: socket.socket | None = None
        self.pid = 0
        self.over = False
        self.files: wire.Known = {}
        self._rest = bytearray()

    def reset(self, sample: Sample, seed: int) -> Pending:
        self.files = wire.files_of(sample)
        request = {"sample": wire.plain_sample(sample), "seed": seed, "setting": self.setting}
        return Pending(self, "reset", request, self._messages)

    def step(self, message: Message) -> Pending:
        (plain,) = wire.plain_messages([message])
        return Pending(self, "step", {"message": plain}, self._step)

    def close(self) -> Pending | None:
        if self.over or self.channel is None:
            return None
        return Pending(self, "close", {}, lambda reply: None)

    def _messages(self, reply: Mapping[str, Any]) -> tuple[Message, ...]:
        return wire.messages_of(reply["messages"], self.files)

    def _step(self, reply: Mapping[str, Any]) -> Step:
        return Step(self._messages(reply), reply["reward"], reply["done"], reply["info"])

    def start(self) -> bool:
        """Whether it has a process; False while there are too many."""
        if self.channel is None and len(self.host.live) < self.host.env.processes:
            self.channel = self.host.fork()
            self.host.live.add(self)
        return self.channel is not None

    def send(self, request: bytes, seconds: float) -> None:
        assert self.channel is not None
        self.channel.settimeout(seconds)
        self.channel.sendall(request)
        self.channel.setblocking(False)

    def receive(self) -> Mapping[str, Any] | None:
        """The next reply, if it is there."""
        assert self.channel is not None
        try:
            new = self._rest
            while b"\n" not in new:
                new = bytearray(self.channel.recv(1 << 20))
                if not new:
                    return {"ended": "its process ended"}
                self._rest += new
                if len(self._rest) > LONGEST_REPLY:
                    return {"ended": f"it said more than {LONGEST_REPLY >> 20} MiB"}
        except BlockingIOError:
            return None  # not yet
        except ConnectionError:
            return {"ended": "its process ended"}
        line, _, self._rest = self._rest.partition(b"\n")
        reply = json.loads(line)
        if "pid" in reply:  # the first word of a new process
            self.pid = reply["pid"]
            return self.receive()
        return reply

    def end(self) -> None:
        """Give the place to another; a process that does not listen any more is killed."""
        self.over = True
        self.host.live.discard(self)
        if self.channel is not None:
            self.channel.close()
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class Pending:
    """A call under way. `seconds` may be set until it begins."""

    def __init__(
        self,
        hosted: Hosted,
        method: str,
        request: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], Any],
    ) -> None:
        self.hosted, self.method, self.read = hosted, method, read
        self.request = request
        self.seconds = 60.0
        self.took = 0.0  # seconds there, not until somebody looked
        self.outcome: Any = None  # an exception where the call failed
        self._began: float | None = None

    def done(self) -> bool:
        """Begins when there is a process for it; never waits."""
        if self._began is None:
            if not self.hosted.start():
                return False
            self._began = time.monotonic()
            try:
                line = wire.line({"method": self.method, **self.request})
                self.hosted.send(line, self.seconds)
            except OSError as error:  # it hangs with its ears closed, or has ended
                return self._over(error)
        reply = self.hosted.receive()
        if reply is None and time.monotonic() - self._began < self.seconds:
            return False
        if reply is None:
            what = f"{self.method} took more than {self.seconds:g} s"
            return self._over(TimeoutError(f"the environment's {what}"))
        if "ended" in reply:
            return self._over(Failed(f"{reply['ended']} during {self.method}"))
        self.took = reply["took"]
        self.outcome = Failed(reply["error"]) if "error" in reply else self.read(reply)
        if self.method == "close":
            self.hosted.end()
        return True

    def _over(self, error: Exception) -> bool:
        self.outcome = error
        self.hosted.end()
        return True
