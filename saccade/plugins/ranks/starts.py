"""Start the ranks of a run, and restart a run that has lost a rank.

team = start_team(config, "rl", model=family.path, folder=None, logs=run.path)
run_again(rl.run, "rl", config)
"""

import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import distributed

from saccade.config import Config, load
from saccade.errors import MicroBatchTooLarge, RankLost, SaccadeError
from saccade.models.load import pick_device
from saccade.plugins.engines.replicas.replica_pool import visible_gpus
from saccade.plugins.ranks.launchers import Places, join, local, own_engines
from saccade.plugins.ranks.preflight import MARK, look, meet
from saccade.plugins.ranks.ray_cluster import gpus_left, ray
from saccade.plugins.ranks.team import RankSettings, Team
from saccade.run.messages import show_error

log = logging.getLogger(__name__)

LAUNCHERS: Mapping[str, Callable[..., Places]] = {"local": local, "join": join, "ray": ray}


def start_team(config: Config, command: str, *, model: str, folder: str | None, logs: Path) -> Team:
    """Start the ranks and wait until all have joined. They log into `logs`; all machines must see `logs` and `model`.
    `folder`: the checkpoint to continue from.
    """
    device, here = pick_device(config.run.device), config.run.launcher == "local"
    listening = socket.create_server(("127.0.0.1" if here else "", 0))
    port = listening.getsockname()[1]
    store = distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    options, seen = config.model_dump(mode="json", exclude_unset=True), look(config, model, logs)
    place: Any = {"rank": 0, "size": config.run.gpus, "port": port}
    settings = RankSettings(options=options, command=command, folder=folder, seen=seen, **place)
    visible = visible_gpus("cuda") if device.type == "cuda" else []
    with ExitStack() as exits:
        exits.callback((logs / MARK).unlink, missing_ok=True)
        places = LAUNCHERS[config.run.launcher](settings, visible, logs, exits, own_engines(config, command))
        team = Team(places.ranks, exits.pop_all(), places.replicas, places.workers)
    team.store = store  # keeps the TCP store alive as long as the ranks
    if shared := meet(store, team.hosts):
        slow = "they exchange through main memory (gloo), which is slow"
        log.warning(f"ranks {', '.join(map(str, shared))} have a GPU in common: {slow}")
    return team


def run_again(recipe: Callable[[Config], Any], command: str, config: Config) -> Any:
    """Run the recipe and return its result. If a rank is lost, or a micro-batch does not fit in memory, start it again,
    up to `run.restarts` times.
    """
    wanted = config
    for left in range(config.run.restarts, 0, -1):
        try:
            return recipe(config)
        except (RankLost, MicroBatchTooLarge) as error:
            show_error(f"{error}\nstarting again; run.restarts: {left - 1} left", error)
            again = _changes(config, wanted, command, error)
            show_error(f"now with {' '.join(again) or 'the same options'}", error)
            config = load(config, again)
    return recipe(config)


def _changes(config: Config, wanted: Config, command: str, error: SaccadeError) -> list[str]:
    """Returns the options of the next start: resume from the last checkpoint, on as many of the originally `wanted`
    GPUs as are left, with smaller micro-batches if one did not fit.
    """
    saved = any((Path(config.run.out) / config.run.name / "checkpoints").glob("step-*"))
    found = ["run.resume=auto"] if saved or config.run.resume == "none" else []
    if isinstance(error, MicroBatchTooLarge):
        found += [f"train.micro_tokens={max(1, config.train.micro_tokens // 2)}", "model.checkpointing=on"]
    return found + (gpus_left(wanted, command).split() if wanted.run.min_gpus is not None else [])
