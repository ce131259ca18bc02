"""Processes for tests of several ranks, forked from one that has imported torch and transformers: to import them
takes a core seconds, to fork milliseconds.
"""

import gc
import json
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from saccade.plugins.engines.replicas.replica import Replica
from saccade.plugins.ranks.connections import accepting
from saccade.system.process import Channel, Child
from tests.ranks import forked_command

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 250  # seconds
LOCK = threading.Lock()  # runs start and look after their processes in several threads
FORKING: Any = multiprocessing.get_context("forkserver")
OURS = ("saccade.plugins.ranks.rank_process", "saccade.plugins.ranks.sharded", "tests.ranks.processes")
FORKING.set_forkserver_preload([*OURS, "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "peft"])
# What every fork would do again: transformers compiles the patterns of its names, and writes configs out to check them;
# Pillow imports its formats.
get_checkpoint_conversion_mapping("qwen2_5_vl")
Image.init()
PreTrainedConfig.__repr__ = object.__repr__  # type: ignore[method-assign]


def forked(main: Callable[..., None], *arguments: Any) -> Any:
    """A process that runs a function of a module."""
    process = FORKING.Process(target=_inside, args=(dict(os.environ), main, *arguments), daemon=True)
    with LOCK, pytest.MonkeyPatch.context() as at_first:
        at_first.setenv("PYTHONPATH", str(ROOT))  # where to find what is imported before the first fork
        process.start()
    return process


def _inside(environment: Mapping[str, str], main: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()  # what the test before the first fork had set
    os.environ.update(environment)
    gc.freeze()  # what it was forked with stays
    main(*arguments)


@contextmanager
def forked_commands() -> Iterator[dict[str, str]]:
    """Variables with which `forked_command.py` starts commands."""

    def start(link: socket.socket, address: Any) -> None:
        with link:
            process = forked(run_command, json.loads(link.makefile().readline()))
            connection.wait([link, process.sentinel])
            if process.exitcode is None:  # who asked for it was ended
                process.kill()
            else:
                link.sendall(f"{process.exitcode}\n".encode())

    with accepting(0, start) as port:
        yield {forked_command.FORKS: f"127.0.0.1:{port}"}


def run_command(asked: Mapping[str, Any]) -> None:
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = ["saccade", *asked["arguments"]]
    ray_cluster: Any = import_module("saccade.plugins.ranks.ray_cluster")  # which reads the environment
    ray_cluster.run_rank = forked_command.rank
    import_module("saccade.cli").main()


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- without a run -----------------------------------------------------------------------------------


def on_ranks(
    main: Callable[..., Any], folder: Path, *arguments: Any, beside: Callable[[], Any] = lambda: None, size: int = 2
) -> tuple[Any, list[Any]]:
    """What `beside` returns here, and what `main(rank, folder, *arguments)` returns in each of some processes, which
    are ranks of torch's default group. Fails with what they printed.
    """
    folder.mkdir(exist_ok=True)
    ranks = [forked(_rank, main, rank, size, folder, arguments) for rank in range(size)]
    with ExitStack() as ending:
        for process in ranks:
            ending.callback(process.kill)
        here = beside()
        for process in ranks:
            process.join(LIMIT)
        codes = [process.exitcode for process in ranks]
    said = [(folder / f"{rank}.log").read_text() for rank in range(size)]
    assert codes == [0] * size and not any("FutureWarning" in text for text in said), (codes, *said)
    return here, [pickle.loads((folder / f"{rank}.pkl").read_bytes()) for rank in range(size)]


def _rank(main: Callable[..., Any], rank: int, size: int, folder: Path, arguments: tuple[Any, ...]) -> None:
    with (folder / f"{rank}.log").open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(main(rank, folder, *arguments)))


# -- of a run ----------------------------------------------------------------------------------------


class Forked(Child):
    """As the process of a rank or a replica, but forked."""

    def __init__(self, of: Replica) -> None:
        link, theirs = socket.socketpair()
        with theirs:
            self.popen: Any = _Popen(forked(_serve, of.module, theirs, of.log, dict(of.environment or {})))
        self.channel = Channel(link)
        self.asked, self._shown = 0, None

    def kill(self) -> None:
        self.popen.process.kill()
        self.popen.wait()


class _Popen:
    """A process of `multiprocessing` as one of `subprocess`, for several threads."""

    def __init__(self, process: Any) -> None:
        self.process, self.pid = process, process.pid

    def poll(self) -> int | None:
        with LOCK:
            return self.process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            connection.wait([self.process.sentinel], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a process", timeout or 0.0)
        return code


def _serve(module: str, link: socket.socket, log: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(link.fileno(), 0)
    link.close()
    runpy.run_module(module, run_name="__main__")
