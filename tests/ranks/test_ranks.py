"""A recipe over several ranks: the tokens and numbers of one process, and what happens when a rank dies."""

import ctypes
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import load
from saccade.engines import Settings
from saccade.errors import ConfigError, EnvironmentProblem, RankLost
from saccade.models.load import load_model
from saccade.plugins.engines.replicas import replica, replica_process
from saccade.plugins.preferences import dpo
from saccade.plugins.ranks import launchers, ray_cluster, team
from saccade.plugins.ranks.connections import Arrival, Link, introduce
from saccade.plugins.ranks.loss_codec import decode_loss, encode_loss
from saccade.plugins.ranks.machines import host_name
from saccade.plugins.ranks.rank_trainer import RankTrainer, outline
from saccade.plugins.reward_models import reward_training
from saccade.plugins.reward_models.reward_card import read_card
from saccade.plugins.reward_models.reward_losses import StepsLoss, steps_objective
from saccade.recipes import rl, sft
from saccade.run.loggers import read_metrics
from saccade.system.process import Channel, Ended, listen
from tests.ranks import forked_command
from tests.ranks.processes import LIMIT, forked, forked_commands, lives

ROOT = Path(__file__).parents[2]
OF_THE_MACHINE = ("mem/", "time/", "perf/")
# Else the first steps of Adam blow up rounding: they move every weight by about the learning rate.
STABLE = {"train.eps": 1e-3}
STORED = STABLE | {"track.trajectories_every": 1, "track.trajectories_groups": 4}


def require_alike(ours: Path, theirs: Path, *, noise: tuple[int, str] | None = None, near: float = 1e-5) -> None:
    """The same metrics in every step, up to the order of sums. `noise`: a step and a metric that sums decide."""
    for mine, other in zip(*(read_metrics(run / "metrics.jsonl") for run in (ours, theirs)), strict=True):
        names = {name for name in mine if not name.startswith(OF_THE_MACHINE)}
        assert names == {name for name in other if not name.startswith(OF_THE_MACHINE)}
        for name in names - {name for step, name in filter(None, [noise]) if step == mine["step"]}:
            wanted = None if other[name] is None else pytest.approx(other[name], rel=near, abs=near / 10, nan_ok=True)
            assert mine[name] == wanted, (mine["step"], name)


def sampled(run: Path) -> list[Any]:
    """The tokens of every rollout."""
    files = sorted((run / "trajectories").glob("step-*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(row["id"], row["sample"], [part.get("ids") for part in row["segments"]]) for row in rows]


def require_same_weights(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, theirs[name], atol=5e-6, err_msg=name)


@pytest.fixture(scope="module")
def recipe(rl_config):
    """Forests with and without pictures, a reference, an average, two updates a step."""
    more = {"algorithm.kl.coef": 0.05, "train.updates_per_step": 2, "train.ema": 0.5, "save.every": 1, "save.keep": 4}
    return lambda folder, **options: rl_config(folder, **options) | more | STORED


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    rl.run(recipe(folder, run__name="one"))
    return folder / "one"


@pytest.fixture(scope="module")
def two(recipe, tmp_path_factory):
    """Ranks of torchrun."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.create_server(("", 0)) as free:
        port, token = free.getsockname()[1], {launchers.TOKEN: "of this run"}
    started = [*(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"), forked_command.__file__]
    with (
        pytest.MonkeyPatch.context() as patch,
        forked_commands() as where,
        subprocess.Popen([*started, "rank", f"127.0.0.1:{port}"], env=os.environ | token | where) as ranks,
    ):
        patch.setattr(launchers, "PORT", port)
        patch.setenv(*token.popitem())
        rl.run(recipe(folder, run__name="two", run__gpus=2, run__launcher="join"))
    assert ranks.returncode == 0
    return folder / "two"


def test_two_ranks_have_the_tokens_the_numbers_and_the_weights_of_one_process(two, alone, tensors):
    assert sampled(two) == sampled(alone)
    require_alike(two, alone)
    assert all(1.0 <= row["perf/imbalance"] < 2.0 for row in read_metrics(two))
    for place in ("", "state/ema"):
        require_same_weights(*(tensors(run / "checkpoints" / "step-4" / place) for run in (two, alone)))


def test_a_run_goes_from_two_ranks_to_one_and_back_and_starts_again_when_one_is_halted(
    recipe, alone, two, tmp_path, tensors, monkeypatch, forked_ranks
):
    def options(**more: Any) -> dict[str, Any]:
        return recipe(tmp_path, run__name="on", run__resume="auto", **more)

    rl.run(options(run__max_steps=1, run__gpus=2))
    files = [run / "checkpoints" / "step-1" / "model.safetensors" for run in (tmp_path / "on", two)]
    assert files[0].read_bytes() == files[1].read_bytes()  # the same ranks give the same bits
    rl.run(options(run__max_steps=2))
    train_step, calls = RankTrainer.train_step, []
    # Each time in step 3. In the first call of its kind, which may take an hour, a process that says nothing is seen,
    # in the second one that takes too long.
    limits = {1: {"Rank.silence_limit": 4.0}, 3: {"STALL_LEAST": 1.0, "STALL_FACTOR": 0.0}}

    def halting(self: RankTrainer, *arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:  # what cannot be written ends no rank
            with pytest.raises(EnvironmentProblem, match="/nowhere/model"):
                dict(self.model_files())[""](Path("/nowhere/model"))
        with monkeypatch.context() as patch:
            for name, seconds in limits.get(len(calls), {}).items():
                patch.setattr(f"{team.__name__}.{name}", seconds)
                patch.setattr(team, "STACK_LIMIT", 3.0)
                os.kill(max(self.engine._places, key=self.engine._places.get).child.popen.pid, signal.SIGSTOP)
            return train_step(self, *arguments, **more)

    monkeypatch.setattr(RankTrainer, "train_step", halting)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(load(options()).model_dump(mode="json", exclude_unset=True)))
    done = CliRunner().invoke(app, ["rl", str(file), "run.gpus=2", "run.restarts=2"], env={"COLUMNS": "300"})
    assert done.exit_code == 0 and len(calls) == 7, done.output
    first, second = (f"rank {rank} on {host_name()}" for rank in range(2))
    stalled = (f"{first}, {second}: no answer for 1 s", f"{second} does not say where")
    silent = f"{second} failed in train_step: timed out: it said nothing for 5 s"
    assert done.output.count(f"-- {first} was at") == 2
    for text in (silent, "step 2 is saved in", *stalled, "run.restarts: 0 left"):
        assert text in done.output
    assert sampled(tmp_path / "on") == sampled(alone)
    require_alike(tmp_path / "on", alone)
    require_same_weights(*(tensors(run / "checkpoints" / "step-4") for run in (tmp_path / "on", alone)))


class Slow:
    """An engine whose steps never end and whose calls are slow."""

    def __init__(self, channel: Channel, *, pending: bool) -> None:
        self.channel, self.pending = channel, pending

    def poll(self) -> None:
        self.channel.send({"ready": True})
        threading.Event().wait()

    def wake(self) -> str:
        time.sleep(2.5)
        return "awake"


def serve_slowly(link: socket.socket, kind: str) -> None:
    channel = Channel(link)
    inbox = listen(channel)
    replica_process.REPORT_EVERY = 1.5  # the parent looks every second, sometimes in vain
    for _ in range(2):  # what to run, and with which settings
        inbox.get()
    workers = replica_process.reporting(channel)
    if kind == "stops while it loads":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP)
    workers.append(worker := replica_process.Worker(Slow(channel, pending=kind == "hangs"), channel))  # type: ignore[arg-type]
    if kind != "hangs":
        channel.send({"ready": True})
    worker.run(inbox)


@pytest.mark.parametrize("kind", ["hangs", "is slow", "stops while it loads"])
def test_an_engine_that_hangs_is_ended_while_a_call_is_open_and_a_long_call_is_no_hang(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(replica, "STEP_LIMIT", 0.5)
    monkeypatch.setattr(replica, "LOAD_SILENCE", 1.5)
    monkeypatch.setattr(replica.Replica, "silence_limit", 2.0)
    here, there = socket.socketpair()
    came = Arrival(channel=Channel(here), host="", local=0, pid=0, versions={}, machine="")
    monkeypatch.setattr(replica.Replica, "start", lambda self: Link(came, self.module, self.log))
    with there:
        process = forked(serve_slowly, there, kind)
    events: replica.Events = queue.SimpleQueue()
    engine = replica.Replica(
        Settings(engine="embedded", folder="", dtype="float32"), log=tmp_path / "engine.log", events=events
    )
    if kind == "stops while it loads":
        assert str(events.get(timeout=LIMIT)[1]) == "timed out: it said nothing for 2.5 s"
        process.kill()
        return
    assert events.get(timeout=LIMIT) == (engine, replica.READY)
    asked = engine.begin("wake", ())
    if kind == "hangs":
        assert str(events.get(timeout=LIMIT)[1]).startswith("its engine has not moved for")
        assert isinstance(asked.exception(timeout=LIMIT), replica.Died)
    else:
        time.sleep(0.3)  # so that the thread which hears the engine waits, then gets no turn for longer than its limit
        ctypes.PyDLL(None).usleep(3_500_000)
        assert asked.result(timeout=LIMIT).row["result"] == "awake" and events.empty()
    engine.kill()
    process.join(LIMIT)


def test_a_critic_and_adapters_on_two_ranks(tmp_path, rl_config, tensors, forked_ranks):
    ppo = {"algorithm.preset": ["ppo"], "algorithm.kl.coef": 0.05, "model.train": "lora", "model.lora.rank": 4}
    for name, gpus in {"one": 1, "two": 2}.items():
        rl.run(rl_config(tmp_path, run__name=name, run__gpus=gpus, run__max_steps=2) | ppo | STORED)
    assert sampled(tmp_path / "two") == sampled(tmp_path / "one")
    require_alike(tmp_path / "two", tmp_path / "one")
    last = [tmp_path / name / "checkpoints" / "step-2" for name in ("two", "one")]
    require_same_weights(*(tensors(folder / "adapter") for folder in last))
    assert (last[0] / "state" / "critic" / "weights.safetensors").is_file()


def test_learned_rewards_are_scored_by_the_ranks(tmp_path, rl_config, forked_ranks):
    """With the scores of one process. Ranks hold the model; its card is refused where the run begins."""
    learned = {"verifier": "model", "weight": 0.5, "args": {"path": "tiny:qwen2_vl"}}
    for name, gpus in {"one": 1, "two": 2}.items():
        options = rl_config(tmp_path, run__name=name, run__gpus=gpus, run__max_steps=2) | STORED
        rl.run(options | {"reward.terms": [*options["reward.terms"], learned]})
    assert sampled(tmp_path / "two") == sampled(tmp_path / "one")
    require_alike(tmp_path / "two", tmp_path / "one")
    assert read_metrics(tmp_path / "two")[-1]["reward/model"] != 0
    with pytest.raises(ConfigError, match="has no head 'taste'; it has preference"):
        strange = learned | {"args": {"path": "tiny:qwen2_vl", "head": "taste"}}
        rl.run(options | {"run.name": "three", "reward.terms": [strange]})


RECIPES = {"sft": sft, "teacher": sft, "dpo": dpo, "reference before": dpo, "reward model": reward_training}
SHARING = {"reward model": {"train.layout": "sharded"}}  # of two ranks
SHARING["teacher"] = SHARING["reward model"] | {"train.sequence_parallel": 2}


@pytest.mark.parametrize("kind", RECIPES)
def test_training_on_rows_on_two_ranks(tmp_path, sft_config, scenes, word_model, kind, tensors, forked_ranks):
    """Preferences: the right number over another one, measured on held-out pairs."""
    config, recipe = sft_config(tmp_path) | STABLE | {"run.max_steps": 2}, RECIPES[kind]
    if kind == "teacher":
        config |= {"sft.teacher": word_model, "sft.kd_coef": 0.3}
    if recipe is not sft:
        rows = [json.loads(line) for line in (scenes / "train.jsonl").read_text().splitlines()]
        pairs = [row | {"chosen": row["answer"], "rejected": "none"} for row in rows]
        (scenes / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        config |= {"data.train": str(scenes / "pairs.jsonl"), "prompt.format": "direct"}
        config |= {"data.val": str(scenes / "pairs.jsonl"), "val.every": 2}
        config |= {"reward_model.loss": "hps", "reward_model.probe_layer": 0} if kind == "reward model" else {}
        config |= {"dpo.reference": "compute"} if kind == "dpo" else {}
    for name, gpus in {"one": 1, "two": 2}.items():
        config |= {"run.out": str(tmp_path / name), "run.gpus": gpus, "run.resume": "auto"}
        if kind == "reward model":  # which goes on with its head
            recipe.run(config | {"run.max_steps": 1})
        recipe.run(config | (SHARING.get(kind, {}) if gpus == 2 else {}))
    runs = [tmp_path / name / "run" for name in ("two", "one")]
    require_alike(*runs, noise=(1, "dpo/accuracy"))  # the policy is its reference: margins are rounding
    last = [run / "checkpoints" / "step-2" for run in runs]
    require_same_weights(*map(tensors, last))
    if kind == "reward model":
        cards = [asdict(read_card(folder)) for folder in last]
        found, wanted = (card.pop("statistics")["preference"] for card in cards)
        assert found == pytest.approx(wanted, rel=1e-5)
        assert cards[0] == cards[1] and cards[0]["statistics_step"] == 2


def test_the_steps_of_a_process_travel_as_json():
    loss = StepsLoss(labels={"a": np.array([[1.0, 0.0], [0.2, 0.8]])}, count=2, tokens=(5, 6))
    again = decode_loss(json.loads(json.dumps(encode_loss(loss))), None)
    logits = torch.tensor([[0.3, -0.1], [0.5, 0.7]])
    batch = SimpleNamespace(keys=[("a", 0)])
    assert [float(steps_objective(one, logits, batch)[0]) for one in (loss, again)] == [pytest.approx(0.57557706)] * 2


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen2_audio"])  # of no auto class
def test_the_controller_has_the_names_and_shapes_of_the_model_of_ranks(kind, family_of):
    family = family_of(kind)
    empty = outline(load({"model.path": family.path}), family, torch.float32)
    loaded = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    found, wanted = ({name: weight.shape for name, weight in one.named_parameters()} for one in (empty, loaded))
    assert found == wanted and {weight.device.type for weight in empty.parameters()} == {"meta"}


def test_more_gpus_than_there_are_are_refused(tmp_path, rl_config, monkeypatch):
    monkeypatch.setattr("saccade.plugins.ranks.starts.pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("saccade.plugins.ranks.starts.visible_gpus", lambda trainer: ["0"])
    with pytest.raises(ConfigError, match=r"run\.gpus: 2, and 1 can be seen; try run\.gpus=1"):
        rl.run(rl_config(tmp_path, run__gpus=2))
    with pytest.raises(ConfigError, match=r"vllm needs processes beside run\.gpus; try rollout\.replicas=1"):
        rl.run(rl_config(tmp_path, run__gpus=2, rollout__engine="vllm"))


# What the scripts find on the machines of a job; here each process of Slurm has a machine of its own.
COMMANDS = {
    "saccade": f'exec {sys.executable} -S {Path(__file__).with_name("forked_command.py")} "$@"',
    "hostname": "echo 127.0.0.1",
    "srun": """trap 'kill $(jobs -p)' TERM
        for n in 0 1 2; do SACCADE_HOST=machine-$n SLURM_LOCALID=0 "$@" & done; wait""",
    "ray": f"""exec {sys.executable} -c "import ray.scripts.scripts as ray
ray.get_ray_client_dependency_error = lambda: 'a server that no run needs'; ray.main()" "$@" \\
        --num-cpus=1 --no-monitor --include-log-monitor=false""",
    "ssh": 'shift; SACCADE_HOST=machine-1 exec "$@"',
}


FEWER = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}  # processes of Ray
# No processes that wait for tasks, and machines whose end is noticed within a second.
QUICK_RAY = dict.fromkeys(("RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart"), "0")
QUICK_RAY |= {"RAY_health_check_period_ms": "300", "RAY_health_check_failure_threshold": "2"}
QUICK_RAY |= {"RAY_worker_niceness": "0"}  # 15 would leave a task what other tests leave of the cores


def run_script(name: str, folder: Path, options: dict[str, Any], **environment: str) -> None:
    """One of examples/, on this machine."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(load(options).model_dump(mode="json", exclude_unset=True)))
    for command, line in COMMANDS.items():
        (folder / command).write_text(f"#!/bin/bash\n{line}\n")
        (folder / command).chmod(0o755)
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    started = ["bash", ROOT / "examples" / name, file]
    with (
        forked_commands() as where,
        subprocess.Popen(started, env=os.environ | environment | where, start_new_session=True) as script,
    ):
        try:
            assert script.wait() == 0
        finally:  # else its loops outlive a test that is ended
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)


def test_processes_that_ray_starts_on_two_machines(tmp_path, recipe, alone):
    pytest.importorskip("ray")
    options = recipe(tmp_path, run__name="on", run__max_steps=1, run__gpus=2)
    run_script("ray.sh", tmp_path, options, NODES="machine-1", RAY_PORT=f"{26_000 + os.getpid() % 1000}", **QUICK_RAY)
    assert sampled(tmp_path / "on") == sampled(alone)[:16]


# Ends the worker in the first step, once.
ENDS_ITSELF = """
import os, signal
def nothing(sample):
    if sample.step == 1 and not os.path.exists("{folder}/ended"):
        open("{folder}/ended", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0
"""


@pytest.fixture
def ray_machines(monkeypatch):
    """A cluster of two, with three cores each; ranks of its tasks are forked here. And what ends the second."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(ray_cluster, "run_rank", forked_command.rank)
    with forked_commands() as where, ExitStack() as ending:
        for name, value in (QUICK_RAY | where).items():
            monkeypatch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3} | FEWER)
        ending.callback(cluster.shutdown)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        far = cluster.add_node(num_cpus=3)

        def lose() -> None:
            raylet = psutil.Process(far.all_processes["raylet"][0].process.pid)
            for process in raylet.children(recursive=True):
                process.kill()
            cluster.remove_node(far, allow_graceful=False)

        yield lose


def test_ray_replaces_an_engine_and_a_run_goes_on_without_a_machine_that_is_lost(
    ray_machines, tmp_path, recipe, alone, monkeypatch
):
    """Four ranks, an engine and a reward worker beside them; for two ranks and another engine there is room on one
    machine. The worker kills itself and is replaced; then it has no room, and stays with the run. Before: two ranks
    train while an engine runs a step ahead.
    """
    beside = {"run__gpus": 2, "run__launcher": "ray", "rollout__replicas": 1, "rollout__ahead": 1}
    rl.run(recipe(tmp_path, run__name="ahead", run__max_steps=3, **beside))
    ages = [row["data/staleness_max"] for row in read_metrics(tmp_path / "ahead") if "data/staleness_max" in row]
    stored = sampled(tmp_path / "ahead")
    assert (ages, len(stored), len({row[0] for row in stored})) == ([0, 1, 1], 48, 12)
    assert "process " in (tmp_path / "ahead" / "engine-0.log").read_text()
    train_step, calls = RankTrainer.train_step, list[int]()

    def disturbing(self: RankTrainer, *arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            process, *_ = (tmp_path / "on" / "engine-0.log").read_text().removeprefix("process ").split()
            os.kill(int(process), signal.SIGKILL)
        if len(calls) == 4:  # the last update of step 2
            ranks = [rank.child._process.pid for rank in self.engine._places]
            ray_machines()
            while all(map(lives, ranks)):  # this process has forked them: they end a while after their machine
                time.sleep(0.05)
        return train_step(self, *arguments, **more)

    monkeypatch.setattr(RankTrainer, "train_step", disturbing)
    monkeypatch.setattr(ray_cluster, "WORKERS_LIMIT", 1.0)
    options = recipe(tmp_path, run__name="on", run__max_steps=3, run__gpus=4, rollout__replicas=1)
    (tmp_path / "reward.py").write_text(ENDS_ITSELF.format(folder=tmp_path))
    own = {"verifier": f"{tmp_path}/reward.py:nothing", "weight": 0.0}
    options |= {"reward.terms": [*options["reward.terms"], own], "reward.workers": 1}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(load(options).model_dump(mode="json", exclude_unset=True)))
    more = ["run.launcher=ray", "run.restarts=1", "run.min_gpus=2"]
    for task, kind, why in (
        (forked_command.broken, EnvironmentProblem, "no such disk"),
        (forked_command.lost, RankLost, "died"),  # a restart may help
    ):
        with monkeypatch.context() as patch, pytest.raises(kind, match=rf"(?s)Ray: .*{why}") as raised:
            patch.setattr(ray_cluster, "run_rank", task)
            rl.run(load(options, [more[0], "run.gpus=2", "rollout.replicas=0", f"run.name={task.__name__}"]))
        assert raised.type is kind
    done = CliRunner().invoke(app, ["rl", str(file), *more], env={"COLUMNS": "300"})
    saved = re.search(r"step (\d) is saved in", done.output)  # when the machine was lost: later ones are repeated
    assert done.exit_code == 0 and saved and len(calls) == 4 + 2 * (3 - int(saved[1])), done.output
    for text in ("engine-0 died and starts again", "now with run.resume=auto run.gpus=2 rollout.replicas=1"):
        assert text in done.output
    with pytest.raises(
        RankLost, match=r"run\.min_gpus: .* no room for run\.gpus=4 rollout\.replicas=1; its machines have .*'CPU': 3"
    ):
        ray_cluster.gpus_left(load(options, ["run.min_gpus=4"]), "rl")
    assert (tmp_path / "on" / "engine-0.log").read_text().count("process ") == 3
    assert (tmp_path / "on" / "rewards-0.log").read_text().count("process ") == 2
    assert "reward.workers=1: the Ray cluster has no room for 1 cores beside those of the run" in done.output
    assert {row["reward/error_rate"] for row in read_metrics(tmp_path / "on") if row["step"]} == {0.0}
    assert sampled(tmp_path / "on") == sampled(alone)[:48]


# Ends the engine in the first step.
ENDING = """
import os, signal
def nothing(sample):
    if sample.step == 1 and not os.path.exists("{folder}/ended"):
        process, *_ = open("{folder}/on/engine-0.log").read().removeprefix("process ").split()
        open("{folder}/ended", "w").close()
        os.kill(int(process), signal.SIGKILL)
    return 0.0
"""


def test_processes_that_slurm_starts(tmp_path, recipe, alone):
    """Two ranks, each with all weights, and an engine that gets them over the network and is started again when it is
    killed; a stranger who knocks first is turned away.
    """
    (tmp_path / "reward.py").write_text(ENDING.format(folder=tmp_path))
    options = recipe(tmp_path, run__name="on", run__max_steps=2) | {"train.layout": "hybrid", "run.gpus": 2}
    own = {"verifier": f"{tmp_path}/reward.py:nothing", "weight": 0.0}
    options |= {"reward.terms": [*options["reward.terms"], own], "reward.workers": 1}
    job, refused = os.getpid() % 1000, list[Ended]()
    threading.Thread(target=knock, args=(28_400 + job, refused), daemon=True).start()
    run_script("slurm.sh", tmp_path, options, SLURM_JOB_ID=f"{job}", SLURM_NTASKS="3", REPLICAS="1")
    assert len(refused) == 1 and (tmp_path / "on" / "engine-0.log").read_text().count("process ") == 2
    here = sampled(tmp_path / "on")
    assert len(here) == 32 and here == sampled(alone)[:32]


def knock(port: int, refused: list[Ended]) -> None:
    stranger = Channel(launchers._connected("127.0.0.1", port))
    try:
        introduce(stranger, "of another run", {})
    except Ended as error:
        refused.append(error)
