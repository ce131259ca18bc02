"""A run in which nothing moves any more ends, and says where each of its processes is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.errors import TrainingError
from saccade.plugins.watchdog import watchdog
from saccade.recipes import rl
from saccade.run.checkpoint import complete_steps


@pytest.mark.parametrize("wait", ["threading.Event().wait()", "exec('while True: pass')"])
def test_a_reward_that_hangs_ends_the_run_with_the_stacks_of_its_process(rl_config, tmp_path, monkeypatch, wait):
    reward = tmp_path / "hangs.py"
    reward.write_text(
        f"import threading\n\ndef held(sample):\n    if sample.step > 1:\n        {wait}\n    return 1.0\n"
    )
    changes = {"reward.terms": [f"{reward}:held"], "reward.deadline": 600, "reward.self_test": "off"}
    monkeypatch.setattr(watchdog, "BUSY", 2)  # a reward that computes for ever gets longer
    with pytest.raises(TrainingError, match=r"in phase reward_wait in rollout of step 2 with 0 of 16 done") as told:
        rl.run(rl_config(tmp_path) | changes | {"run.stop.stalled": 1.5})
    assert told.value.exit_code == 5 and "run.resume=auto" in str(told.value)
    assert complete_steps(tmp_path / "run" / "checkpoints") == [1]
    stacks = (tmp_path / "run" / "stalled.txt").read_text()
    ours, *others = stacks.split("\n-- process ")[1:]
    assert "rl_rollout.py" in ours and ours.startswith(str(os.getpid()))
    assert any("reward_workers.worker" in one and "hangs.py" in one and "held" in one for one in others), stacks


def test_a_process_that_hears_nothing_is_ended_and_one_that_works_is_not(tmp_path):
    code = """
import hashlib, sys, time
from pathlib import Path
from saccade.plugins.watchdog import watchdog
from saccade.run.console import Console
watchdog.BUSY = 2
with Console("rl", "x") as console, watchdog.Watchdog(console, Path(sys.argv[1]), 0.5):
    end = time.monotonic() + 2
    while time.monotonic() < end:
        time.monotonic()
    print("worked")
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)  # computes in one place, as one that waits for a GPU
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=env)
    assert (ended.returncode, ended.stdout.startswith("worked")) == (5, True), ended
    assert "did not react" in ended.stdout and "phase starting of step 1" in ended.stdout
