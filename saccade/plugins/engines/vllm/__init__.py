"""vLLM in this process, stepped by our loop, with a copy of the weights.

Adapters arrive merged into the weights. Between rollouts vLLM frees its memory, if the platform
supports that, and takes it back in the order weights, weight update, cache. After an update nothing
that vLLM cached under older weights is used: its caches are emptied, unless running sequences need
theirs, and the cache keys of prompts and images include the version of the weights. The kept ids of
truncated sampling are not returned.

    engine = VllmEngine(Settings(engine="vllm", folder="my-model", dtype="bfloat16"), family)
    generate(engine, [Request(key="a", ids=family.render(messages).ids)])
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from saccade.engines import Settings, prompt_key
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.media.pixel_cache import ImageCache
from saccade.models import DECLARED
from saccade.models.families import Family
from saccade.models.files import model_json
from saccade.plugins.engines import INSTALL, copy_engine
from saccade.plugins.engines.copy_engine import TAKEN, CopyEngine
from saccade.plugins.engines.vllm.vllm_probe import Probe, probe
from saccade.plugins.engines.vllm.vllm_weights import renaming, sample_for
from saccade.plugins.engines.weights import HandOver, checksum, in_memory
from saccade.plugins.media.videos import metadata
from saccade.types import Completion, Request

PICTURES = 256 << 20  # bytes of cached images, at the size that the model sees
BATCHED_TOKENS = 8192  # per forward, or the longest sequence if that is more
CPU_CACHE = 1 << 30  # bytes of the KV cache on a CPU
GOLDEN = 0x9E3779B97F4A7C15  # spreads small numbers over 64 bits


class VllmEngine(CopyEngine):
    name = "vllm"
    live_updates = True

    def __init__(self, settings: Settings, family: Family, *, beside_trainer: bool = False) -> None:
        found = probe()
        if found.problem:
            raise EnvironmentProblem(f"rollout.engine=vllm: {found.problem}")
        super().__init__(settings, family, beside_trainer=beside_trainer)
        self.sleeps = found.sleeps
        self._engine = _build(settings, family, found)
        model = self._engine.vllm_config.model_config
        self.longest = model.max_model_len
        self._ask("saccade_ban", np.flatnonzero(family.banned).tolist())
        self._eos = sorted(family.chat.eos_ids)
        self._pictures = ImageCache(PICTURES, make=family.picture)
        self._aborted: list[Completion] = []
        self._last: tuple[Any, dict[str, Any]] | None = None  # the last prompt: those of a group come in a row
        self._invalidates = True  # tests switch it off, to show what happens without
        self.renamed = renaming(model)
        known = {self.renamed(name): shape for name, shape in self._shapes.items()}
        self._places = self._ask("saccade_places", {name: shape for name, shape in known.items() if name})
        if family.blocks and not self._ask("saccade_sees_both_ways"):
            sees = f"tokens of a picture see each other both ways in a {family.name} model"
            why = f"{sees}, which its attention here lacks"
            raise EnvironmentProblem(f"rollout.engine=vllm: {why}; use rollout.engine=embedded")
        if shown := copy_engine.two_pictures(family, self.longest, settings.max_images):
            self._prompt(shown)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call all workers; returns the answer of the first, which covers only its part of the tensors."""
        return self._engine.collective_rpc(method, args=arguments)[0]

    # -- requests --

    def _start(self, request: Request) -> str:
        """Refuses what this vLLM was not built for, instead of sampling or resizing differently."""
        settings = self.settings
        if request.sampling.first is not None and not settings.first_tokens:
            raise ConfigError(f"request {request.key}: build the engine with Settings(first_tokens=True)")
        for media in (span.media for span in request.media):
            pixels = min(media.max_pixels, media.width * media.height)
            if pixels > settings.max_pixels:
                why = f"an image has {pixels} pixels, the engine is built for {settings.max_pixels}"
                raise ConfigError(f"request {request.key}: {why}; raise data.max_pixels to {pixels}")
        prompt = {**self._prompt(request)}
        prompt["prompt_token_ids"] = list(prompt["prompt_token_ids"])
        return self._engine.add_request(request.key, prompt, params_of(request, self._eos))

    def _prompt(self, request: Request) -> dict[str, Any]:
        content = prompt_key(request)
        if self._last is None or self._last[0] != content:
            named = self.version if self._invalidates else None
            raw = prompt_of(request, self.family, self._pictures.get, named)
            try:
                (prompt,) = self._engine.renderer.render_cmpl([raw])
            except Exception as error:  # vLLM's own classes, such as for too many images
                fix = f"or it cannot read a {self.family.name} model: use rollout.engine=embedded"
                raise ConfigError(f"request {request.key}: vllm refuses it: {error}; {fix}") from error
            theirs = prompt["prompt_token_ids"]
            copy_engine.require_same_prompt(request, self.family, "vllm", theirs, len(theirs))
            self._last = (content, prompt)
        return self._last[1]

    def poll(self) -> list[Completion]:
        done, self._aborted = self._aborted, []
        for output in self._engine.step() if self._running else ():
            if output.finished:
                request, _, version = self._running.pop(output.request_id)
                (answer,) = output.outputs
                if answer.finish_reason not in ("stop", "length"):
                    why = f"vllm gave up ({answer.finish_reason}); see its log, with VLLM_LOGGING_LEVEL=INFO"
                    raise EnvironmentProblem(f"request {request.key}: {why}")
                done.append(self._sampled(request.key, answer, answer.finish_reason, version))
        return done

    def _sampled(self, key: str, answer: Any, finish: str, version: int) -> Completion:
        logprobs = answer.logprobs.logprobs if len(answer.token_ids) else ()
        return self._completion(key, answer.token_ids, logprobs, finish, version)

    @property
    def pending(self) -> int:
        return len(self._running) + len(self._aborted)

    def progress(self, key: str) -> np.ndarray:
        """The ids sampled so far."""
        return np.array(self._state(key).detokenizer.output_token_ids, dtype=np.int64)

    def _state(self, key: str) -> Any:
        """The state of a request in vLLM's output processor."""
        return self._engine.output_processor.request_states[self._running[key][1]]

    def abort(self, key: str) -> None:
        if key in self._running:
            answer = self._state(key)._new_completion_output([], None, None)
            _, name, version = self._running.pop(key)
            self._aborted.append(self._sampled(key, answer, "aborted", version))
            self._engine.abort_request([name], internal=True)

    # -- weights and memory --

    def _load(self, hand_over: HandOver, version: int) -> str:
        sample, dtype = sample_for(self._places, version), getattr(torch, self.settings.dtype)
        checksums: dict[str, int] = {}

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in hand_over:
                if (known := self.renamed(name)) in sample:
                    checksums[known] = checksum(weight.to(dtype))
                yield name, weight

        if self.settings.tensor_parallel == 1:
            loaded, parameters = self._ask("saccade_load", noted())
        else:
            with in_memory(noted()) as paths:
                loaded, parameters = self._ask("saccade_load", paths)
        found = self._ask("saccade_checksums", sample)
        if self._invalidates:
            self._forget()
        if unwritten := sorted(parameters - loaded):
            return f"vllm left unwritten: {unwritten[:5]}"
        wrong = sorted(name for name, value in checksums.items() if found[name] != value)
        return f"other bytes arrived for: {wrong[:5]}" if wrong else ""

    def _forget(self) -> None:
        """Empty vLLM's caches of prompts and images. Not while sequences run, which need theirs: a prompt of the new
        weights has other cache keys anyway.
        """
        self._last = None
        if self._running:
            return
        if not self._engine.reset_prefix_cache():
            self._engine.step()  # a batch was still in flight when the last request ended
            if not self._engine.reset_prefix_cache():
                raise EnvironmentProblem("vllm: prompts of older weights cannot be forgotten")
        self._engine.reset_encoder_cache()
        self._engine.reset_mm_cache()

    def _free(self, *, weights: bool) -> set[str]:
        self._engine.sleep(level=2 if weights else 1)
        self._last = None
        return {"weights", "kv_cache"}

    def _take_back(self, part: str) -> None:
        self._engine.wake_up(tags=[part])

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None
            cleanup_dist_env_and_memory()
            gc.collect()


def _build(settings: Settings, family: Family, found: Probe) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    device = torch.device(settings.device)
    if found.device != device.type:
        why = f"this vllm runs on {found.device}, the run on {device.type}"
        fix = f"use run.device={found.device}, or: {INSTALL['vllm']}"
        raise EnvironmentProblem(f"rollout.engine=vllm: {why}; {fix}")
    if device.index:
        fix = f"use run.device=cuda with CUDA_VISIBLE_DEVICES={device.index} in front of the command"
        raise ConfigError(f"run.device={settings.device}: vllm takes the first GPU that it sees; {fix}")
    longest = min(settings.max_length, family.max_positions)
    arguments: dict[str, Any] = {
        "model": settings.folder,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "trust_remote_code": settings.trust_remote_code,
        "max_model_len": longest,
        "max_num_seqs": settings.max_sequences,
        "max_num_batched_tokens": max(longest, BATCHED_TOKENS),
        "tensor_parallel_size": settings.tensor_parallel,
        "gpu_memory_utilization": settings.memory_share,
        "enable_prefix_caching": True,
        "enable_sleep_mode": found.sleeps,
        "generation_config": "vllm",  # every request has its own sampling parameters
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "saccade.plugins.engines.vllm.vllm_worker.Loader",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if family.spec.image_token:
        # Media are used at the size we send them; vLLM profiles its memory with the largest one.
        size = family.untouched(longest, settings.max_pixels)
        most = {kind: settings.max_images * (kind in family.spec.media_tokens) for kind in TAKEN}
        arguments |= {"limit_mm_per_prompt": most, "mm_processor_kwargs": {"size": size} if size else None}
    if settings.first_tokens:  # keeps vLLM from overlapping its steps
        arguments["logits_processors"] = ["saccade.plugins.engines.vllm.vllm_worker:First"]
    if device.type == "cpu":
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE}
    if settings.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "mp"  # in a Ray task vLLM would otherwise ask Ray for workers
    if DECLARED:
        _inspect_here(settings.folder)
    return LLMEngine.from_engine_args(EngineArgs(**arguments | dict(settings.args)))


def _inspect_here(folder: str) -> None:
    """Register the model class here; otherwise vLLM inspects it in a child process, where torchvision crashes."""
    from vllm import ModelRegistry

    for name in model_json(Path(folder)).get("architectures") or ():
        if (known := ModelRegistry.models.get(name)) is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


# -- requests as vLLM takes them --


def prompt_of(
    request: Request, family: Family, picture: Callable[[Any], np.ndarray], version: int | None
) -> dict[str, Any]:
    """Ids with one placeholder per medium, which vLLM expands again, and the media at the size that
    the model sees. The cache keys of prompt and media include the version of the weights, so that
    nothing computed under other weights is reused.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": copy_engine.collapsed(request, family), "cache_salt": str(version)}
    if request.media:
        data: dict[str, list[Any]] = {}
        names: dict[str, list[str]] = {}
        for media in (span.media for span in request.media):
            pixels = picture(media)
            data.setdefault(media.kind, []).append(_film(media, pixels) if media.frames else Image.fromarray(pixels))
            names.setdefault(media.kind, []).append("/".join(map(str, (*media.key, media.fps, version))))
        prompt |= {"multi_modal_data": data, "multi_modal_uuids": names}
        prompt["mm_processor_kwargs"] = copy_engine.shown_by(request, family)
    return prompt


def _film(media: Any, pixels: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """The frames of a video, all of which are used, and metadata with their times."""
    told = metadata(media.frames, media.fps, media.rate)
    return pixels, {**told, "video_backend": "opencv", "do_sample_frames": False}


def params_of(request: Request, eos: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    # `eos` holds all ids that end a turn, because vLLM's own end ids are switched off.
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=True,
        ignore_eos=True,
        stop_token_ids=None if sampling.ignore_eos else eos,
        seed=(request.noise + request.first_index * GOLDEN) & (2**63 - 1),
        logprobs=0,  # of the sampled token alone
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    params.flat_logprobs = True
    if sampling.first is not None and not request.first_index:
        params.extra_args = {"first": list(sampling.first)}
    return params
