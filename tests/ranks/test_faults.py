"""kill -9 of each process of a run, amid the rollout of its second step: no rollout is lost, and the tokens are those
of a run that nobody disturbed.
"""

import os
import re
import signal
import socket
import threading
import time
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from saccade.checks import check
from saccade.cli import app
from saccade.config import load
from saccade.errors import ConfigError
from saccade.plugins.engines.replicas.replica import Replica
from saccade.plugins.ranks import launchers
from saccade.plugins.ranks.machines import HOST, host_name
from saccade.plugins.ranks.rank_trainer import RankTrainer
from saccade.recipes import rl
from saccade.rollout.scoring import RewardStream
from saccade.run.loggers import read_metrics
from tests.ranks.processes import LIMIT, forked, lives, run_command
from tests.ranks.test_ranks import STORED, sampled

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
    ("rank-1",): (
        f"rank 1 on {host_name()}",
        f"rank 0 on {host_name()} was at",
        ", and run.resume=auto ",  # continues, or starts again if step 1 was still being saved
        "run.restarts: 0 left",
    ),
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
    beside = int("controller" not in victims)  # that a replica ends with its run tests/engines/replicas says
    options = rl_config(tmp_path, run__max_steps=3, save__every=1, run__gpus=2, rollout__replicas=beside) | STORED
    own = {"verifier": f"{tmp_path}/reward.py:nothing", "weight": 0.0}
    options |= {"reward.terms": [*options["reward.terms"], own], "run.restarts": 1, "run.resume": "auto"}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(load(options).model_dump(mode="json", exclude_unset=True)))
    if "controller" in victims:
        ended = forked(run_command, {"environment": {}, "folder": ".", "arguments": ["rl", str(file)]})
        ended.join(LIMIT)
        assert ended.exitcode == -signal.SIGKILL
        require_gone({int(pid) for pid in (tmp_path / "started").read_text().split()})
    left = [] if "controller" in victims else kill_in_step_2(victims, monkeypatch)
    done = CliRunner().invoke(app, ["rl", str(file)], env={"COLUMNS": "300"})
    assert done.exit_code == 0 and not left, done.output
    assert {row["reward/error_rate"] for row in read_metrics(tmp_path / "run") if row["step"]} == {0.0}
    assert all(text in done.output for text in KILLED[victims])
    assert sampled(tmp_path / "run") == undisturbed


def test_a_restart_takes_ranks_that_join_again(undisturbed, tmp_path, rl_config, monkeypatch):
    """As under Slurm: what starts `saccade rank` starts it again until it ends well."""
    with socket.create_server(("", 0)) as free:
        monkeypatch.setattr(launchers, "PORT", free.getsockname()[1])
    options = rl_config(tmp_path, run__max_steps=3, save__every=1, run__gpus=2, run__launcher="join") | STORED
    config = load(options, ["run.restarts=1"])
    with pytest.raises(ConfigError, match=r"run\.restarts: .* needs SACCADE_TOKEN; set it"):
        check(config, "rl")
    monkeypatch.setenv(launchers.TOKEN, "of this run")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    train_step, calls, codes = RankTrainer.train_step, list[int](), list[int]()

    def keep_joining(machine: str) -> None:
        code = None
        while code != 0:
            command = {"folder": ".", "arguments": ["rank", f"127.0.0.1:{launchers.PORT}"]}
            process = forked(run_command, command | {"environment": {HOST: machine}})
            process.join(LIMIT)
            codes.append(code := process.exitcode)

    def killing(self: RankTrainer, *arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            process, *_ = (tmp_path / "run" / "rank-1.log").read_text().removeprefix("process ").split()
            os.kill(int(process), signal.SIGKILL)
        return train_step(self, *arguments, **more)

    monkeypatch.setattr(RankTrainer, "train_step", killing)
    joining = [threading.Thread(target=keep_joining, args=(f"machine-{n}",), daemon=True) for n in range(2)]
    for thread in joining:
        thread.start()
    done = CliRunner().invoke(app, ["rl", str(file)], env={"COLUMNS": "300"})
    assert done.exit_code == 0 and "rank 1 on machine-1 failed in train_step" in done.output, done.output
    for thread in joining:
        thread.join(LIMIT)
    # Where it was, or, if the end of the other has ended it, its last words.
    assert re.search(r'(?s)-- rank 0 on machine-0 (was at|does not say where).*File "', done.output)
    assert sorted(codes)[:2] == [-signal.SIGKILL, 0] and len(codes) == 4
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
    assert len(left) >= 3  # two ranks, a reward worker
    end = time.monotonic() + limit
    while left and time.monotonic() < end:
        left = {pid for pid in left if lives(pid)}
        time.sleep(0.05)
    assert not left
