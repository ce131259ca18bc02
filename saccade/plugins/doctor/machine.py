"""Checks that need no model: packages, devices, kernels, engines, loopback, disk."""

from __future__ import annotations

import importlib
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from saccade.config import RolloutConfig
from saccade.engines import INSTALL
from saccade.system.disk import free_bytes, size, unwritable

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
LEAST_DISK, LEAST_SHARE = 10**10, 0.5  # free bytes; free share of a GPU's memory
SHOWN_MODELS = 8  # of an endpoint that has many
TORCH = 'pip install "torch>=2.11,<3"'

Rows = Iterator[tuple[str, ...]]


def python() -> Rows:
    version, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    yield "ok", f"{version} on {system}, {sys.executable}"


def packages() -> Rows:
    """Installed versions against the ranges that saccade asks for."""
    from packaging.requirements import Requirement

    found = []
    for wanted in map(Requirement, requirements()):
        optional = "extra" in str(wanted.marker or "")
        if not optional and wanted.marker is not None and not wanted.marker.evaluate():
            continue
        name, version = wanted.name, version_of(wanted.name)
        install = f'pip install "{name}{wanted.specifier}"'
        if version is None and not optional:
            yield "failure", f"{name} is missing", install
        elif version is not None and not wanted.specifier.contains(version, prereleases=True):
            status = "warning" if optional else "failure"
            yield status, f"{name} {version} is outside {wanted.specifier}", install
        elif version is not None and not optional:
            found.append(f"{name} {version}")
    yield "ok", ", ".join(found)


def requirements() -> list[str]:
    """Of the installed package, or of the source tree beside this file."""
    try:
        return metadata.requires("saccade") or []
    except metadata.PackageNotFoundError:
        text = PROJECT.read_text(encoding="utf-8") if PROJECT.is_file() else ""
        block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
        return re.findall(r'"([^"]+)"', block[1]) if block else []


def version_of(name: str) -> str | None:
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


def devices(wanted: str) -> Rows:
    torch = imported("torch")
    if isinstance(torch, Exception):
        yield "failure", f"torch does not load: {torch}", TORCH
        return
    pages, page = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not gpus:
        fix = "install a torch built for CUDA and its driver, or use run.device=auto"
        yield "failure", "run.device=cuda, but torch sees no GPU", fix
    host = f"CPU: {os.cpu_count()} cores, {pages * page / 2**30:.1f} GiB of memory free"
    yield "ok", host if gpus else f"{host}; no GPU"
    for index in range(gpus):
        free, total = torch.cuda.mem_get_info(index)
        text = f"GPU {index}: {torch.cuda.get_device_name(index)}, "
        text += f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < LEAST_SHARE * total:
            yield "warning", text, "something else uses it; nvidia-smi names the process"
        else:
            yield "ok", text


def kernels() -> Rows:
    torch = imported("torch")
    if isinstance(torch, Exception):
        return  # said already
    if not torch.cuda.is_available():
        yield "ok", "dense attention of torch; a CPU needs no other"
    elif not hasattr(imported("torch.nn.attention.varlen"), "varlen_attn"):
        text = "torch has no variable-length attention, on which training in half precision relies"
        yield "failure", text, f"{TORCH}, or use model.dtype=float32"
    elif find_spec("triton") is None:
        text = "triton is missing: generation and log-probs take their slow paths"
        yield "warning", text, "pip install triton"
    else:
        yield "ok", f"variable-length flash call, triton {version_of('triton')}"


def engines(wanted: str) -> Rows:
    """What the probe of each engine says; only the engine of the config must be there."""
    yield "ok", "embedded: always there"
    for name, install in INSTALL.items():
        text, _, fix = why_not(name).partition("; ")
        if not text:
            yield "ok", f"{name} {version_of(name) or version_of(f'{name}-cpu') or ''}"
        elif name == wanted:
            yield "failure", text, fix or install
        else:
            yield "note" if "not installed" in text else "warning", text, fix or install


def why_not(name: str) -> str:
    """Why an engine cannot serve, with the fix; empty when it can."""
    if name == "vllm":
        from saccade.plugins.engines.vllm.vllm_probe import probe

        return probe().problem
    from saccade.plugins.engines.sglang.sglang_transport import problem

    return problem()


def endpoint(rollout: RolloutConfig, check: Callable[[], object]) -> Rows:
    """Asked for its models, with the key; that costs nothing. `check` refuses a config for it."""
    if rollout.engine != "http":
        return
    from saccade.plugins.judges.http_client.chat_client import OFF, ChatClient

    check()
    http = rollout.http
    once = {"retries": 0, "cache": OFF, "model": http.model or "any"}
    names = ChatClient(http.model_copy(update=once)).models()
    listed = ", ".join(names[:SHOWN_MODELS]) or "no model"
    if http.model in names or (not http.model and len(names) == 1):
        yield "ok", f"{http.url} has {http.model or listed}"
    else:
        text = f"{http.url} has {f'no {http.model}, but ' if http.model else ''}{listed}"
        yield "failure", text, "name one of its models with rollout.http.model"


def loopback(rollout: RolloutConfig) -> Rows:
    """Servers and replicas listen there; rewards and environments talk through pipes."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        yield (
            "failure" if rollout.replicas > 0 or rollout.engine in INSTALL else "warning",
            f"no port can be opened and reached on 127.0.0.1: {error}; a run needs it for "
            "rollout.replicas and the engines vllm and sglang, nothing else does but "
            "`chat --serve` and `serve-reward`",
            "let this user listen on loopback, or use rollout.engine=embedded rollout.replicas=0",
        )
    else:
        yield "ok", "ports on 127.0.0.1 open and answer"


def disk(out: str) -> Rows:
    if found := unwritable(out, "run.out"):
        yield "failure", *found
        return
    free = free_bytes(out)
    text = f"run.out={out} can be written, {size(free)} free"
    if free < LEAST_DISK:
        yield "warning", text, "a checkpoint may not fit; use run.out on a larger disk"
    else:
        yield "ok", text
