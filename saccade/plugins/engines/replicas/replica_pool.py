"""Several engines in separate processes behind one queue, as one engine.

A request goes to the replica with the least work; requests with equal prompts stay together, so that
their prompt is computed once, and a live episode stays where its cache is. A replica that dies is
started again and given the current weights; others redo what it had not finished. Results and
sampling noise are keyed by request: nothing is lost or doubled, and in fp32 nothing changes.

    engine = start_replicas(settings, 2, logs=folder)
"""

import itertools
import logging
import os
import queue
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from saccade.engines import Capabilities, Engine, Settings, WeightSource, empty_completion, prompt_key
from saccade.errors import ConfigError, EnvironmentProblem, SaccadeError
from saccade.plugins.engines.replicas.replica import Died, Events, Replica, tail
from saccade.types import Completion, Request

log = logging.getLogger(__name__)

POLL_WAIT = 0.02  # seconds that `poll` may block: the caller also handles signals and environments
AHEAD = 16  # requests that a replica may have more than another, to keep equal prompts together
DEATHS_IN_A_ROW = 3  # per replica, with nothing finished in between
ATTEMPTS = 3  # deaths of replicas that a request may survive; one more ends the run


@dataclass(kw_only=True)
class _Task:
    request: Request
    prompt_key: Any
    engine: Replica | None = None  # that has the task; None: not yet assigned
    attempts: int = 0
    aborted: bool = False

    @property
    def work(self) -> int:
        return len(self.request.ids) + self.request.sampling.max_tokens


class Replicas(Engine):
    def __init__(self, launchers: Sequence[Callable[..., Replica]], *, separate_memory: bool = False) -> None:
        self.version = 0
        self._launchers = launchers
        self._events: Events = queue.SimpleQueue()
        self._places: dict[Replica, int] = {}  # all that run or start → index of the launcher
        self._ready: list[Replica] = []  # started, but without the current weights
        self._working: list[Replica] = []
        self._tasks: dict[str, _Task] = {}
        self._episodes: dict[str, Replica] = {}
        self._finished: list[Completion] = []
        self._source: WeightSource | None = None
        self._checksums: Mapping[str, int] = {}
        self._deaths = 0  # since something was finished
        self._most_deaths = 1  # while starting: one may have been killed; one that cannot start dies again
        try:
            for place in range(len(launchers)):
                self._launch(place)
            while len(self._ready) < len(launchers):
                self._hear(wait=None)
            # An engine may share weights with the model of its process, but that is not the trainer's model.
            placed = {"shares_weights": False, "separate_memory": separate_memory}
            self._capabilities = Capabilities(**self._ready[0].ask("capabilities") | placed)
            self._most_deaths = DEATHS_IN_A_ROW * len(launchers)
        except BaseException:
            self.close()
            raise

    # -- the protocol --

    @property
    def pending(self) -> int:
        return len(self._tasks) + len(self._finished)

    def submit(self, request: Request) -> None:
        assert request.key not in self._tasks, f"request {request.key} was submitted twice"
        self._tasks[request.key] = _Task(request=request, prompt_key=prompt_key(request, request.opening))

    def poll(self) -> list[Completion]:
        serving = not self.pending or any(not task.aborted for task in self._tasks.values())
        if serving and not self.weights_move:
            self._join()  # not while all tasks are being aborted: weights may be about to change
        self._hand_out()
        self._hear(wait=0.0 if self._finished else POLL_WAIT)
        finished, self._finished = self._finished, []
        return finished

    def abort(self, key: str) -> None:
        task = self._tasks.get(key)
        if task is not None and task.engine is not None:
            task.aborted = True
            task.engine.unsent.append(("abort", key))
        elif task is not None:
            self._give_up(key)

    def release(self, episode: str) -> None:
        if (engine := self._episodes.pop(episode, None)) is not None:
            engine.unsent.append(("release", episode))

    def update_weights(self, source: WeightSource, version: int) -> None:
        self._hear(wait=0.0)
        if source is self._source and version == self.version and self._checksums:
            self._join()  # the working replicas have these weights already
            return
        self._source, self.version, self._checksums = source, version, {}
        self._checksums = self._share([*self._working, *self._ready])

    def sleep(self) -> None:
        """Only replicas on the trainer's GPU free memory."""
        self._all([engine for engine in self._working if engine.beside_trainer], lambda engine: engine.ask("sleep"))

    def wake(self) -> None:
        self._all(self._working, lambda engine: engine.ask("wake"))

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def close(self) -> None:
        with ThreadPoolExecutor(max(1, len(self._places))) as pool:
            list(pool.map(Replica.close, self._places))
        for part in (self._places, self._ready, self._working):
            part.clear()

    # -- weights --

    def _share(self, engines: Sequence[Replica]) -> Mapping[str, int]:
        """Send the current weights: the trainer's tensors to engines that can open them, one shared copy to the others.
        Then all `_ready` engines are working. Returns checksums of some tensors.
        """
        from saccade.plugins.engines.weights import shared

        checksums: Mapping[str, int] = {}
        if self._source is not None:
            share = getattr(self._source, "shared", partial(shared, self._source))  # ranks have their own `shared`
            for direct in (True, False):
                those = [engine for engine in engines if engine.direct == direct and engine in self._places]
                if those or not (direct or checksums):  # checksums of this version are needed even without engines
                    with share(turn=self.version, direct=direct) as (offer, checksums):
                        ask = partial(Replica.load, offer=offer, checksums=checksums, version=self.version)
                        self._all(those, ask)
        self._working += self._ready
        self._ready.clear()
        return checksums

    def _join(self) -> None:
        """Send newly started engines the weights that the others have."""
        if self._ready:
            checksums = self._share(self._ready)
            assert checksums == self._checksums, "weights have moved without update_weights"

    # -- scheduling --

    def _hand_out(self) -> None:
        waiting = [task for task in self._tasks.values() if task.engine is None]
        if waiting and self._working:
            work = dict.fromkeys(self._working, 0)
            homes: dict[Any, Replica] = {}
            for task in self._tasks.values():
                if task.engine is not None:
                    work[task.engine] += task.work
                    homes.setdefault(task.prompt_key, task.engine)
            for task in waiting:
                engine = task.engine = self._choose(task, work, homes.get(task.prompt_key))
                work[engine] += task.work
                homes.setdefault(task.prompt_key, engine)
                if task.request.episode is not None:
                    self._episodes[task.request.episode] = engine
                engine.unsent.append(("submit", task.request))
        self._all([engine for engine in self._working if engine.unsent], Replica.flush)

    def _choose(self, task: _Task, work: Mapping[Replica, int], home: Replica | None) -> Replica:
        """`work`: tokens that each may still have to compute; `home`: the engine that has this prompt."""
        if task.request.episode in self._episodes:
            return self._episodes[task.request.episode]
        for engine in work:
            if self._places[engine] == task.request.replica:
                return engine
        least = min(work, key=lambda engine: work[engine])
        near = home is not None and work[home] - work[least] <= AHEAD * task.work
        return home if near else least  # type: ignore[return-value]

    def _give_up(self, key: str) -> None:
        del self._tasks[key]
        self._finished.append(empty_completion(key))

    # -- starts and failures --

    def _launch(self, place: int) -> None:
        self._places[self._launchers[place](events=self._events)] = place

    def _hear(self, *, wait: float | None) -> None:
        """Wait for an event, then handle all that have arrived."""
        while True:
            try:
                engine, event = self._events.get(timeout=wait)
            except queue.Empty:
                return
            wait = 0.0
            if engine not in self._places:
                continue  # a late event of an engine that was given up
            if isinstance(event, str):  # READY
                self._ready.append(engine)
            elif isinstance(event, SaccadeError):
                raise event
            elif isinstance(event, Exception):
                self._lose(engine, event)
            else:
                for completion in event:
                    task = self._tasks.get(completion.key)
                    if task is not None and task.engine is engine:  # else it was assigned to another engine
                        self._finished.append(completion)
                        del self._tasks[task.request.key]
                        self._deaths = 0

    def _all(self, engines: Sequence[Replica], call: Callable[[Replica], Any]) -> None:
        """Call all engines in parallel; `_lose` those that die."""
        if not engines:
            return
        with ThreadPoolExecutor(len(engines)) as pool:
            asked = {engine: pool.submit(call, engine) for engine in engines}
        for engine, answer in asked.items():
            try:
                answer.result()
            except Died as death:
                self._lose(engine, death)

    def _lose(self, engine: Replica, death: Exception) -> None:
        """Start a dead engine again and requeue its tasks; raise if deaths repeat."""
        engine.kill()
        place = self._places.pop(engine)
        for part in (self._ready, self._working):
            if engine in part:
                part.remove(engine)
        self._episodes = {name: e for name, e in self._episodes.items() if e is not engine}
        self._deaths += 1
        mine = [task for task in self._tasks.values() if task.engine is engine]
        for task in mine:
            task.engine, task.attempts = None, task.attempts + 1
            if task.aborted:
                self._give_up(task.request.key)
        attempts = max((task.attempts for task in mine), default=0)
        if attempts > ATTEMPTS or self._deaths > self._most_deaths:
            logs = "\n".join(tail(each.log) for each in (engine, *self._places))
            raise EnvironmentProblem(
                f"{engine.log.stem} died: {death}. It was number {self._deaths} in a row with nothing finished, and "
                f"number {attempts} with the same request. Their logs end:\n{logs}"
            )
        log.warning(f"{engine.log.stem} died and starts again, {len(mine)} requests wait: {death}")
        self._launch(place)


def start_replicas(settings: Settings, count: int, *, logs: Path | None, team: Any = None) -> Replicas:
    """Return one engine over `count` replicas. The launcher of a `team` of ranks starts them if it can; else they run
    on this machine, each with its own GPUs if there are enough besides those that train. They log to engine-N.log in
    `logs`, else in a temporary folder.
    """
    folder = logs or Path(tempfile.mkdtemp(prefix="saccade-engines-"))
    visible: list[str] = []
    if settings.device.startswith("cuda"):
        visible = visible_gpus(settings.device)
        settings = replace(settings, device="cuda")  # the first one that the replica sees
    places: list[dict[str, Any]]
    if team is not None and team.place is not None:
        places = [{"place": partial(team.place, index), "beside_trainer": False} for index in range(count)]
    else:
        also = visible[:1] if settings.engine == "embedded" else []  # the trainer's GPU, to read weights in place
        found = placements(count, settings.tensor_parallel, visible, team.size if team else 1, also=also)
        places = [{"environment": environment, "beside_trainer": beside} for environment, beside in found]
    launchers = [partial(Replica, settings, log=folder / f"engine-{n}.log", **place) for n, place in enumerate(places)]
    return Replicas(launchers, separate_memory=not visible or not any(place["beside_trainer"] for place in places))


def placements(
    replicas: int, each: int, visible: Sequence[str], training: int = 1, *, also: Sequence[str] = ()
) -> list[tuple[dict[str, str], bool]]:
    """Returns for every replica its environment variables, and whether it shares memory with the trainer.
    It gets `each` GPUs of its own if there are enough; the first `training` ones, which train, are assigned
    last. Without GPUs replicas share the cores. All see the GPUs in `also`, listed after their own.
    """
    if not visible:
        threads = max(1, (os.cpu_count() or 1) // replicas)
        return [({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}, True)] * replicas
    if each > len(visible):
        why = f"{each} GPUs for one engine, and {len(visible)} can be seen"
        raise ConfigError(f"rollout.tensor_parallel: {why}; try rollout.tensor_parallel={len(visible)}")
    busy = visible[:training]
    endless = itertools.cycle([*visible[training:], *busy])
    given = [list(itertools.islice(endless, each)) for _ in range(replicas)]
    seen = [",".join(dict.fromkeys([*gpus, *also])) for gpus in given]
    beside = [not set(busy).isdisjoint(gpus) for gpus in given]
    return [({"CUDA_VISIBLE_DEVICES": names}, shared) for names, shared in zip(seen, beside, strict=True)]


def visible_gpus(trainer: str) -> list[str]:
    """The names of the GPUs as in CUDA_VISIBLE_DEVICES, that of the device `trainer` first."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = named.split(",") if named else list(map(str, range(torch.cuda.device_count())))
    first = torch.device(trainer).index or 0
    return [every[first], *every[:first], *every[first + 1 :]]
