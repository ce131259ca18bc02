"""What stops a run on several GPUs before weights are read: other code, other files, ranks that do not come."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from saccade.config import load
from saccade.errors import EnvironmentProblem, RankLost
from saccade.models.families import load_family
from saccade.plugins import doctor
from saccade.plugins.imitation.imitation_sources import teacher_of
from saccade.plugins.ranks import connections, launchers, preflight, ray_cluster, starts
from saccade.plugins.ranks.rank_process import within_memory
from saccade.plugins.ranks.rank_rewards import RankReward
from saccade.plugins.reward_models.reward_model_term import LearnedTerms
from saccade.recipes import model_setup
from saccade.rewards.reward_sample import RewardSample
from saccade.run.messages import shown_by
from saccade.system.process import Channel, Ended
from saccade.types import Message
from tests.ranks.processes import LIMIT, forked


def test_an_edited_file_changes_the_hash_of_the_code(tmp_path: Path) -> None:
    source = Path(preflight.__file__).parent
    shutil.copytree(source, tmp_path / "ranks")
    assert preflight.code_hash(tmp_path / "ranks") == preflight.code_hash(source)
    with (tmp_path / "ranks" / "divided.py").open("a") as file:
        file.write("\n")
    assert preflight.code_hash(tmp_path / "ranks") != preflight.code_hash(source)


def come(port: int, token: str = "t", host: str = "near", code: str = "") -> None:
    """A process that belongs to a run, until it is told something; one of them then halts."""
    versions = preflight.versions() | ({"code": code} if code else {})
    about = {"host": host, "pid": os.getpid(), "local": 0, "versions": versions}
    channel = Channel(socket.create_connection(("127.0.0.1", port)))
    connections.introduce(channel, token, about | {"machine": connections.same_processes()})
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_machine_with_other_code_is_refused_by_name() -> None:
    with connections.Reception(0, "t", preflight.versions()) as meeting:
        for options in ({}, {"host": "far", "code": "0123456789ab"}):
            threading.Thread(target=suppressed, args=(meeting.port,), kwargs=options, daemon=True).start()
        with pytest.raises(
            EnvironmentProblem, match=r"far has .*'code': '0123456789ab'.*, this machine .*; install alike"
        ):
            meeting.arrivals("t", 2)


def suppressed(*given: Any, **options: Any) -> None:
    with suppress(Ended):
        come(*given, **options)


def test_a_run_and_its_processes_prove_themselves_and_one_that_is_halted_ends_with_its_link(tmp_path: Path) -> None:
    """No side sends the token."""
    with connections.Reception(0, "t", preflight.versions()) as meeting:
        with pytest.raises(Ended, match="its process ended"):
            come(meeting.port, "of another run")
        process = forked(come, meeting.port)
        (came,) = meeting.arrivals("t", 1)
        link = connections.Link(came, "a module", tmp_path / "log")
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        link.close()
        process.join(LIMIT)
        assert process.exitcode == -signal.SIGKILL

    def pretend(link: socket.socket, address: Any) -> None:
        """To be the run."""
        channel = Channel(link)
        channel.receive()
        channel.send({"nonce": "0"})
        said.append(channel.receive())
        channel.send({"module": "os", "cwd": "/", "log": "/", "proof": ""})

    said: list[Any] = []
    with connections.accepting(0, pretend) as port, pytest.raises(Ended, match="does not know the token"):
        come(port, "a secret")
    assert "a secret" not in str(said)


def test_ranks_that_do_not_come_or_have_the_gpu_of_another_one_are_named() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("gpu-1", "")
    with pytest.raises(EnvironmentProblem, match=r"^rank 0 on a, rank 2 on c did not come within 0\.2 s"):
        preflight.meet(store, "abc", limit=0.2)
    others = TCPStore("127.0.0.1", store.port, is_master=False)
    threading.Timer(0.2, lambda: [others.set(f"gpu-{rank}", "") for rank in (0, 2)]).start()
    assert preflight.meet(store, "abc", limit=30) == []
    for rank, gpu in enumerate(("node-1 a", "node-1 b", "node-1 a", "node-2 a")):
        store.set(f"gpu-{rank}", gpu)
    assert preflight.meet(store, "abcd") == [0, 2]
    store.set("gpu-3", "")
    with pytest.raises(EnvironmentProblem, match=r"^rank 3 on d sees no GPU, others do"):
        preflight.meet(store, "abcd")


def test_a_machine_with_other_files_is_refused(tmp_path: Path, family_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SEEN_LIMIT", 0.1)
    model, logs, rows = tmp_path / "model", tmp_path / "run", tmp_path / "rows.jsonl"
    shutil.copytree(family_of("qwen2_5_vl").path, model)
    logs.mkdir()
    rows.write_text("")
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").touch()
    named = ("rows.jsonl:few@train", "rewards.py:of", "run", "a/b")
    options = dict(zip(("data.train", "algorithm.advantage", "run.name", "model.train"), named, strict=True))
    seen = preflight.look(load(options), str(model), logs)
    assert seen["paths"] == [*map(str, (model, rows, tmp_path / "rewards.py"))]  # run.name is none
    preflight.require_seen(seen, 0)
    assert [path.name for path in logs.iterdir()] == [preflight.MARK]
    rows.unlink()
    with pytest.raises(EnvironmentProblem, match=r"rows\.jsonl is not there; all machines must see the same paths"):
        preflight.require_seen(seen, 0)
    rows.touch()
    (logs / preflight.MARK).write_text("of another run")
    with pytest.raises(EnvironmentProblem, match=r"run\.out: .* is another folder here"):
        preflight.require_seen(seen, 0)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(EnvironmentProblem, match=r"model\.path: .*/model has other weights than that of the run"):
        preflight.require_seen(seen, 0)


def test_a_gpu_without_room_for_weights_is_refused(
    tmp_path: Path, sft_config: Any, word_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "free_gpu_bytes", lambda device: 2**20)
    with pytest.raises(EnvironmentProblem, match=r"0\.0 GiB of the GPU are free, .* `nvidia-smi` shows it"):
        preflight.require_room(Path(word_model), 2**21, torch.device("cuda"))
    monkeypatch.setattr(model_setup, "device_of", lambda config: torch.device("cuda"))
    config = load(sft_config(tmp_path) | {"sft.teacher": word_model, "model.dtype": "float32"}, command="sft")
    with pytest.raises(EnvironmentProblem, match=r"sft\.teacher lies beside .* a smaller one, or train\.offload=true"):
        teacher_of(config, load_family(word_model))


def test_a_first_sum_that_never_returns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the set-up of nccl does where a machine cannot be reached."""
    monkeypatch.setattr(preflight.dist, "all_reduce", lambda number: threading.Event().wait())
    with pytest.raises(EnvironmentProblem, match=r"on cpu failed \(no answer for 0\.1 s\); .* set GLOO_SOCKET_IFNAME"):
        preflight.require_sum(torch.device("cpu"), limit=0.1)


class Machines:
    """As much of Ray as reserves places: GPUs that are left, and cores enough."""

    def __init__(self, gpus: int) -> None:
        self.gpus, self.util = gpus, self

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 99.0, "GPU": float(self.gpus), "memory": 1e9}

    available_resources = cluster_resources

    def placement_group(self, bundles: list[dict[str, int]], strategy: str) -> Any:
        ready = sum(bundle.get("GPU", 0) for bundle in bundles) <= self.gpus
        return SimpleNamespace(wait=lambda seconds: ready)

    def remove_placement_group(self, group: Any) -> None: ...


@pytest.mark.parametrize(
    ("options", "left", "found"),
    [
        ("rollout.replicas=8", 8, "run.gpus=4 rollout.replicas=4"),
        ("rollout.replicas=8 run.min_gpus=8", 9, "run.gpus=8 rollout.replicas=1"),
        ("rollout.replicas=8", 3, "run.gpus=2 rollout.replicas=1"),
        ("rollout.replicas=8", 2, "no room for run.gpus=2 rollout.replicas=1; its machines have"),
        ("train.sequence_parallel=4", 7, "run.gpus=4"),
        ("", 0, "no room for run.gpus=2; its machines have"),  # and none without a GPU
        ("run.device=cpu", 0, "run.gpus=8"),
    ],
)
def test_a_restart_takes_the_gpus_that_are_left(
    options: str, left: int, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Machines(16)
    monkeypatch.setattr(ray_cluster, "_cluster", lambda held: cluster)
    given = f"run.out={tmp_path} run.name=r run.gpus=8 run.launcher=ray run.restarts=1 run.min_gpus=2 {options}".split()
    config = load({"model.path": "m"}, given)
    ray_cluster._gpus_of_a_rank(cluster, config.run.device, tmp_path / "r")  # as the run begins
    cluster.gpus = left
    with pytest.raises(RankLost, match=found) if "no room" in found else nullcontext():
        assert ray_cluster.gpus_left(config, "rl") == found


def test_a_ray_cluster_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "JOIN_LIMIT", 0.0)
    monkeypatch.setattr(ray_cluster, "_cluster", lambda held: Machines(2))
    settings: Any = SimpleNamespace(size=8, options={})
    said = r"run\.gpus=8 needs 8 cores and 8 GPUs of .* no room; free: {'CPU': 99\.0, 'GPU': 2\.0}"
    with pytest.raises(EnvironmentProblem, match=said), ExitStack() as exits:
        ray_cluster.ray(settings, [], tmp_path, exits, launchers.OwnEngines(0, 1))


def test_a_full_gpu_is_no_rank_that_died() -> None:
    """It would be full again: so nothing starts again, whoever finds that out."""
    with (
        pytest.raises(EnvironmentProblem, match=r"^rank-1: .* 260 MiB; `saccade estimate` shows") as raised,
        within_memory("rank-1: "),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 260 MiB. GPU 0 has")

    said = Message(role="user", parts=("how many",))
    nothing: Any = None
    reward = RankReward("folder", nothing, nothing)
    reward.team = cast("Any", SimpleNamespace(size=1, ask_all=Mock(side_effect=raised.value)))
    learned = LearnedTerms(lambda path: reward)
    learned.models["folder"] = reward
    learned.submit({"path": "folder"}, RewardSample(id="", response="4", asked=(said,), replied=(said,)))
    with pytest.raises(EnvironmentProblem, match=r"^rank-1: .* 260 MiB") as scoring:
        learned.flush()
    assert raised.type is scoring.type is EnvironmentProblem


def test_doctor_lets_ranks_meet(
    tmp_path: Path, family_of: Any, forked_ranks: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    kept = partial(tmp_path.glob, "saccade-doctor-*")

    def ranks(gpus: int) -> doctor.Finding:
        given = {"model.path": family_of("qwen2_5_vl").path, "run.out": str(tmp_path), "run.gpus": gpus}
        return next(found for found in doctor.examine(load(given)) if found.name == "ranks")

    def looking(*given: Any) -> Any:
        logging.getLogger("saccade").info("looking")
        return preflight.look(*given)

    monkeypatch.setattr(starts, "look", looking)
    with shown_by(print):
        doctor.run(load({"run.out": str(tmp_path), "run.gpus": 2}), as_json=True)
    said = capsys.readouterr()
    (found,) = [row["text"] for row in json.loads(said.out)["findings"] if row["name"] == "ranks"]
    assert re.fullmatch(r"2 of \S+ meet, see the same files and sum over gloo, \S+ GB/s", found), found
    assert "looking" in said.err and not any(kept())
    row = ranks(999)
    assert row.status == "failure" and row.text.endswith("cores; try run.gpus=2") and not any(kept())

    monkeypatch.setattr(starts, "look", lambda *given: preflight.look(*given) | {"weights": "other"})
    row, (logs,) = ranks(2), kept()
    assert re.match(r"(?s)rank .*has other weights than that of the run; .*all logs are in \S+$", row.text), row
    assert row.text.endswith(str(logs)) and (logs / "rank-1.log").is_file()

    (row,) = doctor.look("ranks", Mock(side_effect=RuntimeError("because" * 1000 + " of this")))
    assert row.text.startswith("RuntimeError: because") and row.text.endswith(" of this") and len(row.text) < 5000
