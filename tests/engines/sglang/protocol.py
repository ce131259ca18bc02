"""SGLang's side of the protocol as the sources of 0.5.23 have it, with a tiny model behind it: its
HTTP server, and the methods of its Python engine. Field names, answers, errors and the two caches
are SGLang's (one is flushed with the weights, the other is not); the sampling is our own.
"""

import asyncio
import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
from fastapi import FastAPI, Header
from fastapi.responses import JSONResponse
from safetensors.torch import load_file

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine
from saccade.media.images import open_media
from saccade.plugins.serving.http_server import running
from saccade.types import MediaSpan, Request, Sampling
from tests.engines.copies import remembering

FIELDS = {
    "rid", "input_ids", "image_data", "mm_hashes", "sampling_params", "return_logprob",
    "return_prompt_token_ids",
}  # fmt: skip
SAMPLING = {
    "max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "logit_bias",
    "sampling_seed",
}  # fmt: skip


class Core:
    """What schedulers and tokenizer manager do together."""

    def __init__(self, model, family):
        self.family, self.model, self.lock = family, model, threading.Lock()
        self.hashes: tuple[str, ...] = ()
        kept = remembering(family.features, lambda media: self.hashes)  # no flush reaches it
        self.engine = EmbeddedEngine(model, replace(family, features=kept))
        self.bodies: list[dict[str, Any]] = []
        self.told: list[tuple[str, Any]] = []
        self.waits: dict[str, threading.Event] | None = None  # requests that stay in the queue
        self.extra_tokens = 0  # a processor that reads pictures in its own way
        self.session = False

    def generate(self, body):
        self.bodies.append(body)
        for known, given in ((FIELDS, body), (SAMPLING, body["sampling_params"])):
            for name in given.keys() - known:
                raise ValueError(f"unknown field `{name}`")
        if self.waits is not None:
            self.waits.setdefault(body["rid"], threading.Event()).wait(30)
            reason = {"type": "abort", "message": "Abort in waiting queue"}
            return {"text": "", "meta_info": {"id": body["rid"], "finish_reason": reason}}
        with self.lock:
            return self._generate(body)

    def _generate(self, body):
        params, pad = body["sampling_params"], self.family.chat.placeholder
        images, prompt = body.get("image_data") or [], body["input_ids"]
        if prompt.count(pad) != len(images):
            raise ValueError(
                f"prompt has {prompt.count(pad)} image placeholder token(s) but {len(images)} image(s) were provided"
            )
        shown = [
            open_media(base64.b64decode(image.split(",")[1]), min_pixels=784, max_pixels=1 << 30) for image in images
        ]
        ids: list[int] = []
        spans: list[MediaSpan] = []
        for token in prompt:
            if token == pad:
                media = shown[len(spans)]
                grid, tokens = self.family.measure(media)
                spans.append(MediaSpan(media=media, start=len(ids), length=tokens, grid=grid))
                ids += [pad] * tokens
            else:
                ids.append(token)
        self.hashes = tuple(body.get("mm_hashes") or [image[-64:] for image in images])
        assert all(0 <= int(name, 16) < 1 << 64 for name in body.get("mm_hashes", ()))
        banned = torch.zeros(self.family.vocabulary, dtype=torch.bool)
        banned[[int(i) for i, bias in params["logit_bias"].items() if bias < -1e6]] = True
        self.engine.banned = banned
        ends = set(params["stop_token_ids"])
        sampling = Sampling(
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=params["top_k"],
            max_tokens=params["max_new_tokens"],
            stop=tuple(params["stop"]),
            ignore_eos=params["ignore_eos"] and not ends,
        )
        asked = Request(
            key=body["rid"], ids=np.array(ids), media=tuple(spans), sampling=sampling, noise=params["sampling_seed"]
        )
        (done,) = generate(self.engine, [asked])
        sampled, logprobs = done.ids.tolist(), done.logprobs.tolist()
        last = sampled[-1] if sampled else None
        matched = last if last in ends else next(iter(params["stop"]), None)
        reason = (
            {"type": "length", "length": len(sampled)}
            if done.finish == "length"
            else {"type": "stop", "matched": matched}
        )
        answer: dict[str, Any] = {
            "text": self.family.decode(done.ids),
            "meta_info": {
                "id": body["rid"],
                "finish_reason": reason,
                "prompt_tokens": len(ids) + self.extra_tokens,
                "output_token_logprobs": [
                    [logprob, token, None] for logprob, token in zip(logprobs, sampled, strict=True)
                ],
            },
        }
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = ids
        return answer

    def abort(self, rid):
        self.told.append(("abort", rid))
        for name, event in (self.waits or {}).items():
            if name.startswith(rid):
                event.set()

    def load(self, tensors):
        """Under the names of the folder; an unknown one is skipped, as SGLang's loaders do."""
        mine = dict(self.model.named_parameters())
        short = {n.replace("model.language_model.", "model."): p for n, p in mine.items()}
        short = {n.replace("model.visual.", "visual."): p for n, p in short.items()} | mine
        for name, tensor in tensors.items():
            if name in short:
                short[name].data.copy_(tensor)
        self.told.append(("load", sorted(tensors)))

    def flush(self):
        self.told.append(("flush", None))
        self.engine.update_weights(None, self.engine.version + 1)


@contextmanager
def serve(core, key=""):
    """Yields the address."""
    app = FastAPI()

    @app.api_route("/{path}", methods=["GET", "POST"])
    def answer(path: str, body: dict | None = None, authorization: Annotated[str, Header()] = ""):
        if body is None:
            return {"version": "0.5.23", "enable_memory_saver": True}
        if key and authorization != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        try:
            return ROUTES[f"/{path}"](core, body)
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)

    with running(app, "127.0.0.1", 0) as address:
        yield address


def _from_disk(core, body):
    for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
        core.load(load_file(file))
    if body["flush_cache"]:
        core.flush()
    return {"success": True, "message": "Succeeded", "num_paused_requests": 0}


def _memory(what):
    return lambda core, body: core.told.append((what, body["tags"]))


ROUTES = {
    "/generate": lambda core, body: core.generate(body),
    "/abort_request": lambda core, body: core.abort(body["rid"]),
    "/update_weights_from_disk": _from_disk,
    "/release_memory_occupation": _memory("release"),
    "/resume_memory_occupation": _memory("resume"),
}


def engine_class(core):
    """`sglang.Engine` over the same core."""

    class Engine:
        def __init__(self, **arguments):
            self.arguments, self.loop = arguments, asyncio.new_event_loop()
            self.threads = ThreadPoolExecutor(8)
            self.tokenizer_manager = SimpleNamespace(abort_request=lambda rid="", abort_all=False: core.abort(rid))
            core.told.append(("start", arguments))

        async def async_generate(
            self, prompt=None, sampling_params=None, input_ids=None, image_data=None, mm_hashes=None,
            return_logprob=False, rid=None,
        ):  # fmt: skip
            body = {
                "rid": rid, "input_ids": input_ids, "image_data": image_data, "mm_hashes": mm_hashes or [],
                "sampling_params": sampling_params, "return_logprob": return_logprob,
            }  # fmt: skip
            return await self.loop.run_in_executor(self.threads, core.generate, body)

        def begin_weight_update(self, selector="all"):
            core.session = True
            return True, "Success"

        def end_weight_update(self):
            core.session = False
            return True, "Success"

        def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
            if not core.session:
                return False, "update_weights_from_tensor must run between begin and end"
            core.load(dict(named_tensors))
            return True, "Success"

        def flush_cache(self):
            core.flush()
            return SimpleNamespace(success=True, message="")

        def release_memory_occupation(self, tags=None):
            core.told.append(("release", tags))

        def resume_memory_occupation(self, tags=None):
            core.told.append(("resume", tags))

        def shutdown(self):
            self.threads.shutdown()
            self.loop.close()

    return Engine
