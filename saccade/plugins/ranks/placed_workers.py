"""Reward workers on other machines: a process that was placed there starts the worker as its child and relays messages
both ways. It runs no code of the user, so it can always kill a worker that hangs.

    move_workers(pool, lambda: link)       # in the controller
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from saccade.errors import EnvironmentProblem
from saccade.plugins.ranks.connections import Link
from saccade.plugins.reward_workers.pool import WORKER, WorkerPool, start_worker
from saccade.system.process import LARGEST, LOOK_EVERY, Channel, Child, Ended, Process

log = logging.getLogger(__name__)


def move_workers(pool: WorkerPool, placed: Callable[[], Link]) -> None:
    """Start the pool's processes on other machines from now on; those for which there is no place start here."""

    def start() -> Process:
        try:
            link = placed()
        except EnvironmentProblem as error:
            log.warning(f"reward.workers: one is started beside the run, none elsewhere: {error}")
            return start_worker()
        link.channel.largest = LARGEST  # bytes of a message, because user code may send anything
        return link

    pool.move(start)


def serve(channel: Channel, controller: str | None = None) -> None:
    """Runs in the placed process: relay messages until either side ends."""
    child = Child(WORKER, tied=True)

    def pass_on() -> None:
        try:
            with suppress(Ended):
                while block := channel.receive():
                    child.channel.send(*block)
        finally:
            child.kill()

    threading.Thread(target=pass_on, name="pass on", daemon=True).start()
    with suppress(Ended):
        while True:
            if block := child.receive(LOOK_EVERY):
                channel.send(*block)
    child.close()
    os._exit(0)  # Ray would reuse this process for another task
