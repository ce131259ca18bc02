"""How ranks are started: as processes of this machine, as tasks of a Ray cluster, or by whoever runs
`saccade rank` under Slurm, torchrun or by hand.

A rank that is started elsewhere connects to the controller and proves with a token that it belongs
to the run. From then on it is talked to as a local one is. Only Ray's own call is pickled.

    SACCADE_TOKEN=... saccade rank node-1:28400
"""

import hmac
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

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
COMPARED = ("torch", "transformers")
TOKEN = "SACCADE_TOKEN"

Starter = Callable[..., Replica]


def local(settings: RankSettings, visible: Sequence[str], logs: Path, held: ExitStack) -> list[Starter]:
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
    ]


def join(settings: RankSettings, visible: Sequence[str], logs: Path, held: ExitStack) -> list[Starter]:
    """Whoever connects, in the order of hosts."""
    given = os.environ.get(TOKEN)
    token = given or secrets.token_hex(16)
    try:
        door = socket.create_server(("", PORT))
    except OSError as error:
        raise EnvironmentProblem(
            f"run.launcher=join: port {PORT} cannot be opened ({error.strerror}); set SACCADE_PORT to another"
        ) from None
    with door:
        shown = "..." if given else token
        command = f"{TOKEN}={shown} saccade rank {socket.gethostname()}:{PORT}"
        log.info(f"waiting for {settings.size} processes: run `{command}` once for each GPU")
        return _joined(door, settings, token, logs)


def ray(settings: RankSettings, visible: Sequence[str], logs: Path, held: ExitStack) -> list[Starter]:
    """Tasks of the cluster that `ray status` shows, or of one that is started here."""
    import ray as cluster

    if not cluster.is_initialized():
        held.callback(cluster.shutdown)
        quiet: Any = {"log_to_driver": False, "configure_logging": False}
        try:
            cluster.init(address="auto", **quiet)
        except ConnectionError:
            cluster.init(include_dashboard=False, **quiet)
    each = {"GPU": 1, "CPU": 1} if visible or cluster.cluster_resources().get("GPU") else {"CPU": 1}
    group = cluster.util.placement_group([each] * settings.size, strategy="PACK")
    held.callback(cluster.util.remove_placement_group, group)
    if not group.wait(JOIN_LIMIT):
        free = cluster.available_resources()
        raise EnvironmentProblem(f"run.gpus={settings.size}: the Ray cluster has no room for that, free are {free}")
    token = secrets.token_hex(16)
    with socket.create_server(("", 0)) as door:
        address = f"{cluster.util.get_node_ip_address()}:{door.getsockname()[1]}"
        task = cluster.remote(_rank_of_ray)
        for index in range(settings.size):
            place = cluster.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
            options: Any = {
                "num_gpus": each.get("GPU", 0),
                "num_cpus": 1,
                "max_retries": 0,
                "scheduling_strategy": place,
            }
            task.options(**options).remote(address, token)
        return _joined(door, settings, token, logs)


LAUNCHERS = {"local": local, "join": join, "ray": ray}


def starters(config: Config, settings: RankSettings, cuda: bool, logs: Path, held: ExitStack) -> list[Starter]:
    """For each rank what starts it, or takes the one that is there. `held`: what ends with them."""
    return LAUNCHERS[config.run.launcher](settings, visible_gpus("cuda") if cuda else [], logs, held)


# -- ranks that connect ----------------------------------------------------------------------------


class Link:
    """To a rank that was started elsewhere, which ends when this does."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.receive = channel.receive
        self._ended = threading.Event()

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


class JoinedRank(Rank):
    def __init__(self, settings: RankSettings, *, link: Link, **options: Any) -> None:
        self.link = link
        super().__init__(settings, **options)

    def start(self) -> Any:
        return self.link


def _joined(door: socket.socket, settings: RankSettings, token: str, logs: Path) -> list[Starter]:
    came: list[tuple[Any, Channel]] = []
    door.settimeout(0.2)
    end = time.monotonic() + JOIN_LIMIT
    while len(came) < settings.size:
        with suppress(TimeoutError):  # whoever says nothing keeps nobody else waiting
            threading.Thread(target=_greet, args=(*door.accept(), token, came), daemon=True).start()
        if time.monotonic() > end:
            hosts = ", ".join(f"{hello['host']}" for hello, _ in came) or "no machine"
            raise EnvironmentProblem(
                f"run.gpus={settings.size}: {len(came)} processes connected within {JOIN_LIMIT:.0f} s, from {hosts}; "
                "start the others, or lower run.gpus"
            )
    del came[settings.size :]
    came.sort(key=lambda one: (one[0]["host"], one[0]["local"], one[0]["pid"]))
    for hello, _ in came:
        if hello["versions"] != versions():
            raise EnvironmentProblem(
                f"{hello['host']} has {hello['versions']}, this machine {versions()}; install alike"
            )
    found: list[Starter] = []
    for rank, (_, channel) in enumerate(came):
        file = logs.absolute() / f"rank-{rank}.log"
        mine = replace(settings, rank=rank, log=str(file))
        found.append(partial(JoinedRank, mine, link=Link(channel), log=file))
    return found


def _greet(link: socket.socket, address: Any, token: str, came: list[tuple[Any, Channel]]) -> None:
    """Adds a process that knows the token. Others may send anything."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(link, largest=HELLO_BYTES)
    try:
        block = channel.receive(HELLO_LIMIT)
        hello = dict(block.row) if block else {}
        if hmac.compare_digest(str(hello["token"]).encode(), token.encode()):
            channel.largest = None
            came.append(({"host": hello["host"], "local": int(hello["local"]), "pid": hello["pid"]} | hello, channel))
            log.info(f"connected: process {hello['pid']} of {hello['host']}, number {len(came)}")
            return
    except Exception:
        log.debug("%s sent what cannot be read", address)
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
    from saccade.plugins.ranks.rank_process import serve

    channel = Channel(_connected(host, int(port)))
    channel.send({"token": token, "host": host_name(), "pid": os.getpid(), "local": int(place), "versions": versions()})
    for number in (signal.SIGINT, signal.SIGTERM):  # the run saves first, and its end is this one's
        signal.signal(number, signal.SIG_IGN)
    try:
        told = channel.receive(JOIN_LIMIT)
    except Ended:
        told = None
    if told is None:
        raise EnvironmentProblem(f"{address}: the run refused this process: another {TOKEN}, or it has all it needs")
    serve(channel, told.row["settings"], host)


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
