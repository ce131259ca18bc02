"""SGLang, in this process or behind its HTTP server, with its own copy of the weights.

Written against the sources of SGLang 0.5.23; docs/engines.md says what of it has run. Images are
named after the version of the weights: flushing SGLang's cache drops prefixes, but not outputs of
the vision tower. Kept ids of truncated sampling are not returned.

    engine = SglangEngine(Settings(engine="sglang", folder="my-model", dtype="bfloat16"), family)
    generate(engine, [Request(key="a", ids=family.render(messages).ids)])
"""

from __future__ import annotations

import base64
import hashlib
import io
import uuid
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from saccade.engines import Engine, Settings, WeightSource, require_room
from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import Family
from saccade.plugins.engines.foreign_engines import collapsed, reads_differently, require_finite
from saccade.plugins.engines.sglang.sglang_transport import InProcess, OverHttp
from saccade.plugins.engines.weights import HandOver, folder_shapes
from saccade.types import Completion, Media, Request

PICTURES = 1024  # encoded images that are kept
BANNED = -1e9  # added to a logit; JSON has no infinity
FINISH = {"stop": "stop", "length": "length", "abort": "aborted"}


class SglangEngine(Engine):
    def __init__(self, settings: Settings, family: Family, *, beside_trainer: bool = False) -> None:
        """`beside_trainer`: the source of weights stays readable, so that sleep may forget them."""
        self.settings, self.family, self.version = settings, family, 0
        self._beside, self._shapes = beside_trainer, folder_shapes(settings.folder)
        self._sglang: InProcess | OverHttp
        if url := settings.args.get("url"):  # a server that runs already
            self._sglang = OverHttp(url, settings.args.get("key", ""))
        else:
            self._sglang = InProcess(settings, family)
        self._encode = lru_cache(maxsize=PICTURES)(self._encoded)
        self._running: dict[str, Request] = {}  # by SGLang's name of it
        self._names: dict[str, str] = {}  # by key
        self._aborted: set[str] = set()  # names
        self._source: WeightSource | None = None
        self._asleep: set[str] = set()
        self._unusable = ""

    def submit(self, request: Request) -> None:
        if self._unusable:
            raise EnvironmentProblem(self._unusable)
        require_room(request, min(self.settings.max_length, self.family.max_positions))
        assert request.key not in self._names, f"request {request.key} was submitted twice"
        self.wake()
        # SGLang aborts whatever begins with a name, so no name may begin with another.
        name, body = uuid.uuid4().hex, body_of(request, self.family, self._encode, self.version)
        self._sglang.start(name, body)
        self._running[name], self._names[request.key] = request, name

    def _encoded(self, media: Media) -> str:
        """A PNG of the size that the model sees, so that SGLang does not resize it."""
        file = io.BytesIO()
        Image.fromarray(self.family.picture(media)).save(file, "PNG", compress_level=1)
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    def poll(self) -> list[Completion]:
        done = []
        for name, answer in self._sglang.wait() if self._running else ():
            request, aborted = self._running.pop(name), name in self._aborted
            del self._names[request.key]
            self._aborted.discard(name)
            done.append(completion_of(request, answer, version=self.version, aborted=aborted))
            if self.settings.finite:
                require_finite(done[-1].logprobs)
        return done

    @property
    def pending(self) -> int:
        return len(self._running)

    def abort(self, key: str) -> None:
        if key in self._names:
            self._aborted.add(self._names[key])
            self._sglang.abort(self._names[key])

    def update_weights(self, source: WeightSource, version: int) -> None:
        assert not self._running, "weights change while sequences are running"
        self._rouse("weights")
        self._unusable = f"sglang: the hand-over of weights {version} did not end"
        hand_over = HandOver(weights=source.weights(), shapes=self._shapes, renamed=_plain)
        self._sglang.load(hand_over, version)
        if drift := hand_over.drift():
            raise EnvironmentProblem(
                f"sglang: names of weights have drifted apart: {drift}; start again from the model.path that is "
                "trained, or use rollout.engine=embedded"
            )
        self.version, self._unusable = version, ""
        self._source = source if self._beside else None

    def sleep(self) -> None:
        """Drop weights that a trainer can hand over again; else keep them."""
        assert not self._running, "sleep while sequences are running"
        if self._sglang.sleeps and not self._asleep:
            self._asleep = {"kv_cache", "weights"} if self._source else {"kv_cache"}
            self._sglang.memory("release", sorted(self._asleep))

    def wake(self) -> None:
        """Weights, hand-over, cache: in this order there is room for each."""
        if "weights" in self._asleep and self._source is not None:
            self.update_weights(self._source, self.version)
        self._rouse("kv_cache")

    def _rouse(self, part: str) -> None:
        if part in self._asleep:
            self._sglang.memory("resume", [part])
            self._asleep.discard(part)

    def close(self) -> None:
        self._sglang.close()


def _plain(name: str) -> str:
    """Folders of the same model differ in where they put the two towers."""
    for long, short in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        name = short + name.removeprefix(long) if name.startswith(long) else name
    return name


# -- requests as SGLang takes them, in Python and over HTTP --


def body_of(request: Request, family: Family, encode: Callable[[Media], str], version: int) -> dict[str, Any]:
    """One placeholder per image, which SGLang expands again."""
    sampling = request.sampling
    if sampling.first is not None:
        raise ConfigError(
            "rollout.engine=sglang draws every token alike; use "
            "algorithm.hot_first_token.temperature=0, or rollout.engine=embedded"
        )
    body: dict[str, Any] = {
        "input_ids": collapsed(request),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            # Every id that ends a turn is among these: the end ids of SGLang are switched off.
            "stop_token_ids": [] if sampling.ignore_eos else sorted(family.chat.eos_ids),
            "ignore_eos": True,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "logit_bias": {str(i): BANNED for i in np.flatnonzero(family.banned)},
            # Read together with the position, where SGLang runs with deterministic inference.
            "sampling_seed": request.noise,
        },
    }
    if request.media:
        shown = [span.media for span in request.media]
        body["image_data"] = [encode(media) for media in shown]
        body["mm_hashes"] = [_name(media, version) for media in shown]
    return body


def _name(media: Media, version: int) -> str:
    """64 bits under which SGLang keeps what it computed of an image."""
    content = "/".join(map(str, (*media.key, version)))
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def completion_of(request: Request, answer: Mapping[str, Any], *, version: int, aborted: bool) -> Completion:
    info = answer["meta_info"]
    reason = info["finish_reason"]
    if reason["type"] == "abort" and not aborted:
        raise EnvironmentProblem(f"sglang gave up request {request.key}: {reason.get('message')}; see its log")
    _compare_prompt(request, answer, aborted)
    triples = info.get("output_token_logprobs") or []  # (log-prob, id, text); none if it waited
    return Completion(
        key=request.key,
        ids=np.array([triple[1] for triple in triples], dtype=np.int64),
        logprobs=np.array([triple[0] for triple in triples], dtype=np.float32),
        versions=np.full(len(triples), version, dtype=np.int32),
        finish="aborted" if aborted else FINISH[reason["type"]],  # type: ignore[arg-type]
    )


def _compare_prompt(request: Request, answer: Mapping[str, Any], aborted: bool) -> None:
    """Refuse other ids than were sent, where the answer holds them, or another number of them."""
    count = answer["meta_info"].get("prompt_tokens", len(request.ids) if aborted else None)
    ids = answer.get("prompt_token_ids", request.ids)
    if count != len(request.ids) or not np.array_equal(ids, request.ids):
        raise reads_differently(request, "sglang", count)
