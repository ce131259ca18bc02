"""Pictures of stored rollouts: each once, as a small copy and as the model saw it, and where it came from.

pictures = StoredPictures(folder / "trajectories", decode, print)
record["images"] = pictures.records(trajectory, family.size_unit)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.media.images import resized_size
from saccade.types import Media, MediaSpan, Trajectory

IMAGES = "images"
LARGEST_SIDE = 512
LARGEST_SEEN = 1024  # as the model saw it
FEW_COLOURS = 256  # drawings with so few stay sharp as PNG; photographs are smaller as JPEG


class StoredPictures:
    def __init__(self, root: Path, image: Callable[[Media], np.ndarray], report: Callable[[str], object]) -> None:
        self._root, self._image, self._report = root, image, report
        self._files: dict[str, str | None] = {}  # name of a picture -> its file

    def records(self, trajectory: Trajectory, unit: int | None) -> list[dict[str, Any]]:
        """What is known of each picture of an episode. `unit`: the side of what the model sees as
        one token, which says at which size it saw pictures; those of several turns are stored like
        that, too.
        """
        return [
            self._record(span, unit, trajectory.turns > 1) | view
            for span, view in zip(trajectory.media, _views(trajectory), strict=True)
        ]

    def _record(self, span: MediaSpan, unit: int | None, several: bool) -> dict[str, Any]:
        media = span.media
        record: dict[str, Any] = {
            "name": picture_name(media),
            "hash": media.hash,
            "kind": "crop" if media.box is not None else media.kind,
            "size": [media.width, media.height],
            "parent": media.parent,
            "box": media.box,
            "path": media.path,
            "start": span.start,
            "tokens": span.length,
            "file": self._stored(media),
            "seen": None,
        }
        if unit is not None and media.kind == "image":
            budget = {"min_pixels": media.min_pixels, "max_pixels": media.max_pixels}
            height, width = resized_size(media.width, media.height, unit=unit, **budget)
            record["seen"] = [width, height]
            if several and max(width, height) <= LARGEST_SEEN:
                record["seen_file"] = self._stored(media, (width, height))
        return record

    def _stored(self, media: Media, size: tuple[int, int] | None = None) -> str | None:
        """File of a picture relative to trajectories/, made on first sight; None when it cannot be
        made.
        """
        name = picture_name(media) + ("" if size is None else f"-seen-{size[0]}x{size[1]}")
        if media.kind != "image":
            return None
        if name not in self._files:
            try:
                self._files[name] = _store(self._root, name, self._image(media), size)
            except Exception as error:
                self._files[name] = None
                self._report(f"picture {name} could not be stored: {type(error).__name__}: {error}")
        return self._files[name]


def picture_name(media: Media) -> str:
    """Equal names mean equal pixels; a crop may carry the hash of the picture it was cut from."""
    box = "" if media.box is None else "-" + "-".join(str(edge) for edge in media.box)
    return safe_name(media.hash) + box


def safe_name(name: str) -> str:
    """A name of data as a file name that cannot leave its folder."""
    return re.sub(r"[^\w.=+-]|^\.+", "_", name) or "_"


def _views(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Each picture as its episode calls it, which one it was cut from, and where in that one."""
    calls = trajectory.info.get("tool_calls") or ()
    shown = {call.get("observation"): call for call in calls}
    asked = sum(span.start < trajectory.prompt_length for span in trajectory.media)
    views: list[dict[str, Any]] = []
    for number in range(1, len(trajectory.media) + 1):
        call = shown.get(number - asked, {}) if number > asked else {}
        name = f"observation_{number - asked}" if call else f"image_{number}"
        if number <= asked:
            name = "original_image" if asked == 1 else f"original_image_{number}"
        where = {"source": call.get("source"), "place": call.get("box")}
        views.append({"view": name, **where, "lineage": list(call.get("lineage") or ())})
    return views


def _store(root: Path, name: str, pixels: np.ndarray, size: tuple[int, int] | None) -> str:
    for suffix in (".png", ".jpg"):
        if (root / IMAGES / (name + suffix)).exists():
            return f"{IMAGES}/{name}{suffix}"
    picture = Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8)).convert("RGB")
    drawing = picture.getcolors(FEW_COLOURS) is not None or max(picture.size) <= 128
    if size is None:
        picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    else:
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    file = root / IMAGES / (name + (".png" if drawing else ".jpg"))
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    picture.save(temporary, format="PNG" if drawing else "JPEG", quality=88)
    temporary.replace(file)
    return f"{IMAGES}/{file.name}"
