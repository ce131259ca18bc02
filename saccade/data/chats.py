"""Conversations of a row: roles, content items, and the place of each medium in the text.

A piece is text or a `MediaSource` (the source of any medium, not opened yet). Placeholders `<image>` and `<image2>` are
replaced by the row's images in order or by number; `\\<image>` is plain text. `<video>`, `<audio>` and `<series>` work
alike if the row has such media. Columns, files and pixels are handled elsewhere.

    >>> arrange(read_chat("<image>How many?"), [MediaSource.of("a.png")], prepend=True)[0][1][1]
    'How many?'
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from saccade.media.kinds import KINDS, SOURCE_KEYS

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}
PLACEHOLDER = re.compile(rf"(\\?)<({'|'.join(KINDS)}) ?(\d*)>")
JSON_LIST = re.compile(r"\s*\[\s*\{")


class RowError(ValueError):
    """A row that cannot be used; the message is the reason."""


class MediaSource(NamedTuple):
    """A media source, its kind, and the row's options for it, such as a pixel budget or frames."""

    source: Any
    kind: str
    options: Mapping[str, Any]

    @staticmethod
    def of(source: Any, item: Mapping[str, Any] | None = None, kind: str = "image") -> MediaSource:
        said = item if item is not None else source if isinstance(source, Mapping) else {}
        if said.get("use_audio_in_video"):
            raise RowError("use_audio_in_video: sound inside a video is not heard; add it as an audio item")
        given = {name: said[name] for name in KINDS[kind].options if said.get(name) is not None}
        for name, value in given.items():
            frames, types = name == "frames", (int, float) if name == "fps" else (int,)
            numbers = value if frames and isinstance(value, list) else [] if frames else [value]
            if not numbers or not all(type(n) in types and (n > 0 or (frames and n == 0)) for n in numbers):
                what = "a list of numbers" if frames else "a positive integer"
                raise RowError(f"{name} of {KINDS[kind].article} must be {what}, not {value!r}")
        return MediaSource(source, kind, given)


class Slot(NamedTuple):
    """A placeholder for one of the row's media of its kind; number 0: the next one."""

    number: int = 0
    kind: str = "image"


Piece = str | MediaSource | Slot
Turns = list[tuple[str, list[Piece]]]


def parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowError(f"{what} is not valid JSON: {error}") from None


def escape(text: str) -> str:
    """Escape placeholders, so that the text is read back unchanged."""
    return PLACEHOLDER.sub(lambda found: "\\" + found[0], text)


# -- reading ---------------------------------------------------------------------------------------


def read_chat(prompt: Any) -> Turns:
    """Read a question, a list of messages, or JSON text of such a list."""
    prompt = _unpacked(prompt)
    if isinstance(prompt, str):
        return [("user", [prompt])]
    if not isinstance(prompt, Sequence) or not prompt:
        raise RowError(f"the prompt must be text or a list of messages, not {_short(prompt)}")
    turns = [_turn(message) for message in prompt]
    if not any(role == "user" for role, _ in turns):
        raise RowError("the conversation has no user message")
    return turns


def read_reply(reply: Any) -> Turns:
    """Read an assistant's reply: text, content items, or messages (also as JSON text)."""
    reply = _unpacked(reply)
    items = reply if isinstance(reply, list | tuple) else [reply]
    if not items or any(item is None for item in items):
        raise RowError("there is no reply where one is expected")
    if all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in items):
        return [_turn(message) for message in items]
    return [("assistant", [_piece(item) for item in items])]


def _unpacked(given: Any) -> Any:
    is_json = isinstance(given, str) and JSON_LIST.match(given)
    return parse_json(given, "the list of messages") if is_json else given


def _turn(message: Any) -> tuple[str, list[Piece]]:
    if not isinstance(message, Mapping):
        raise RowError(f"a message must be a record with role and content, not {_short(message)}")
    name = message.get("role") or message.get("from")
    content = message.get("content") if message.get("content") is not None else message.get("value")
    if not isinstance(name, str) or name not in ROLES:
        raise RowError(f"unknown role {name!r}; roles are {', '.join(ROLES)}")
    items = [content] if isinstance(content, str | Mapping) else content
    if not isinstance(items, list | tuple):
        raise RowError(f"a {name} message has no content that can be read: {_short(content)}")
    return ROLES[name], [_piece(item) for item in items]


def _piece(item: Any) -> Piece:
    if isinstance(item, str):
        return item
    if not isinstance(item, Mapping):
        raise RowError(f"a content item must be text or a record with a type, not {_short(item)}")
    keys = {name: (*kind.keys, *SOURCE_KEYS) for name, kind in KINDS.items()}
    named = ("text", *KINDS, *chain(*keys.values()))
    kind = item.get("type") or next((key for key in named if item.get(key)), None)
    if kind == "text":
        if not isinstance(item.get("text"), str):
            raise RowError("a text item without text")
        return item["text"]
    medium = next((name for name, each in keys.items() if kind in each), None)
    if medium is None:
        raise RowError(f"content of type {kind!r} cannot be read: text, {', '.join(KINDS)} can")
    source = next((item[key] for key in keys[medium] if item.get(key) is not None), None)
    if isinstance(source, Mapping) and ("url" in source or (medium == "audio" and "data" in source)):
        source = source.get("url") or source["data"]
    return Slot(kind=medium) if source is None else MediaSource.of(source, item, medium)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- arranging -------------------------------------------------------------------------------------


def arrange(turns: Turns, media: Sequence[MediaSource], *, prepend: bool, columns: Collection[str] = ()) -> Turns:
    """Replace placeholders by the row's media; without placeholders, the media are put first in the first user turn
    (`prepend`). `columns`: kinds of media for which the row has a column, even an empty one.
    """
    placed = any(isinstance(piece, MediaSource) for _, pieces in turns for piece in pieces)
    given = {medium.kind for medium in media}
    # If the chat itself places its images, a placeholder in the text is literal text; so is one of a
    # kind of media that the row does not have.
    marks = given if placed else {*given, *columns, "image"}
    turns = [(role, _split(pieces, marks)) for role, pieces in turns]
    slots = [piece for _, pieces in turns for piece in pieces if isinstance(piece, Slot)]
    filled: dict[str, Iterator[MediaSource]] = {}
    first: list[Piece] = []
    for kind in KINDS:
        places = [slot for slot in slots if slot.kind == kind]
        shown = [medium for medium in media if medium.kind == kind]
        if shown and not places and prepend:
            first += shown
        elif shown and not places:
            raise RowError(f"{_count(shown, kind)} but no <{kind}> in the text, and data.placeholder is strict")
        elif len(places) != len(shown):
            raise RowError(f"{len(places)} <{kind}> placeholder(s) but {_count(shown, kind)}")
        filled[kind] = iter(_ordered(places, shown, kind))
    turns = [(role, [next(filled[p.kind]) if isinstance(p, Slot) else p for p in pieces]) for role, pieces in turns]
    if first:
        asked = next(index for index, (role, _) in enumerate(turns) if role == "user")
        turns[asked] = ("user", [*first, *turns[asked][1]])
    if not any(piece for _, pieces in turns for piece in pieces):
        raise RowError("the prompt is empty")
    return turns


def _split(pieces: Sequence[Piece], marks: Collection[str]) -> list[Piece]:
    parts: list[Piece] = []
    for piece in pieces:
        if not isinstance(piece, str):
            parts.append(piece)
            continue
        text, start = "", 0
        for found in PLACEHOLDER.finditer(piece):
            text += piece[start : found.start()]
            start = found.end()
            if found[1] or found[2] not in marks:
                text += found[0].removeprefix("\\")
            else:
                parts += [text, Slot(int(found[3] or 0), found[2])]
                text = ""
        parts.append(text + piece[start:])
    return [part for part in parts if part != ""]


def _ordered(slots: Sequence[Slot], media: Sequence[MediaSource], kind: str) -> list[MediaSource]:
    numbers = [slot.number for slot in slots]
    if not any(numbers):
        return list(media)
    if sorted(numbers) != list(range(1, len(media) + 1)):
        names = ", ".join(f"<{kind}{number or ''}>" for number in numbers)
        raise RowError(f"placeholders {names} must name each of {_count(media, kind)} once, from <{kind}1>")
    return [media[number - 1] for number in numbers]


def _count(media: Sequence[MediaSource], kind: str) -> str:
    return f"{len(media)} {kind}{'' if len(media) == 1 or kind == 'series' else 's'}"
