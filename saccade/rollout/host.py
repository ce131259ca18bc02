"""The process that has imported the user's environment or tools. Each episode is a fork of it.

So a file is imported once, an environment that hangs or crashes takes nothing with it but its own
episode, and no two episodes share state. The control socket is standard input: a first line says
which environment, then every byte comes with the socket of a new episode. What user code prints
goes to standard error. When the parent is gone, everything here ends.

    $ python -m saccade.rollout.host    # started by rollout/hosting.py
"""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.config import EnvConfig
from saccade.environments import Environment, Own, Setting, Step, build, load_own
from saccade.errors import ConfigError
from saccade.media.blob_file import encoded
from saccade.media.images import decode, root_hash
from saccade.rewards.extract import extract
from saccade.rollout import wire
from saccade.types import Media, Message

KNOWN: dict[str, Media] = {}  # pictures of this episode's question


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    with control.makefile("rb") as lines:
        env = EnvConfig.model_validate(json.loads(lines.readline()))
    try:
        own = load_own(env)
        ready: Mapping[str, Any] = {"tools": own.descriptions}
    except BaseException as error:  # whatever the file raises, also SystemExit
        ready = {"failed": str(error) if isinstance(error, ConfigError) else told(error)}
    control.sendall(wire.line(ready))
    if "failed" in ready:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended episodes leave nothing behind
    gc.collect()
    gc.freeze()  # pages stay shared among the forks
    while True:
        mark, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not mark:
            _end()
        if os.fork() == 0:
            os.setsid()
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _live(socket.socket(fileno=sockets[0]), env, own)
            finally:
                _end()
        os.close(sockets[0])


def _live(channel: socket.socket, env: EnvConfig, own: Own) -> None:
    """One episode; never returns."""
    channel.sendall(wire.line({"pid": os.getpid()}))
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox), daemon=True).start()
    environment: Environment | None = None
    while True:
        request = json.loads(inbox.get())
        began = time.monotonic()
        try:
            if request["method"] == "reset":
                environment = build(env, setting_of(request["setting"]), own)
            assert environment is not None
            reply = METHODS[request["method"]](environment, request)
            line = wire.line(reply | {"took": time.monotonic() - began})
        except BaseException as error:
            line = wire.line({"error": told(error), "took": time.monotonic() - began})
        channel.sendall(line)


def _listen(channel: socket.socket, inbox: queue.SimpleQueue[bytes]) -> None:
    with suppress(ConnectionError), channel.makefile("rb") as lines:
        for line in lines:
            inbox.put(line)
    _end()  # the parent is gone or done with it; the main thread may be stuck


def _end() -> None:
    """This process leads a session: what the user's code started or forked ends with it."""
    os.killpg(0, signal.SIGKILL)


def setting_of(plain: Mapping[str, Any]) -> Setting:
    """The setting with its finder of answers."""
    order, prefilled = plain["order"], plain["think_prefilled"]
    return Setting(
        answer=lambda text: extract(text, order, think_prefilled=prefilled) or None,
        role=plain["role"],
        unit=plain["unit"],
    )


def _reset(environment: Environment, request: Mapping[str, Any]) -> dict[str, Any]:
    sample = wire.sample_of(request["sample"])
    KNOWN.update(wire.files_of(sample))
    messages = environment.reset(sample, request["seed"])
    return {"messages": wire.plain_messages(_checked(messages), KNOWN)}


def _step(environment: Environment, request: Mapping[str, Any]) -> dict[str, Any]:
    (message,) = wire.messages_of([request["message"]])
    step = Step(*environment.step(message))
    return {
        "messages": wire.plain_messages(_checked(step.messages), KNOWN),
        "reward": None if step.reward is None else float(step.reward),
        "done": bool(step.done),
        "info": dict(step.info),
    }


def _close(environment: Environment, request: Mapping[str, Any]) -> dict[str, Any]:
    environment.close()
    return {}


METHODS = {"reset": _reset, "step": _step, "close": _close}


def _checked(messages: Any) -> list[Message]:
    messages = list(messages)
    if not all(isinstance(message, Message) for message in messages):
        raise TypeError("an environment speaks in saccade.types.Message")
    return [
        replace(m, parts=tuple(p if isinstance(p, str) else _kept(p) for p in m.parts))
        for m in messages
    ]


def _kept(media: Media) -> Media:
    """A picture with the bytes of its file, which may vanish before the model has seen it. It is
    decoded once: one that cannot be must fail here, not in the training.
    """
    if root_hash(media) in KNOWN:
        return media
    if media.kind != "image":
        if media.path is not None and not Path(media.path).is_file():
            raise FileNotFoundError(media.path)
        return replace(media, pictures=tuple(map(_kept, media.pictures)))
    if media.path is not None:
        media = replace(media, path=None, data=encoded(media))
    decode(media)
    return media


def told(error: BaseException) -> str:
    """The exception and the last line of user code that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


if __name__ == "__main__":
    main()
