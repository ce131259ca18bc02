"""Checks that need no model: packages, devices, kernels, engines, loopback, disk."""

import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec

from rich.filesize import decimal as size

from saccade.config import RolloutConfig
from saccade.plugins.engines import INSTALL
from saccade.system.disk import free_disk_bytes, unwritable

LEAST_DISK, LEAST_SHARE = 10**10, 0.5  # free bytes; free share of a GPU's memory
SHOWN_MODELS = 8  # most models of an endpoint that are listed
TORCH = 'pip install "torch>=2.10,<3"'

Rows = Iterator[tuple[str, ...]]


def python() -> Rows:
    version, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    yield "ok", f"{version} on {system}, {sys.executable}"


def packages() -> Rows:
    """Compare installed versions with the ranges that saccade requires."""
    from packaging.requirements import Requirement

    found = []
    asked = metadata.requires("saccade") if version_of("saccade") else ()  # not installed: it runs from its sources
    for wanted in map(Requirement, asked or ()):
        optional = "extra" in str(wanted.marker or "")
        if not optional and wanted.marker is not None and not wanted.marker.evaluate():
            continue
        name, version = wanted.name, version_of(wanted.name)
        if version is None and optional:
            continue
        if version is not None and wanted.specifier.contains(version, prereleases=True):
            found += [] if optional else [f"{name} {version}"]
            continue
        text = f"{name} is missing" if version is None else f"{name} {version} is outside {wanted.specifier}"
        yield "warning" if optional else "failure", text, f'pip install "{name}{wanted.specifier}"'
    yield ("ok", ", ".join(found)) if found else ("note", "not installed by pip: versions were not compared")


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices(wanted: str) -> Rows:
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError, RuntimeError) as error:  # an installed torch may fail to load
        yield "failure", f"torch does not load: {error}", TORCH
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
        name = torch.cuda.get_device_name(index)
        text = f"GPU {index}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < LEAST_SHARE * total:
            yield "warning", text, "something else uses it; nvidia-smi names the process"
        else:
            yield "ok", text
    there = [name for name in ("gloo", "nccl") if getattr(distributed, f"is_{name}_available", bool)()]
    text, fix = f"collectives: {', '.join(there) or 'none'}", "install a torch built with nccl, over which GPUs sum"
    yield ("warning", text, fix) if gpus > 1 and "nccl" not in there else ("ok", text)


def kernels() -> Rows:
    if find_spec("torch") is None:
        return  # reported by `devices`
    import torch

    if not torch.cuda.is_available():
        yield "ok", "dense attention of torch; a CPU needs no other"
    elif find_spec("torch.nn.attention.varlen") is None:
        text = "torch has no variable-length attention, on which training in half precision relies"
        yield "failure", text, f"{TORCH}, or use model.dtype=float32"
    elif find_spec("triton") is None:
        text = "triton is missing: generation and log-probs take their slow paths"
        yield "warning", text, "pip install triton"
    else:
        yield "ok", f"variable-length flash call, triton {version_of('triton')}"


def engines(wanted: str) -> Rows:
    """The result of each engine's probe; only the engine of the config must be installed."""
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
    """Why an engine cannot be used, and the fix after "; "; empty if it can."""
    if name == "vllm":
        from saccade.plugins.engines.vllm.vllm_probe import probe

        return probe().problem
    from saccade.plugins.engines.sglang.sglang_transport import problem

    return problem()


def endpoint(rollout: RolloutConfig, check: Callable[[], object]) -> Rows:
    """Request the endpoint's list of models with the key, which is free. `check` may refuse the config first."""
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
    """Servers and replicas listen on loopback; rewards and environments need only pipes."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        status = "failure" if rollout.replicas > 0 or rollout.engine in INSTALL else "warning"
        text = f"no port can be opened on 127.0.0.1 ({error}), which rollout.replicas, vllm, sglang and servers need"
        yield status, text, "let this user listen on loopback, or use rollout.engine=embedded rollout.replicas=0"
    else:
        yield "ok", "ports on 127.0.0.1 open and answer"


def disk(out: str) -> Rows:
    free = free_disk_bytes(out)
    text = f"run.out={out} can be written, {size(free)} free"
    if found := unwritable(out, "run.out"):
        yield "failure", *found
    elif free < LEAST_DISK:
        yield "warning", text, "a checkpoint may not fit; use run.out on a larger disk"
    else:
        yield "ok", text
