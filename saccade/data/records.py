"""Values as plain data, and hashes of what samples hold."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from saccade.types import Message, Sample

CANONICAL = ("messages", "pairs", "sides", "labels")  # formats of canonical rows, whose column `extra` is unpacked


def json_data(value: Any) -> Any:
    """Convert any value to JSON data, for hashes and reports; bytes become their hash."""
    if isinstance(value, Mapping):
        return {str(key): json_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_data(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return json_data(value.tolist())
    if isinstance(value, bytes):
        return f"sha256:{hashlib.sha256(value).hexdigest()}"
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else f"<{type(value).__name__}>"


def content_hash(sample: Sample, *, everything: bool = False) -> str:
    """Hash of prompt, gold and choices; with `everything` also of id, source and extra columns."""
    content: list[Any] = [_content(sample.messages), sample.answer, sample.choices]
    if sample.candidates:
        content += [[_content(candidate) for candidate in sample.candidates], sample.desirable]
    if everything:
        content += [sample.id, sample.data_source, json_data(sample.extra)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _content(messages: Iterable[Message]) -> list[Any]:
    return [[m.role, [p if isinstance(p, str) else p.key for p in m.parts]] for m in messages]
