"""Rows of the quickstart's counting task: those of training, and test pictures that differ from them in one thing.

rows = rows_of("more", 300, seed=3)     # seven to nine objects
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from saccade.media.blob_file import encoded
from saccade.media.media_files import Encoded, make_media
from saccade.plugins.quickstart.counting import MID_GREY, TRAINING_COLOURS, UNSEEN_COLOURS, counting_split
from saccade.types import Sample, replace


def striped(image: np.ndarray) -> np.ndarray:
    """The grey behind the objects becomes stripes of two other greys."""
    light = np.indices(image.shape[:2]).sum(0) % 8 < 4
    stripes = np.where(light, 160, 96).astype(np.uint8)[..., None].repeat(3, 2)
    return np.where(_behind(image)[..., None], stripes, image)


def outlined(image: np.ndarray) -> np.ndarray:
    """Objects are outlines, two pixels wide."""
    behind = np.pad(_behind(image), 2, constant_values=True)
    high, wide = image.shape[:2]
    near = [behind[y : y + high, x : x + wide] for y in range(5) for x in range(5)]
    return np.where(np.any(near, 0)[..., None], image, np.uint8(MID_GREY[0]))


def _behind(image: np.ndarray) -> np.ndarray:
    return (image == MID_GREY).all(-1)


class Look(NamedTuple):
    about: str
    scene: Mapping[str, Any] = {}
    change: Callable[[np.ndarray], np.ndarray] | None = None


LOOKS = {
    "same": Look("1 to 6 filled objects in six colours on plain grey"),
    "more": Look("7 to 9 objects", {"counts": (7, 9)}),
    "colours": Look("four other colours", {"colours": UNSEEN_COLOURS}),
    "small": Look("smaller objects", {"radius": (3, 3)}),
    "backgrounds": Look("stripes behind the objects", change=striped),
    "outlines": Look("another renderer: outlines", change=outlined),
}


def rows_of(look: str, count: int, seed: int) -> Sequence[Sample]:
    _, scene, change = LOOKS[look]
    rows = counting_split(count, seed=seed, name=look, **{"colours": TRAINING_COLOURS, **scene})
    return [_changed(row, change) for row in rows] if change else rows


def _changed(row: Sample, change: Callable[[np.ndarray], np.ndarray]) -> Sample:
    ((asked, (media, *rest)),) = ((message, message.parts) for message in row.messages)
    with Image.open(io.BytesIO(encoded(media))) as picture:
        drawn = Image.fromarray(change(np.asarray(picture)))
    drawn.save(file := io.BytesIO(), "PNG")
    shown = make_media(Encoded("", file.getvalue()), width=drawn.width, height=drawn.height)
    return replace(row, messages=(replace(asked, parts=(shown, *rest)),))
