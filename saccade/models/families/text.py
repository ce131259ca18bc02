"""Text decoders: one position axis, no media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from saccade.errors import DataError
from saccade.types import Media, MediaSpan


def bind(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"axes": 1, "measure": _refuse, "positions": positions, "vision": _nothing}


def positions(length: int, media: tuple[MediaSpan, ...]) -> np.ndarray:
    return np.arange(length)[None]


def _refuse(media: Media) -> NoReturn:
    raise DataError(
        f"this model reads text only, but a row holds an image ({media.path or media.hash[:12]})"
    )


def _nothing(spans: Sequence[MediaSpan], device: Any, dtype: Any) -> Mapping[str, Any]:
    return {}
