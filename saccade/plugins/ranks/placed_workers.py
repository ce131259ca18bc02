"""Reward workers on other machines: a process that was placed there starts the worker as its child and passes on what
both say. It runs no code of the user, so it can always end the worker, whatever that hangs in.

    pool.move(lambda: PlacedWorker(link))       # in the controller
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from saccade.errors import EnvironmentProblem
from saccade.plugins.ranks.connections import Link
from saccade.plugins.reward_workers.pool import WORKER, WorkerPool, start_worker
from saccade.system.process import LARGEST, LOOK_EVERY, Channel, Child, Ended

log = logging.getLogger(__name__)

LOST = -1  # the exit code of a worker that is gone, whose own nobody knows


class PlacedWorker(Child):
    """As a child of this process, at the end of a link."""

    def __init__(self, link: Link) -> None:
        self.channel, self.asked, self._link = link.channel, 0, link
        self.receive = link.receive  # type: ignore[method-assign]
        self.channel.largest = LARGEST

    def exit_code(self) -> int | None:
        return LOST if self._link.gone else None

    def kill(self) -> None:
        self._link.kill()

    def close(self) -> None:
        self._link.close()
        self.channel.link.close()


def move_workers(pool: WorkerPool, placed: Callable[[], Link]) -> None:
    """From now on its processes are started elsewhere; here where there is no place."""

    def start() -> Child:
        try:
            return PlacedWorker(placed())
        except EnvironmentProblem as error:
            log.warning(f"reward.workers: one is started beside the run, none elsewhere: {error}")
            return start_worker()

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
