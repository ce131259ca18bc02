"""An engine in a process of its own, started by a `Replica`:

    $ python -m saccade.plugins.engines.replicas.replica_process

The first block holds the settings; the answer says that the engine is there, or why it is not. The
main thread drives the engine. Another one takes what the parent sends, also during a long step, and
reports every second that this process lives.
"""

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from saccade.engines import Engine, Settings
from saccade.engines.builders import build
from saccade.errors import EnvironmentProblem, SaccadeError
from saccade.models.families import load_family
from saccade.plugins.engines.replicas.replica import REPORT_EVERY
from saccade.system.codec import FILES, Arrays, decode, encode
from saccade.system.process import Block, Channel, connect, end, listen
from saccade.types import Request


class Worker:
    """The engine and what it is asked to do."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self.engine, self.channel = engine, channel
        self._files: Arrays = {}  # of media, as long as the parent wants
        self._orders: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._unusable = ""  # why: it has failed, or its weights may be half those of one version
        self._ended = False
        self._working_since: float | None = None

    # -- for the main thread --

    def run(self) -> None:
        while not self._ended:
            works = self.engine.pending and not self._unusable
            orders = [] if works else [self._orders.get()]
            while not self._orders.empty():
                orders.append(self._orders.get())
            for order in (*orders, *([self._advance] if works else [])):
                self._working_since = time.monotonic()
                try:
                    order()
                except SaccadeError as error:  # anything else ends the process
                    self._unusable = self._unusable or str(error)
                    self.channel.send({"failed": describe_error(error)})
                self._working_since = None

    def _advance(self) -> None:
        if done := self.engine.poll():
            arrays: Arrays = {}
            self.channel.send({"completions": encode(tuple(done), arrays)}, arrays)

    def _submit(self, request: Request) -> None:
        if self._unusable:
            raise EnvironmentProblem(self._unusable)
        self.engine.submit(request)

    def _answer(self, number: int, call: str, arguments: Sequence[Any]) -> None:
        mine: dict[str, Callable[..., Any]] = {"load": self._load, "shutdown": self._end}
        function = mine[call] if call in mine else getattr(self.engine, call)
        try:
            reply = {"result": encode(function(*arguments))}
        except SaccadeError as error:
            reply = {"failed": describe_error(error)}
        self.channel.send({**reply, "id": number})

    def _load(self, paths: Sequence[str], checksums: Mapping[str, int], version: int) -> None:
        from saccade.plugins.engines.weights import Mapped, load_by_name, require_checksums

        engine, source = self.engine, Mapped(paths)
        self._unusable = "the last update of weights failed: there are none to use"
        require_checksums(source.weights(), checksums)
        if engine.capabilities().shares_weights:  # with a model that nobody else writes to
            load_by_name(engine.model, source)  # type: ignore[attr-defined]
            require_checksums(engine.model.named_parameters(), checksums)  # type: ignore[attr-defined]
        engine.update_weights(source, version)
        self._unusable = ""

    def _end(self) -> None:
        self._ended = True

    # -- for the thread that takes orders --

    def serve(self, inbox: queue.SimpleQueue[Block]) -> None:
        reported = 0.0
        try:
            while True:
                if time.monotonic() - reported > REPORT_EVERY:
                    reported = time.monotonic()
                    since = self._working_since
                    self.channel.send({"busy_s": 0.0 if since is None else reported - since})
                with suppress(queue.Empty):
                    self._take(inbox.get(timeout=REPORT_EVERY))
        except BaseException:
            traceback.print_exc()
            end()

    def _take(self, block: Block) -> None:
        row, put = block.row, self._orders.put
        if "call" in row:
            put(partial(self._answer, row["id"], row["call"], row["arguments"]))
            return
        self._files |= {name: file for name, file in block.arrays.items() if name.startswith(FILES)}
        arrays = {**self._files, **block.arrays}
        for call, item in row["orders"]:
            if call == "submit":
                put(partial(self._submit, decode(Request, item, arrays)))
            else:
                put(partial(getattr(self.engine, call), item))
        for name in row["forget"]:
            del self._files[name]


def describe_error(error: SaccadeError) -> dict[str, str]:
    """For the parent, which raises the same."""
    ours = (kind for kind in type(error).__mro__ if kind.__module__ == SaccadeError.__module__)
    return {"kind": next(ours).__name__, "message": str(error)}


def main() -> None:
    channel = connect(tied=True)
    inbox = listen(channel)
    settings = Settings(**inbox.get().row["settings"])
    try:
        family = load_family(
            settings.folder,
            name=settings.family,
            chat_template=settings.chat_template,
            trust_remote_code=settings.trust_remote_code,
        )
        engine = build(settings, family)
    except SaccadeError as error:
        channel.send({"failed": describe_error(error)})
        sys.exit(error.exit_code)
    worker = Worker(engine, channel)
    channel.send({"ready": True})
    threading.Thread(target=worker.serve, args=(inbox,), name="orders", daemon=True).start()
    worker.run()
    engine.close()


if __name__ == "__main__":
    main()
