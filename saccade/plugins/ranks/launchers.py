"""How ranks are started: as processes of this machine, as tasks of a Ray cluster, or by whoever runs
`saccade rank` under Slurm, torchrun or by hand.

A rank that is started elsewhere connects to the controller and proves with a token that it belongs
to the run. From then on it is talked to as a local one is. Only Ray's own call is pickled.

    SACCADE_TOKEN=... saccade rank node-1:28400
"""

import hmac
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

from saccade.config import Config
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.plugins.engines.replicas.replica import Replica
from saccade.plugins.engines.replicas.replica_pool import placements, visible_gpus
from saccade.plugins.ranks.machines import host_name
from saccade.plugins.ranks.preflight import code_hash
from saccade.plugins.ranks.team import Rank, RankSettings
from saccade.system.process import Channel, Ended

log = logging.getLogger(__name__)

PORT = int(os.environ.get("SACCADE_PORT", "28400"))  # where `saccade rank` connects to
JOIN_LIMIT = 900.0  # seconds until the last rank is there: a cluster may have to start machines
HELLO_LIMIT = 10.0  # seconds for a rank to say who it is
HELLO_BYTES = 1 << 16
SERVED = (Replica.module, Rank.module)  # what a process that connects may become
COMPARED = ("torch", "transformers")
TOKEN = "SACCADE_TOKEN"


class Beside(NamedTuple):
    """Engines that generate beside the ranks."""

    replicas: int
    gpus: int  # of each


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A process that has connected, and what it says of itself."""

    channel: Channel
    host: str
    local: int  # which of the processes of its machine
    pid: int
    versions: Mapping[str, str]


Starter = Callable[..., Replica]
Place = Callable[[int, Replica], Any]  # starts the process of a replica with this number, and returns the link to it
Places = tuple[list[Starter], Place | None]  # of the ranks, and of replicas beside them; None: processes of this one


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
    threads = max(1, (os.cpu_count() or 1) // settings.size)
    inside = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    inside |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return [
        partial(Rank, replace(settings, rank=rank), log=logs / f"rank-{rank}.log", environment=seen | inside)
        for rank, (seen, _) in enumerate(places)
    ], None


def join(settings: RankSettings, visible: Sequence[str], logs: Path, held: ExitStack, beside: Beside) -> Places:
    """Whoever connects, in the order of hosts: first ranks, then replicas. One more may take the place of a replica."""
    if beside.replicas and beside.gpus > 1:
        gpus = f"{beside.gpus} GPUs for one engine, and `saccade rank` has one"
        raise ConfigError(f"rollout.tensor_parallel: {gpus}; try rollout.tensor_parallel=1, or run.launcher=ray")
    given = os.environ.get(TOKEN)
    token = given or secrets.token_hex(16)
    try:
        door = held.enter_context(Door(PORT, token))
    except OSError as error:
        raise EnvironmentProblem(
            f"run.launcher=join: port {PORT} cannot be opened ({error.strerror}); set SACCADE_PORT to another"
        ) from None
    shown, count = "..." if given else token, settings.size + beside.replicas
    command = f"{TOKEN}={shown} saccade rank {socket.gethostname()}:{PORT}"
    log.info(f"waiting for {count} processes: run `{command}` once for each GPU")
    came = door.arrivals(token, count)
    if not beside.replicas:
        door.refuse(token)
    for one in came[settings.size :]:
        door.expected[token].put(one)

    def replica_at(number: int, replica: Replica) -> Link:
        if door.expected[token].empty():
            log.info(f"{replica.log.stem} waits for a process: run `{command}` once more")
        return Link(door.arrivals(token, 1)[0], replica)

    return _ranks(came[: settings.size], settings, logs), replica_at


def ray(settings: RankSettings, visible: Sequence[str], logs: Path, held: ExitStack, beside: Beside) -> Places:
    """Tasks of the cluster that `ray status` shows, or of one that is started here."""
    import ray as cluster

    if not cluster.is_initialized():
        held.callback(cluster.shutdown)
        quiet: Any = {"log_to_driver": False, "configure_logging": False}
        try:
            cluster.init(address="auto", **quiet)
        except ConnectionError:
            cluster.init(address="local", include_dashboard=False, **quiet)
    gpu = 1 if visible or cluster.cluster_resources().get("GPU") else 0
    gpus = [gpu] * settings.size + [gpu * beside.gpus] * beside.replicas
    group = cluster.util.placement_group([{"CPU": 1} | ({"GPU": n} if n else {}) for n in gpus], strategy="PACK")
    held.callback(cluster.util.remove_placement_group, group)
    if not group.wait(JOIN_LIMIT):
        wanted = f"run.gpus={settings.size}" + f" rollout.replicas={beside.replicas}" * bool(beside.replicas)
        free = cluster.available_resources()
        raise EnvironmentProblem(f"{wanted}: the Ray cluster has no room for that, free are {free}")
    token = secrets.token_hex(16)
    door = held.enter_context(Door(0, token))
    address = f"{cluster.util.get_node_ip_address()}:{door.port}"

    def start(bundle: int, token: str) -> None:
        place = cluster.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)
        options: Any = {"num_gpus": gpus[bundle], "num_cpus": 1, "max_retries": 0, "scheduling_strategy": place}
        cluster.remote(_rank_of_ray).options(**options).remote(address, token)

    def replica_at(number: int, replica: Replica) -> Link:
        door.expected[own := secrets.token_hex(16)] = queue.SimpleQueue()
        start(settings.size + number, own)
        try:
            return Link(door.arrivals(own, 1)[0], replica)
        finally:
            door.refuse(own)

    for rank in range(settings.size):
        start(rank, token)
    return _ranks(door.arrivals(token, settings.size), settings, logs), replica_at


LAUNCHERS = {"local": local, "join": join, "ray": ray}


def launch(config: Config, settings: RankSettings, cuda: bool, logs: Path, held: ExitStack) -> Places:
    """For each rank what starts it, or takes the one that is there. `held`: what ends with them."""
    rollout = config.rollout
    beside = Beside(rollout.replicas, 1 if rollout.engine == "embedded" else rollout.tensor_parallel)
    return LAUNCHERS[config.run.launcher](settings, visible_gpus("cuda") if cuda else [], logs, held, beside)


def _ranks(came: Sequence[Arrival], settings: RankSettings, logs: Path) -> list[Starter]:
    return [
        partial(Rank, replace(settings, rank=rank), log=logs / f"rank-{rank}.log", place=partial(Link, arrival))
        for rank, arrival in enumerate(came)
    ]


# -- ranks that connect ----------------------------------------------------------------------------


class Link:
    """To a process that was started elsewhere, which ends when this does."""

    def __init__(self, arrival: Arrival, replica: Replica) -> None:
        self.channel = arrival.channel
        self.receive = self.channel.receive
        self._ended = threading.Event()
        self.channel.send({"module": replica.module, "log": str(replica.log.absolute()), "cwd": os.getcwd()})

    def exit_code(self) -> None:
        return None

    def wait(self, seconds: float) -> None:
        """Until the thread that receives has seen its end."""
        self._ended.wait(seconds)

    def kill(self) -> None:
        with suppress(OSError):
            self.channel.link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ended.set()
        self.kill()


class Door:
    """Where the processes of a run connect to. Each has a token of those that are expected."""

    def __init__(self, port: int, token: str) -> None:
        self._listening = socket.create_server(("", port))
        self.port = self._listening.getsockname()[1]
        self.expected: dict[str, queue.SimpleQueue[Arrival]] = {token: queue.SimpleQueue()}
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends the thread that waits there
        self._listening.close()
        for token in list(self.expected):
            self.refuse(token)

    def refuse(self, token: str) -> None:
        """Whoever waits with this token, and whoever comes with it from now on."""
        waiting = self.expected.pop(token)
        while not waiting.empty():
            waiting.get().channel.link.close()

    def arrivals(self, token: str, count: int) -> list[Arrival]:
        """The next processes with this token, in the order of hosts."""
        came: list[Arrival] = []
        end = time.monotonic() + JOIN_LIMIT
        while len(came) < count:
            try:
                came.append(self.expected[token].get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                hosts = ", ".join(one.host for one in came) or "no machine"
                raise EnvironmentProblem(
                    f"{len(came)} of {count} processes connected within {JOIN_LIMIT:.0f} s, from {hosts}; "
                    "start the others, or lower run.gpus or rollout.replicas"
                ) from None
            if came[-1].versions != versions():
                other = came[-1]
                raise EnvironmentProblem(f"{other.host} has {other.versions}, this machine {versions()}; install alike")
        return sorted(came, key=lambda one: (one.host, one.local, one.pid))

    def _accept(self) -> None:
        with suppress(OSError):
            while True:  # whoever says nothing keeps nobody else waiting
                threading.Thread(target=self._greet, args=self._listening.accept(), daemon=True).start()

    def _greet(self, link: socket.socket, address: Any) -> None:
        """Takes a process that knows a token. Others may send anything."""
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(link, largest=HELLO_BYTES)
        try:
            block = channel.receive(HELLO_LIMIT)
            hello = dict(block.row) if block else {}
            given = str(hello.pop("token")).encode()
            queues = [one for token, one in [*self.expected.items()] if hmac.compare_digest(given, token.encode())]
            arrival = Arrival(channel=channel, **hello)
            channel.largest = None
            queues[0].put(arrival)
            log.info(f"connected: process {arrival.pid} of {arrival.host}")
        except Exception:
            log.warning(f"a process on {address[0]} that does not belong to this run was refused")
            link.close()


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
    channel.send({"token": token, "host": host_name(), "pid": os.getpid(), "local": int(place), "versions": versions()})
    try:
        told = channel.receive()
    except Ended:
        raise EnvironmentProblem(
            f"{address}: the run refused this process: another {TOKEN}, or it has all it needs"
        ) from None
    for number in (signal.SIGINT, signal.SIGTERM):  # the run saves first, and its end is this one's
        signal.signal(number, signal.SIG_IGN)
    assert told is not None and told.row["module"] in SERVED, f"{address} asks for what no run asks for"
    if Path(told.row["cwd"]).is_dir():
        os.chdir(told.row["cwd"])
    if Path(told.row["log"]).parent.is_dir():
        with open(told.row["log"], "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    print(f"process {os.getpid()} of {host_name()}", file=sys.stderr, flush=True)
    import_module(told.row["module"]).serve(channel, host)


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
