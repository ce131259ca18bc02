"""Launchers of ranks: child processes on this machine, or processes that run `saccade rank`, started by Slurm, torchrun
or by hand. The launcher for Ray is in `ray_cluster.py`.

A rank that is started elsewhere connects to the controller, and each proves to the other that it knows the token of the
run. From then on it is used like a local one.

    SACCADE_TOKEN=... saccade rank node-1:28400
"""

import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from saccade.config import Config
from saccade.errors import ConfigError, EnvironmentProblem
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
from saccade.plugins.ranks.preflight import versions
from saccade.plugins.ranks.team import Rank, RankSettings
from saccade.system.process import Channel, Ended

log = logging.getLogger(__name__)

PORT = int(os.environ.get("SACCADE_PORT", "28400"))  # where `saccade rank` connects to
REPLACE_LIMIT = 60.0  # seconds to wait for a process that replaces a replica, before it is asked for again
SERVED = (Replica.module, Rank.module, placed_workers.__name__)  # modules that a connected process may run
TOKEN = "SACCADE_TOKEN"


class OwnEngines(NamedTuple):
    """Engines that generate in addition to the ranks."""

    replicas: int
    gpus: int  # per replica


Starter = Callable[..., Replica]
Place = Callable[[int, Replica], Any]  # starts the process of a replica with this number, and returns the link to it


class Places(NamedTuple):
    ranks: list[Starter]
    replicas: Place | None = None  # starts a replica elsewhere; None: they are child processes
    workers: Callable[..., None] | None = None  # moves the reward workers of a pool elsewhere; None: they stay here


def local(settings: RankSettings, visible: Sequence[str], logs: Path, exits: ExitStack, engines: OwnEngines) -> Places:
    """Launcher: one child process per GPU of this machine; without GPUs they share the cores."""
    if visible and len(visible) < settings.size:
        seen = len(visible)
        raise ConfigError(f"run.gpus: {settings.size}, and {seen} can be seen; try run.gpus={seen}")
    most = 4 * (os.cpu_count() or 1)
    if not visible and settings.size > most:
        raise ConfigError(f"run.gpus: {settings.size} processes on {os.cpu_count()} cores; try run.gpus=2")
    # `placements` assigns the first GPU last: rotated by one, rank n gets GPU n.
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


def join(settings: RankSettings, visible: Sequence[str], logs: Path, exits: ExitStack, engines: OwnEngines) -> Places:
    """Launcher: wait for processes to connect. By host, the first are ranks, the rest replicas; later ones spares."""
    if engines.replicas and engines.gpus > 1:
        gpus = f"{engines.gpus} GPUs for one engine, and `saccade rank` has one"
        raise ConfigError(f"rollout.tensor_parallel: {gpus}; try rollout.tensor_parallel=1, or run.launcher=ray")
    given = os.environ.get(TOKEN)
    token = given or secrets.token_hex(16)
    try:
        reception = exits.enter_context(Reception(PORT, token, versions()))
    except OSError as error:
        raise EnvironmentProblem(
            f"run.launcher=join: port {PORT} cannot be opened ({error.strerror}); set SACCADE_PORT to another"
        ) from None
    shown, count = "..." if given else token, settings.size + engines.replicas
    command = f"{TOKEN}={shown} saccade rank {socket.gethostname()}:{PORT}"
    log.info(f"waiting for {count} processes: run `{command}` once for each GPU")
    came = reception.arrivals(token, count)
    if not engines.replicas:
        reception.refuse(token)
    for one in came[settings.size :]:
        reception.expected[token].put(one)

    def replica_at(number: int, replica: Replica) -> Link:
        if reception.expected[token].empty():
            log.info(f"{replica.log.stem} waits for a process: run `{command}` once more")
        return linked(reception.arrivals(token, 1, limit=REPLACE_LIMIT)[0], replica)

    return Places(ranks_at(came[: settings.size], settings, logs), replica_at)


def own_engines(config: Config, command: str) -> OwnEngines:
    rollout, used = config.rollout, generates(config, command)
    return OwnEngines(rollout.replicas * used, 1 if rollout.engine == "embedded" else rollout.tensor_parallel)


def ranks_at(came: Sequence[Arrival], settings: RankSettings, logs: Path) -> list[Starter]:
    settings = replace(settings, hosts=[one.host for one in came])
    return [
        partial(Rank, replace(settings, rank=rank), log=logs / f"rank-{rank}.log", place=partial(linked, arrival))
        for rank, arrival in enumerate(came)
    ]


def linked(arrival: Arrival, replica: Replica) -> Link:
    return Link(arrival, replica.module, replica.log)


# -- in a process that was started elsewhere ---------------------------------------------------------


def run_rank(address: str, token: str | None = None) -> None:
    """Serve the run whose controller is at HOST:PORT, until it ends."""
    host, _, port = address.rpartition(":")
    token = token or os.environ.get(TOKEN)
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address}: write HOST:PORT, as the run prints it")
    if not token:
        raise ConfigError(f"set {TOKEN} to the token that the run prints")
    if place := os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID"):
        import torch

        # Does not initialize CUDA, which would fix the visible GPUs before the variable is set.
        seen = visible_gpus("cuda") if torch.cuda.device_count() else []
        if len(seen) > 1:  # torchrun and Slurm may show all GPUs to every task
            os.environ["CUDA_VISIBLE_DEVICES"] = seen[int(place) % len(seen)]
    channel = Channel(_connected(host, int(port)))
    about = {"host": host_name(), "pid": os.getpid(), "local": int(place or 0), "versions": versions()}
    try:
        told = introduce(channel, token, about | {"machine": same_processes()})
    except Ended as error:
        raise EnvironmentProblem(
            f"{address}: the run refused this process: another {TOKEN}, or it has all it needs ({error})"
        ) from None
    for number in (signal.SIGINT, signal.SIGTERM):  # the controller saves first, then ends this process
        signal.signal(number, signal.SIG_IGN)
    if told["module"] not in SERVED:
        raise EnvironmentProblem(f"{address} asks this process to become {told['module']}, which no run asks for")
    if Path(told["cwd"]).is_dir():
        os.chdir(told["cwd"])
    if Path(told["log"]).parent.is_dir():
        with open(told["log"], "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    print(f"process {os.getpid()} of {host_name()}", file=sys.stderr, flush=True)
    import_module(told["module"]).serve(channel, host)


def _connected(host: str, port: int) -> socket.socket:
    """Connect to the controller; retry, because it may still be loading its data."""
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
