"""Start ranks, replicas and reward workers as tasks of a Ray cluster. Ray only starts the processes: tensors and calls
go through our own sockets, and nothing is pickled but the call that starts a task.

    saccade rl run.yaml run.gpus=16 run.launcher=ray
"""

import itertools
import logging
import queue
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from saccade.config import Config
from saccade.errors import EnvironmentProblem, RankLost
from saccade.models.load import pick_device
from saccade.plugins.engines.replicas.replica import Replica
from saccade.plugins.ranks import placed_workers
from saccade.plugins.ranks.connections import JOIN_LIMIT, Arrival, Link, Reception
from saccade.plugins.ranks.launchers import REPLACE_LIMIT, OwnEngines, Places, linked, own_engines, ranks_at, run_rank
from saccade.plugins.ranks.placed_workers import move_workers
from saccade.plugins.ranks.preflight import versions
from saccade.plugins.ranks.team import RankSettings
from saccade.plugins.reward_workers.pool import WorkerPool

log = logging.getLogger(__name__)

LEFT_LIMIT = 60.0  # seconds until Ray has noticed that a machine is gone
WORKERS_LIMIT = 30.0  # seconds until Ray has cores for reward workers


def ray(settings: RankSettings, visible: Sequence[str], logs: Path, exits: ExitStack, engines: OwnEngines) -> Places:
    """Launcher: tasks of the running Ray cluster (see `ray status`), or of a local one that is started here."""
    cluster = _cluster(exits)
    device = settings.options.get("run", {}).get("device", "auto")
    gpus = _bundles(settings.size, engines, _gpus_of_a_rank(cluster, device, logs.absolute()))
    group, end = _reserve(cluster, gpus, exits), time.monotonic() + JOIN_LIMIT
    needed = f"{_options(settings.size, engines)} needs {len(gpus)} cores and {sum(gpus)} GPUs of the Ray cluster"
    if not group.wait(1):
        log.info(f"waiting for room: {needed}; free: {_counted(cluster.available_resources())}")
    while not group.wait(1):  # not longer: Ray holds back Ctrl-C meanwhile
        if time.monotonic() > end:
            raise EnvironmentProblem(f"{needed}, which has no room; free: {_counted(cluster.available_resources())}")
    token = secrets.token_hex(16)
    reception = exits.enter_context(Reception(0, token, versions()))
    address = f"{cluster.util.get_node_ip_address()}:{reception.port}"

    def start(group: Any, bundle: int, token: str, gpu: int = 0) -> Any:
        place = cluster.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)
        options: Any = {"num_gpus": gpu, "num_cpus": 1, "max_retries": 0, "scheduling_strategy": place}
        return cluster.remote(run_rank).options(**options).remote(address, token)

    def arrived(tasks: Sequence[Any], token: str, limit: float = JOIN_LIMIT) -> list[Arrival]:
        def failed() -> None:
            """Raise if a task ended before its process connected: EnvironmentProblem for an exception of the task,
            which would recur; RankLost for a lost machine, which would not.
            """
            for task in cluster.wait([*tasks], num_returns=1, timeout=0)[0]:
                try:
                    cluster.get(task)
                except Exception as error:  # raised by the task, or by Ray if the process is gone
                    own = isinstance(error, cluster.exceptions.RayTaskError)
                    text = f"a process ended before all had connected: Ray: {error}"
                    raise (EnvironmentProblem if own else RankLost)(text) from None

        try:
            return reception.arrivals(token, len(tasks), limit=limit, failed=failed)
        except EnvironmentProblem:
            for task in tasks:  # a task that still waits for a machine must not start later, only to be refused
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
        return linked(one(limit, group, bundle, gpus[bundle]), replica)

    def workers(exits: ExitStack, pool: WorkerPool, count: int) -> None:
        """Move the pool's workers to cores spread over all machines. If the cluster has no room, they stay here."""
        own = _reserve(cluster, [0] * count, exits, "SPREAD")
        if not own.wait(WORKERS_LIMIT):
            there = f"the Ray cluster has no room for {count} cores beside those of the run"
            log.warning(f"reward.workers={count}: {there}; they stay on the machine of the run")
            cluster.util.remove_placement_group(own)
            return
        numbers = itertools.cycle(range(count))
        module = placed_workers.__name__
        move_workers(pool, lambda: Link(one(REPLACE_LIMIT, own, -1), module, logs / f"rewards-{next(numbers)}.log"))

    came = arrived([start(group, rank, token, gpus[rank]) for rank in range(settings.size)], token)
    return Places(ranks_at(came, settings, logs), replica_at, workers)


def _cluster(exits: ExitStack) -> Any:
    import ray as cluster

    if not cluster.is_initialized():
        exits.callback(cluster.shutdown)
        quiet: Any = {"log_to_driver": False, "configure_logging": False}
        try:
            cluster.init(address="auto", **quiet)
        except ConnectionError:
            cluster.init(address="local", include_dashboard=False, **quiet)
    return cluster


@cache
def _gpus_of_a_rank(cluster: Any, device: str, run: Path) -> int:
    """Returns 1, or 0 if the config says so or neither this machine nor the cluster has a GPU. Cached for the folder of
    the `run`: after machines were lost, the cluster may have no GPU left.
    """
    if device == "cpu":
        return 0
    return 1 if pick_device(device).type == "cuda" or cluster.cluster_resources().get("GPU") else 0


def _bundles(ranks: int, engines: OwnEngines, gpu: int) -> list[int]:
    """GPUs of each process: first the ranks, then the replicas."""
    return [gpu] * ranks + [gpu * engines.gpus] * engines.replicas


def _counted(resources: Mapping[str, float]) -> dict[str, float]:
    """Those that are reserved, without the memory and the names of machines that Ray also lists."""
    return {name: resources.get(name, 0) for name in ("CPU", "GPU")}


def _options(ranks: int, engines: OwnEngines) -> str:
    return f"run.gpus={ranks}" + f" rollout.replicas={engines.replicas}" * bool(engines.replicas)


def _reserve(cluster: Any, gpus: Sequence[int], exits: ExitStack, strategy: str = "PACK") -> Any:
    """Request a placement group: one core and `gpus[n]` GPUs for process n. PACK uses as few machines as possible."""
    group = cluster.util.placement_group([{"CPU": 1} | ({"GPU": n} if n else {}) for n in gpus], strategy=strategy)
    exits.callback(cluster.util.remove_placement_group, group)
    return group


def gpus_left(config: Config, command: str) -> str:
    """Returns the `run.gpus` and `rollout.replicas` options that fit the Ray cluster after machines may have been lost:
    as many as the run had, else fewer of both in proportion (down to `run.min_gpus`), then fewer replicas.
    """
    engines, limit, run = own_engines(config, command), LEFT_LIMIT, Path(config.run.out) / config.run.name
    most, least = config.run.gpus, config.run.min_gpus or config.run.gpus
    counts = [*range(most, least - 1, -config.train.sequence_parallel)]
    sizes = [(ranks, -(-engines.replicas * ranks // most)) for ranks in counts]
    sizes += [(counts[-1], replicas) for replicas in range(sizes[-1][1] - 1, 0, -1)]
    with ExitStack() as exits:
        cluster = _cluster(exits)
        gpu = _gpus_of_a_rank(cluster, config.run.device, run.absolute())
        for ranks, replicas in sizes:
            fewer = engines._replace(replicas=replicas)
            gpus = _bundles(ranks, fewer, gpu)
            with ExitStack() as tried:
                group, end = _reserve(cluster, gpus, tried), time.monotonic() + limit
                while not (ready := group.wait(1)) and time.monotonic() < end:
                    there = cluster.cluster_resources()  # of live machines
                    if there.get("CPU", 0) < len(gpus) or there.get("GPU", 0) < sum(gpus):
                        break
            if ready:
                return _options(ranks, fewer)
            limit = LEFT_LIMIT / 10
        have = _counted(cluster.cluster_resources())
    raise RankLost(f"run.min_gpus: the Ray cluster has no room for {_options(ranks, fewer)}; its machines have {have}")
