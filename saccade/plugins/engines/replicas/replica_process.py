"""An engine in a separate process, started by a `Replica`:

    $ python -m saccade.plugins.engines.replicas.replica_process

The first block holds the settings; the answer says that the engine is ready, or why it is not. The
main thread drives the engine. Other threads receive what the parent sends, also during a long step,
and report every second that this process is alive.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from saccade.engines import Engine, Settings
from saccade.engines.builders import build
from saccade.errors import EnvironmentProblem, SaccadeError
from saccade.models.families import load_family
from saccade.plugins.engines.replicas.replica import REPORT_EVERY
from saccade.system.codec import FILES, Arrays, decode, encode
from saccade.system.process import Block, Channel, connect, listen
from saccade.types import Request


class Worker:
    """Runs the engine and carries out what the parent asks."""

    def __init__(self, engine: Engine, channel: Channel, controller: str | None = None) -> None:
        """`controller`: its address, if it did not start this process itself."""
        self.engine, self.channel, self.controller = engine, channel, controller
        self._files: Arrays = {}  # of media, until the parent says to forget them
        self._unusable = ""  # the reason: the engine failed, or its weights may be a mix of two versions
        self._ended = False
        self.working_since: float | None = None

    def run(self, inbox: queue.SimpleQueue[Block]) -> None:
        while not self._ended:
            works = self.engine.pending and not self._unusable
            blocks = [] if works else [inbox.get()]
            while not inbox.empty():
                blocks.append(inbox.get())
            for block in blocks:
                self._obey(block)
            if works:
                self._attempt(self._advance)

    def _obey(self, block: Block) -> None:
        row = block.row
        self._files |= {name: file for name, file in block.arrays.items() if name.startswith(FILES)}
        arrays = {**self._files, **block.arrays}
        if "call" in row:
            self.answer(Block(row, arrays))
        for call, item in row.get("orders", ()):
            if call == "submit":
                self._attempt(self._submit, decode(Request, item, arrays))
            else:
                self._attempt(getattr(self.engine, call), item)
        for name in row["forget"]:
            del self._files[name]

    def _attempt(self, order: Callable[..., Any], *arguments: Any) -> None:
        """Let the engine work, and report its time as busy. (Calls are not: their callers have time limits.)"""
        self.working_since = time.monotonic()
        try:
            order(*arguments)
        except SaccadeError as error:  # anything else ends the process
            self._unusable = self._unusable or str(error)
            self.channel.send({"failed": describe_error(error)})
        self.working_since = None

    def _advance(self) -> None:
        if done := self.engine.poll():
            arrays: Arrays = {}
            self.channel.send({"completions": encode(tuple(done), arrays)}, arrays)

    def _submit(self, request: Request) -> None:
        if self._unusable:
            raise EnvironmentProblem(self._unusable)
        self.engine.submit(request)

    def answer(self, block: Block) -> None:
        arrays: Arrays = {}
        try:
            reply = {"result": encode(self.perform(block), arrays)}
        except SaccadeError as error:
            reply = {"failed": describe_error(error)}
        self.channel.send({**reply, "id": block.row["id"]}, arrays)

    def perform(self, block: Block) -> Any:
        """The result of a call."""
        call = block.row["call"]
        return getattr(self if call in ("load", "shutdown") else self.engine, call)(*block.row["arguments"])

    def load(self, offer: Mapping[str, Any], checksums: Mapping[str, int], version: int) -> bool:
        """Load weights into the engine. False if the trainer's GPU tensors cannot be opened here."""
        from saccade.plugins.engines.gpu_handles import opened_tensor
        from saccade.plugins.engines.weight_transfer import opened
        from saccade.plugins.engines.weights import Mapped, load_by_name, require_checksums

        engine, handles = self.engine, offer["handles"]
        tensors = {name: tensor for name, handle in handles.items() if (tensor := opened_tensor(handle)) is not None}
        if len(tensors) < len(handles):
            return False
        self._unusable = "the last update of weights failed: there are none to use"
        with opened(offer, self.controller) as paths:
            source = Mapped(paths, tensors)
            if engine.capabilities().shares_weights:  # it samples with `model`, to which nothing else writes
                load_by_name(engine.model, source)  # type: ignore[attr-defined]
                require_checksums(engine.model.named_parameters(), checksums)  # type: ignore[attr-defined]
            else:
                require_checksums(source.weights(), checksums)
            engine.update_weights(source, version)
        self._unusable = ""
        return True

    def shutdown(self) -> None:
        self._ended = True


def reporting(channel: Channel) -> list[Worker]:
    """Report every second that this process is alive, also while it starts. Append its worker to the list that this
    returns: then long steps are reported, too.
    """
    workers: list[Worker] = []

    def report() -> None:
        with suppress(OSError):  # the other end is gone
            while True:
                since = workers[0].working_since if workers else None
                channel.send({"busy_s": 0.0 if since is None else time.monotonic() - since})
                time.sleep(REPORT_EVERY)

    threading.Thread(target=report, name="report", daemon=True).start()
    return workers


def describe_error(error: SaccadeError) -> dict[str, str]:
    """The error as a row, from which the parent raises it again."""
    ours = (kind for kind in type(error).__mro__ if kind.__module__ == SaccadeError.__module__)
    return {"kind": next(ours).__name__, "message": str(error)}


def serve(channel: Channel, controller: str | None = None) -> None:
    """Do what the parent asks, or the `controller` at that address, until it ends."""
    inbox = listen(channel, tied=controller is None)
    settings = Settings(**inbox.get().row["settings"])
    workers = reporting(channel)
    try:
        template, trusted = settings.chat_template, settings.trust_remote_code
        family = load_family(settings.folder, name=settings.family, chat_template=template, trust_remote_code=trusted)
        engine = build(settings, family)
    except SaccadeError as error:
        channel.send({"failed": describe_error(error)})
        sys.exit(error.exit_code)
    workers.append(worker := Worker(engine, channel, controller))
    channel.send({"ready": True})
    worker.run(inbox)
    engine.close()


if __name__ == "__main__":
    serve(connect(tied=True))
