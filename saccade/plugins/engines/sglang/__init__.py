"""SGLang, in this process or behind its HTTP server, with a copy of the weights.

Written against the sources of SGLang 0.5.23; docs/engines.md says which parts have been run. Hashes of
images include the version of the weights, because flushing SGLang's cache drops prefixes, but not
outputs of the vision tower. The kept ids of truncated sampling are not returned.

    engine = SglangEngine(Settings(engine="sglang", folder="my-model", dtype="bfloat16"), family)
    generate(engine, [Request(key="a", ids=family.render(messages).ids)])
"""

import base64
import hashlib
import io
import uuid
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from saccade.engines import Settings, generate
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import Family
from saccade.plugins.engines import copy_engine
from saccade.plugins.engines.copy_engine import NO_LIMIT, CopyEngine
from saccade.plugins.engines.sglang.sglang_transport import InProcess, OverHttp
from saccade.plugins.engines.weights import HandOver
from saccade.plugins.families.pixel_options import call_options
from saccade.types import Completion, Media, Request

PICTURES = 1024  # encoded images in memory
BANNED = -1e9  # added to a logit; JSON has no infinity


class SglangEngine(CopyEngine):
    name = "sglang"
    renamed = staticmethod(str)  # its names are those of the folder

    def __init__(self, settings: Settings, family: Family, *, beside_trainer: bool = False) -> None:
        super().__init__(settings, family, beside_trainer=beside_trainer)
        url = settings.args.get("url")  # of a running server
        self._sglang: Any = OverHttp(url, settings.args.get("key", "")) if url else InProcess(settings, family)
        self.sleeps = self._sglang.sleeps
        self._encode = lru_cache(maxsize=PICTURES)(self._encoded)
        self._aborted: set[str] = set()
        if shown := copy_engine.two_pictures(family, self.longest, settings.max_images):
            generate(self, [shown])

    def _start(self, request: Request) -> str:
        # SGLang aborts all requests whose id begins with the given one, so no id may begin with another.
        name = f"{uuid.uuid4().hex}/{request.key}"
        self._sglang.start(name, body_of(request, self.family, self._encode, self.version))
        return name

    def _encoded(self, media: Media) -> str:
        """A PNG of the size that the model sees, so that SGLang does not resize it."""
        file = io.BytesIO()
        Image.fromarray(self.family.picture(media)).save(file, "PNG", compress_level=1)
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    def poll(self) -> list[Completion]:
        done = []
        for name, answer in self._sglang.wait() if self._running else ():
            key = name.partition("/")[2]
            (request, _, version), aborted = self._running.pop(key), key in self._aborted
            self._aborted.discard(key)
            triples = triples_of(request, self.family, answer, aborted=aborted)
            how = answer["meta_info"]["finish_reason"]["type"]
            finish = "aborted" if how == "abort" else how  # an aborted request may have finished before
            done.append(self._completion(key, [t[1] for t in triples], [t[0] for t in triples], finish, version))
        return done

    def abort(self, key: str) -> None:
        if key in self._running:
            self._aborted.add(key)
            self._sglang.abort(self._running[key][1])

    def _load(self, hand_over: HandOver, version: int) -> str:
        self._sglang.load(hand_over, version)
        return ""

    def _free(self, *, weights: bool) -> set[str]:
        parts = {"kv_cache", "weights"} if weights else {"kv_cache"}
        self._sglang.memory("release", sorted(parts))
        return parts

    def _take_back(self, part: str) -> None:
        self._sglang.memory("resume", [part])

    def close(self) -> None:
        self._sglang.close()


# -- requests as SGLang takes them, in Python and over HTTP --


def body_of(request: Request, family: Family, encode: Callable[[Media], str], version: int) -> dict[str, Any]:
    """A request as SGLang takes it, with one placeholder per image, which SGLang expands again."""
    sampling, others = request.sampling, {span.media.kind for span in request.media} - {"image"}
    if others:
        why = f"the prompt has {' and '.join(sorted(others))}, but sglang is sent images only"
        raise ConfigError(f"request {request.key}: {why}; use rollout.engine=embedded")
    cut, usual = copy_engine.shown_by(request, family), call_options(family.budget(1, NO_LIMIT))
    if request.media and not family.spec.whole and cut != usual:
        why = f"its images are shown with {cut}, but sglang shows all as the folder's image processor says"
        raise ConfigError(f"request {request.key}: {why}; write that into it, or use rollout.engine=embedded")
    if sampling.first is not None:
        fix = "use algorithm.hot_first_token.temperature=0, or rollout.engine=embedded"
        raise ConfigError(f"rollout.engine=sglang draws every token alike; {fix}")
    body: dict[str, Any] = {
        "input_ids": copy_engine.collapsed(request, family),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            # All ids that end a turn, because SGLang's own end ids are switched off.
            "stop_token_ids": [] if sampling.ignore_eos else sorted(family.chat.eos_ids),
            "ignore_eos": True,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "logit_bias": {str(i): BANNED for i in np.flatnonzero(family.banned)},
            # Combined with the position, if SGLang runs with deterministic inference.
            "sampling_seed": request.noise,
        },
    }
    if request.media:
        shown = [span.media for span in request.media]
        body["image_data"] = [encode(media) for media in shown]
        # 64 bits: SGLang's cache key for what it computed of an image.
        names = ("/".join(map(str, (*media.key, version))) for media in shown)
        body["mm_hashes"] = [hashlib.blake2b(name.encode(), digest_size=8).hexdigest() for name in names]
    return body


def triples_of(request: Request, family: Family, answer: Mapping[str, Any], *, aborted: bool) -> list[Any]:
    """(log-prob, id, text) of every sampled token; none if the request was still queued. Refuses an
    answer to another prompt: other ids, if the answer holds them, or another number of them.
    """
    info = answer["meta_info"]
    reason = info["finish_reason"]
    if reason["type"] == "abort" and not aborted:
        raise EnvironmentProblem(f"sglang gave up request {request.key}: {reason.get('message')}; see its log")
    count = info.get("prompt_tokens", len(request.ids) if aborted else None)
    copy_engine.require_same_prompt(request, family, "sglang", answer.get("prompt_token_ids"), count)
    return info.get("output_token_logprobs") or []
