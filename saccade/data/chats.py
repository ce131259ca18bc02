"""Conversations of a row: roles, content items, and where each image stands in the text.

A piece is text or a `Picture` (an image source that is not opened yet). Placeholders `<image>`
and `<image2>` take the row's images in order or by number; `\\<image>` is plain text. Knows
nothing of columns, files or pixels.

    >>> arrange(read_chat("<image>How many?"), [Picture.of("a.png")], prepend=True)[0][1][1]
    'How many?'
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
PLACEHOLDER = re.compile(r"(\\?)<image ?(\d*)>")
JSON_LIST = re.compile(r"\s*\[\s*\{")
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")


class RowError(ValueError):
    """A row that cannot be used; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image source with the pixel budget that the row asks for."""

    source: Any
    min_pixels: int | None = None
    max_pixels: int | None = None

    @staticmethod
    def of(source: Any, item: Mapping[str, Any] | None = None) -> Picture:
        budget = item if item is not None else source if isinstance(source, Mapping) else {}
        limits = {name: budget.get(name) for name in ("min_pixels", "max_pixels")}
        for name, value in limits.items():
            if value is not None and not (isinstance(value, int) and value > 0):
                raise RowError(f"{name} of an image must be a positive integer, not {value!r}")
        return Picture(source=source, **limits)


@dataclass(frozen=True)
class Slot:
    """A place for one of the row's images; number 0 takes the next one."""

    number: int = 0


Piece = str | Picture | Slot
Turns = list[tuple[str, list[Piece]]]


def parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowError(f"{what} is not valid JSON: {error}") from None


def escape(text: str) -> str:
    """Text as a row must write it to be read back as it is."""
    return PLACEHOLDER.sub(lambda found: "\\" + found[0], text)


# -- reading ---------------------------------------------------------------------------------------


def read_chat(prompt: Any) -> Turns:
    """A question, a list of messages, or JSON text of such a list."""
    if isinstance(prompt, str) and JSON_LIST.match(prompt):
        prompt = parse_json(prompt, "the list of messages")
    if isinstance(prompt, str):
        return [("user", [prompt])]
    if not isinstance(prompt, Sequence) or not prompt:
        raise RowError(f"the prompt must be text or a list of messages, not {_short(prompt)}")
    turns = [_turn(message) for message in prompt]
    if not any(role == "user" for role, _ in turns):
        raise RowError("the conversation has no user message")
    return turns


def read_reply(reply: Any) -> Turns:
    """What an assistant answers: text, content items, or messages (also as JSON text)."""
    if isinstance(reply, str) and JSON_LIST.match(reply):
        reply = parse_json(reply, "the list of messages")
    items = reply if isinstance(reply, list | tuple) else [reply]
    if not items or any(item is None for item in items):
        raise RowError("there is no reply where one is expected")
    if all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in items):
        return [_turn(message) for message in items]
    return [("assistant", [_piece(item) for item in items])]


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
    kind = item.get("type") or next((key for key in ("text", *IMAGE_KEYS) if item.get(key)), None)
    if kind == "text":
        if not isinstance(item.get("text"), str):
            raise RowError("a text item without text")
        return item["text"]
    if kind not in IMAGE_KEYS:
        raise RowError(f"content of type {kind!r} cannot be read, only text and image")
    source = next((item[key] for key in IMAGE_KEYS if item.get(key) is not None), None)
    if isinstance(source, Mapping) and "url" in source:
        source = source["url"]
    return Slot() if source is None else Picture.of(source, item)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- arranging -------------------------------------------------------------------------------------


def arrange(turns: Turns, pictures: Sequence[Picture], *, prepend: bool) -> Turns:
    """Placeholders become the row's pictures; without any, pictures open the first user turn."""
    placed = any(isinstance(piece, Picture) for _, pieces in turns for piece in pieces)
    # Where the chat itself places its images, a placeholder in the text is something that the
    # author talks about.
    literal = placed and not pictures
    turns = [(role, _split(pieces, literal=literal)) for role, pieces in turns]
    slots = [piece for _, pieces in turns for piece in pieces if isinstance(piece, Slot)]
    if pictures and not slots:
        if not prepend:
            raise RowError(
                f"{_count(pictures)} but no <image> in the text, and data.placeholder is strict"
            )
        first = next(index for index, (role, _) in enumerate(turns) if role == "user")
        turns[first] = ("user", [*pictures, *turns[first][1]])
    elif len(slots) != len(pictures):
        raise RowError(f"{len(slots)} <image> placeholder(s) but {_count(pictures)}")
    else:
        ordered = iter(_ordered(slots, pictures))
        turns = [
            (role, [next(ordered) if isinstance(piece, Slot) else piece for piece in pieces])
            for role, pieces in turns
        ]
    if not any(piece for _, pieces in turns for piece in pieces):
        raise RowError("the prompt is empty")
    return turns


def _split(pieces: Sequence[Piece], *, literal: bool) -> list[Piece]:
    parts: list[Piece] = []
    for piece in pieces:
        if not isinstance(piece, str):
            parts.append(piece)
            continue
        text, start = "", 0
        for found in PLACEHOLDER.finditer(piece):
            text += piece[start : found.start()]
            start = found.end()
            if found[1] or literal:
                text += found[0].removeprefix("\\")
            else:
                parts += [text, Slot(int(found[2] or 0))] if text else [Slot(int(found[2] or 0))]
                text = ""
        if text + piece[start:]:
            parts.append(text + piece[start:])
    return parts


def _ordered(slots: Sequence[Slot], pictures: Sequence[Picture]) -> list[Picture]:
    numbers = [slot.number for slot in slots]
    if not any(numbers):
        return list(pictures)
    if sorted(numbers) != list(range(1, len(pictures) + 1)):
        names = ", ".join(f"<image{number or ''}>" for number in numbers)
        raise RowError(
            f"placeholders {names} must name each of {_count(pictures)} once, from <image1>"
        )
    return [pictures[number - 1] for number in numbers]


def _count(pictures: Sequence[Picture]) -> str:
    return f"{len(pictures)} image{'' if len(pictures) == 1 else 's'}"
