"""Runs the user's environments in separate processes. This file has both sides of the protocol.

One host process imports the user's file; each episode is a fork of it. So the file is imported once,
episodes share no state, and an environment that hangs or crashes ends only its own episode.
Calls do not block: the rollout collector polls them. A call that exceeds its time limit ends its
process. At most `env.processes` episodes run at a time; further ones wait at their reset.

    $ python -m saccade.plugins.user_environments.env_process    # the host, started by `Host`
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from saccade.config import EnvConfig
from saccade.environments import Environment, Step, UserCode, build, load_user_code
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.media.blob_file import encoded
from saccade.media.images import decode as pixels
from saccade.rollout.env_setup import EnvironmentCall, Failed, context_of
from saccade.system.codec import Arrays, decode, encode, files_of
from saccade.system.process import LARGEST, Block, Channel, Child, Ended, connect, end, end_with_parent, listen
from saccade.types import Media, Message, Sample, root_hash
from saccade.user_code import raised_at

MODULE = "saccade.plugins.user_environments.env_process"
START_LIMIT = 120.0  # seconds for a host to import the user's file


def host_of(env: EnvConfig) -> Host:
    return _host(env.model_dump_json())


@cache
def _host(env: str) -> Host:
    return Host(EnvConfig.model_validate_json(env))


# -- in the parent ---------------------------------------------------------------------------------


class Host:
    """The process that has imported the user's file; it runs until this process ends."""

    def __init__(self, env: EnvConfig) -> None:
        self.env = env
        self.live: weakref.WeakSet[Hosted] = weakref.WeakSet()
        self.child = Child(MODULE)
        atexit.register(self.close)
        try:
            ready = self.child.ask({"env": env.model_dump(mode="json")}, seconds=START_LIMIT).row
        except (Ended, TimeoutError) as error:
            ready = {"failed": f"its file was not imported: {error}"}
        if reason := ready.get("failed"):
            self.close()
            option = f"env.tools={list(env.tools)}" if env.tools else f"env.name={env.name}"
            raise ConfigError(reason if reason.startswith("env.") else f"{option}: {reason}")
        self.tools: Mapping[str, str] = ready["tools"]
        self.child.channel.link.settimeout(START_LIMIT)

    def fork(self) -> Channel:
        """Fork a process for an episode; returns the channel to it."""
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.child.channel.link, [b"+"], [theirs.fileno()])
            except OSError:
                code = self.child.popen.wait()
                raise EnvironmentProblem(f"the process that hosts {self.env.name} ended with code {code}") from None
        return Channel(mine, largest=LARGEST)

    def environment(self, context: Mapping[str, Any]) -> Any:
        """The proxy of an environment for one episode."""
        return Hosted(self, context)

    def close(self) -> None:
        for hosted in list(self.live):
            hosted.end()
        self.child.close()
        atexit.unregister(self.close)


class Hosted:
    """Proxy of an environment in another process; its methods return calls to poll."""

    def __init__(self, host: Host, context: Mapping[str, Any]) -> None:
        self.host, self.context = host, context
        self.channel: Channel | None = None
        self.pid = 0
        self.over = False
        self.files: Mapping[str, Media] = {}

    def reset(self, sample: Sample, seed: int) -> EnvironmentCall:
        self.files = files_of(sample)
        return ProcessCall(self, "reset", sample, seed=seed, context=self.context)

    def step(self, message: Message) -> EnvironmentCall:
        return ProcessCall(self, "step", message)

    def close(self) -> EnvironmentCall | None:
        return None if self.over or self.channel is None else ProcessCall(self, "close")

    def read(self, reply: Block) -> Any:
        """Decode the result of a call: the messages of a reset, the Step of a step, nothing for a close."""
        row = reply.row
        messages = decode(tuple[Message, ...], row.get("messages", []), reply.arrays, shared=self.files)
        return Step(messages, row["reward"], row["done"], row["info"]) if "done" in row else messages

    def start(self) -> bool:
        """Fork its process if it has none; returns False while `env.processes` others are live."""
        if self.channel is None and len(self.host.live) < self.host.env.processes:
            self.channel = self.host.fork()
            self.host.live.add(self)
        return self.channel is not None

    def receive(self) -> Block | None:
        """The next reply, or None if there is none yet; does not wait."""
        assert self.channel is not None
        reply = self.channel.receive(0)
        if reply is not None and "pid" in reply.row:  # the first block of a new process
            self.pid = reply.row["pid"]
            return self.channel.receive(0)
        return reply

    def end(self) -> None:
        """Free the slot for another episode and kill the process with its group, even if it hangs."""
        self.over = True
        self.host.live.discard(self)
        if self.channel is not None:
            self.channel.link.close()
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class ProcessCall(EnvironmentCall):
    """A call of a method; `record` is its argument: the sample of a reset, the message of a step."""

    def __init__(self, hosted: Hosted, method: str, record: Any = None, **row: Any) -> None:
        self.hosted, self.method = hosted, method
        self._arrays: Arrays = {}
        self._row = {"method": method, "record": encode(record, self._arrays), **row}
        self._began: float | None = None

    def done(self) -> bool:
        if self._began is None and not self.hosted.start():
            return False
        try:
            if self._began is None:
                self._began = time.monotonic()
                assert self.hosted.channel is not None
                self.hosted.channel.send(self._row, self._arrays, seconds=self.seconds)
            reply = self.hosted.receive()
            if reply is None and time.monotonic() - self._began < self.seconds:
                return False
            if reply is None:
                raise TimeoutError(f"the environment's {self.method} took more than {self.seconds:g} s")
        except (TimeoutError, Ended) as error:  # sending times out, too, if the process does not read
            self.outcome = Failed(f"{error} during {self.method}") if isinstance(error, Ended) else error
            self.hosted.end()
            return True
        self.took = reply.row["took"]
        failed = reply.row.get("error")
        self.outcome = self.hosted.read(reply) if failed is None else Failed(failed)
        if self.method == "close":
            self.hosted.end()
        return True


# -- in the host and its forks ---------------------------------------------------------------------

# Seconds for episodes to kill their process groups after the run has ended; then the host ends, which kills the rest.
GRACE = 1.0
KNOWN: dict[str, Media] = {}  # media of this episode's sample, by hash; the other side has them


def main() -> None:
    channel = connect(tied=False)  # the thread that started this process may end before the run does
    first = channel.receive()
    assert first is not None
    env = EnvConfig.model_validate(first.row["env"])
    try:
        user = load_user_code(env)
        channel.send({"tools": user.descriptions, "id": first.row["id"]})
    except BaseException as error:  # anything that the user's file raises, also SystemExit
        reason = str(error) if isinstance(error, ConfigError) else raised_at(error)
        channel.send({"failed": reason, "id": first.row["id"]})
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended episodes leave no zombies
    gc.collect()
    gc.freeze()  # the collector does not touch these pages, so forks keep sharing them
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
                _live(Channel(socket.socket(fileno=sockets[0])), env, user)
            finally:
                end()
        os.close(sockets[0])


def _live(channel: Channel, env: EnvConfig, user: UserCode) -> None:
    """Serve one episode until its channel closes."""
    channel.send({"pid": os.getpid()})
    inbox = listen(channel)
    environment: Environment | None = None
    while True:
        request = inbox.get()
        began = time.monotonic()
        try:
            if request.row["method"] == "reset":
                environment = build(env, context_of(request.row["context"]), user)
            assert environment is not None
            reply = _answered(environment, request)
            channel.send(reply.row | {"took": time.monotonic() - began}, reply.arrays)
        except Ended:
            return
        except BaseException as error:
            channel.send({"error": raised_at(error), "took": time.monotonic() - began})


def _answered(environment: Environment, request: Block) -> Block:
    row = request.row
    if row["method"] == "close":
        environment.close()
        return Block({}, {})
    if row["method"] == "reset":
        sample = decode(Sample, row["record"], request.arrays)
        KNOWN.update(files_of(sample))
        return _said(environment.reset(sample, row["seed"]))
    step = Step(*environment.step(decode(Message, row["record"], request.arrays)))
    said = _said(step.messages)
    reward = None if step.reward is None else float(step.reward)
    said.row.update(reward=reward, done=bool(step.done), info=dict(step.info))
    return said


def _said(messages: Any) -> Block:
    messages, arrays = list(messages), Arrays()
    if not all(isinstance(message, Message) for message in messages):
        raise TypeError("an environment speaks in saccade.types.Message")
    whole = tuple(replace(m, parts=tuple(p if isinstance(p, str) else _whole(p) for p in m.parts)) for m in messages)
    return Block({"messages": encode(whole, arrays, shared=KNOWN)}, arrays)


def _whole(media: Media) -> Media:
    """The medium with its file read into memory (images), as the file may vanish before the model sees it.
    Decodes an image once, so that a broken one fails here and not in training.
    """
    if root_hash(media.hash, media.box) in KNOWN:
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
