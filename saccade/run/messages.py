"""Where the messages of the package are shown.

Every module logs to a child of the logger `saccade`; the display of a run, or the command, shows
what arrives there. A warning says that it is one.

    with shown_by(print):
        logging.getLogger("saccade.data").warning("no rows")  # prints WARNING: no rows
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("saccade")


class Shown(logging.Handler):
    """Hands every message to a function, such as `print`; what that raises is not caught."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.show(f"WARNING: {text}" if record.levelno >= logging.WARNING else text)


@contextmanager
def shown_by(show: Callable[[str], object]) -> Iterator[None]:
    """Inside, only `show` gets the messages."""
    before = LOGGER.handlers, LOGGER.level, LOGGER.propagate
    LOGGER.handlers, LOGGER.propagate = [Shown(show)], False
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.handlers, level, LOGGER.propagate = before
        LOGGER.setLevel(level)
