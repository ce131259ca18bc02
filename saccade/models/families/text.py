"""Text decoders, mixtures of experts among them: one position axis, no media."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from saccade.errors import EnvironmentProblem
from saccade.media.images import ImageError
from saccade.media.kinds import KINDS
from saccade.media.pixel_cache import ImageCache
from saccade.types import Media, MediaSpan

NO_PIXELS = ImageCache(0, make=lambda media: np.empty(0))


def bind(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "axes": 1,
        "measure": _refuse,
        "positions": positions,
        "picture": _refuse,
        "untouched": _nothing,
        "cache": lambda media: NO_PIXELS,
        "media": _refuse_spans,
        "features": _refuse_spans,
        "vision": _nothing,
        "unit": 1,
    }


def positions(length: int, media: tuple[MediaSpan, ...]) -> np.ndarray:
    return np.arange(length)[None]


def refuse_noise(model: Any) -> None:
    """Random routes in training would be those of another policy than the one that answered."""
    noise = getattr(model.config, "router_jitter_noise", 0.0)
    if noise:
        raise EnvironmentProblem(
            f"router_jitter_noise={noise:g} in the model's config.json makes its experts random "
            "in training; set it to 0"
        )


def _refuse(media: Media) -> NoReturn:
    raise ImageError(
        f"this model reads text only, but a row holds {KINDS[media.kind].article} ({media.path or media.hash[:12]})"
    )


def _refuse_spans(*arguments: Any) -> NoReturn:
    raise AssertionError("no span is made for a model that reads text only")


def _nothing(*arguments: Any) -> Mapping[str, Any]:
    return {}
