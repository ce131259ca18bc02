"""Whether a usable vLLM is installed: judged by its classes, never by its version.

probe().problem        # empty when it can
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name

from saccade.plugins.engines import INSTALL

# Read when vLLM is imported or its engine is built; the user's values take precedence.
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # first tokens need logits processors
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the same threads
}
NEEDED = {
    "vllm:SamplingParams": ("flat_logprobs", "extra_args"),
    "vllm.engine.arg_utils:EngineArgs": ("logits_processors", "logprobs_mode", "worker_extension_cls"),
    "vllm.model_executor.model_loader:reload": ("initialize_layerwise_reload", "finalize_layerwise_reload"),
    "vllm.renderers:BaseRenderer": ("render_cmpl",),
    "vllm.v1.engine:EngineCoreRequest": ("cache_salt",),
    "vllm.v1.engine.llm_engine:LLMEngine": (
        *("collective_rpc", "sleep", "wake_up"),
        *("reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The installed vLLM."""

    device: str = ""  # that it was built for: cpu, cuda …
    sleeps: bool = False  # can free memory between rollouts
    problem: str = ""  # why it cannot be used, with the fix


@cache
def probe() -> Probe:
    if find_spec("vllm") is None:
        return Probe(problem=f"vllm is not installed; run: {INSTALL['vllm']}")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine runs in this process
    try:
        from vllm.platforms import current_platform as platform

        needed = ((owner, name) for owner, names in NEEDED.items() for name in names)
        lacks = [f"{o.partition(':')[2]}.{name}" for o, name in needed if not hasattr(resolve_name(o), name)]
    except Exception as error:  # a library that does not fit the machine may raise anything
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return Probe(problem=f"vllm cannot be imported ({why}); use one for this torch: {INSTALL['vllm']}")
    sleeps = platform.is_sleep_mode_available() and getattr(platform, "is_cumem_allocator_available", bool)()
    problem = f"vllm has no {', '.join(lacks)}; install a newer one: {INSTALL['vllm']}" if lacks else ""
    return Probe(device=platform.device_type, sleeps=sleeps, problem=problem)
