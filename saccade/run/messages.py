"""Shows the log messages of the package, and the error that ends a command.

Every module logs to a child of the logger `saccade`; the display of a run, or the command, shows the messages that
arrive there. Warnings are marked as such.

    with shown_by(print):
        logging.getLogger("saccade.data").warning("no rows")  # prints WARNING: no rows
"""

import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("saccade")


class Shown(logging.Handler):
    """A handler that passes every message to a function, such as `print`; its exceptions propagate."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.show(f"WARNING: {text}" if record.levelno >= logging.WARNING else text)


@contextmanager
def shown_by(show: Callable[[str], object]) -> Iterator[None]:
    """Context manager: inside, only `show` gets the messages."""
    before = LOGGER.handlers, LOGGER.level, LOGGER.propagate
    LOGGER.handlers, LOGGER.propagate = [Shown(show)], False
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.handlers, level, LOGGER.propagate = before
        LOGGER.setLevel(level)


def show_error(message: str, error: BaseException) -> None:
    from rich.console import Console

    if os.environ.get("SACCADE_DEBUG"):
        traceback.print_exception(error)
    Console(stderr=True, soft_wrap=True, emoji=False).print(message, style="red", markup=False, highlight=False)
