"""A child can be asked, timed and killed, and never outlives its parent."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from saccade.system.process import Channel, Child, Ended

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
import re, sys, time
from saccade.system.process import Child
child = Child("saccade.plugins.reward_workers.worker")
hangs = {"verifier": sys.argv[1], "args": "{}", "deadline": 600, "apart": False}
child.ask(hangs | {"samples": ['{"id": "a", "response": ""}']}, seconds=60)
print(child.popen.pid, flush=True)
time.sleep(600)
"""
HANGS = """
import re, time
def holds_the_lock(sample): re.match("^(a+)+$", "a" * 60 + "!")  # no other thread runs meanwhile
def sleeps(sample): time.sleep(600)
"""


def pair(**options):
    here, there = socket.socketpair()
    return Channel(here, **options), Channel(there)


def test_blocks_arrive_whole_and_in_order():
    here, there = pair()
    large = np.arange(1 << 20)
    with ThreadPoolExecutor() as threads:
        sent = threads.submit(there.send, {"n": 0}, {"a": large})  # more than the socket holds
        block = here.receive(30)
        sent.result()
    assert block is not None and block.row == {"n": 0} and np.array_equal(block.arrays["a"], large)
    for n in (1, 2):
        there.send({"n": n, "extra": {"x"}})
    assert [here.receive(1).row for _ in (1, 2)] == [{"n": n, "extra": ["x"]} for n in (1, 2)]
    assert here.receive(0) is None and here.receive(0.01) is None
    there.link.close()
    for call in (here.receive, lambda: here.send({})):
        with pytest.raises(Ended, match="its process ended"):
            call()


def test_one_that_does_not_read_or_says_too_much_is_noticed():
    here, there = pair(largest=1 << 20)
    with pytest.raises(TimeoutError, match=r"it read nothing for 0\.1 s"):
        here.send({"x": "x" * (8 << 20)}, seconds=0.1)
    with ThreadPoolExecutor() as threads:
        threads.submit(there.send, {"x": "x" * (2 << 20)}, seconds=5)
        with pytest.raises(Ended, match="it said more than 1 MiB"):
            here.receive(5)
        here.link.close()


def test_an_answer_has_a_deadline_and_an_end_a_code():
    child = Child("saccade.plugins.reward_workers.worker")
    assert child.receive(0.01) is None and child.exit_code() is None
    os.kill(child.popen.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"no answer after 0\.1 s"):
        child.ask({"verifier": "count"}, seconds=0.1)
    os.kill(child.popen.pid, signal.SIGKILL)
    with pytest.raises(Ended):
        child.answer(10)
    assert child.exit_code() == -signal.SIGKILL
    child.close()


@pytest.mark.parametrize("name", ["holds_the_lock", "sleeps"])
def test_a_child_that_hangs_ends_with_its_killed_parent(tmp_path, name):
    (tmp_path / "mine.py").write_text(HANGS)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{tmp_path}/mine.py:{name}"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        assert runs(pid)
        parent.kill()
    for _ in range(200):
        if not runs(pid):
            break
        time.sleep(0.02)
    assert not runs(pid)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
