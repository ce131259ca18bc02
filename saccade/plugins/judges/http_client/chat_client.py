"""Asks an endpoint and waits for its answer; thread-safe. Requests are sent and retried by a `Sender` and counted; with
a cache on disk, none is sent or paid for twice. Knows nothing of engines or episodes, so that a judge can use it, too.

Images are sent as base64 with at most the medium's max_pixels. A file is sent unchanged if possible; it is re-encoded
as PNG if it is too large, rotated or a crop, or if few endpoints support its format.

    client = ChatClient(HttpConfig(url="http://127.0.0.1:8000/v1"))
    client.ask([Message(role="user", parts=("2 + 2?",))], Sampling(temperature=0), seed=0).text
"""

import base64
import hashlib
import io
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from saccade.config.schema import HttpConfig
from saccade.errors import ConfigError
from saccade.media.blob_file import encoded
from saccade.media.image_files import ORIENTATION
from saccade.media.images import ImageError, decode
from saccade.plugins.judges.http_client.sender import Sender, Target, key_from
from saccade.types import Media, Message, Sampling

COMMON = ("PNG", "JPEG", "WEBP")
KEPT = 64  # encoded images in the cache


@lru_cache(maxsize=KEPT)
def encode(media: Media) -> tuple[str, str]:
    """MIME type and base64 text of an image."""
    if media.kind != "image":
        raise ImageError(f"{media.path or media.hash}: endpoints are sent images, and no {media.kind}")
    small = media.width * media.height <= media.max_pixels
    data = encoded(media)
    with Image.open(io.BytesIO(data)) as image:
        kind, size = image.format or "", image.size
        upright = image.getexif().get(ORIENTATION, 1) == 1
    if not (small and upright and kind in COMMON and size == (media.width, media.height)):
        shown, kind, file = Image.fromarray(decode(media)), "PNG", io.BytesIO()
        if not small:
            scale = math.sqrt(media.max_pixels / (media.width * media.height))
            fitting = (max(1, int(media.width * scale)), max(1, int(media.height * scale)))
            shown = shown.resize(fitting, Image.Resampling.BICUBIC)
        shown.save(file, "PNG")
        data = file.getvalue()
    return f"image/{kind.lower()}", base64.b64encode(data).decode()


EncodeImage = Callable[[Media], tuple[str, str]]
Body = dict[str, Any]
CHARACTERS_PER_TOKEN = 4  # estimate, if the endpoint does not count an answer's tokens


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    finish: Literal["stop", "length"]
    usage: Mapping[str, int]  # tokens of prompt and response, and whether they are estimated


def settings(sampling: Sampling, seed: int) -> Body:
    """The sampling fields of a request."""
    # Not every server accepts these, so they are sent only if they differ from the default.
    optional = {"stop": list(sampling.stop), "top_k": max(0, sampling.top_k), "ignore_eos": sampling.ignore_eos}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        **{name: value for name, value in optional.items() if value},
    }


def read_answer(reply: Mapping[str, Any], sampling: Sampling) -> Answer:
    """The answer in a reply; its tokens are estimated if the endpoint does not count them."""
    choice = reply["choices"][0]
    text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
    # Endpoints remove the stop string. If they say which it was, append it: it belongs to the
    # response.
    ended_by = choice.get("stop_reason") or choice.get("matched_stop")
    if ended_by in sampling.stop and not text.endswith(ended_by):
        text += ended_by
    usage = reply.get("usage") or {}
    prompt, response = usage.get("prompt_tokens"), usage.get("completion_tokens")
    counted = {
        "prompt": int(prompt or 0),
        "response": math.ceil(len(text) / CHARACTERS_PER_TOKEN) if response is None else int(response),
        "estimated": prompt is None or response is None,
    }
    return Answer(text=text, finish="length" if choice["finish_reason"] == "length" else "stop", usage=counted)


def _chat_body(messages: Sequence[Message], encoder: EncodeImage) -> Body:
    def part(item: str | Media) -> Body:
        if isinstance(item, str):
            return {"type": "text", "text": item}
        kind, data = encoder(item)
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}

    written = [{"role": m.role, "content": [part(p) for p in m.parts] if m.media else m.text} for m in messages]
    return {"messages": written}


def _completions_body(messages: Sequence[Message], encoder: EncodeImage) -> Body:
    """The prompt format of models without a chat template."""
    return {"prompt": "".join(f"{m.role}: {m.text}\n" for m in messages) + "assistant:"}


APIS: Mapping[str, tuple[str, Callable[[Sequence[Message], EncodeImage], Body]]] = {  # path and body of a request
    "chat": ("/chat/completions", _chat_body),
    "completions": ("/completions", _completions_body),
}


def key_of(asked: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def stored_answer(folder: str, key: str) -> Answer | None:
    """The cached answer, or None. A file that cannot be read counts as absent."""
    try:
        return Answer(**json.loads(_file_of(folder, key).read_bytes())["answer"]) if folder else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_answer(folder: str, key: str, asked: Mapping[str, Any], answer: Answer) -> None:
    """Write an answer to its own file, with `asked` for human readers; under a temporary name first, so that a killed
    run leaves no partial answer in the cache.
    """
    if not folder:
        return
    path = _file_of(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    record = {"answer": asdict(answer), "asked": asked}
    unfinished.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
    unfinished.replace(path)


def _file_of(folder: str, key: str) -> Path:
    return Path(folder) / key[:2] / f"{key}.json"


OFF = "off"  # value of the option `cache` for no cache


class ChatClient:
    def __init__(
        self, http: HttpConfig, *, fields: Mapping[str, Any] | None = None, section: str = "rollout.http"
    ) -> None:
        """`fields` are added to every request; a null removes a field. `section`: config section of the
        options, for error messages.
        """
        self.http, self.section, self._fields = http, section, dict(fields or {})
        # sent, repeated: requests; cached: answers from the cache; prompt_tokens, response_tokens: of other answers;
        # estimated: answers whose tokens the endpoint did not count.
        self.counters: Counter[str] = Counter()
        self._path, self._make_body = APIS[http.api]
        self._cache = "" if http.cache == OFF else http.cache or ""
        self._lock = threading.Lock()
        key = key_from(http.key, f"{section}.key", example="OPENAI_API_KEY")
        options = {"model": f"{section}.model", "max_tokens": f"{section.removesuffix('.http')}.max_tokens"}
        target = Target([http.url], section, http.retries, http.timeout, http.per_minute, key=key, options=options)
        self._sender = Sender(target, lambda again: self._count(sent=1, repeated=int(again)))
        self.model = http.model or self._only_model()

    def ask(self, messages: Sequence[Message], sampling: Sampling, seed: int, *, until: float = math.inf) -> Answer:
        """The endpoint's answer. `until`: deadline of all attempts and pauses, on the monotonic clock."""
        named = self._body(messages, sampling, seed, lambda media: ("image", "/".join(map(str, media.key))))
        asked = {"url": self.http.url, "api": self.http.api, "seed": seed, "body": named}
        key = key_of(asked)
        if (stored := stored_answer(self._cache, key)) is not None:
            self._count(cached=1)
            return stored
        body = self._body(messages, sampling, seed, encode)
        answer = self._sender.send("POST", self._path, body, lambda reply: read_answer(reply, sampling), until)
        used = answer.usage
        self._count(prompt_tokens=used["prompt"], response_tokens=used["response"], estimated=used["estimated"])
        store_answer(self._cache, key, asked, answer)
        return answer

    def stop(self) -> None:
        """Calls that wait to send or to retry raise an error."""
        self._sender.stop()

    def _body(self, messages: Sequence[Message], sampling: Sampling, seed: int, encoder: EncodeImage) -> dict[str, Any]:
        if self.http.api == "completions" and any(message.media for message in messages):
            why = "completions take text only, and a row holds an image"
            raise ConfigError(f"{self.section}.api: {why}; try {self.section}.api=chat")
        body = {"model": self.model, **self._make_body(messages, encoder), **settings(sampling, seed), **self._fields}
        return {name: value for name, value in body.items() if value is not None}

    def models(self) -> list[str]:
        return self._sender.send("GET", "/models", None, lambda r: [m["id"] for m in r["data"]])

    def _only_model(self) -> str:
        names = self.models()
        if len(names) != 1:
            listed = ", ".join(names) or "no model"
            raise ConfigError(f"{self.section}.model: {self.http.url} has {listed}; name one of them")
        return names[0]

    def _count(self, **added: int) -> None:
        with self._lock:
            self.counters.update(added)

    def expenses(self) -> str:
        """A sentence with counts of requests, answers and tokens, and their cost."""
        n = self.counters
        price = "" if self.http.price is None else f", cost {cost(n, self.http.price):.4f}"
        guess = f"; the endpoint counted no tokens of {n['estimated']} answers: estimated" if n["estimated"] else ""
        return (
            f"{n['sent']} requests sent ({n['repeated']} of them again), {n['cached']} answers from the cache; "
            f"{n['prompt_tokens']} prompt and {n['response_tokens']} response tokens{price}{guess}"
        )


def cost(counters: Counter[str], price: tuple[float, float]) -> float:
    """The cost of the counted tokens. `price`: per million prompt tokens, and per million response tokens."""
    return (counters["prompt_tokens"] * price[0] + counters["response_tokens"] * price[1]) / 1e6
