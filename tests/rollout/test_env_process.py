"""Environments and tools of the user live in processes that can be killed one by one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from saccade.config import EnvConfig
from saccade.engines.embedded import EmbeddedEngine
from saccade.errors import ConfigError
from saccade.media.images import decode
from saccade.rollout.env_setup import environments, explanation
from saccade.rollout.episode import Limits
from saccade.types import Message, Sample

ROOT = str(Path(__file__).resolve().parents[2])
WORLD = """
import os, subprocess, time
import numpy as np
from saccade.media.images import open_media
from saccade.types import Message

imported = os.getpid()
seen = []

class World:
    def __init__(self, word="more"):
        self.word, self.turns = word, 0

    def reset(self, sample, seed):
        seen.append(sample.id)
        self.sample = sample
        if sample.id == "no start":
            raise ValueError("no board")
        return sample.messages

    def step(self, message):
        self.turns += 1
        trouble = {"hangs": self.hang, "raises": self.fail, "dies": lambda: os._exit(3)}
        trouble.get(self.sample.id, lambda: None)()
        print("this must not disturb the line")
        info = {"pid": os.getpid(), "host": imported, "seen": list(seen)}
        if self.turns == 3:
            return [], 1.0, True, info | {"end_reason": "answered"}
        frame = open_media(np.full((56, 56, 3), 80 * self.turns, np.uint8))
        return [Message(role="user", parts=(frame, self.word))], 0.5, False, info

    def hang(self):
        while True:
            time.sleep(1)

    def fail(self):
        raise RuntimeError("no world today")

    def close(self):
        pass

class Half:
    def reset(self, sample, seed): pass

class Pictures(World):
    def step(self, message):
        file = f"{os.path.dirname(__file__)}/{self.sample.id}.png"
        frame = open_media(np.full((56, 56, 3), 7, np.uint8))
        with open(file, "wb") as out:
            out.write(frame.data)
        shown = open_media(file)
        if self.sample.id == "vanished":
            os.remove(file)
        self.file = file
        return [Message(role="user", parts=(shown,))], None, False, {}

    def close(self):
        if os.path.exists(self.file):
            os.remove(self.file)

class Starts(World):
    def reset(self, sample, seed):
        subprocess.Popen(["sleep", "777"])
        if os.fork() == 0:
            time.sleep(777)
        return [Message(role="user", parts=(str(os.getpid()),))]

class Slow(World):
    def step(self, message):
        time.sleep(0.4)
        return super().step(message)
"""


@pytest.fixture
def world(tmp_path):
    file = tmp_path / "world.py"
    file.write_text(WORLD)
    return file


def question(name):
    return Sample(id=name, messages=(Message(role="user", parts=("Your move?",)),))


@pytest.fixture
def play(model, family, brief, play_with):
    def played(env, names, **limits):
        asked, make = [question(name) for name in names], environments(env, order=("answer_tag",))
        most = Limits(**{"max_turns": 4} | limits)
        groups = play_with(EmbeddedEngine(model, family), asked, make, limits=most, seed="1")
        return {g.sample.id: g.trajectories[0] for g in groups}

    return played


def test_one_that_hangs_crashes_or_fails_costs_its_own_episode(world, play):
    names = ["a", "hangs", "b", "raises", "dies", "c", "no start"]
    ended = play(EnvConfig(name=f"{world}:World", args={"word": "go"}), names, step_timeout=2.0)
    assert {name: t.end_reason for name, t in ended.items()} == {
        "a": "answered", "b": "answered", "c": "answered", "hangs": "timeout", "raises": "env_error",
        "dies": "env_error", "no start": "env_error",
    }  # fmt: skip
    for name in "abc":
        t = ended[name]
        assert t.turn_rewards == (0.5, 0.5, 1.0) and t.turns == 3 and len(t.media) == 2
        assert t.info["seen"] == [name]  # nothing of other episodes
        assert [m.text for m in t.messages if m.role == "user"] == ["Your move?", "go", "go"]
    assert len({ended[name].info["pid"] for name in "abc"}) == 3
    assert len({ended[name].info["host"] for name in "abc"}) == 1  # imported once
    assert ended["raises"].info["error"].startswith("RuntimeError: no world today (world.py:")
    assert ended["no start"].info["error"].startswith("ValueError: no board (world.py:")
    assert ended["hangs"].info["error"] == "the environment's step took more than 2 s"
    assert ended["dies"].info["error"] == "its process ended during step"
    assert settled("--ppid", str(ended["a"].info["host"])) == []  # also the one that hung


def settled(*which):
    """Live processes; one that was just killed may need a moment."""
    for _ in range(100):
        if not alive(*which):
            break
        time.sleep(0.02)
    return alive(*which)


def alive(*which):
    listed = subprocess.run(["ps", "-o", "stat=", *which], capture_output=True, text=True)
    return [state for state in listed.stdout.split() if not state.startswith("Z")]


def test_pictures_are_read_before_their_files_go(world, play):
    ended = play(EnvConfig(name=f"{world}:Pictures"), ["kept", "vanished"], max_turns=2)
    assert [t.end_reason for t in ended.values()] == ["max_turns", "env_error"]
    (span,) = ended["kept"].media
    assert (decode(span.media) == 7).all() and not (world.parent / "kept.png").exists()
    assert "vanished.png: cannot be read: No such file" in ended["vanished"].info["error"]


KILLED = """
import sys, time
from saccade.config import EnvConfig
from saccade.rollout.env_setup import environments
from saccade.types import Message, Sample

pending = environments(EnvConfig(name=sys.argv[1]), order=())().reset(
    Sample(id="q", messages=(Message(role="user", parts=("?",)),)), 0
)
while not pending.done():
    time.sleep(0.001)
print(pending.outcome[0].text, flush=True)
time.sleep(600)
"""


def test_a_killed_training_leaves_no_process(world):
    command, env = [sys.executable, "-c", KILLED, f"{world}:Starts"], os.environ | {"PYTHONPATH": ROOT}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=env, **streams) as training:
        leader = training.stdout.readline().strip()
        assert len(alive("-s", leader)) == 3  # itself, its fork, its program
        training.send_signal(signal.SIGKILL)
    assert settled("-s", leader) == []


def test_time_adds_up_and_few_processes_serve_many_episodes(world, play):
    ended = play(EnvConfig(name=f"{world}:Slow"), ["a"], timeout=0.5)
    assert ended["a"].end_reason == "timeout" and ended["a"].turns < 4  # no step alone takes that long
    ended = play(EnvConfig(name=f"{world}:World", processes=2), [f"q{n}" for n in range(5)])
    assert {t.end_reason for t in ended.values()} == {"answered"}
    assert len({t.info["pid"] for t in ended.values()}) == 5  # each its own, two at a time


def test_an_environment_that_cannot_be_used_is_refused_at_once(world, tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    for name, reason in {
        f"{world}:Absent": "no function 'Absent'",
        f"{world}:Half": "needs reset, step and close",
        f"{tmp_path}/broken.py:World": "No module named 'nothing_like_this'",
    }.items():
        with pytest.raises(ConfigError, match=reason) as caught:
            environments(EnvConfig(name=name), order=("answer_tag",))
        assert str(caught.value).startswith("env.name=")


TOOLS = '''
import time

def shout(text: str) -> str:
    """Says it louder."""
    if text == "sleep":
        time.sleep(60)
    return text.upper()
'''


def test_tools_of_ones_own_run_there_too(tmp_path, model, family, saying, play_with):
    (tmp_path / "mine.py").write_text(TOOLS)
    env = EnvConfig(name="tools", tools=[f"{tmp_path}/mine.py:shout"])
    assert "- shout: Says it louder; arguments text: str." in explanation(env)
    make = environments(env, order=("answer_tag",))

    def play(*texts, patience=30.0):
        replies = [f'<tool_call>{{"name": "shout", "arguments": {{"text": "{t}"}}}}</tool_call>' for t in texts]
        with saying(*replies, "<answer>7</answer>"):
            limits = Limits(max_turns=4, step_timeout=patience)
            (group,) = play_with(EmbeddedEngine(model, family), [question("q")], make, limits=limits)
        return group.trajectories[0]

    heard = play("hello", "again")
    assert (heard.end_reason, heard.status, heard.turns) == ("answered", "ok", 3)
    assert [m.text for m in heard.messages[1:] if m.role == "user"] == [
        "<tool_response>\nResult of request 1: HELLO\n</tool_response>",
        "<tool_response>\nResult of request 2: AGAIN\n</tool_response>",
    ]
    assert [call["args"] for call in heard.info["tool_calls"]] == [{"text": "hello"}, {"text": "again"}]
    assert play("sleep", patience=0.4).end_reason == "timeout"
    with pytest.raises(ConfigError, match="no function 'whisper'"):
        environments(EnvConfig(name="tools", tools=[f"{tmp_path}/mine.py:whisper"]), order=())


def test_the_example(image):
    file = Path(__file__).resolve().parents[2] / "examples" / "my_environment.py"

    def wait(pending):
        while not pending.done():
            time.sleep(0.001)
        return pending.outcome

    game = environments(EnvConfig(name=f"{file}:Guess", args={"most": 8}), order=())()
    assert wait(game.reset(question("q"), 3))[0].text == "Guess my number between 1 and 8."
    steps = [wait(game.step(Message(role="assistant", parts=(str(n),)))) for n in range(1, 9)]
    rewards = [step.reward for step in steps if step.done]
    assert rewards[0] == 1.0 and not steps[0].done and steps[0].messages[0].text == "It is higher."
    wait(game.close())
    env = EnvConfig(name="crop", tools=[f"{file}:brighten"])
    assert "- brighten: Shows a picture brighter; source is its name" in explanation(env)
    tool = environments(env, order=("answer_tag",))()
    shown = Sample(id="s", messages=(Message(role="user", parts=(image(56, 56, 1),)),))
    wait(tool.reset(shown, 0))
    call = '{"name": "brighten", "arguments": {"source": "original_image"}}'
    said = wait(tool.step(Message(role="assistant", parts=(f"<tool_call>{call}</tool_call>",))))
    assert decode(said.messages[0].media[0]).mean() > 1.3 * decode(shown.media[0]).mean()
    wait(tool.close())
