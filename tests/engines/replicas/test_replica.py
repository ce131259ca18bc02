"""One engine in a process of its own: what it answers to whom, and that it never stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.engines.replicas import replica
from saccade.engines.replicas.replica import launch
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.types import Request, Sampling

pytestmark = pytest.mark.xdist_group("server")  # the process is started once
PARENT = """
import json, sys, time
from pathlib import Path
from saccade.engines.settings import Settings
from saccade.engines.replicas.replica import Replica
engine = Replica(Settings(**json.loads(sys.argv[1])), log=Path(sys.argv[2]))
while engine.child is None:
    time.sleep(0.01)
threads = Path(f"/proc/{engine.child.popen.pid}/task")
while sys.argv[3] == "watching" and len(list(threads.iterdir())) < 2:
    time.sleep(0.01)
print(engine.child.popen.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def engine(settings, tmp_path_factory):
    engine = launch(settings, log=tmp_path_factory.mktemp("engine") / "engine-0.log")
    yield engine
    engine.close()


def test_it_answers_with_what_the_same_engine_says_in_this_process(engine, load, family, ask):
    """One replica; several are in test_replicas."""
    for sampling in (Sampling(temperature=0.0, max_tokens=12), Sampling(max_tokens=12)):
        here = generate(EmbeddedEngine(load(), family), ask(sampling))
        there = generate(engine, ask(sampling))
        for a, b in zip(here, there, strict=True):
            assert a.key == b.key and a.ids.tolist() == b.ids.tolist() and a.finish == b.finish
            assert np.abs(a.logprobs - b.logprobs).max() < 1e-5
    assert engine.pending == 0


def test_files_of_media_travel_once_and_again_when_they_were_forgotten(engine, ask, monkeypatch):
    greedy = ask(Sampling(temperature=0.0, max_tokens=4), repeats=1)
    first = [done.ids.tolist() for done in generate(engine, greedy)]
    sent, send = [], engine.child.channel.send

    def noted(row, arrays, **options):
        sent.append([name for name in arrays if name.startswith("media/")])
        send(row, arrays, **options)

    monkeypatch.setattr(engine.child.channel, "send", noted)
    for limit in (replica.KEPT_FILES, 1, 1):
        monkeypatch.setattr(replica, "KEPT_FILES", limit)
        assert [done.ids.tolist() for done in generate(engine, greedy)] == first
    assert list(map(len, sent)) == [0, 0, 2] and not engine._files
    assert engine.health()["pending"] == 0 and engine.health()["host_peak_gb"] > 0


def test_a_picture_in_a_spill_file_is_sent(engine, load, family, ask, image, on_disk):
    request = ask(Sampling(temperature=0.0, max_tokens=12), repeats=1)[1]

    def showing(media):  # one that the server has not seen
        return replace(request, media=(replace(request.media[0], media=media),))

    (there,) = generate(engine, [showing(on_disk(image(56, 56, 77)))])
    (here,) = generate(EmbeddedEngine(load(), family), [showing(image(56, 56, 77))])
    assert there.ids.tolist() == here.ids.tolist()
    assert np.abs(there.logprobs - here.logprobs).max() < 1e-5


def test_an_aborted_request_comes_back_and_a_live_episode_goes_on(engine, load, family, ask):
    asked = ask(Sampling(max_tokens=4000, ignore_eos=True), repeats=1)[1]
    engine.submit(asked)
    engine.poll()
    engine.abort(asked.key)
    (done,) = wait_for(engine)
    assert done.finish == "aborted" and len(done.ids) < 4000

    short = Sampling(max_tokens=5, ignore_eos=True)
    first = Request(key="e", ids=asked.ids, media=asked.media, sampling=short, episode="e")
    answers = {}
    for name, one in {"here": EmbeddedEngine(load(), family), "there": engine}.items():
        (turn,) = generate(one, [first])
        longer = np.concatenate([first.ids, turn.ids, first.ids[:3]])
        second = Request(
            key="e",
            ids=longer,
            media=first.media,
            sampling=short,
            first_index=5,
            episode="e",
        )
        answers[name] = turn.ids.tolist(), generate(one, [second])[0].ids.tolist()
        one.release("e")
    assert answers["here"] == answers["there"]


def wait_for(engine) -> list:
    while not (done := engine.poll()):
        pass
    return done


def test_weights_with_another_name_are_refused_and_nothing_is_generated(engine, changed, ask):
    names = [name for name, _ in changed.weights()]
    told = {names[5]: "model.drifted.weight"}
    renamed = SimpleNamespace(weights=lambda: ((told.get(n, n), t) for n, t in changed.weights()))
    with pytest.raises(EnvironmentProblem) as error:
        engine.update_weights(renamed, version=1)
    assert f"missing: {names[5]};" in str(error.value)
    assert "unexpected: model.drifted.weight" in str(error.value)
    with pytest.raises(EnvironmentProblem, match="the last update of weights failed"):
        generate(engine, ask(repeats=1)[:1])
    engine.update_weights(changed, version=1)
    assert engine.health()["version"] == 1
    assert {v for done in generate(engine, ask()) for v in done.versions.tolist()} == {1}


def test_what_a_user_can_mend_is_raised_here(engine, ask, family):
    """The last test of this process: as in one process, such an error ends a run."""
    too_long = Sampling(max_tokens=family.max_positions)
    with pytest.raises(ConfigError, match=r"lower rollout\.max_tokens"):
        generate(engine, ask(too_long, repeats=1)[:1])


@pytest.mark.parametrize("when, how", [("watching", signal.SIGKILL), ("starting", signal.SIGTERM)])
def test_it_ends_when_its_parent_is_killed(settings, tmp_path, servers, when, how):
    order = json.dumps(vars(settings))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, order, str(tmp_path / "engine.log"), when],
        stdout=subprocess.PIPE,
    )
    child = int(parent.stdout.readline())
    assert servers(parent.pid) == {child} or when == "starting"
    os.kill(parent.pid, how)
    parent.wait()
    deadline = time.monotonic() + 60
    while child in servers(0) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert child not in servers(0)
    parent.stdout.close()
