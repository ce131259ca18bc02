"""An engine in a separate process, started by a `Replica`:

    $ python -m saccade.plugins.engines.replicas.replica_process

The first block holds the settings; the answer says that the engine is there, or why it is not. The
main thread drives the engine. Others take what the parent sends, also during a long step, and
report every second that this process lives.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
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
    """The engine and what it is asked to do."""

    def __init__(self, engine: Engine, channel: Channel, controller: str | None = None) -> None:
        """`controller`: its machine, where another one has started this process."""
        self.engine, self.channel, self.controller = engine, channel, controller
        self._files: Arrays = {}  # of media, as long as the parent wants
        self._unusable = ""  # why: it has failed, or its weights may be half those of one version
        self._ended = False
        self._working_since: float | None = None

    def report(self) -> None:
        """Say every second that this process lives, also during a long step."""
        while True:
            since = self._working_since
            self.channel.send({"busy_s": 0.0 if since is None else time.monotonic() - since})
            time.sleep(REPORT_EVERY)

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
        """Work of the engine, whose time is reported; who makes a call has a limit for it."""
        self._working_since = time.monotonic()
        try:
            order(*arguments)
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

    def answer(self, block: Block) -> None:
        arrays: Arrays = {}
        try:
            reply = {"result": encode(self.perform(block), arrays)}
        except SaccadeError as error:
            reply = {"failed": describe_error(error)}
        self.channel.send({**reply, "id": block.row["id"]}, arrays)

    def perform(self, block: Block) -> Any:
        """What is answered to a call."""
        call = block.row["call"]
        return getattr(self if call in ("load", "shutdown") else self.engine, call)(*block.row["arguments"])

    def load(self, offer: Mapping[str, Any], checksums: Mapping[str, int], version: int) -> bool:
        """False: tensors of the trainer cannot be opened here."""
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
            if engine.capabilities().shares_weights:  # with a model that nobody else writes to
                load_by_name(engine.model, source)  # type: ignore[attr-defined]
                require_checksums(engine.model.named_parameters(), checksums)  # type: ignore[attr-defined]
            else:
                require_checksums(source.weights(), checksums)
            engine.update_weights(source, version)
        self._unusable = ""
        return True

    def shutdown(self) -> None:
        self._ended = True


def describe_error(error: SaccadeError) -> dict[str, str]:
    """For the parent, which raises the same."""
    ours = (kind for kind in type(error).__mro__ if kind.__module__ == SaccadeError.__module__)
    return {"kind": next(ours).__name__, "message": str(error)}


def serve(channel: Channel, controller: str | None = None) -> None:
    """Do what the parent asks, or the `controller` on another machine, until it ends."""
    inbox = listen(channel, tied=controller is None)
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
    worker = Worker(engine, channel, controller)
    channel.send({"ready": True})
    threading.Thread(target=worker.report, name="report", daemon=True).start()
    worker.run(inbox)
    engine.close()


if __name__ == "__main__":
    serve(connect(tied=True))
