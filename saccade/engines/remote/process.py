"""Starting and ending the process of a server; its log and the devices that it sees.

process = Process(settings, log=Path("engine-0.log"), environment={})
port = process.port()
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from saccade import errors
from saccade.engines.settings import Settings

START_LIMIT = 1800.0  # seconds: a large model is read and its kernels are compiled
GRACE = 10.0  # seconds to end in good order
SHOWN_LINES = 20  # of a log, in an error


class Died(Exception):
    """The process is gone, or as good as gone; the message says how that showed."""


class Process:
    """To be made in a thread that lives as long as the process: on Linux it ends with the
    thread.
    """

    def __init__(self, settings: Settings, *, log: Path, environment: Mapping[str, str]) -> None:
        root = str(Path(__file__).resolve().parents[3])
        search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.token = secrets.token_hex(16)
        self._order = {"settings": asdict(settings), "token": self.token, "parent": os.getpid()}
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "saccade.engines.remote.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches the trainer only, which ends its engines
                env={**os.environ, "PYTHONPATH": search, **environment},
            )

    def port(self) -> int:
        """When the engine is there. Raises what the process says is wrong, or `Died`."""
        requests, replies = self.popen.stdin, self.popen.stdout
        assert requests is not None and replies is not None
        try:
            requests.write(json.dumps(self._order).encode() + b"\n")
            requests.flush()
        except OSError as error:
            raise Died(f"it did not start: {error}") from error
        if not select.select([replies], [], [], START_LIMIT)[0]:
            raise Died(f"it did not start in {START_LIMIT:g} s")
        line = replies.readline()
        if not line:
            raise Died(f"it did not start: exit code {self.popen.wait()}")
        reply = json.loads(line)
        if "port" not in reply:
            raise mended(reply)
        return reply["port"]

    def kill(self) -> None:
        """With all that it has started; also when it hangs."""
        if self.popen.poll() is None:
            with suppress(ProcessLookupError):  # another thread has just seen its end
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def wait(self) -> None:
        """For an end that was asked for."""
        try:
            self.popen.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            self.kill()

    def dispose(self) -> None:
        """For the thread that made it, as its last act."""
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what it did not read any more
                pipe.close()


def mended(reply: Mapping[str, str]) -> errors.SaccadeError:
    """An error of the server as it was there."""
    return getattr(errors, reply["kind"])(reply["message"])


def tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"-- {log}:", *lines[-SHOWN_LINES:]])


def placements(replicas: int, each: int, visible: Sequence[str]) -> list[dict[str, str]]:
    """What every replica sees of the machine: `each` GPUs of its own where there are enough. The
    trainer's, the first one, is the last to be given away. Without GPUs they share the cores.
    """
    if not visible:
        threads = max(1, (os.cpu_count() or 1) // replicas)
        return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}] * replicas
    if each > len(visible):
        raise errors.ConfigError(
            f"rollout.tensor_parallel: {each} GPUs for one engine, and {len(visible)} can be seen; "
            f"try rollout.tensor_parallel={len(visible)}"
        )
    order = [*visible[1:], visible[0]]
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(order[(i * each + j) % len(order)] for j in range(each))}
        for i in range(replicas)
    ]


def shares_memory(environment: Mapping[str, str], visible: Sequence[str]) -> bool:
    """With the trainer, as placed above."""
    return not visible or visible[0] in environment["CUDA_VISIBLE_DEVICES"].split(",")


def visible_gpus(trainer: str) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; that of the device `trainer` first."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = named.split(",") if named else list(map(str, range(torch.cuda.device_count())))
    first = torch.device(trainer).index or 0
    return [every[first], *every[:first], *every[first + 1 :]]
