"""Visual search scenes, drawn at run time: one small target in a large picture, readable only after zooming.

A scene is `grid` x `grid` places; `view` is the side in pixels at which the model reads a picture. All
objects vanish when the picture is shrunk (optotypes.py), so at the model's input resolution the whole picture
is plain grey where they are.

easy    a light patch, visible in the whole picture, shows the target's place: one zoom reads it.
medium  no hint: `grid`² places to look at, one zoom each.
hard    twice the side. A zoom on a place shows frames, some of them around look-alikes; the content of a
        frame is readable only after a second zoom.

A policy with k zooms finds a medium target with probability k / grid², and a guess is right with probability
1 / number of answers, so the effect of a turn limit on a policy's patience can be measured
(docs/visual_search.md). Needs no font, no download and no model.

    >>> row = search_split(1, seed=0, level="medium", kind="digit")[0]
    >>> row.media[0].width, row.messages[0].text
    (448, 'Which digit is hidden in the picture?')
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from saccade.errors import ConfigError
from saccade.media.images import open_media
from saccade.plugins.quickstart.counting import balanced
from saccade.plugins.visual_search import optotypes
from saccade.plugins.visual_search.optotypes import DIGITS, FRAME, LETTERS, MARGIN, TILE, TINTS, TURNS
from saccade.types import Media, Message, Sample

Box = tuple[int, int, int, int]

GREY = 128
CONTRAST = 76.0  # of objects; with LIGHT and the overshoot of details, values stay within 0 to 255
GRAIN = 6.0  # grey levels of noise, in blocks that survive shrinking
JITTER = 2  # most pixels between an object and the centre of its slot
LIGHT = 48.0  # grey levels by which the patch behind an easy target is lighter


@dataclass(frozen=True, kw_only=True)
class Level:
    """The difficulty of a scene."""

    hinted: bool = False  # a patch that survives shrinking is behind the target
    nested: bool = False  # objects are readable only after two zooms
    objects: int = 3  # per place, including the target
    lookalikes: float = 0.0  # share of the other places with an object similar to targets


class Kind(NamedTuple):
    """A kind of question."""

    question: str
    objects: Mapping[str, str]  # answer → name of the drawing
    lookalikes: Sequence[str]


LEVELS = {"easy": Level(hinted=True, objects=2), "medium": Level(), "hard": Level(nested=True, lookalikes=0.4)}
RING = "Where is the opening of the hidden ring: up, down, left or right?"
SPOTS = {name: f"spots:{name}" for name in TINTS}
KINDS: Mapping[str, Kind] = {
    "digit": Kind("Which digit is hidden in the picture?", {name: name for name in DIGITS}, tuple(LETTERS)),
    "letter": Kind("Which letter is hidden in the picture?", {name: name for name in LETTERS}, tuple(DIGITS)),
    "orientation": Kind(RING, {name: f"ring:{name}" for name in TURNS}, ("ring:closed",)),
    "colour": Kind("Which colour is hidden in the picture?", SPOTS, ("spots:grey",)),
}


# -- scenes ----------------------------------------------------------------------------------------


def draw_scene(
    rng: np.random.Generator, *, level: Level, kind: str, answer: str, grid: int, view: int
) -> tuple[np.ndarray, Box, list[Box]]:
    """Returns (picture [side, side] or [side, side, 3], box of the target, boxes of all frames in hard scenes). One of
    the `grid`² places has the target, all have distractors.
    """
    place = 2 * view if level.nested else view
    canvas = Canvas(grid * place, grid, coloured=kind == "colour")
    shrink = 2 if level.nested else grid  # the factor at which objects vanish
    home = int(rng.integers(grid * grid))
    target: Box = (0, 0, 0, 0)
    framed: list[Box] = []
    for index in range(grid * grid):
        special = KINDS[kind].objects[answer] if index == home else ""
        if index != home and rng.random() < level.lookalikes:
            special = str(rng.choice(KINDS[kind].lookalikes))
        names = rng.choice(optotypes.SHAPES, size=level.objects).tolist()
        names[0] = special or names[0]
        corner = np.array([index % grid, index // grid]) * place
        for name, inside in zip(names, _slots(rng, place, nested=level.nested), strict=False):
            x, y = (corner + inside).tolist()
            canvas.add(name, x, y, shrink)
            box = (x, y, x + TILE, y + TILE)
            target = box if index == home and name == special else target
            if level.nested and name == special:
                canvas.add(FRAME, x, y, 2 * grid)
                framed.append(box)
    if level.hinted:
        canvas.pixels[target[1] : target[3], target[0] : target[2]] += LIGHT
    canvas.add_grain(rng, shrink)
    return canvas.image(), target, framed


def _slots(rng: np.random.Generator, place: int, *, nested: bool) -> Iterator[np.ndarray]:
    """Top left corners of objects within a place, in random order and without overlap."""
    pitch = TILE * (2 if nested else 1)
    across = place // pitch
    for slot in rng.permutation(across * across).tolist():
        inside = np.array([slot % across, slot // across]) * pitch + (pitch - TILE) // 2
        inside += rng.integers(-JITTER, JITTER + 1, size=2)
        yield np.clip(inside, 0, place - TILE)


class Canvas:
    """A grey image with a border, into which windows of objects near the edge extend."""

    def __init__(self, side: int, grid: int, *, coloured: bool) -> None:
        self.border, self.channels = 16 * grid, 3 if coloured else 1
        whole = side + 2 * self.border
        self._all = np.full((whole, whole, self.channels), GREY, np.float32)
        self._drawn = np.zeros((whole, whole, 1), bool)
        self.pixels = self._all[self.border : -self.border, self.border : -self.border]

    def add(self, name: str, x: int, y: int, shrink: int) -> None:
        margin = MARGIN * shrink
        drawn = optotypes.detail(name, x % shrink + margin, y % shrink + margin, shrink)
        left, top = (v // shrink * shrink - margin + self.border for v in (x, y))
        window = (slice(top, top + len(drawn)), slice(left, left + len(drawn)))
        tint = np.array(TINTS.get(name.removeprefix("spots:"), (1, 1, 1)), np.float32)
        self._all[window] += drawn[:, :, None] * tint[: self.channels] * CONTRAST
        self._drawn[window] = True

    def add_grain(self, rng: np.random.Generator, block: int) -> None:
        """Add noise around all objects; the rest stays flat, which keeps the file small."""
        blocks = len(self._all) // block
        grain = rng.uniform(-GRAIN, GRAIN, size=(blocks, blocks, self.channels)).astype(np.float32)
        self._all += grain.repeat(block, axis=0).repeat(block, axis=1) * self._drawn

    def image(self) -> np.ndarray:
        """The picture without the border, uint8 [side, side] or [side, side, 3]."""
        pixels = np.clip(np.rint(self.pixels), 0, 255).astype(np.uint8)
        return pixels if self.channels == 3 else pixels[:, :, 0]


# -- rows ------------------------------------------------------------------------------------------


def search_split(
    n: int, *, seed: int, level: str = "medium", kind: str = "digit", grid: int = 4, view: int = 112
) -> list[Sample]:
    """`n` rows with uniform answers; row i does not depend on `n`."""
    for name, value, known in (("level", level, LEVELS), ("kind", kind, KINDS)):
        if value not in known:
            raise ConfigError(f"{name} {value!r} is unknown; choose one of {', '.join(known)}")
    if not 4 <= grid <= 16:
        raise ConfigError(f"grid {grid}: must be from 4 to 16; try 4")
    if view < 2 * TILE or view % (2 * TILE):
        raise ConfigError(f"view {view}: must be a multiple of {2 * TILE}; try 112")
    rows = []
    for i, answer in enumerate(balanced([*KINDS[kind].objects], n, seed)):
        rng = np.random.default_rng((seed, i))
        image, target, framed = draw_scene(rng, level=LEVELS[level], kind=kind, answer=answer, grid=grid, view=view)
        extra = {"level": level, "kind": kind, "grid": grid, "view": view}
        extra |= {"box": [*target], "framed": [[*box] for box in framed]}
        asked = Message(role="user", parts=(_picture(image, view), KINDS[kind].question))
        id, name = f"search-{level}-{kind}-{seed}-{i}", f"visual_search_{level}"
        rows.append(Sample(id=id, messages=(asked,), answer=answer, data_source=name, extra=extra))
    return rows


def _picture(image: np.ndarray, view: int) -> Media:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=4)
    return open_media(file.getvalue(), min_pixels=view * view, max_pixels=view * view)
