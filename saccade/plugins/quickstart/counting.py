"""A counting task with generated images: coloured shapes on a plain background, "how many objects?".

Needs no download and no model. A split depends on its arguments alone: row i is the same image
for every number of rows. Answers are uniform, so guessing scores 1 / number of counts.

    >>> rows = counting_split(6, seed=0, colours=TEACHING_COLOURS)
    >>> sorted(row.answer for row in rows)
    ['1', '2', '3', '4', '5', '6']
"""

import io
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from saccade.media.blob_file import encoded
from saccade.media.media_files import Encoded, make_media
from saccade.plugins.drawn.drawn_sets import finished_file
from saccade.types import Message, Sample, replace

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (30, 60, 230),
    "yellow": (250, 230, 30),
    "purple": (150, 30, 180),
    "cyan": (40, 220, 230),
    "orange": (250, 140, 20),
    "pink": (250, 130, 200),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
}
TEACHING_COLOURS = ("red", "green", "blue")  # of the demonstrations
TRAINING_COLOURS = (*TEACHING_COLOURS, "yellow", "purple", "cyan")
UNSEEN_COLOURS = ("orange", "pink", "white", "black")

MID_GREY = (128, 128, 128)
KINDS = ("circle", "square", "diamond")
QUESTION = "how many objects?"
TRIES = 400  # layouts tried for one scene before it is an error


class Drawn(NamedTuple):
    """One drawn object; centre and radius in pixels."""

    kind: str
    colour: str
    x: int
    y: int
    radius: int


def counting_scene(
    rng: np.random.Generator, *, count: int, colours: Sequence[str], size: int = 56, radius: tuple[int, int] = (4, 6)
) -> tuple[np.ndarray, tuple[Drawn, ...]]:
    """An image [size, size, 3] of shapes that do not touch, and the shapes in reading order: the
    upper half of the image before the lower half, each from left to right.
    """
    placed: list[Drawn] = []
    for _ in range(TRIES):
        radii = rng.integers(radius[0], radius[1] + 1, size=count).tolist()
        kinds = rng.integers(len(KINDS), size=count).tolist()
        names = rng.integers(len(colours), size=count).tolist()
        placed.clear()
        for u, v in rng.random((8 * count, 2)).tolist():
            if len(placed) == count:
                break
            i, r = len(placed), radii[len(placed)]
            x, y = r + int(u * (size - 2 * r)), r + int(v * (size - 2 * r))
            if all(max(abs(x - s.x), abs(y - s.y)) > r + s.radius + 1 for s in placed):
                placed.append(Drawn(KINDS[kinds[i]], colours[names[i]], x, y, r))
        if len(placed) == count:
            break
    else:
        raise ValueError(f"{count} shapes of radius {radius} do not fit into {size} pixels; size={size * 2} does")
    image = np.full((size, size, 3), MID_GREY, dtype=np.uint8)
    for kind, colour, x, y, r in placed:
        image[y - r : y + r + 1, x - r : x + r + 1][_stencil(kind, r)] = COLOURS[colour]
    return image, tuple(sorted(placed, key=lambda s: (2 * s.y >= size, s.x)))


def balanced(values: Sequence[Any], n: int, seed: int) -> list[Any]:
    """`n` values in random order, all equally often; the first ones do not depend on `n`."""
    shuffler = np.random.default_rng(seed)
    rounds = [shuffler.permutation(values) for _ in range(math.ceil(n / len(values)))]
    return np.concatenate(rounds)[:n].tolist() if rounds else []


def counting_split(
    n: int, *, seed: int, colours: Sequence[str], counts: tuple[int, int] = (1, 6), name: str = "counting", **scene: Any
) -> list[Sample]:
    """`n` rows whose answers are uniform over `counts` (both ends included). `scene`: options of `counting_scene`."""
    rows = []
    for index, count in enumerate(balanced(range(counts[0], counts[1] + 1), n, seed)):
        rng = np.random.default_rng((seed, index))
        image, shapes = counting_scene(rng, count=count, colours=colours, **scene)
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG", compress_level=1)
        media = make_media(Encoded("", file.getvalue()), width=len(image), height=len(image))
        listed, answer = [shape.colour for shape in shapes], str(count)
        said = f"<think> {' '.join(listed)} </think><answer> {answer} </answer>"
        asked, extra = Message(role="user", parts=(media, QUESTION)), {"colours": listed, "demonstration": said}
        id = f"{name}-{seed}-{index}"
        rows.append(Sample(id=id, messages=(asked,), answer=answer, data_source=name, extra=extra))
    return rows


def demonstrated(sample: Sample) -> Sample:
    """The row with its demonstration as the assistant's turn, for supervised training."""
    turn = Message(role="assistant", parts=(sample.extra["demonstration"],))
    return replace(sample, messages=(*sample.messages, turn))


def write_jsonl(samples: Sequence[Sample], folder: Path, *, name: str = "train", budgets: bool = False) -> Path:
    """Write the rows to NAME.jsonl, images to images/. A row that ends in an assistant's turn becomes
    a conversation for SFT, any other a question. `budgets`: also write min_pixels and max_pixels.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    with finished_file(path) as file:
        for sample in samples:
            (media,) = sample.media
            image = f"images/{media.hash[:16]}.png"
            (folder / image).write_bytes(encoded(media))
            shown: Any = {"path": image, "min_pixels": media.min_pixels, "max_pixels": media.max_pixels}
            shown = shown if budgets else image
            row: dict[str, Any] = {"id": sample.id, "images": [shown], "data_source": sample.data_source}
            question, last = f"<image>{sample.messages[0].text}", sample.messages[-1]
            if last.role == "assistant":
                row["conversations"] = [{"from": "human", "value": question}, {"from": "gpt", "value": last.text}]
            else:
                row |= {"problem": question, "answer": sample.answer, **sample.extra}
            file.write(json.dumps(row) + "\n")
    return path


@cache
def _stencil(kind: str, radius: int) -> np.ndarray:
    """Boolean mask of a shape in its bounding square [2 · radius + 1, 2 · radius + 1]."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    if kind == "circle":
        return x**2 + y**2 <= radius**2
    return np.maximum(abs(x), abs(y)) < radius if kind == "square" else abs(x) + abs(y) <= radius
