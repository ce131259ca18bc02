"""Python files of the user: reward functions, environments, rows, algorithms, encoders.

own_module("my_reward.py").compute_score
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from subprocess import Popen
from types import ModuleType

SHOWN = 1 << 18  # bytes of what a process of the user's code prints


def own_module(path: str | Path) -> ModuleType:
    """Runs the file, and raises what it raises. Its neighbours can be imported."""
    path = Path(path).resolve()
    # No other file of that name is meant, nor a module of a library.
    spec = spec_from_file_location(f"saccade_own_{path.stem}_{abs(hash(str(path)))}", path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def show_output(process: Popen[bytes], who: str) -> threading.Thread:
    """Passes on what the process prints, up to SHOWN bytes; the rest is read all the same, for the
    process would wait otherwise. Ends with the last process that may print there.
    """
    pipe = process.stderr
    assert pipe is not None

    def forward() -> None:
        left = SHOWN
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                with suppress(OSError):  # nobody may be there to read it
                    os.write(2, data[: max(0, left)])
                left -= len(data)
                if left < 0:
                    _say_enough(who)

    thread = threading.Thread(target=forward, name="output", daemon=True)
    thread.start()
    return thread


@cache
def _say_enough(who: str) -> None:
    logging.getLogger("saccade").warning(
        "%s printed more than %d kB; of each of its processes only that much is shown",
        who,
        SHOWN >> 10,
    )
