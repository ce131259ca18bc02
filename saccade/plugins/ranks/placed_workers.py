"""Reward workers on other machines: a process that was placed there starts the worker as its child and passes on what
both say. It runs no code of the user, so it can always end the worker, whatever that hangs in.

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
    """From now on its processes are started elsewhere; here where there is no place."""

    def start() -> Process:
        try:
            link = placed()
        except EnvironmentProblem as error:
            log.warning(f"reward.workers: one is started beside the run, none elsewhere: {error}")
            return start_worker()
        link.channel.largest = LARGEST  # it runs code of the user
        return link

    pool.move(start)


def serve(channel: Channel, controller: str | None = None) -> None:
    """In the process that was placed: until either side ends."""
    child = Child(WORKER, who="a reward", tied=True)

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
    os._exit(0)  # Ray would give this process to another task
