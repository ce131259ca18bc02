"""Several processes behind one queue: the same results as one engine here, whatever dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from saccade.engines import generate
from saccade.engines.builders import ENGINES
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.engines.replicas import replica
from saccade.plugins.engines.replicas.replica import Replica
from saccade.plugins.engines.replicas.replica_pool import Replicas, placements, start_replicas, visible_gpus
from saccade.recipes import rl
from saccade.types import Request, Sampling
from tests.engines.asked import drain, over_kept_keys
from tests.ranks.processes import Forked, lives

PARENT = """
import json, queue, sys, time
from pathlib import Path
from saccade.engines import Settings
from saccade.plugins.engines.replicas.replica import Replica
settings, events = Settings(**json.loads(sys.argv[1])), queue.SimpleQueue()
engine = Replica(settings, log=Path(sys.argv[2]), events=events)
while engine.child is None:
    time.sleep(0.01)
print(engine.child.popen.pid, flush=True)
time.sleep(600)
"""
LONG = Sampling(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def pool(settings, tmp_path_factory):
    """The first process, and those that cannot start, are started as in a run; others are forked."""
    start, number = Replica.start, count()

    def starting(one):
        return start(one) if next(number) == 0 or "PYTHONHOME" in (one.environment or {}) else Forked(one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "start", starting)
        pool = start_replicas(settings, 2, logs=tmp_path_factory.mktemp("pool"))
        processes = {engine.child.popen.pid for engine in pool._places}
        assert len(processes) == 2 and all(map(lives, processes))
        yield pool
        processes |= {engine.child.popen.pid for engine in pool._places}
        pool.close()
        assert not any(map(lives, processes))


def first_of(pool):
    return next(engine for engine, place in pool._places.items() if place == 0)


def source_of(model):
    return SimpleNamespace(weights=model.named_parameters)


def same(here, there):
    for a, b in zip(here, there, strict=True):
        assert a.key == b.key and a.ids.tolist() == b.ids.tolist() and a.finish == b.finish
        assert a.versions.tolist() == b.versions.tolist()
        assert np.abs(a.logprobs - b.logprobs).max(initial=0) < 1e-5


def test_a_run_over_two_replicas_is_the_run_over_the_embedded_engine(pool, rl_config, tmp_path, numbers, monkeypatch):
    """The first test of this pool: its weights are still those of the folder."""
    asked, closed = [], []

    def start(settings, count, *, logs, team):
        asked.append((settings.folder, settings.dtype, count, logs))
        return pool

    monkeypatch.setitem(ENGINES, "replicas", start)
    monkeypatch.setattr(pool, "close", lambda: closed.append(True))
    for name, replicas in {"here": 0, "there": 2}.items():
        rl.run(rl_config(tmp_path / name, run__max_steps=2, rollout__replicas=replicas))
    folder = tmp_path / "there" / "run"
    assert asked == [(pool._working[0].settings.folder, "float32", 2, folder)] and closed == [True]
    here, there = ([row for row in numbers(tmp_path / name / "run") if row["step"] > 0] for name in ("here", "there"))
    assert len(here) == len(there) == 2
    for one, other in zip(here, there, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {key for key in one if key.startswith("mismatch/")}:
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
        assert other["mismatch/mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert any(row["policy/grad_norm"] > 0 for row in there) and pool.version == 2


def test_two_processes_say_what_one_engine_says_here(pool, load, family, ask):
    sampling = Sampling(temperature=0.9, top_p=0.8, max_tokens=16, stop=("red",), support=True)
    model = load()
    pool.update_weights(source_of(model), version=0)
    here = generate(EmbeddedEngine(model, family), ask(sampling, repeats=6))
    there = generate(pool, ask(sampling, repeats=6))
    same(here, there)
    for a, b in zip(here, there, strict=True):
        kept = [[part.tolist() for part in done.support or ()] for done in (a, b)]
        assert kept[0] == kept[1] != []


def test_equal_prompts_stay_together_until_others_would_idle(pool, ask):
    requests = ask(LONG, repeats=6)
    for request in requests:
        pool.submit(request)
    pool._join()
    pool._hand_out()
    homes = {name: {pool._tasks[r.key].engine for r in requests if r.key[0] == name} for name in "0123"}
    assert all(len(engines) == 1 for engines in homes.values())
    assert set.union(*homes.values()) == set(pool._working)
    for request in requests:
        pool.abort(request.key)
    finish(pool, requests)
    assert not pool._tasks
    many = ask(LONG, repeats=60)[:60]  # one prompt
    for request in many:
        pool.submit(request)
    pool._hand_out()
    spread = Counter(id(pool._tasks[request.key].engine) for request in many)
    assert len(spread) == 2 and max(spread.values()) - min(spread.values()) <= 17
    for request in many:
        pool.abort(request.key)
    finish(pool, many)


def test_only_those_beside_the_trainer_sleep(pool, monkeypatch):
    pool._join()
    slept = []
    monkeypatch.setattr(Replica, "ask", lambda engine, call: slept.append(engine))
    first, second = pool._working
    pool.sleep()
    monkeypatch.setattr(first, "beside_trainer", False)
    pool.sleep()
    assert set(slept[:2]) == {first, second} and slept[2:] == [second]


def finish(pool, requests, early=()):
    """Completions in the order of the requests, each exactly once."""
    done = [*early, *drain(pool)]
    found = {completion.key: completion for completion in done}
    assert len(found) == len(done)
    return [found[request.key] for request in requests]


def test_kill_9_amid_a_rollout_loses_and_doubles_nothing(pool, load, family, ask, changed, said):
    pool.update_weights(changed, version=7)
    engine = EmbeddedEngine(changed.model, family)
    engine.update_weights(changed, version=7)
    undisturbed = generate(engine, ask(LONG, repeats=6))
    victim = pool._working[1]
    requests = ask(LONG, repeats=6)
    for request in requests:
        pool.submit(request)
    early = pool.poll()
    os.kill(victim.child.popen.pid, signal.SIGKILL)
    same(undisturbed, finish(pool, requests, early))
    assert len(said) == 1 and f"{victim.log.stem} died and starts again" in said[0]
    assert " 0 requests wait" not in said[0]
    while len(pool._working) < 2:  # the new one gets the current weights, not those of its folder
        time.sleep(0.05)
        pool.poll()
    assert victim not in pool._working and not lives(victim.child.popen.pid)
    again = generate(pool, requests)
    same(undisturbed, again)
    assert {v for done in again for v in done.versions.tolist()} == {7}


def test_a_process_that_cannot_start_says_why(settings, tmp_path):
    launch = partial(Replica, settings, log=tmp_path / "engine-0.log")
    with pytest.raises(EnvironmentProblem, match="Fatal Python error"):
        Replicas([partial(launch, environment={"PYTHONHOME": "/nowhere"})])


def test_one_that_is_killed_while_it_starts_is_started_again(settings, tmp_path, monkeypatch):
    children, launch = [], partial(Replica, settings, log=tmp_path / "engine-0.log")

    def starting(replica):
        children.append(Forked(replica))
        if len(children) == 1:
            children[0].kill()
        return children[-1]

    monkeypatch.setattr(Replica, "start", starting)
    with closing(Replicas([launch])) as pool:
        assert len(children) == 2 and len(pool._ready) == 1


def test_tensors_of_a_gpu_that_is_not_seen_come_as_files(pool):
    engine, unseen = (
        first_of(pool),
        json.dumps(["GPU-of-another-machine", [2], [1], 0, "torch.float32", [8, 0], 0, False, []]),
    )
    assert engine.direct
    engine.load({"paths": [], "handles": {"w": unseen}}, {}, 1)
    assert not engine.direct
    engine.direct = True


def test_replicas_get_gpus_of_their_own_and_the_trainers_last(monkeypatch):
    def seen(*args, **options):
        return [row["CUDA_VISIBLE_DEVICES"] for row, _ in placements(*args, **options)]

    assert seen(2, 1, ["0"]) == ["0", "0"]
    assert seen(2, 1, ["0", "1", "2"]) == ["1", "2"]
    assert seen(3, 1, ["4", "5", "6"]) == ["5", "6", "4"]
    assert seen(2, 2, list("01234")) == ["1,2", "3,4"]
    assert seen(3, 1, list("012"), also=["0"]) == ["1,0", "2,0", "0"]
    with pytest.raises(ConfigError, match=r"tensor_parallel: 3 GPUs .* 2 can be seen; .*=2"):
        placements(1, 3, ["0", "1"])
    assert [beside for _, beside in placements(3, 1, list("012"))] == [False, False, True]
    assert [beside for _, beside in placements(3, 1, list("0123"), 2)] == [False, False, True]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert visible_gpus("cuda") == ["4", "5", "6"] and visible_gpus("cuda:1") == ["5", "4", "6"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert placements(3, 1, []) == [({"OMP_NUM_THREADS": "2"}, True)] * 3


def test_files_of_media_travel_once_and_again_when_they_were_forgotten(pool, ask, monkeypatch):
    greedy = [replace(r, replica=0) for r in ask(Sampling(temperature=0.0, max_tokens=4), repeats=1)]
    first = [done.ids.tolist() for done in generate(pool, greedy)]
    engine, sent = first_of(pool), []
    send = engine.child.channel.send

    def noted(row, arrays, **options):
        sent.append([name for name in arrays if name.startswith("media/")])
        send(row, arrays, **options)

    monkeypatch.setattr(engine.child.channel, "send", noted)
    for limit in (replica.KEPT_FILES, 1, 1):
        monkeypatch.setattr(replica, "KEPT_FILES", limit)
        assert [done.ids.tolist() for done in generate(pool, greedy)] == first
    assert list(map(len, sent)) == [0, 0, 2] and not engine._files


def test_an_aborted_request_comes_back_and_a_live_episode_goes_on(pool, load, family, ask):
    asked = ask(Sampling(max_tokens=4000, ignore_eos=True), repeats=1)[1]
    pool.submit(asked)
    pool.poll()
    pool.abort(asked.key)
    (done,) = finish(pool, [asked])
    assert done.finish == "aborted" and len(done.ids) < 4000
    short = Sampling(max_tokens=5, ignore_eos=True)
    first = Request(key="e", ids=asked.ids, media=asked.media, sampling=short, episode="e")
    answers, model = {}, load()
    pool.update_weights(source_of(model), version=0)
    for name, one in {"here": EmbeddedEngine(model, family), "there": pool}.items():
        (turn,) = generate(one, [first])
        longer = np.concatenate([first.ids, turn.ids, first.ids[:3]])
        second = Request(key="e", ids=longer, media=first.media, sampling=short, first_index=5, episode="e")
        answers[name] = turn.ids.tolist(), generate(one, [second])[0].ids.tolist()
        one.release("e")
    assert answers["here"] == answers["there"]


def test_weights_change_under_a_sequence_which_keeps_its_keys(pool, load, family, ask, changed):
    before, (asked, *_) = load(), ask(Sampling(max_tokens=4000, ignore_eos=True), repeats=1)
    pool.update_weights(source_of(before), version=0)
    asked = replace(asked, key="long", replica=0)
    pool.submit(asked)
    pool.poll()
    time.sleep(0.1)
    pool.update_weights(changed, version=3)
    after = [replace(request, replica=n) for n, request in enumerate(ask(LONG, repeats=2)[:2])]  # the same prompt
    later = generate(pool, after)
    pool.abort(asked.key)
    (kept,) = finish(pool, [asked])
    assert kept.finish == "aborted" and set(kept.versions.tolist()) == {0}
    old = over_kept_keys(family, (before, before), asked, kept, 1)
    count = int((np.abs(kept.logprobs - old) > 1e-4).argmax())  # tokens before the update
    assert 0 < count < len(kept.ids) - 1
    assert np.abs(kept.logprobs - over_kept_keys(family, (before, changed.model), asked, kept, count)).max() < 1e-4
    recomputed = over_kept_keys(family, (changed.model, changed.model), asked, kept, 1)
    assert np.abs(kept.logprobs - recomputed)[count:].max() > 1e-3
    here = EmbeddedEngine(changed.model, family)
    here.update_weights(changed, version=3)
    same(generate(here, after), later)


def test_weights_with_another_name_are_refused_and_nothing_is_generated(pool, changed, ask, monkeypatch):
    names = [name for name, _ in changed.weights()]
    told = {names[5]: "model.drifted.weight"}
    renamed = SimpleNamespace(weights=lambda: ((told.get(n, n), t) for n, t in changed.weights()))
    with pytest.raises(EnvironmentProblem) as error:
        pool.update_weights(renamed, version=1)
    assert f"missing: {names[5]};" in str(error.value)
    assert "unexpected: model.drifted.weight" in str(error.value)
    with pytest.raises(EnvironmentProblem, match="the last update of weights failed"):
        generate(pool, ask(repeats=1)[:1])
    pool._tasks.clear()  # nobody would go on with this pool
    pool.update_weights(changed, version=1)
    monkeypatch.setattr(changed, "weights", None)
    pool.update_weights(changed, version=1)  # reads none: all have them
    assert {v for done in generate(pool, ask()) for v in done.versions.tolist()} == {1}


def test_what_a_user_can_fix_is_raised_here(pool, ask, family):
    """As in one process, such an error ends a run: this replica does nothing after it."""
    too_long = Sampling(max_tokens=family.max_positions)
    with pytest.raises(ConfigError, match=r"lower rollout\.max_tokens"):
        generate(pool, [replace(ask(too_long, repeats=1)[0], replica=0)])
    pool._tasks.clear()


def test_one_that_no_longer_answers_is_ended_and_endless_deaths_stop_the_run(pool, said, ask, monkeypatch):
    """The last test of this pool: one process is halted, all are killed, and no other can start."""
    broken = partial(pool._launchers[0], environment={"PYTHONHOME": "/nowhere"})
    del said[:]
    halted = first_of(pool)
    halted.silence_limit = 1.0
    os.kill(halted.child.popen.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_launch", lambda place: None)
        assert len(generate(pool, [replace(request, replica=0) for request in ask()])) == 12
    assert not lives(halted.child.popen.pid)
    assert len(said) == 1 and "timed out" in said[0]
    monkeypatch.setattr(pool, "_launchers", [broken, broken])
    for engine in pool._places:
        os.kill(engine.child.popen.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentProblem, match="/nowhere"):
        generate(pool, ask())
    assert len(said) == 7


def test_it_ends_when_its_parent_is_killed(settings, tmp_path):
    """While it is still starting, too."""
    command = [sys.executable, "-c", PARENT, json.dumps(vars(settings)), str(tmp_path / "engine.log")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(child)
    parent.stdout.close()
