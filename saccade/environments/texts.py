"""The texts of environments, from `texts.yaml`, whose fingerprint is part of a run's manifest.

>>> render_parts("error", k=2, reason="it has no end")
('Request 2 failed: it has no end. Correct it, or answer.',)
"""

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from saccade.types import Media

FILE = Path(__file__).with_name("texts.yaml")
FIELD = re.compile(r"\{(\w+)\}")


@cache
def _texts() -> dict[str, str]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def texts_hash() -> str:
    return hashlib.sha256(FILE.read_bytes()).hexdigest()


def render_parts(text: str, /, **values: Any) -> tuple[str | Media, ...]:
    """The text of that name with its fields filled, split at images."""
    pieces: list[str | Media] = [""]
    for index, piece in enumerate(FIELD.split(_texts()[text])):
        value = values.get(piece, f"{{{piece}}}") if index % 2 else piece
        if isinstance(value, Media):
            pieces += [value, ""]
        else:
            pieces[-1] += str(value)  # type: ignore[operator]
    return tuple(piece for piece in pieces if piece != "")


def render_text(text: str, /, **values: Any) -> str:
    """The same as one string, for texts without images."""
    return "".join(str(piece) for piece in render_parts(text, **values))
