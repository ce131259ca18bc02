"""Runs many episodes at once over one engine, in one thread at a time: in the background while the caller trains.

Finished trajectories are passed on immediately, so that rewards are computed while others are generated; groups are
returned in the order of the samples and repeats, whatever finished first. Environments in other processes are polled
between polls of the engine, so nothing blocks on them.

    groups = collect(engine, samples, EpisodeSetup(environment=SingleTurn, …), repeats=8)

A pool holds the episodes of several steps at once. `interrupt` aborts unfinished requests and keeps their tokens; they
continue later, with the weights of that time and the same noise.

    pool = Pool(engine)
    first, second = (pool.start(samples, setup, repeats=8, name=f"{step}|") for step in (1, 2))
    groups = pool.finish(first)
    pool.interrupt()
"""

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from saccade.engines import Engine
from saccade.rollout.env_setup import EnvironmentCall
from saccade.rollout.episode import GREEDY, EpisodeSetup, episode, episode_key
from saccade.types import Completion, Group, Request, Sample, Trajectory

IDLE = 0.02  # seconds between two looks at environments in the background
OnFinish = Callable[[Sample, Trajectory], None]


class Generated(NamedTuple):
    """The completions of one episode: those of finished turns, and the partial one of an interrupted turn."""

    turns: tuple[Completion, ...] = ()
    beginning: Completion | None = None


NOTHING: Mapping[str, Generated] = {}


@dataclass(kw_only=True)
class _Running:
    """One episode. Completions in `replayed` are used up before the engine is asked."""

    episode: Generator[Request | EnvironmentCall, Any, Trajectory]
    replayed: list[Completion]
    turns: list[Completion] = field(default_factory=list)
    beginning: Completion | None = None
    request: Request | None = None


@dataclass(frozen=True, kw_only=True)
class Started:
    """The episodes that one call of `Pool.start` started."""

    samples: Sequence[Sample]
    uids: Sequence[str]
    repeats: int
    setup: EpisodeSetup
    places: Mapping[str, tuple[int, int]]  # by key: index of the sample, repeat
    running: Mapping[str, _Running]  # also finished ones
    done: dict[tuple[int, int], Trajectory]
    on_finish: OnFinish | None

    def generated(self) -> dict[str, Generated]:
        """The completions so far, by key."""
        return {key: Generated(tuple(one.turns), one.beginning) for key, one in self.running.items()}


class Pool:
    def __init__(self, engine: Engine, *, at_once: float = math.inf) -> None:
        """`at_once`: requests of episodes that `finish` is not waiting for are submitted only while the engine has
        fewer requests than this. They fill gaps, so answers of equal length are never sampled ahead.
        """
        self.engine, self.at_once = engine, at_once
        self.awaited: Started | None = None
        self._waiting: deque[str] = deque()  # keys of requests that are held back by `at_once`, oldest first
        self.started: list[Started] = []
        self.calls: dict[str, EnvironmentCall] = {}
        self._owners: dict[str, Started] = {}  # of unfinished episodes
        self._interrupted: set[str] | None = None  # keys of interrupted requests; None: no interruption

    def start(
        self,
        samples: Sequence[Sample],
        setup: EpisodeSetup,
        *,
        repeats: int,
        greedy: bool = False,
        name: str = "",
        generated: Mapping[str, Generated] = NOTHING,
        on_finish: OnFinish | None = None,
        on_limit: OnFinish | None = None,
    ) -> Started:
        """Start `repeats` episodes per sample. A sample that occurs twice gets other noise the second time. With
        `greedy` each group also gets one rollout at temperature 0, its baseline. `name` is the prefix of request keys,
        which must be unique in the pool. Episodes continue after their completions in `generated`. `on_limit` gets
        each episode as the limits in `limits.smaller_turns` would have ended it.
        """
        setups = dict.fromkeys(range(repeats), setup)
        if greedy:
            likeliest = replace(setup.sampling, temperature=0.0, top_p=1.0, top_k=-1, first=None, support=False)
            setups[GREEDY] = replace(setup, sampling=likeliest)
        ids, uids = {sample.id for sample in samples}, dict[str, int]()
        places: dict[str, tuple[int, int]] = {}
        running: dict[str, _Running] = {}
        for index, sample in enumerate(samples):
            uid = sample.id
            if uid in uids:
                uid = next(u for n in count(2) if (u := f"{sample.id}~{n}") not in ids and u not in uids)
            uids[uid] = index
            for repeat, own_setup in setups.items():
                key = f"{name}{episode_key(uid, repeat)}"
                before = generated.get(key, Generated())
                steps = episode(sample, repeat, uid, own_setup, on_limit and partial(on_limit, sample))
                places[key] = (index, repeat)
                running[key] = _Running(episode=steps, replayed=[*before.turns], beginning=before.beginning)
        started = Started(
            samples=samples,
            uids=[*uids],
            repeats=repeats,
            setup=setup,
            places=places,
            running=running,
            done={},
            on_finish=on_finish,
        )
        self.started.append(started)
        self._owners |= dict.fromkeys(places, started)
        for key in places:
            self._advance(key, None)
        return started

    def finish(self, started: Started, progress: Callable[[int, int], None] | None = None) -> list[Group]:
        """Wait for these episodes; returns their groups in the order of the samples. Others continue meanwhile."""
        self.resume()
        self.awaited, complete = started, False
        for key in [key for key in self._waiting if key in started.places]:
            self._waiting.remove(key)
            self._ask(key)
        while not complete:
            self._poll()  # even if all are done: this sends requests of the others to a remote engine
            complete = len(started.done) == len(started.places)
            if progress is not None:
                progress(len(started.done), len(started.places))
            if not complete and self.calls and not self.engine.pending:
                time.sleep(0.001)
        self.started.remove(started)
        self.awaited = None
        return [
            Group(
                sample=sample,
                uid=started.uids[i],
                trajectories=tuple(started.done[i, r] for r in range(started.repeats)),
                greedy=started.done.get((i, GREEDY)),
            )
            for i, sample in enumerate(started.samples)
        ]

    def drain(self) -> None:
        """Wait until all episodes have ended."""
        while self._owners:
            self._poll()
            if self.calls and not self.engine.pending:
                time.sleep(0.001)

    def interrupt(self) -> None:
        """Abort unfinished requests and keep their tokens: the engine is then idle, and weights may change."""
        self._interrupted = {*(self._interrupted or ()), *self._waiting}
        self._waiting.clear()
        for key in self._owners:
            if key not in self.calls and key not in self._interrupted:
                self.engine.abort(key)
        while self.engine.pending:
            self._poll()

    def prefer(self, started: Started) -> None:
        """After an interruption, submit these before all others but the oldest."""
        self.started.remove(started)
        self.started.insert(1, started)

    def resume(self) -> None:
        """Submit interrupted requests again, oldest first."""
        interrupted, self._interrupted = self._interrupted or set(), None
        for key in [key for started in self.started for key in started.places if key in interrupted]:
            self._ask(key)

    @contextmanager
    def polled(self) -> Iterator[None]:
        """In a thread, while the caller trains and leaves pool and engine alone: turns and rewards of unfinished
        episodes are asked for as soon as others end. An error of the thread is raised at the end.
        """
        over, self.engine.weights_move = threading.Event(), True
        try:
            with ThreadPoolExecutor(1, "rollouts") as thread:
                polling = thread.submit(self._poll_until, over)
                try:
                    yield
                finally:
                    over.set()
            polling.result()
        finally:
            self.engine.weights_move = False

    def _poll_until(self, over: threading.Event) -> None:
        while not over.is_set():
            self._poll()
            if not self.engine.pending:
                over.wait(IDLE)

    def _poll(self) -> None:
        for key in [key for key, call in self.calls.items() if call.done()]:
            self._advance(key, self.calls.pop(key).outcome)
        for completion in self.engine.poll() if self.engine.pending else ():
            running = self._owners[completion.key].running[completion.key]
            assert running.request is not None
            whole, running.beginning = _joined(running.beginning, completion), None
            if completion.finish == "aborted" and self._interrupted is not None:
                if len(whole.ids) < running.request.sampling.max_tokens:
                    running.beginning = whole if len(whole.ids) else None
                    self._interrupted.add(completion.key)
                    continue
                whole = replace(whole, finish="length")
            elif len(whole.ids) > len(completion.ids):
                decode = self._owners[completion.key].setup.family.decode
                whole = _until_stop(whole, running.request.sampling.stop, decode)
            self._advance(completion.key, whole)
        while self._waiting and self.engine.pending < self.at_once:
            self._ask(self._waiting.popleft())

    def _advance(self, key: str, value: Any) -> None:
        started = self._owners[key]
        running = started.running[key]
        if isinstance(value, Completion):
            running.turns.append(value)
        try:
            wanted = running.episode.send(value)
        except StopIteration as end:
            trajectory: Trajectory = end.value
        else:
            if not isinstance(wanted, Request):
                self.calls[key] = wanted
                return
            running.request = wanted
            if key != wanted.key:
                running.request = replace(wanted, key=key, episode=wanted.episode and key)
            if running.replayed:
                self._advance(key, running.replayed.pop(0))
            elif self._interrupted is not None:
                self._interrupted.add(key)
            else:
                self._ask(key)
            return
        index, repeat = started.places[key]
        started.done[index, repeat] = trajectory
        del self._owners[key]
        self.engine.release(key)
        if started.on_finish is not None:
            started.on_finish(started.samples[index], trajectory)

    def _ask(self, key: str) -> None:
        """Submit an episode's request, with tokens sampled before an interruption in its prompt; or hold it back."""
        if self.engine.pending >= self.at_once and self._owners[key] is not self.awaited:
            self._waiting.append(key)
            return
        running = self._owners[key].running[key]
        request, before = running.request, running.beginning
        assert request is not None
        if before is not None:
            left = request.sampling.max_tokens - len(before.ids)
            request = replace(
                request,
                ids=np.concatenate([request.ids, before.ids]),
                first_index=request.first_index + len(before.ids),
                sampling=replace(request.sampling, max_tokens=left),
            )
        self.engine.submit(request)


def collect(
    engine: Engine,
    samples: Sequence[Sample],
    setup: EpisodeSetup,
    *,
    repeats: int,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> list[Group]:
    """Run all episodes; returns groups in the order of the samples. Options are those of `Pool.start`."""
    pool = Pool(engine)
    return pool.finish(pool.start(samples, setup, repeats=repeats, **options), progress)


def _joined(beginning: Completion | None, rest: Completion) -> Completion:
    if beginning is None:
        return rest
    pieces, names = [beginning, rest], ("ids", "logprobs", "versions")
    columns: dict[str, Any] = {name: np.concatenate([getattr(c, name) for c in pieces]) for name in names}
    kept = [c.support for c in pieces if len(c.ids)]
    support = None if None in kept else tuple(ids for each in kept for ids in each or ())
    return replace(rest, **columns, support=support)


def _until_stop(whole: Completion, stop: Sequence[str], decode: Callable[[np.ndarray], str]) -> Completion:
    """Cut a resumed completion at a stop string: no engine sees one that began before the interruption."""

    def stopped(length: int) -> bool:
        text = decode(whole.ids[:length])
        return any(each in text for each in stop)

    if not stop or not stopped(len(whole.ids)):
        return whole
    end = bisect_left(range(len(whole.ids)), True, key=lambda index: stopped(index + 1)) + 1
    columns: dict[str, Any] = {name: getattr(whole, name)[:end] for name in ("ids", "logprobs", "versions")}
    return replace(whole, **columns, support=whole.support and whole.support[:end], finish="stop")
