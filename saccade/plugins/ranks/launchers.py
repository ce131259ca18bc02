"""How ranks are started: as processes of this machine, as tasks of a Ray cluster, or by whoever runs
`saccade rank` under Slurm, torchrun or by hand.

A rank that is started elsewhere connects to the controller, and each proves to the other that it knows the token of the
run. From then on it is talked to as a local one is. Only Ray's own call is pickled.

    SACCADE_TOKEN=... saccade rank node-1:28400
"""

import itertools
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

from torch import distributed

from saccade.config import Config
from saccade.errors import ConfigError, EnvironmentProblem, RankLost
from saccade.models.load import pick_device
from saccade.plugins.engines.replicas.replica import Replica
from saccade.plugins.engines.replicas.replica_pool import placements, visible_gpus
from saccade.plugins.ranks import placed_workers
from saccade.plugins.ranks.connections import (
    HELLO_LIMIT,
    JOIN_LIMIT,
    Arrival,
    Link,
    Reception,
    introduce,
    same_processes,
)
from saccade.plugins.ranks.layouts import generates
from saccade.plugins.ranks.machines import host_name
from saccade.plugins.ranks.placed_workers import move_workers
from saccade.plugins.ranks.preflight import MARK, code_hash, look, meet
from saccade.plugins.ranks.team import Rank, RankSettings, Team
from saccade.plugins.reward_workers.pool import WorkerPool
from saccade.system.process import Channel, Ended

log = logging.getLogger(__name__)

PORT = int(os.environ.get("SACCADE_PORT", "28400"))  # where `saccade rank` connects to
REPLACE_LIMIT = 60.0  # seconds for whoever takes the place of a replica, then it is said once more that one is missing
LEFT_LIMIT = 60.0  # seconds until Ray has noticed that a machine is gone
WORKERS_LIMIT = 30.0  # seconds until Ray has cores for reward workers
SERVED = (Replica.module, Rank.module, placed_workers.__name__)  # what a process that connects may become
COMPARED = ("torch", "transformers")
TOKEN = "SACCADE_TOKEN"


class Beside(NamedTuple):
    """Engines that generate beside the ranks."""

    replicas: int
    gpus: int  # of each


Starter = Callable[..., Replica]
Place = Callable[[int, Replica], Any]  # starts the process of a replica with this number, and returns the link to it


class Places(NamedTuple):
    ranks: list[Starter]
    replicas: Place | None = None  # beside them; None: processes of this one
    workers: Callable[..., None] | None = None  # has those of a pool of rewards started elsewhere; None: as they are


def local(settings: RankSettings, visible: Sequence[str], logs: Path, held: ExitStack, beside: Beside) -> Places:
    """A process for each GPU of this machine; without GPUs they share the cores."""
    if visible and len(visible) < settings.size:
        seen = len(visible)
        raise ConfigError(f"run.gpus: {settings.size}, and {seen} can be seen; try run.gpus={seen}")
    most = 4 * (os.cpu_count() or 1)
    if not visible and settings.size > most:
        raise ConfigError(f"run.gpus: {settings.size} processes on {os.cpu_count()} cores; try run.gpus=2")
    # `placements` gives the first GPU away last.
    places = placements(settings.size, 1, [*visible[-1:], *visible[:-1]])
    settings = replace(settings, hosts=[host_name()] * settings.size)
    threads = max(1, (os.cpu_count() or 1) // settings.size)
    inside = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    inside |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return Places(
        [
            partial(Rank, replace(settings, rank=rank), log=logs / f"rank-{rank}.log", environment=seen | inside)
            for rank, (seen, _) in enumerate(places)
        ]
    )


def join(settings: RankSettings, visible: Sequence[str], logs: Path, held: ExitStack, beside: Beside) -> Places:
    """Whoever connects, in the order of hosts: first ranks, then replicas. One more may take the place of a replica."""
    if beside.replicas and beside.gpus > 1:
        gpus = f"{beside.gpus} GPUs for one engine, and `saccade rank` has one"
        raise ConfigError(f"rollout.tensor_parallel: {gpus}; try rollout.tensor_parallel=1, or run.launcher=ray")
    given = os.environ.get(TOKEN)
    token = given or secrets.token_hex(16)
    try:
        reception = held.enter_context(Reception(PORT, token, versions()))
    except OSError as error:
        raise EnvironmentProblem(
            f"run.launcher=join: port {PORT} cannot be opened ({error.strerror}); set SACCADE_PORT to another"
        ) from None
    shown, count = "..." if given else token, settings.size + beside.replicas
    command = f"{TOKEN}={shown} saccade rank {socket.gethostname()}:{PORT}"
    log.info(f"waiting for {count} processes: run `{command}` once for each GPU")
    came = reception.arrivals(token, count)
    if not beside.replicas:
        reception.refuse(token)
    for one in came[settings.size :]:
        reception.expected[token].put(one)

    def replica_at(number: int, replica: Replica) -> Link:
        if reception.expected[token].empty():
            log.info(f"{replica.log.stem} waits for a process: run `{command}` once more")
        return _linked(reception.arrivals(token, 1, limit=REPLACE_LIMIT)[0], replica)

    return Places(_ranks(came[: settings.size], settings, logs), replica_at)


def ray(settings: RankSettings, visible: Sequence[str], logs: Path, held: ExitStack, beside: Beside) -> Places:
    """Tasks of the cluster that `ray status` shows, or of one that is started here."""
    cluster = _cluster(held)
    device = settings.options.get("run", {}).get("device", "auto")
    gpus = _bundles(settings.size, beside, _gpus_of_a_rank(cluster, device, logs.absolute()))
    group = _reserve(cluster, gpus, held)
    if not group.wait(JOIN_LIMIT):
        free = cluster.available_resources()
        raise EnvironmentProblem(
            f"{_options(settings.size, beside)}: the Ray cluster has no room for that, free are {free}"
        )
    token = secrets.token_hex(16)
    reception = held.enter_context(Reception(0, token, versions()))
    address = f"{cluster.util.get_node_ip_address()}:{reception.port}"

    def start(group: Any, bundle: int, token: str, gpu: int = 0) -> Any:
        place = cluster.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)
        options: Any = {"num_gpus": gpu, "num_cpus": 1, "max_retries": 0, "scheduling_strategy": place}
        return cluster.remote(_rank_of_ray).options(**options).remote(address, token)

    def arrived(tasks: Sequence[Any], token: str, limit: float = JOIN_LIMIT) -> list[Arrival]:
        def failed() -> None:
            """No process will come of a task that is over. An error of its own will come again, the end of its machine
            will not.
            """
            for task in cluster.wait([*tasks], num_returns=1, timeout=0)[0]:
                try:
                    cluster.get(task)
                except Exception as error:  # whatever the task raised, and what Ray says of a process that is gone
                    own = isinstance(error, cluster.exceptions.RayTaskError)
                    text = f"a process ended before all had connected: Ray: {error}"
                    raise (EnvironmentProblem if own else RankLost)(text) from None

        try:
            return reception.arrivals(token, len(tasks), limit=limit, failed=failed)
        except EnvironmentProblem:
            for task in tasks:  # one that still waits for a machine must not start later, and be refused
                cluster.cancel(task)
            raise

    def one(limit: float, group: Any, bundle: int, gpu: int = 0) -> Arrival:
        reception.expected[own := secrets.token_hex(16)] = queue.SimpleQueue()
        try:
            return arrived([start(group, bundle, own, gpu)], own, limit)[0]
        finally:
            reception.refuse(own)

    begun = set[int]()

    def replica_at(number: int, replica: Replica) -> Link:
        limit, bundle = REPLACE_LIMIT if number in begun else JOIN_LIMIT, settings.size + number
        begun.add(number)
        return _linked(one(limit, group, bundle, gpus[bundle]), replica)

    def workers(held: ExitStack, pool: WorkerPool, count: int) -> None:
        """A core for each, on as many machines as there are. Where the cluster has no room they stay."""
        own = _reserve(cluster, [0] * count, held, "SPREAD")
        if not own.wait(WORKERS_LIMIT):
            there = f"the Ray cluster has no room for {count} cores beside those of the run"
            log.warning(f"reward.workers={count}: {there}; they stay on the machine of the run")
            cluster.util.remove_placement_group(own)
            return
        numbers = itertools.cycle(range(count))
        module = placed_workers.__name__
        move_workers(pool, lambda: Link(one(REPLACE_LIMIT, own, -1), module, logs / f"rewards-{next(numbers)}.log"))

    came = arrived([start(group, rank, token, gpus[rank]) for rank in range(settings.size)], token)
    return Places(_ranks(came, settings, logs), replica_at, workers)


def _cluster(held: ExitStack) -> Any:
    import ray as cluster

    if not cluster.is_initialized():
        held.callback(cluster.shutdown)
        quiet: Any = {"log_to_driver": False, "configure_logging": False}
        try:
            cluster.init(address="auto", **quiet)
        except ConnectionError:
            cluster.init(address="local", include_dashboard=False, **quiet)
    return cluster


@cache
def _gpus_of_a_rank(cluster: Any, device: str, run: Path) -> int:
    """As when the run in this folder began, because no GPU may be left; none where neither this machine nor the cluster
    has any, or the config wants none.
    """
    if device == "cpu":
        return 0
    return 1 if pick_device(device).type == "cuda" or cluster.cluster_resources().get("GPU") else 0


def _bundles(ranks: int, beside: Beside, gpu: int) -> list[int]:
    """GPUs of each process."""
    return [gpu] * ranks + [gpu * beside.gpus] * beside.replicas


def _options(ranks: int, beside: Beside) -> str:
    return f"run.gpus={ranks}" + f" rollout.replicas={beside.replicas}" * bool(beside.replicas)


def _reserve(cluster: Any, gpus: Sequence[int], held: ExitStack, strategy: str = "PACK") -> Any:
    """A core and so many GPUs for each process, full machines first."""
    group = cluster.util.placement_group([{"CPU": 1} | ({"GPU": n} if n else {}) for n in gpus], strategy=strategy)
    held.callback(cluster.util.remove_placement_group, group)
    return group


LAUNCHERS = {"local": local, "join": join, "ray": ray}


def start_team(config: Config, command: str, *, model: str, folder: str | None, logs: Path) -> Team:
    """Ranks that have met. They log into `logs`, which all machines must see, and so they must the `model`; `folder` is
    the checkpoint to continue from.
    """
    device, here = pick_device(config.run.device), config.run.launcher == "local"
    listening = socket.create_server(("127.0.0.1" if here else "", 0))
    port = listening.getsockname()[1]
    store = distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    settings = RankSettings(
        options=config.model_dump(mode="json", exclude_unset=True),
        command=command,
        folder=folder,
        rank=0,
        size=config.run.gpus,
        port=port,
        seen=look(config, model, logs),
    )
    visible = visible_gpus("cuda") if device.type == "cuda" else []
    with ExitStack() as held:
        held.callback((logs / MARK).unlink, missing_ok=True)
        places = LAUNCHERS[config.run.launcher](settings, visible, logs, held, _beside(config, command))
        team = Team(places.ranks, held.pop_all(), places.replicas, places.workers)
    team.store = store  # it lasts as long as the ranks
    if shared := meet(store, team.hosts):
        slow = "they exchange through main memory (gloo), which is slow"
        log.warning(f"ranks {', '.join(map(str, shared))} have a GPU in common: {slow}")
    return team


def _beside(config: Config, command: str) -> Beside:
    rollout, used = config.rollout, generates(config, command)
    return Beside(rollout.replicas * used, 1 if rollout.engine == "embedded" else rollout.tensor_parallel)


def gpus_left(config: Config, command: str) -> str:
    """Options for as many ranks, and replicas beside them, as the Ray cluster has room for where a machine may be gone:
    as the run had, or fewer of both in proportion, then of replicas alone.
    """
    beside, limit, run = _beside(config, command), LEFT_LIMIT, Path(config.run.out) / config.run.name
    most, least = config.run.gpus, config.run.min_gpus or config.run.gpus
    counts = [*range(most, least - 1, -config.train.sequence_parallel)]
    sizes = [(ranks, -(-beside.replicas * ranks // most)) for ranks in counts]
    sizes += [(counts[-1], replicas) for replicas in range(sizes[-1][1] - 1, 0, -1)]
    with ExitStack() as held:
        cluster = _cluster(held)
        gpu = _gpus_of_a_rank(cluster, config.run.device, run.absolute())
        for ranks, replicas in sizes:
            fewer = beside._replace(replicas=replicas)
            gpus = _bundles(ranks, fewer, gpu)
            with ExitStack() as tried:
                group, end = _reserve(cluster, gpus, tried), time.monotonic() + limit
                while not (ready := group.wait(1)) and time.monotonic() < end:
                    there = cluster.cluster_resources()  # of machines that live
                    if there.get("CPU", 0) < len(gpus) or there.get("GPU", 0) < sum(gpus):
                        break
            if ready:
                return _options(ranks, fewer)
            limit = LEFT_LIMIT / 10
        have = cluster.cluster_resources()
    raise RankLost(f"run.min_gpus: the Ray cluster has no room for {_options(ranks, fewer)}; its machines have {have}")


def _ranks(came: Sequence[Arrival], settings: RankSettings, logs: Path) -> list[Starter]:
    settings = replace(settings, hosts=[one.host for one in came])
    return [
        partial(Rank, replace(settings, rank=rank), log=logs / f"rank-{rank}.log", place=partial(_linked, arrival))
        for rank, arrival in enumerate(came)
    ]


def _linked(arrival: Arrival, replica: Replica) -> Link:
    return Link(arrival, replica.module, replica.log)


# -- in a process that was started elsewhere ---------------------------------------------------------


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in COMPARED} | {"code": code_hash()}


def run_rank(address: str, token: str | None = None) -> None:
    """Serve the run whose controller is at HOST:PORT, until it ends."""
    host, _, port = address.rpartition(":")
    token = token or os.environ.get(TOKEN)
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address}: write HOST:PORT, as the run prints it")
    if not token:
        raise ConfigError(f"set {TOKEN} to the token that the run prints")
    place = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    if os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID"):
        import torch

        # Asks no CUDA, which would hold on to what it sees before the variable is set.
        seen = visible_gpus("cuda") if torch.cuda.device_count() else []
        if len(seen) > 1:  # torchrun and Slurm may show all to every task
            os.environ["CUDA_VISIBLE_DEVICES"] = seen[int(place) % len(seen)]
    channel = Channel(_connected(host, int(port)))
    about = {"host": host_name(), "pid": os.getpid(), "local": int(place), "versions": versions()}
    try:
        told = introduce(channel, token, about | {"machine": same_processes()})
    except Ended as error:
        raise EnvironmentProblem(
            f"{address}: the run refused this process: another {TOKEN}, or it has all it needs ({error})"
        ) from None
    for number in (signal.SIGINT, signal.SIGTERM):  # the run saves first, and its end is this one's
        signal.signal(number, signal.SIG_IGN)
    assert told["module"] in SERVED, f"{address} asks for what no run asks for"
    if Path(told["cwd"]).is_dir():
        os.chdir(told["cwd"])
    if Path(told["log"]).parent.is_dir():
        with open(told["log"], "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    print(f"process {os.getpid()} of {host_name()}", file=sys.stderr, flush=True)
    import_module(told["module"]).serve(channel, host)


def _connected(host: str, port: int) -> socket.socket:
    """The controller may still be loading its data."""
    end, said = time.monotonic() + JOIN_LIMIT, False
    while True:
        try:
            link = socket.create_connection((host, port), timeout=HELLO_LIMIT)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link
        except OSError as error:
            if time.monotonic() > end or isinstance(error, socket.gaierror):
                raise EnvironmentProblem(f"{host}:{port}: no run answers there ({error})") from None
            if not said:
                print(f"waiting for a run at {host}:{port} ({error})", file=sys.stderr, flush=True)
            said = True
            time.sleep(1)


def _rank_of_ray(address: str, token: str) -> None:
    run_rank(address, token)
