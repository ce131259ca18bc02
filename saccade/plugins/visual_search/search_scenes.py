"""Visual search drawn in place: one small target in a large picture, to be read after zooming.

A scene is `grid` x `grid` places; `view` is the side at which the model reads a picture. All
objects vanish when the picture is shrunk (optotypes.py), so the whole picture at the model's input
resolution is bare grey wherever they are; `readability` holds that to numbers.

easy    a light patch, seen in the whole picture, gives the place away: one zoom reads it.
medium  nothing gives it away: `grid`² places to look at, one zoom each.
hard    twice the side. A zoom on a place shows frames, some of them around look-alikes; what a
        frame holds is read only after a zoom inside that zoom.

Who may look k times finds a medium target with probability k / grid², and a guess pays
1 / number of answers: so what a limit of turns does to a policy's patience can be measured
(docs/visual_search.md). Needs no font, no download and no model.

    >>> row = search_split(1, seed=0, level="medium", kind="digit")[0]
    >>> row.media[0].width, row.messages[0].text
    (448, 'Which digit is hidden in the picture?')
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from saccade.errors import ConfigError
from saccade.media.blob_file import encoded
from saccade.plugins.quickstart.counting import write_rows
from saccade.plugins.visual_search.optotypes import (
    COLOURS,
    DIGITS,
    FRAME,
    LETTERS,
    MARGIN,
    SHAPES,
    TILE,
    TURNS,
    detail,
    resized,
    tint,
)
from saccade.types import Media, Message, Sample

Box = tuple[int, int, int, int]

GREY = 128
CONTRAST = 76.0  # with the patch below and the overshoot of details it stays inside 0 to 255
GRAIN = 6.0  # grey levels of noise, in blocks that survive shrinking, unlike what it hides
JITTER = 2  # pixels by which an object may leave the middle of its slot
LIGHT = 48.0  # how much lighter than grey the patch behind an easy target is


@dataclass(frozen=True, kw_only=True)
class Level:
    """What makes a scene hard."""

    hinted: bool = False  # a patch that survives shrinking lies behind the target
    nested: bool = False  # a place must be zoomed twice before anything is read
    objects: int = 3  # in each place, the target among them
    lookalikes: float = 0.0  # share of the other places with an object of the target's sort


LEVELS: Mapping[str, Level] = {
    "easy": Level(hinted=True, objects=2),
    "medium": Level(),
    "hard": Level(nested=True, lookalikes=0.4),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An attribute that can be asked."""

    question: str
    objects: Mapping[str, str]  # answer → name of the drawing
    lookalikes: tuple[str, ...]


KINDS: Mapping[str, Kind] = {
    "digit": Kind(
        question="Which digit is hidden in the picture?",
        objects={name: name for name in DIGITS},
        lookalikes=tuple(LETTERS),
    ),
    "letter": Kind(
        question="Which letter is hidden in the picture?",
        objects={name: name for name in LETTERS},
        lookalikes=tuple(DIGITS),
    ),
    "orientation": Kind(
        question="Where is the opening of the hidden ring: up, down, left or right?",
        objects={name: f"ring:{name}" for name in TURNS},
        lookalikes=("ring:closed",),
    ),
    "colour": Kind(
        question="Which colour is hidden in the picture?",
        objects={name: f"spots:{name}" for name in COLOURS},
        lookalikes=("spots:grey",),
    ),
}


# -- scenes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A picture [side, side] or [side, side, 3] and what is where, in pixels."""

    image: np.ndarray
    target: Box
    framed: tuple[Box, ...]  # what a zoom on a place shows to be worth another zoom


def draw_scene(rng: np.random.Generator, *, level: Level, kind: str, answer: str, grid: int, view: int) -> Scene:
    """The answer in one of `grid`² places, distractors in all of them."""
    canvas = _Canvas(grid * _place(level, view), grid, coloured=kind == "colour")
    shrinks = (2 if level.nested else grid, 2 * grid)  # of objects, of frames
    home = int(rng.integers(grid * grid))
    target: Box = (0, 0, 0, 0)
    framed: list[Box] = []
    for index in range(grid * grid):
        special = ""
        if index == home:
            special = KINDS[kind].objects[answer]
        elif rng.random() < level.lookalikes:
            special = str(rng.choice(KINDS[kind].lookalikes))
        names = rng.choice(SHAPES, size=level.objects).tolist()
        names = [special, *names[1:]] if special else names
        for name, (x, y) in zip(names, _slots(rng, index, level, grid, view), strict=False):
            canvas.add(name, x, y, shrinks[0])
            box = (x, y, x + TILE, y + TILE)
            target = box if index == home and name == special else target
            if level.nested and name == special:
                canvas.add(FRAME, x, y, shrinks[1])
                framed.append(box)
    if level.hinted:
        canvas.pixels[target[1] : target[3], target[0] : target[2]] += LIGHT
    canvas.add_grain(rng, shrinks[0])
    return Scene(image=canvas.image(), target=target, framed=tuple(framed))


def _place(level: Level, view: int) -> int:
    return 2 * view if level.nested else view


def _slots(rng: np.random.Generator, index: int, level: Level, grid: int, view: int) -> Iterator[tuple[int, int]]:
    """Corners for the objects of a place, in random order; they do not touch."""
    place, pitch = _place(level, view), TILE * (2 if level.nested else 1)
    across = place // pitch
    for slot in rng.permutation(across * across).tolist():
        inside = np.array([slot % across, slot // across]) * pitch + (pitch - TILE) // 2
        inside += rng.integers(-JITTER, JITTER + 1, size=2)
        inside = np.clip(inside, 0, place - TILE)
        x, y = np.array([index % grid, index // grid]) * place + inside
        yield int(x), int(y)


class _Canvas:
    """Grey, with a border into which the windows of objects at the edge reach."""

    def __init__(self, side: int, grid: int, *, coloured: bool) -> None:
        self.border, self.channels = 16 * grid, 3 if coloured else 1
        whole = side + 2 * self.border
        self._all = np.full((whole, whole, self.channels), GREY, np.float32)
        self._drawn = np.zeros((whole, whole, 1), bool)
        self.pixels = self._all[self.border : -self.border, self.border : -self.border]

    def add(self, name: str, x: int, y: int, shrink: int) -> None:
        margin = MARGIN * shrink
        drawn = detail(name, x % shrink + margin, y % shrink + margin, shrink)
        left, top = (v // shrink * shrink - margin + self.border for v in (x, y))
        window = (slice(top, top + len(drawn)), slice(left, left + len(drawn)))
        self._all[window] += drawn[:, :, None] * tint(name)[: self.channels] * CONTRAST
        self._drawn[window] = True

    def add_grain(self, rng: np.random.Generator, block: int) -> None:
        """Noise around all objects; elsewhere the picture stays flat, and its file small."""
        blocks = len(self._all) // block
        size = (blocks, blocks, self.channels)
        grain = rng.uniform(-GRAIN, GRAIN, size=size).astype(np.float32)
        self._all += grain.repeat(block, axis=0).repeat(block, axis=1) * self._drawn

    def image(self) -> np.ndarray:
        """[side, side] or [side, side, 3]."""
        pixels = np.clip(np.rint(self.pixels), 0, 255).astype(np.uint8)
        return pixels if self.channels == 3 else pixels[:, :, 0]


# -- rows ------------------------------------------------------------------------------------------


def search_split(
    n: int, *, seed: int, level: str = "medium", kind: str = "digit", grid: int = 4, view: int = 112
) -> list[Sample]:
    """`n` rows whose answers are uniform; row i is the same however many are asked for."""
    _refuse_unknown(level, kind, grid, view)
    answers = list(KINDS[kind].objects)
    shuffler = np.random.default_rng(seed)
    rounds = [shuffler.permutation(answers) for _ in range(math.ceil(n / len(answers)))]
    return [
        _sample(str(answer), (seed, i), level, kind, grid, view)
        for i, answer in enumerate(np.concatenate(rounds)[:n] if rounds else ())
    ]


def _refuse_unknown(level: str, kind: str, grid: int, view: int) -> None:
    for name, value, known in (("level", level, LEVELS), ("kind", kind, KINDS)):
        if value not in known:
            raise ConfigError(f"{name} {value!r} is unknown; choose one of {', '.join(known)}")
    if not 4 <= grid <= 16:
        raise ConfigError(f"grid {grid}: must be from 4 to 16; try 4")
    if view < 2 * TILE or view % (2 * TILE):
        raise ConfigError(f"view {view}: must be a multiple of {2 * TILE}; try 112")


def _sample(answer: str, seed: tuple[int, int], level: str, kind: str, grid: int, view: int) -> Sample:
    scene = draw_scene(np.random.default_rng(seed), level=LEVELS[level], kind=kind, answer=answer, grid=grid, view=view)
    file = io.BytesIO()
    Image.fromarray(scene.image).save(file, "PNG", compress_level=4)
    data = file.getvalue()
    side = len(scene.image)
    media = Media(
        hash=hashlib.sha256(data).hexdigest(),
        width=side,
        height=side,
        data=data,
        min_pixels=view * view,
        max_pixels=view * view,
    )
    return Sample(
        id=f"search-{level}-{kind}-{seed[0]}-{seed[1]}",
        messages=(Message(role="user", parts=(media, KINDS[kind].question)),),
        answer=answer,
        data_source=f"visual_search_{level}",
        extra={
            "level": level,
            "kind": kind,
            "grid": grid,
            "view": view,
            "box": list(scene.target),
            "framed": [list(box) for box in scene.framed],
        },
    )


def write_search(samples: Sequence[Sample], folder: Path, *, name: str = "train") -> Path:
    """Questions as NAME.jsonl, pictures in images/; each row carries its pixel budget."""
    return write_rows(samples, folder, name, _row)


def _row(sample: Sample, image: str) -> dict[str, Any]:
    (media,) = sample.media
    budget = {"min_pixels": media.min_pixels, "max_pixels": media.max_pixels}
    return {
        "id": sample.id,
        "data_source": sample.data_source,
        "problem": f"<image>{sample.messages[0].text}",
        "answer": sample.answer,
        "images": [{"path": image} | budget],
        **sample.extra,
    }


# -- the claim -------------------------------------------------------------------------------------


def readability(samples: Sequence[Sample]) -> dict[str, float]:
    """Share of right readings by a matcher that is told where the target is: in the whole picture
    at the model's input resolution, in a zoom on its place, in hard scenes also in a zoom on its
    quarter of the place.
    """
    right: Counter[str] = Counter()
    for sample in samples:
        image = np.asarray(Image.open(io.BytesIO(encoded(sample.media[0]))))
        x, y = sample.extra["box"][:2]
        place = len(image) // sample.extra["grid"]
        sides = {"whole": len(image), "place": place}
        if sample.extra["framed"]:
            sides["quarter"] = place // 2
        for name, side in sides.items():
            found = _read(image, (x // side * side, y // side * side, side), sample.extra)
            right[name] += found == sample.answer
    return {name: count / len(samples) for name, count in right.items()}


def _read(image: np.ndarray, window: tuple[int, int, int], extra: Mapping[str, Any]) -> str:
    """The answer whose drawing, seen through the same window, is most like what is seen."""
    level, kind, view = LEVELS[extra["level"]], KINDS[extra["kind"]], extra["view"]
    x0, y0, side = window
    x, y = extra["box"][0] - x0, extra["box"][1] - y0
    left, top, reach = x * view // side, y * view // side, math.ceil(TILE * view / side) + 1

    def seen(pixels: np.ndarray) -> np.ndarray:
        spot = resized(pixels, view)[top : top + reach, left : left + reach]
        return spot.astype(float)

    shown = seen(image[y0 : y0 + side, x0 : x0 + side])
    distances = {}
    for answer, name in kind.objects.items():
        canvas = _Canvas(side, extra["grid"], coloured=extra["kind"] == "colour")
        canvas.add(name, x, y, 2 if level.nested else extra["grid"])
        if level.nested:
            canvas.add(FRAME, x, y, 2 * extra["grid"])
        if level.hinted:
            canvas.pixels[y : y + TILE, x : x + TILE] += LIGHT
        distances[answer] = float(np.square(seen(canvas.image()) - shown).sum())
    return min(distances, key=lambda answer: distances[answer])
