"""Where environments live: built-in ones in this process, those of the user in processes of their
own. This file is both sides of them.

One host process imports the user's file; each episode is a fork of it. So a file is imported once,
no two episodes share state, and an environment that hangs or crashes takes nothing with it but its
episode. Nobody waits for a call: the collector asks now and then whether it is done. A call that
takes too long costs its process. At most `env.processes` episodes live at a time; further ones wait
for their reset.

    make = environments(config.env, order=("answer_tag",), think_prefilled=False)
    environment = make()

    $ python -m saccade.rollout.env_process    # the host, started by `Host`
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from saccade.config import EnvConfig
from saccade.environments import Environment, Own, Setting, Step, build, instruction, is_own, load_own, problems
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.media.blob_file import encoded, root_hash
from saccade.media.images import decode as pixels
from saccade.rewards.verifiers import ANSWERS
from saccade.system.codec import Arrays, decode, encode, files_of
from saccade.system.process import LARGEST, Block, Channel, Child, Ended, connect, end, end_with_parent, listen
from saccade.types import Media, Message, Sample

START_LIMIT = 120.0  # seconds for a host to import the user's file


class Failed(Exception):
    """An environment raised, or its process ended; the text says what and where."""


def environments(
    env: EnvConfig, *, order: Sequence[str], think_prefilled: bool = False, role: str = "user", unit: int = 28
) -> Callable[[], Environment]:
    """What makes an environment for each episode. `order`: where answers are looked for; `role`: in
    which the model reads what a tool says; `unit`: pixels of a side that it sees as one token.
    """
    require(env)
    plain = {"order": tuple(order), "think_prefilled": think_prefilled, "role": role, "unit": unit}
    if is_own(env):
        host = _host(env.model_dump_json())
        return lambda: Hosted(host, plain)  # type: ignore[return-value]
    setting = _setting(plain)
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


def describe_error(error: BaseException) -> str:
    """The exception and the last line of user code that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


# -- in the parent ---------------------------------------------------------------------------------


class Host:
    """The process that has imported the user's file. It stays until this process ends."""

    def __init__(self, env: EnvConfig) -> None:
        self.env = env
        self.live: weakref.WeakSet[Hosted] = weakref.WeakSet()
        self.child = Child("saccade.rollout.env_process", who=f"env.name={env.name}")
        atexit.register(self.close)
        try:
            ready = self.child.ask({"env": env.model_dump(mode="json")}, seconds=START_LIMIT).row
        except Ended as error:
            ready = {"failed": str(error)}
        except TimeoutError:
            ready = {"failed": f"its file was not imported after {START_LIMIT:g} s"}
        if "failed" in ready:
            self.close()
            option = f"env.tools={list(env.tools)}" if env.tools else f"env.name={env.name}"
            reason = ready["failed"]
            raise ConfigError(reason if reason.startswith("env.") else f"{option}: {reason}")
        self.tools: Mapping[str, str] = ready["tools"]
        self.child.channel.link.settimeout(START_LIMIT)

    def fork(self) -> Channel:
        """To a new process."""
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.child.channel.link, [b"+"], [theirs.fileno()])
            except OSError:
                code = self.child.popen.wait()
                raise EnvironmentProblem(f"the process that hosts {self.env.name} ended with code {code}") from None
        return Channel(mine, largest=LARGEST)

    def close(self) -> None:
        for hosted in list(self.live):
            hosted.end()
        self.child.close()
        atexit.unregister(self.close)


class Hosted:
    """An environment in another process: its methods return calls that are under way."""

    def __init__(self, host: Host, setting: Mapping[str, Any]) -> None:
        self.host, self.setting = host, setting
        self.channel: Channel | None = None
        self.pid = 0
        self.over = False
        self.known: Mapping[str, Media] = {}

    def reset(self, sample: Sample, seed: int) -> EnvironmentCall:
        self.known = files_of(sample)
        arrays: Arrays = {}
        row = {"sample": encode(sample, arrays), "seed": seed, "setting": self.setting}
        return EnvironmentCall(self, "reset", Block(row, arrays), self._messages)

    def step(self, message: Message) -> EnvironmentCall:
        arrays: Arrays = {}
        row = {"message": encode(message, arrays)}
        return EnvironmentCall(self, "step", Block(row, arrays), self._step)

    def close(self) -> EnvironmentCall | None:
        if self.over or self.channel is None:
            return None
        return EnvironmentCall(self, "close", Block({}, {}), lambda reply: None)

    def _messages(self, reply: Block) -> tuple[Message, ...]:
        messages, known = reply.row["messages"], self.known
        return decode(tuple[Message, ...], messages, reply.arrays, known=known)

    def _step(self, reply: Block) -> Step:
        row = reply.row
        return Step(self._messages(reply), row["reward"], row["done"], row["info"])

    def start(self) -> bool:
        """Whether it has a process; False while there are too many."""
        if self.channel is None and len(self.host.live) < self.host.env.processes:
            self.channel = self.host.fork()
            self.host.live.add(self)
        return self.channel is not None

    def receive(self) -> Block | None:
        """The next reply, if it is there."""
        assert self.channel is not None
        reply = self.channel.receive(0)
        if reply is not None and "pid" in reply.row:  # the first block of a new process
            self.pid = reply.row["pid"]
            return self.channel.receive(0)
        return reply

    def end(self) -> None:
        """Makes room for another; a process that no longer listens is killed."""
        self.over = True
        self.host.live.discard(self)
        if self.channel is not None:
            self.channel.link.close()
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class EnvironmentCall:
    """A call under way. `seconds` may be set until it begins."""

    def __init__(self, hosted: Hosted, method: str, request: Block, read: Callable[[Block], Any]) -> None:
        self.hosted, self.method, self.read = hosted, method, read
        self.request = request
        self.seconds = 60.0
        self.took = 0.0  # seconds there, not until somebody looked
        self.outcome: Any = None  # an exception where the call failed
        self._began: float | None = None

    def done(self) -> bool:
        """Begins when there is a process for it; never waits."""
        if self._began is None and not self.hosted.start():
            return False
        try:
            if self._began is None:
                self._began = time.monotonic()
                row, channel = {"method": self.method, **self.request.row}, self.hosted.channel
                assert channel is not None
                channel.send(row, self.request.arrays, seconds=self.seconds)
            reply = self.hosted.receive()
        except TimeoutError as error:  # the process is not reading
            return self._over(error)
        except Ended as error:
            return self._over(Failed(f"{error} during {self.method}"))
        if reply is None:
            if time.monotonic() - self._began < self.seconds:
                return False
            what = f"{self.method} took more than {self.seconds:g} s"
            return self._over(TimeoutError(f"the environment's {what}"))
        self.took = reply.row["took"]
        failed = reply.row.get("error")
        self.outcome = self.read(reply) if failed is None else Failed(failed)
        if self.method == "close":
            self.hosted.end()
        return True

    def _over(self, error: Exception) -> bool:
        self.outcome = error
        self.hosted.end()
        return True


# -- in the host and its forks ---------------------------------------------------------------------

# Seconds in which episodes end with all that they started; one that hangs then dies with its host.
GRACE = 1.0
KNOWN: dict[str, Media] = {}  # media of this episode's question


def main() -> None:
    channel = connect(tied=False)  # the thread that starts it may end before the run does
    first = channel.receive()
    assert first is not None
    env = EnvConfig.model_validate(first.row["env"])
    try:
        own = load_own(env)
        ready: Mapping[str, Any] = {"tools": own.descriptions}
    except BaseException as error:  # whatever the file raises, also SystemExit
        told = str(error) if isinstance(error, ConfigError) else describe_error(error)
        ready = {"failed": told}
    channel.send({**ready, "id": first.row["id"]})
    if "failed" in ready:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended episodes leave nothing behind
    gc.collect()
    gc.freeze()  # pages stay shared among the forks
    channel.link.setblocking(True)
    while True:  # every byte comes with the socket of a new episode
        mark, sockets, _, _ = socket.recv_fds(channel.link, 1, 1)
        if not mark:
            time.sleep(GRACE)
            end()
        if os.fork() == 0:
            os.setsid()
            try:
                end_with_parent()
                channel.link.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _live(Channel(socket.socket(fileno=sockets[0])), env, own)
            finally:
                end()
        os.close(sockets[0])


def _live(channel: Channel, env: EnvConfig, own: Own) -> None:
    """One episode; never returns."""
    channel.send({"pid": os.getpid()})
    inbox = listen(channel)
    environment: Environment | None = None
    while True:
        request = inbox.get()
        began = time.monotonic()
        try:
            if request.row["method"] == "reset":
                environment = build(env, _setting(request.row["setting"]), own)
            assert environment is not None
            reply = METHODS[request.row["method"]](environment, request)
            channel.send(reply.row | {"took": time.monotonic() - began}, reply.arrays)
        except Ended:
            return
        except BaseException as error:
            channel.send({"error": describe_error(error), "took": time.monotonic() - began})


def _setting(plain: Mapping[str, Any]) -> Setting:
    """The setting with its finder of answers."""
    order, prefilled = plain["order"], plain["think_prefilled"]
    return Setting(
        answer=lambda text: ANSWERS["extract"](text, order, think_prefilled=prefilled) or None,
        role=plain["role"],
        unit=plain["unit"],
    )


def _reset(environment: Environment, request: Block) -> Block:
    sample = decode(Sample, request.row["sample"], request.arrays)
    KNOWN.update(files_of(sample))
    return _said(environment.reset(sample, request.row["seed"]))


def _step(environment: Environment, request: Block) -> Block:
    step = Step(*environment.step(decode(Message, request.row["message"], request.arrays)))
    said = _said(step.messages)
    reward = None if step.reward is None else float(step.reward)
    said.row.update(reward=reward, done=bool(step.done), info=dict(step.info))
    return said


def _close(environment: Environment, request: Block) -> Block:
    environment.close()
    return Block({}, {})


METHODS = {"reset": _reset, "step": _step, "close": _close}


def _said(messages: Any) -> Block:
    messages = list(messages)
    if not all(isinstance(message, Message) for message in messages):
        raise TypeError("an environment speaks in saccade.types.Message")
    arrays: Arrays = {}
    whole = tuple(replace(m, parts=tuple(p if isinstance(p, str) else _whole(p) for p in m.parts)) for m in messages)
    return Block({"messages": encode(whole, arrays, known=KNOWN)}, arrays)


def _whole(media: Media) -> Media:
    """With the bytes of its file, which may vanish before the model has seen it. A picture is
    decoded once: one that cannot be must fail here, not in the training.
    """
    if root_hash(media) in KNOWN:
        return media
    if media.kind != "image":
        if media.path is not None and not Path(media.path).is_file():
            raise FileNotFoundError(media.path)
        return replace(media, pictures=tuple(map(_whole, media.pictures)))
    if media.path is not None:
        media = replace(media, path=None, data=encoded(media))
    pixels(media)
    return media


if __name__ == "__main__":
    main()
