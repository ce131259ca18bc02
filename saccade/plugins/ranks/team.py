"""Ranks as one engine and one trainer: processes that each hold the models of the run and generate
with the weights they train.

The recipe runs here, in the controller, which is no rank. Requests are distributed as among replicas.
Every other call goes to all ranks at once, because they wait for each other inside it: the first
error of any rank ends all of them.

    team = Team(starters, exits)
    team.ask_all("update_weights", [{"version": 1}] * team.size)
"""

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as LateAnswer
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from saccade.engines import WeightSource
from saccade.errors import RankLost, SaccadeError
from saccade.forest.batch import Batch, Forest
from saccade.plugins.engines.replicas.replica import Died, Replica, tail
from saccade.plugins.engines.replicas.replica_pool import Replicas
from saccade.plugins.ranks.machines import named
from saccade.plugins.ranks.stalls import LOOK_EVERY, Watch
from saccade.system.codec import Arrays, encode
from saccade.system.process import Block
from saccade.types import Completion

STACK_LIMIT = 5.0  # seconds for a process to report its stack
# A call has stalled if it takes STALL_FACTOR times as long per token as the slowest of its kind, and at least
# STALL_LEAST seconds. The first of a kind has the time limit of collectives, because it may compile kernels.
STALL_LEAST, STALL_FACTOR, STALL_FIRST = 60.0, 10.0, 3600.0
WRITE_LIMIT = 24 * 3600.0  # seconds: checkpoints are large, and disks may be slow


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What a rank is started with; plain data, to be sent as JSON."""

    options: Mapping[str, Any]  # of the config, those that are set
    command: str
    folder: str | None  # the checkpoint that the run continues from
    rank: int
    size: int  # how many ranks there are
    port: int  # of the TCP store on the controller's host
    seen: Mapping[str, Any] = field(default_factory=dict)  # the files of the controller: `preflight.look`
    host: str = "127.0.0.1"
    hosts: Sequence[str] = ()  # the machine of each rank

    @property
    def who(self) -> str:
        return named(self.hosts, [self.rank])


class Rank(Replica):
    module = "saccade.plugins.ranks.rank_process"
    silence_limit = 20.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._forests: WeakKeyDictionary[Forest, str] = WeakKeyDictionary()  # held by the rank → name

    def call(self, name: str, arguments: Mapping[str, Any]) -> Future[Block]:
        """Send a call; returns its future answer. A forest of `batches` is sent once, with the files it needs; the rank
        holds it as long as it exists here. Columns and `questions` are sent every time.
        """
        arrays: Arrays = {}
        sent = self._sent(arguments["batches"], arrays) if "batches" in arguments else {}
        if "questions" in arguments:
            sent = {"questions": encode(arguments["questions"], arrays, shared=self._files)}
        try:
            return self.begin(name, {**arguments, **sent}, arrays)
        except Died as death:
            failed: Future[Block] = Future()
            failed.set_exception(death)
            return failed

    def _sent(self, batches: Sequence[Batch], arrays: Arrays) -> dict[str, Any]:
        held, forests, rows = [*self._forests.values()], dict[str, Any](), []
        for number, batch in enumerate(batches):
            forest = batch.forest
            if forest not in self._forests:
                name = f"forest-{next(self._numbers)}"
                row = encode(replace(forest, keys=()), arrays, shared=self._files, name=name)
                self._forests[forest] = name
                forests[name] = {**row, "keys": forest.keys}  # already plain JSON
            columns = {f"{number}/{column}": array for column, array in batch.columns.items()}
            arrays |= columns
            rows.append({"forest": self._forests[forest], "columns": [*columns]})
        return {"batches": rows, "forests": forests, "held": held}


class Team(Replicas):
    """The engines of all ranks. The trainers (`RankTrainer`) use `ask_all`."""

    store: Any = None  # the TCP store of the process group

    def __init__(
        self,
        starters: Sequence[Callable[..., Replica]],
        exits: ExitStack,
        place: Any = None,
        place_workers: Callable[..., None] | None = None,
    ) -> None:
        """`exits`: resources to release after the ranks have ended. `place` starts a replica elsewhere, `place_workers`
        moves reward workers elsewhere; None: they run on this machine.
        """
        self.size, self._exits, self.place = len(starters), exits, place
        self.place_workers = place_workers and partial(place_workers, exits)
        self._end: Exception | None = None  # why the ranks are gone
        self._slowest: dict[tuple[str, ...], float] = {}  # seconds per token, or per call without any
        super().__init__(starters)
        self.hosts: Sequence[str] = self._ready[0].settings.hosts
        self._capabilities = replace(self._capabilities, shares_weights=True)
        self._working, self._ready = self._ready, []

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Each engine uses the weights of its rank, or a whole copy that all ranks fill together."""
        self.ask_all("update_weights", [{"version": version}] * self.size)
        self.version = version

    def ask_all(self, call: str, arguments: Iterable[Mapping[str, Any]]) -> list[Block]:
        """Call all ranks, each with its own arguments; returns their answers in rank order."""
        return self._ask(call, self._alive(), [*arguments])

    def ask_first(self, call: str, **arguments: Any) -> Any:
        """Call only the first rank and return its result; only for calls in which it waits for no other rank."""
        return self._ask(call, self._alive()[:1], [arguments])[0].row["result"]

    def _ask(self, call: str, ranks: Sequence[Rank], arguments: Sequence[Mapping[str, Any]]) -> list[Block]:
        began, kind = time.monotonic(), (call, *(str(arguments[0].get(name)) for name in ("part", "kind")))
        tokens = max(1, *map(_work, arguments))
        slowest = self._slowest.get(kind)
        known = None if slowest is None else STALL_FACTOR * slowest * tokens
        limit = STALL_FIRST if known is None else max(STALL_LEAST, known)
        asked = {rank.call(call, given): rank for rank, given in zip(ranks, arguments, strict=True)}
        watch = Watch(asked, known)
        self._wait(call, asked, watch, limit)
        if any(one.exception() for one in asked if one.done()):
            self._end_all(call, asked, watch)
        self._slowest[kind] = max(slowest or 0.0, (time.monotonic() - began) / tokens)
        return [answer.result() for answer in asked]

    def write(self, arguments: Mapping[str, Any]) -> None:
        """Let all ranks write their files. No rank waits for another, so an error ends none of them. Thread-safe."""
        asked = {rank.call("write", arguments): rank for rank in self._alive()}
        wait(asked, WRITE_LIMIT)
        for answer, rank in asked.items():
            try:
                answer.result(timeout=0)
            except (Died, LateAnswer) as death:
                raise RankLost(f"{rank.settings.who} failed to write: {death}") from None

    def first_address(self) -> str:
        """The address of the first rank's machine; empty if that is this machine."""
        link = self._alive()[0].child.channel.link
        address = link.getpeername()[0] if link.family in (socket.AF_INET, socket.AF_INET6) else ""
        return "" if address in ("127.0.0.1", "::1") else address

    def poll(self) -> list[Completion]:
        self._alive()
        return super().poll()

    def _alive(self) -> list[Any]:
        """The ranks in their order."""
        if self._end is not None:
            raise RankLost(f"the processes of this run have ended: {str(self._end).partition(chr(10))[0]}")
        return sorted(self._working, key=self._places.__getitem__)

    def _wait(self, call: str, asked: Mapping[Future[Block], Rank], watch: Watch, limit: float) -> None:
        """Wait until all ranks have answered, or one has failed; raises RankLost if that will not happen."""
        why = None
        while (found := wait(asked, LOOK_EVERY, return_when=FIRST_EXCEPTION)).not_done:
            if any(one.exception() for one in found.done):
                return
            late = [rank for one, rank in asked.items() if one in found.not_done]
            before, why = why, watch.look()
            if watch.now > limit:
                why = f"{', '.join(rank.settings.who for rank in late)}: no answer for {limit:.0f} s"
            if before and why:  # in two looks in a row, so an error had time to arrive
                raise self._kill_all(RankLost(f"{call} will not end: {why}\n{watch.table()}\n{_stacks(late)}"))

    def _end_all(self, call: str, asked: Mapping[Future[Block], Rank], watch: Watch) -> None:
        """Kill all ranks and raise the first error, with the stacks of the ranks that were still working."""
        failed = [one for one in asked if one.done() and one.exception()]
        one = min(failed, key=lambda one: watch.answered.get(one, watch.now))
        rank, error = asked[one], one.exception()
        assert error is not None
        where = _stacks([rank for one, rank in asked.items() if not one.done()])
        if isinstance(error, SaccadeError):
            error.args = (f"{rank.settings.who}: {error}",)
            raise self._kill_all(error)
        text = f"{rank.settings.who} failed in {call}: {error}\n{tail(rank.log)}\n{where}"
        raise self._kill_all(RankLost(text.rstrip()))

    def _lose(self, engine: Replica, death: Exception) -> None:
        """Kill all ranks, because none can go on without the others, and raise RankLost with their stacks."""
        others = [rank for rank in self._working if rank is not engine]
        text = f"{engine.settings.who} died: {death}\n{tail(engine.log)}\n{_stacks(others)}"
        raise self._kill_all(RankLost(text.rstrip()))

    def close(self) -> None:
        super().close()
        self._exits.close()

    def _kill_all(self, why: Exception) -> Exception:
        self._end = why
        for rank in self._places:
            rank.kill()
        for part in (self._places, self._ready, self._working):
            part.clear()
        return why


def _work(given: Mapping[str, Any]) -> int:
    """The amount of work in a call: tokens, or questions."""
    return sum(len(batch.forest.rows) for batch in given.get("batches", ())) or len(given.get("questions", ()))


def _stacks(ranks: Sequence[Replica]) -> str:
    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        return "\n".join(pool.map(_stack, ranks))


def _stack(rank: Replica) -> str:
    """The stack of the main thread of a rank, or the end of its log."""
    try:
        return f"-- {rank.settings.who} was at:\n{rank.ask('where', limit=STACK_LIMIT)['stack']}"
    except (Died, SaccadeError) as error:
        return f"-- {rank.settings.who} does not say where it is ({error})\n{tail(rank.log)}".rstrip()
