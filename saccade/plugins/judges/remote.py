"""The client of a reward service: ours, or one with the protocol of OpenRLHF and LMM-R1.

A few threads batch samples into requests and send them; each future gets the score of its sample. A
retried request has the same id, so our service scores it once. A sample that a service does not
score, or not in time, is an error (or an abstention), never 0.

    remote = Remote(RemoteConfig(url=("http://127.0.0.1:8400",)))
    remote.submit(sample).result()
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from saccade.config.schema import RemoteConfig, RewardConfig
from saccade.errors import ConfigError
from saccade.plugins.judges.http_client.chat_client import encode
from saccade.plugins.judges.http_client.sender import Reply, RequestQueue, Sender, Target, key_from
from saccade.plugins.judges.service_protocol import PATH, PROTOCOL, read_reply, request_for
from saccade.rewards.reward_sample import RewardSample
from saccade.system.codec import jsonable
from saccade.types import Media, Score

SECTION = "reward.remote"
GATHER = 0.02  # seconds to wait for more samples before a request is sent
LARGEST = 128 * 2**20  # characters of images in one request
QUOTED = 500
COUNTED = ("samples", "requests", "repeated", "failures")
HINTS = {
    401: ("token", "let it name an environment variable that holds the service's token"),
    403: ("url", "this service answers its own machine only, unless it asks for a token"),
    404: ("url", "give the whole address, such as http://127.0.0.1:8400/get_reward"),
    413: ("batch", "the request is too large there; lower it"),
}


def open_remote(reward: RewardConfig, args: Mapping[str, Any]) -> Remote:
    """The client for a reward term: options of `reward.remote`, overridden by the term's args."""
    try:
        return Remote(RemoteConfig(**reward.remote.model_dump(exclude_unset=True) | dict(args)))
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        fields = ", ".join(RemoteConfig.model_fields)
        raise ConfigError(f"reward.terms: remote: {problem}; arguments are {fields}") from None


_Job = tuple[RewardSample, Future[Score]]


class Remote:
    """`submit` may be called from any thread; `metrics` counts since its last call."""

    def __init__(self, config: RemoteConfig) -> None:
        for url in map(urlsplit, config.url or ("",)):
            if url.scheme not in ("http", "https") or not url.hostname or url.username or url.query:
                why = "takes http://HOST:PORT/PATH, without a password or a query"
                raise ConfigError(f"{SECTION}.url: {why}; try {SECTION}.url=http://127.0.0.1:8400")
        self.config = config
        urls = [url if urlsplit(url).path.strip("/") else url.rstrip("/") + PATH for url in config.url]
        key = key_from(config.token, f"{SECTION}.token", example="SACCADE_TOKEN")
        target = Target(urls, SECTION, config.retries, config.timeout, key=key, hints=HINTS, waits_if_busy=True)
        self._sender = Sender(target, self._count_request)
        self._queue = RequestQueue(self._send_batch, threads=config.concurrency, batch=config.batch, gather=GATHER)
        self._models = False  # whether the service has a reward model that sees images
        self._refers = False  # whether an image that occurs again is sent as a reference to the first

    def check(self) -> None:
        """Check that every service is reachable and accepts the token. Old services answer only to POST."""
        ours: list[dict[str, Any]] = []
        for url in self._sender.target.urls:
            reply = self._sender.reach(url, time.monotonic() + self.config.timeout)
            if reply.status in (401, 403, 404):
                raise self._sender.refusal(url, reply)
            ours.append(_info(reply))
        self._refers = all(ours)
        self._models = any(info.get("models") for info in ours)

    def check_media(self, kinds: Collection[str]) -> None:
        """Refuse rows with media that a reward model of the service would not see, before the first sample."""
        if not self._models:
            return
        if other := set(kinds) - {"image"}:
            why = f"a model of this service would have to see {min(other)}, and requests carry images only"
            raise ConfigError(f"reward.terms: remote: {why}; name the model in this run: verifier: model")
        if kinds and not self.config.send_images:
            raise ConfigError(f"a model of this service scores rows by their images; set {SECTION}.send_images=true")

    def submit(self, sample: RewardSample) -> Future[Score]:
        future: Future[Score] = Future()
        future.set_running_or_notify_cancel()
        other = next((media.kind for media in sample.media if media.kind != "image"), None)
        if other is not None and self.config.send_images:
            future.set_result(self._failed(f"requests carry images only, and no {other}"))
        elif self._queue.put((sample, future)):
            self._queue.count("samples")
        else:
            future.set_result(self._failed("the client is closed"))
        return future

    def metrics(self) -> dict[str, float]:
        counts, latency = self._queue.take_counts()
        return {name: counts[name] for name in COUNTED} | latency

    def close(self) -> None:
        """Pending samples get a failure; does not wait for requests in flight."""
        left = self._queue.close()
        self._sender.stop()
        for _, future in left:
            future.set_result(self._failed("the client was closed first"))

    # -- in threads --

    def _send_batch(self, jobs: Sequence[_Job]) -> None:
        try:
            self._ask(jobs)
        except Exception as error:  # every future must get a result
            failure = self._failed(str(error) or type(error).__name__, len(jobs))
            for _, future in jobs:
                if not future.done():
                    future.set_result(failure)

    def _ask(self, jobs: Sequence[_Job]) -> None:
        samples = [sample for sample, _ in jobs]
        images = self._images(samples) if self.config.send_images else []
        if len(jobs) > 1 and sum(len(image) for own in images for image in own) > LARGEST:
            middle = len(jobs) // 2
            self._send_batch(jobs[:middle])
            self._send_batch(jobs[middle:])
            return
        body = request_for(samples, request_id=uuid.uuid4().hex, template=self.config.template)
        body |= {"images": images} if images else {}
        data, began = json.dumps(body, default=jsonable).encode(), time.monotonic()
        until = began + self.config.deadline
        scores = self._sender.send("POST", "", data, lambda reply: read_reply(reply, len(jobs)), until)
        self._queue.timed(time.monotonic() - began)
        for (_, future), score in zip(jobs, scores, strict=True):
            future.set_result(score)

    def _images(self, samples: Sequence[RewardSample]) -> list[list[Any]]:
        """Images as base64, or as `{"ref": [sample, image]}` if the same image occurred before."""
        places: dict[Any, list[int]] = {}

        def image(media: Media, here: list[int]) -> Any:
            place = places.setdefault(media.key, here)
            return {"ref": place} if self._refers and place != here else encode(media)[1]

        return [
            [image(media, [index, number]) for number, media in enumerate(sample.media)]
            for index, sample in enumerate(samples)
        ]

    def _failed(self, why: str, count: int = 1) -> Score:
        if self._queue.count("failures", count) == count:  # warn once; metrics count the others
            logging.getLogger("saccade").warning("samples were not scored: %s", why)
        return Score(kind=self.config.on_failure, reason=f"remote: {why[:QUOTED]}")

    def _count_request(self, again: bool) -> None:
        self._queue.count("requests")
        self._queue.count("repeated", again)


def _info(reply: Reply) -> dict[str, Any]:
    """The self-description of one of our services; empty for any other."""
    with suppress(ValueError):
        said = json.loads(reply.text)
        if reply.status == 200 and isinstance(said, dict) and said.get("protocol") == PROTOCOL:
            return said
    return {}
