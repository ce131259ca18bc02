"""kill -9 of each process of a run, amid the rollout of its second step: no rollout is lost, and the tokens are those
of a run that nobody disturbed.
"""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import load
from saccade.plugins.engines.replicas.replica import Replica
from saccade.recipes import rl
from saccade.rollout.scoring import RewardStream
from saccade.run.loggers import read_metrics
from tests.ranks.test_ranks import ROOT, STORED, sampled

# A reward that ends its parent, the run, once, and says what this had started.
ENDING = """
import os, psutil, signal
def nothing(sample):
    found = "{folder}/started"
    if sample.step == 2 and not os.path.exists(found):
        run = psutil.Process(os.getppid())
        with open(found, "w") as file:
            file.write(" ".join(str(one.pid) for one in run.children(recursive=True)))
        run.send_signal(signal.SIGKILL)
    return 0.0
"""
# What is killed, and what is said of it.
KILLED = {
    ("rank-1",): ("rank-1", "run.restarts: 0 left"),
    ("engine-0", "reward worker"): ("engine-0 died and starts again",),
    ("controller",): (),
}


@pytest.fixture(scope="module")
def undisturbed(rl_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    rl.run(rl_config(folder, run__max_steps=3) | STORED)
    return sampled(folder / "run")


@pytest.mark.parametrize("victims", KILLED, ids=", ".join)
def test_a_run_survives_the_end_of_any_of_its_processes(
    victims, undisturbed, tmp_path, rl_config, monkeypatch, forked_ranks
):
    """One replica generates, two ranks train, a worker computes a reward of the user."""
    (tmp_path / "reward.py").write_text(
        ENDING.format(folder=tmp_path) if "controller" in victims else "def nothing(sample): return 0.0\n"
    )
    options = rl_config(tmp_path, run__max_steps=3, save__every=1, run__gpus=2, rollout__replicas=1) | STORED
    own = {"verifier": f"{tmp_path}/reward.py:nothing", "weight": 0.0}
    options |= {"reward.terms": [*options["reward.terms"], own], "run.restarts": 1, "run.resume": "auto"}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(load(options).model_dump(mode="json", exclude_unset=True)))
    if "controller" in victims:
        command = [sys.executable, "-m", "saccade", "rl", str(file)]
        ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
        assert ended.returncode == -signal.SIGKILL
        require_gone({int(pid) for pid in (tmp_path / "started").read_text().split()})
    left = [] if "controller" in victims else kill_in_step_2(victims, monkeypatch)
    done = CliRunner().invoke(app, ["rl", str(file)], env={"COLUMNS": "300"})
    assert done.exit_code == 0 and not left, done.output
    assert {row["reward/error_rate"] for row in read_metrics(tmp_path / "run") if row["step"]} == {0.0}
    assert all(text in done.output for text in KILLED[victims])
    assert sampled(tmp_path / "run") == undisturbed


def kill_in_step_2(victims: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When its first rollout has finished. Returns those that are not killed yet."""
    start, submit = Replica.start, RewardStream.submit
    processes: dict[str, int] = {}
    left = [*victims]

    def starting(replica: Replica) -> Any:
        child = start(replica)
        processes[replica.log.stem] = child.popen.pid
        return child

    def killing(stream: RewardStream, *arguments: Any) -> None:
        submit(stream, *arguments)
        if stream.step == 2 and left:
            for child in psutil.Process().children():
                if "saccade.plugins.reward_workers.worker" in child.cmdline():
                    processes["reward worker"] = child.pid
            while left:
                os.kill(processes[left.pop()], signal.SIGKILL)

    monkeypatch.setattr(Replica, "start", starting)
    monkeypatch.setattr(RewardStream, "submit", killing)
    return left


def require_gone(left: set[int], limit: float = 30.0) -> None:
    assert len(left) >= 4  # two ranks, a replica, a reward worker
    end = time.monotonic() + limit
    while left and time.monotonic() < end:
        left = {pid for pid in left if lives(pid)}
        time.sleep(0.05)
    assert not left


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
