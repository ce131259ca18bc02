"""Many episodes at once over one engine, in one thread.

Finished trajectories are handed on at once, so that rewards are computed while others still
generate; the groups come back in the order of the samples and repeats, whatever finished first.
Nobody waits for an environment in another process: it is asked between two looks at the engine.

    groups = collect(engine, samples, Play(environment=SingleTurn, …), repeats=8)
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from saccade.engines import Engine
from saccade.rollout.env_setup import EnvironmentCall
from saccade.rollout.episode import GREEDY, Play, episode, episode_key
from saccade.types import Group, Request, Sample, Trajectory

OnFinish = Callable[[Sample, Trajectory], None]


def collect(
    engine: Engine,
    samples: Sequence[Sample],
    play: Play,
    *,
    repeats: int,
    greedy: bool = False,
    on_finish: OnFinish | None = None,
    on_mark: OnFinish | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Group]:
    """Groups in the order of the samples; one that occurs twice gets other noise the second time.
    With `greedy` each group also gets one rollout at temperature 0, its baseline. `on_mark` gets
    episodes as a limit of turns among `limits.marks` would have ended them.
    """
    plays = dict.fromkeys(range(repeats), play)
    if greedy:
        likeliest = replace(play.sampling, temperature=0.0, top_p=1.0, top_k=-1, first=None, support=False)
        plays[GREEDY] = replace(play, sampling=likeliest)
    occurrence: Counter[str] = Counter()
    owners: dict[str, tuple[int, int]] = {}
    episodes: dict[str, Generator[Request | EnvironmentCall, Any, Trajectory]] = {}
    uids = []
    for index, sample in enumerate(samples):
        occurrence[sample.id] += 1
        uid = sample.id if occurrence[sample.id] == 1 else f"{sample.id}~{occurrence[sample.id]}"
        uids.append(uid)
        for repeat, how in plays.items():
            key = episode_key(uid, repeat)
            owners[key] = (index, repeat)
            episodes[key] = episode(sample, repeat, uid, how, on_mark and partial(on_mark, sample))
    done: dict[tuple[int, int], Trajectory] = {}
    calls: dict[str, EnvironmentCall] = {}

    def advance(key: str, value: Any) -> None:
        try:
            wanted = episodes[key].send(value)
        except StopIteration as end:
            trajectory: Trajectory = end.value
        else:
            if isinstance(wanted, Request):
                engine.submit(wanted)
            else:
                calls[key] = wanted
            return
        done[owners[key]] = trajectory
        engine.release(key)
        if on_finish is not None:
            on_finish(samples[owners[key][0]], trajectory)

    for key in episodes:
        advance(key, None)
    while engine.pending or calls:
        for key in [key for key, call in calls.items() if call.done()]:
            advance(key, calls.pop(key).outcome)
        for completion in engine.poll() if engine.pending else ():
            advance(completion.key, completion)
        if progress is not None:
            progress(len(done), len(owners))
        if calls and not engine.pending:
            time.sleep(0.001)
    return [
        Group(
            sample=sample,
            uid=uids[i],
            trajectories=tuple(done[i, r] for r in range(repeats)),
            greedy=done.get((i, GREEDY)),
        )
        for i, sample in enumerate(samples)
    ]
