"""Rewards over HTTP: POST /get_reward, and GET /health, /info and /metrics.

A `Scorer` behind a bounded queue. A request that is repeated with the same id, because its reply was lost,
gets the scores of the first. When too many samples wait, requests are refused with a Retry-After.
Verifiers run in the scorer's worker processes, so a slow one cannot block the others.

    service = RewardService(scorer, config.reward.serve, config.data)
    with running(reward_app(service, token="sesame"), "127.0.0.1", 8400): ...
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import signal
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from saccade import __version__, checks
from saccade.config import Config, on_one_gpu
from saccade.config.schema import DataConfig, ServeConfig
from saccade.errors import SaccadeError
from saccade.media.images import open_media
from saccade.plugins.judges.service_protocol import PATH, PROTOCOL, read_samples, reply_to
from saccade.plugins.serving import http_server
from saccade.plugins.serving.http_server import BACKLOG, BadRequest, Gate, JsonReply, json_app
from saccade.registry import HOOKS
from saccade.rewards.combine import Scored
from saccade.rewards.reward_sample import RewardSample, image_records
from saccade.rewards.scorer import Scorer
from saccade.types import Media

BODIES_AT_ONCE = 2  # bodies of the largest size that may be in memory at once
KEPT = 512  # requests whose scores are kept for repeats
LATENCIES = 2048  # latest requests over which latency quantiles are computed
MAX_RETRY_AFTER = 30.0  # most seconds of a Retry-After
STATUSES = ("ok", "abstain", "error")
CHECK_INTERVAL = 0.2  # seconds between two checks for a stop signal
GRACE = 30.0  # seconds for waiting samples after a stop signal


def reward_app(service: RewardService, *, token: str) -> FastAPI:
    """The application; an empty `token` requires none."""
    largest = service.serve.max_body_mb * 2**20
    gate = Gate(token=token, largest_body=largest, public=("/health",), memory_left=BODIES_AT_ONCE * largest)
    app = json_app(gate, lambda problem: {"error": str(problem)})
    threads = anyio.CapacityLimiter(BACKLOG)  # each of these threads waits for the scores of one request

    @app.post(PATH)
    async def get_reward(request: Request, body: dict[str, Any]) -> Response:
        digest = hashlib.sha256(await request.body()).hexdigest()
        answer = partial(service.answer, body, digest=digest)
        return JsonReply(await anyio.to_thread.run_sync(answer, limiter=threads, abandon_on_cancel=True))

    for path in ("/info", PATH):
        app.get(path)(service.info)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics)
    return app


class RewardService:
    """Scores requests and counts them. `answer` is thread-safe."""

    def __init__(self, scorer: Scorer, serve: ServeConfig, data: DataConfig) -> None:
        self.scorer, self.serve, self.data = scorer, serve, data
        self.draining = False
        self.started = time.time()
        self._changed = threading.Condition()
        self._pending = 0  # samples
        self._requests: OrderedDict[str, Future[list[Scored]]] = OrderedDict()
        self._rate = 0.0  # samples per second, moving average
        self._counts = dict.fromkeys(("requests", "repeated", "busy", "refused", *STATUSES), 0)
        self._seconds: deque[float] = deque(maxlen=LATENCIES)
        self._log = serve.log
        if serve.log:
            Path(serve.log).parent.mkdir(parents=True, exist_ok=True)
            Path(serve.log).touch()

    def answer(self, body: Mapping[str, Any], *, digest: str) -> dict[str, Any]:
        """The reply. Repeats are found by `digest`, of the request's bytes: ids of different requests may collide."""
        key, mine = digest if body.get("request_id") else "", Future[list[Scored]]()
        with self._changed:
            first = self._requests.setdefault(key, mine) if key else mine
            self._counts["requests"] += 1
            self._counts["repeated"] += first is not mine
            while len(self._requests) > KEPT and next(iter(self._requests.values())).done():
                self._requests.popitem(last=False)
        if first is mine:
            try:
                mine.set_result(self._score(body))
            except BaseException as problem:
                with self._changed:
                    self._requests.pop(key, None)  # a refused client may retry
                    self._counts["refused"] += isinstance(problem, BadRequest) and problem.status == 400
                mine.set_exception(problem)
        return reply_to(first.result(), ours=body.get("protocol") == PROTOCOL, unscored=self.serve.unscored)

    async def info(self) -> dict[str, Any]:
        recipes = {**self.scorer.recipes, **({"default": d} if (d := self.scorer.default) else {})}
        rewards = {source: {term.name: term.verifier for term in recipe.terms} for source, recipe in recipes.items()}
        learned = any(term.uses_model for term in self.scorer.terms)
        return {"protocol": PROTOCOL, "version": __version__, "models": learned, "rewards": rewards}

    async def health(self) -> Response:
        status = "draining" if self.draining else "ok"
        shown = {"status": status, "pending": self._pending, "queue": self.serve.queue}
        return JsonReply(shown, 503 if self.draining else 200)

    async def metrics(self) -> Response:
        """Counters and gauges in the text format of Prometheus."""
        with self._changed:
            counts, seconds, pending = dict(self._counts), list(self._seconds), self._pending
        gauges = {"pending": pending, "queue": self.serve.queue, "uptime_seconds": time.time() - self.started}
        if (pool := self.scorer.pool) is not None:
            gauges |= {"workers": pool.alive(), "workers_replaced": pool.replaced}
        lines = [f'samples_total{{status="{kind}"}} {counts.pop(kind)}' for kind in STATUSES]
        lines += [f"{name}_total {value}" for name, value in counts.items()]
        lines += [f"{name} {value:g}" for name, value in gauges.items()]
        for share in (0.5, 0.95) if seconds else ():
            lines.append(f'request_seconds{{quantile="{share:g}"}} {np.quantile(seconds, share):.6f}')
        text = "".join(f"saccade_reward_{line}\n" for line in lines)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for pending samples; returns False if some are left after `seconds`."""
        with self._changed:
            self.draining = True
            return self._changed.wait_for(lambda: not self._pending, seconds)

    # -- one request --

    def _score(self, body: Mapping[str, Any]) -> list[Scored]:
        began = time.monotonic()
        try:
            samples = read_samples(body, response_after=self.serve.response_after)
            self.scorer.check_sources(sample.data_source for sample in samples)
        except ValueError as problem:
            raise BadRequest(None, str(problem)) from None
        self._admit(len(samples))
        try:
            with tempfile.TemporaryDirectory(prefix="saccade-reward-") as folder:
                if images := body.get("images", body.get("raw_images")):
                    samples = _with_images(samples, images, self.data, Path(folder))
                scored = self.scorer.score(samples)
        finally:
            with self._changed:
                self._pending -= len(samples)
                self._changed.notify_all()
        seconds = time.monotonic() - began
        with self._changed:
            self._seconds.append(seconds)
            recent = len(samples) / max(seconds, 1e-3)
            self._rate = recent if not self._rate else 0.9 * self._rate + 0.1 * recent
            for each in scored:
                self._counts[each.status] += 1
            self._write(samples, scored)
        return scored

    def _write(self, samples: Sequence[RewardSample], scored: Sequence[Scored]) -> None:
        if not self._log:
            return
        try:
            with open(self._log, "a", encoding="utf-8") as log:
                log.writelines(map(_line, samples, scored))
        except OSError as error:  # a failing log must not fail the scores
            why = f"{self._log} cannot be written ({error})"
            logging.getLogger("saccade").warning(f"reward.serve.log: {why}; no more is logged")
            self._log = None

    def _admit(self, count: int) -> None:
        if count > self.serve.queue:
            raise BadRequest(None, f"{count} samples, at most {self.serve.queue} are taken at once", status=413)
        with self._changed:
            full = self._pending + count > self.serve.queue
            if self.draining or full:
                self._counts["busy"] += 1
                wait = min(MAX_RETRY_AFTER, max(1.0, self._pending / (self._rate or 1.0)))
                why = "it is shutting down" if self.draining else f"{self._pending} samples wait"
                status = 503 if self.draining else 429
                raise BadRequest(None, f"come back later: {why}", status=status, wait=wait)
            self._pending += count


def _with_images(samples: Sequence[RewardSample], images: Any, limits: DataConfig, folder: Path) -> list[RewardSample]:
    """The samples with their images stored as files in `folder`, as verifiers read images by path."""
    if not isinstance(images, list) or len(images) != len(samples):
        raise BadRequest("images", f"not {len(samples)} entries")
    most, earlier, shown = limits.max_images, dict[str, Media](), list[RewardSample]()
    for index, (sample, given) in enumerate(zip(samples, images, strict=True)):
        if not isinstance(given, list) or len(given) > most:
            raise BadRequest(f"images[{index}]", f"give a list of at most {most} (data.max_images)")
        media: list[Media] = []
        for number, image in enumerate(given):
            try:
                media.append(_stored(image, earlier, limits, folder))
            except (ValueError, SaccadeError) as error:
                raise BadRequest(f"images[{index}][{number}]", str(error)) from None
            earlier[str([index, number])] = media[-1]
        # The client's records have the image size before it was shrunk for sending, which answers refer to.
        facts = sample.images if len(sample.images) == len(media) else image_records(media)
        records = [{**record, "path": m.path} for record, m in zip(facts, media, strict=True)]
        shown.append(replace(sample, media=tuple(media), images=records))
    return shown


def _stored(image: Any, earlier: Mapping[str, Media], limits: DataConfig, folder: Path) -> Media:
    if isinstance(image, dict) and (ref := str(image.get("ref"))) in earlier:
        return earlier[ref]
    if not isinstance(image, str):
        raise ValueError("give base64 of a PNG or JPEG, or ref: [sample, image] of an earlier one")
    data = base64.b64decode(image.split(",", 1)[-1], validate=True)
    media = open_media(data, limits=limits)
    path = folder / media.hash
    path.write_bytes(data)
    return replace(media, path=str(path), data=None)


def _line(sample: RewardSample, scored: Scored) -> str:
    row = {"time": time.time(), "gold": sample.answer}
    row |= {name: getattr(sample, name) for name in ("id", "data_source", "response")}
    row |= {name: getattr(scored, name) for name in ("status", "reward", "parts", "extracted", "reason")}
    return json.dumps(row) + "\n"


# -- the command -----------------------------------------------------------------------------------


def serve(config: Config, *, host: str, port: int, token: bool) -> None:
    """`saccade serve-reward`: serve until SIGTERM or Ctrl-C, then answer the pending requests."""
    checks.check(config, "serve-reward")
    config = on_one_gpu(config)
    secret = http_server.make_token(host, wanted=token)
    scorer = Scorer(
        config.reward,
        prompt_format=config.prompt.format,
        max_tokens=config.rollout.max_tokens,
        isolate=True,
        load_model=lambda path: HOOKS["load_reward_model"](config, path),  # imports torch only if a model is used
    )
    stops: list[int] = []  # not an Event: a signal handler must not wait for a lock
    with closing(scorer):
        service = RewardService(scorer, config.reward.serve, config.data)
        with http_server.running(reward_app(service, token=secret), host, port) as address:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, _: stops.append(number))
            print(f"rewards at {address}{PATH}", flush=True)
            if secret:
                print(f"token: {http_server.shown_token(secret)}", flush=True)
            while not stops:
                time.sleep(CHECK_INTERVAL)
            print("stopping", flush=True)
            if not service.drain(GRACE):
                print(f"some samples were not scored after {GRACE:g} s; their clients get no reply", flush=True)
