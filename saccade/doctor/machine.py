"""Checks that need no model: packages, devices, kernels, engines, loopback, disk."""

from __future__ import annotations

import importlib
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from saccade.config import Config
from saccade.disk import free_bytes, size, unwritable
from saccade.doctor.finding import AS_IT_SAYS, Finding, failure, note, ok, warning
from saccade.engines.settings import INSTALL
from saccade.errors import SaccadeError

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
LEAST_DISK, LEAST_SHARE = 10**10, 0.5  # free bytes; free share of a GPU's memory
SHOWN_MODELS = 8  # of an endpoint that has many


def python(config: Config) -> Iterator[Finding]:
    version, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    yield ok("python", f"{version} on {system}, {sys.executable}")


def packages(config: Config) -> Iterator[Finding]:
    """Installed versions against the ranges that saccade asks for."""
    from packaging.requirements import Requirement

    found = []
    for line in requirements():
        wanted = Requirement(line)
        optional = "extra" in str(wanted.marker or "")
        if not optional and wanted.marker is not None and not wanted.marker.evaluate():
            continue
        plain = f"{wanted.name}{wanted.specifier}"
        version = _version(wanted.name)
        if version is None and not optional:
            yield failure("packages", f"{wanted.name} is missing", f'pip install "{plain}"')
        elif version is not None and not wanted.specifier.contains(version, prereleases=True):
            say = warning if optional else failure
            text = f"{wanted.name} {version} is outside {wanted.specifier}"
            yield say("packages", text, f'pip install "{plain}"')
        elif version is not None and not optional:
            found.append(f"{wanted.name} {version}")
    yield ok("packages", ", ".join(found))


def requirements() -> list[str]:
    """Of the installed package, or of the source tree beside this file."""
    try:
        return metadata.requires("saccade") or []
    except metadata.PackageNotFoundError:
        text = PROJECT.read_text(encoding="utf-8") if PROJECT.is_file() else ""
        block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
        return re.findall(r'"([^"]+)"', block[1]) if block else []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def imported(name: str) -> Any:
    """The module, or what went wrong: a library may be there and still not load."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        return error


def devices(config: Config) -> Iterator[Finding]:
    torch = imported("torch")
    if isinstance(torch, Exception):
        yield failure("devices", f"torch does not load: {torch}", 'pip install "torch>=2.11,<3"')
        return
    pages, page = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    host = f"{os.cpu_count()} cores, {pages * page / 2**30:.1f} GiB of memory free"
    if not torch.cuda.is_available():
        if config.run.device == "cuda":
            yield failure(
                "devices",
                "run.device=cuda, but torch sees no GPU",
                "install a torch built for CUDA and its driver, or use run.device=auto",
            )
        yield ok("devices", f"CPU: {host}; no GPU")
        return
    yield ok("devices", f"CPU: {host}")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"GPU {index}: {torch.cuda.get_device_name(index)}, "
        text += f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < LEAST_SHARE * total:
            yield warning("devices", text, "something else uses it; nvidia-smi names the process")
        else:
            yield ok("devices", text)


def kernels(config: Config) -> Iterator[Finding]:
    torch = imported("torch")
    if isinstance(torch, Exception):
        return  # said already
    gpu, text = torch.cuda.is_available(), "dense attention of torch; a CPU needs no other"
    if not gpu:
        yield ok("attention", text)
        return
    varlen = imported("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn"):
        yield failure(
            "attention",
            "torch has no variable-length attention, on which training in half precision relies",
            'pip install "torch>=2.11,<3", or use model.dtype=float32',
        )
    elif find_spec("triton") is None:
        yield warning(
            "attention",
            "triton is missing: generation and log-probs take their slow paths",
            "pip install triton",
        )
    else:
        yield ok("attention", f"variable-length flash call, triton {_version('triton')}")


def engines(config: Config) -> Iterator[Finding]:
    """What is installed is asked what it can do; only the engine of the config must be there."""
    yield ok("engine", "embedded: always there")
    for name, install in INSTALL.items():
        asked = config.rollout.engine == name
        if find_spec(name) is None:
            say = failure if asked else note
            yield say("engine", f"{name}: not installed", install)
            continue
        problem = why_not(name)
        version = _version(name) or _version(f"{name}-cpu") or ""
        if problem:
            text, _, fix = problem.partition("; ")
            yield (failure if asked else warning)("engine", text, fix or install)
        else:
            yield ok("engine", f"{name} {version}")


def why_not(name: str) -> str:
    """What the engine's own probe says against it, with the fix."""
    if name == "vllm":
        from saccade.engines.vllm.vllm_probe import probe

        return probe().problem
    from saccade.engines.sglang.sglang_transport import problem

    return problem()


def endpoint(config: Config) -> Iterator[Finding]:
    """Asked for its models, with the key; that costs nothing."""
    if config.rollout.engine != "http":
        return
    from saccade.checks import check
    from saccade.http_client.chat_client import OFF, ChatClient

    http = config.rollout.http
    once = {"retries": 0, "cache": OFF, "model": http.model or "any"}
    try:
        check(config, "chat")
        names = ChatClient(http.model_copy(update=once)).models()
    except SaccadeError as error:
        yield failure("endpoint", str(error), AS_IT_SAYS)
        return
    listed = ", ".join(names[:SHOWN_MODELS]) or "no model"
    if http.model in names or (not http.model and len(names) == 1):
        yield ok("endpoint", f"{http.url} has {http.model or listed}")
    else:
        text = f"{http.url} has {f'no {http.model}, but ' if http.model else ''}{listed}"
        yield failure("endpoint", text, "name one of its models with rollout.http.model")


def loopback(config: Config) -> Iterator[Finding]:
    """Servers and replicas listen there; rewards and environments talk through pipes."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        rollout = config.rollout
        asked = rollout.replicas > 0 or rollout.engine in INSTALL
        yield (failure if asked else warning)(
            "loopback",
            f"no port can be opened and reached on 127.0.0.1: {error}; a run needs it for "
            "rollout.replicas and the engines vllm and sglang, nothing else does but "
            "`chat --serve` and `serve-reward`",
            "let this user listen on loopback, or use rollout.engine=embedded rollout.replicas=0",
        )
    else:
        yield ok("loopback", "ports on 127.0.0.1 open and answer")


def disk(config: Config) -> Iterator[Finding]:
    if found := unwritable(config.run.out, "run.out"):
        yield failure("disk", *found)
        return
    free = free_bytes(config.run.out)
    text = f"run.out={config.run.out} can be written, {size(free)} free"
    if free < LEAST_DISK:
        yield warning("disk", text, "a checkpoint may not fit; use run.out on a larger disk")
    else:
        yield ok("disk", text)


CHECKS = (python, packages, devices, kernels, engines, endpoint, loopback, disk)
