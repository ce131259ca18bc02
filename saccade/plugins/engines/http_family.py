"""A stand-in for the model family of an HTTP endpoint, whose tokenizer and weights are not here.

A prompt is sent as messages, so rendering yields only one placeholder id per image. A response is one
id for its whole text, padded with empty ids to the number of tokens that the endpoint counted: lengths
are in tokens, and `decode` returns the text.

    family = endpoint_family("http://127.0.0.1:8000/v1")
    family.decode(family.chat.tokenizer.record("It is 4.", tokens=5))
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from saccade.media.images import ImageError
from saccade.media.pixel_cache import DECODED
from saccade.models.chat import Chat, Grid
from saccade.models.families import Family, FamilySpec
from saccade.types import Media

MARK = "\ufffc"  # placeholder of an image
NOTHING = 0  # the id of a placeholder, and of padding


class Texts:
    """Stands in for a tokenizer: stores whole texts under ids."""

    def __init__(self) -> None:
        self._known = [""]

    def record(self, text: str, *, tokens: int) -> np.ndarray:
        ids = np.full(max(1, tokens), NOTHING, np.int64)
        ids[0] = len(self._known)
        self._known.append(text)
        return ids

    def decode(self, ids: Iterable[int], **_: Any) -> str:
        return "".join(self._known[i] for i in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [NOTHING] * text.count(MARK)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
        return "".join(_shown(message["content"]) for message in messages)


def _shown(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content.replace(MARK, "")
    return "".join(_shown(item["text"]) if "text" in item else MARK for item in content)


def _measure(media: Media) -> tuple[Grid, int]:
    if media.kind != "image":
        raise ImageError(f"an endpoint is sent images, but a row holds a {media.kind}")
    return (1, 1, 1), 1


def endpoint_family(url: str) -> Family:
    """A stand-in family without a limit on prompts: the endpoint has its own."""
    chat = Chat(
        tokenizer=Texts(),
        template="",
        placeholders=dict.fromkeys(("image", "video", "audio"), NOTHING),
        reserved=(),
        end_of_turn=None,
        eos_ids=frozenset(),
        think_prefilled=False,
    )
    return Family(
        name="endpoint",
        path=url,
        spec=FamilySpec(auto_class="", towers={}),
        chat=chat,
        vocabulary=0,
        banned=np.zeros(0, dtype=bool),
        max_positions=1 << 30,
        measure=_measure,
        cache=lambda media: DECODED,
    )
