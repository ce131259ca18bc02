"""The syntax of tool calls, and their parser.

A call is a JSON object between tags, whose strings may have single quotes. It is never evaluated as code, and
its length and depth are bounded.

    >>> read("{'source': 'original_image', 'bbox_2d': [0, 0.5, 1, 1]}")["bbox_2d"]
    [0, 0.5, 1, 1]
"""

import json
import math
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

LONGEST = 4096  # bytes of a call
DEEPEST = 8  # brackets inside brackets
MOST_DIGITS = 16  # of an integer; longer ones are floats

# An unclosed string matches up to the end, which keeps matching linear; such a text is never valid JSON.
STRING = re.compile(r"""\"(?:[^"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?""", re.DOTALL)
ESCAPE = re.compile(r"""\\.|["]""")


class CallError(Exception):
    """A call that cannot be answered. `reason` names its text and its metric; `facts` fill in the text."""

    def __init__(self, reason: str, **facts: Any) -> None:
        super().__init__(f"{reason} {facts or ''}".strip())
        self.reason, self.facts = reason, facts


class CallSpan(NamedTuple):
    """A call in a turn: the span including its tags, and the text between them."""

    start: int
    end: int
    body: str | None  # None: the tag is not closed


def find(text: str, call: str, most: int) -> list[CallSpan]:
    """The first calls of a turn, at most `most`. A call starts at the last opening tag before its closing tag, so an
    earlier mention of the tag does not start it.
    """
    opening, closing = f"<{call}>", f"</{call}>"
    found: list[CallSpan] = []
    at = 0
    while len(found) < most and (close := text.find(closing, at)) >= 0:
        start, at = text.rfind(opening, at, close), close + len(closing)
        if start >= 0:
            found.append(CallSpan(start, at, text[start + len(opening) : close]))
    if not found and (start := text.find(opening)) >= 0:
        found.append(CallSpan(start, len(text), None))
    return found


def read(text: str | None) -> dict[str, Any]:
    """Parse the object in a call; raises CallError."""
    if text is None:
        raise CallError("unclosed")
    if len(text) > LONGEST or len(text.encode(errors="replace")) > LONGEST:
        raise CallError("too_long", longest=LONGEST)
    depths = accumulate((mark in "{[") - (mark in "}]") for mark in STRING.sub("", text))
    if max(depths, default=0) > DEEPEST:
        raise CallError("json")
    hooks: dict[str, Any] = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), _number)
    try:
        value = json.loads(STRING.sub(_double_quoted, text), object_pairs_hook=_object, **hooks)
        json.dumps(value, ensure_ascii=False).encode()  # raises for a lone surrogate, which could not be stored
    except (json.JSONDecodeError, UnicodeEncodeError):
        raise CallError("json") from None
    if not isinstance(value, dict):
        raise CallError("json")
    return value


def _double_quoted(string: re.Match[str]) -> str:
    if string[0].startswith('"'):
        return string[0]
    changed = {"\\'": "'", '"': '\\"'}
    return '"' + ESCAPE.sub(lambda found: changed.get(found[0], found[0]), string[0][1:-1]) + '"'


def _number(text: str) -> int | float:
    if text.lstrip("-").isdigit() and len(text) <= MOST_DIGITS:
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise CallError("number")
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):  # duplicate names are ambiguous
        raise CallError("json")
    return dict(pairs)
