"""Whether there is a vLLM that can serve: asked of its classes, never derived from its version.

probe().problem        # empty when it can
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from typing import Any

from saccade.plugins.engines.foreign_engines import INSTALL

HOW_TO_INSTALL = INSTALL["vllm"]

# Read when vLLM is imported or its engine is built; what a user has set stays.
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # first tokens need processors of logits
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are the same
}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What is installed."""

    device: str = ""  # that it was built for: cpu, cuda …
    sleeps: bool = False  # gives memory back between rollouts
    problem: str = ""  # why it cannot serve, with the fix


@cache
def probe() -> Probe:
    if find_spec("vllm") is None:
        return Probe(problem=f"vllm is not installed; run: {HOW_TO_INSTALL}")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine runs in this process
    try:
        platform, lacks = _look()
    except Exception as error:  # whatever a library raises that does not fit the machine
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return Probe(problem=f"vllm cannot be imported ({why}); use one for this torch: {HOW_TO_INSTALL}")
    sleeps = platform.is_sleep_mode_available() and getattr(platform, "is_cumem_allocator_available", bool)()
    problem = f"vllm has no {', '.join(lacks)}; install a newer one: {HOW_TO_INSTALL}" if lacks else ""
    return Probe(device=platform.device_type, sleeps=sleeps, problem=problem)


def _look() -> tuple[Any, tuple[str, ...]]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import reload
    from vllm.platforms import current_platform
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = {field.name for field in fields(EngineArgs)}
    wanted = {
        "LLMEngine": (LLMEngine, ["collective_rpc", "sleep", "wake_up", *CACHES]),
        "SamplingParams": (SamplingParams, ["flat_logprobs", "extra_args"]),
        "Renderer": (BaseRenderer, ["render_cmpl"]),
        "reload": (reload, ["initialize_layerwise_reload", "finalize_layerwise_reload"]),
    }
    lacks = [f"EngineArgs.{n}" for n in ARGUMENTS if n not in arguments]
    for place, (owner, names) in wanted.items():
        lacks += [f"{place}.{name}" for name in names if not hasattr(owner, name)]
    return current_platform, tuple(lacks)


CACHES = ("reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache")
ARGUMENTS = ("logits_processors", "logprobs_mode", "worker_extension_cls")
