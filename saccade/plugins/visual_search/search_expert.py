"""A scripted searcher for search_scenes.py, which writes the assistant's turns.

It zooms into one place after the other, row by row, and answers when it sees the target; in hard scenes it
also zooms into every frame. It knows the scene, so it starts at a place from which the allowed turns suffice.
Some calls are wrong on purpose and then corrected, so that a model learns to recover. It writes text only: the
observations come from the environment.

    >>> sample = search_split(1, seed=0)[0]
    >>> demonstration(sample, np.random.default_rng(0), turns=6, mistakes=0.0)[-1]
    '<think>It reads 5.</think><answer>5</answer>'
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from saccade.types import Sample

Fractions = tuple[float, float, float, float]
Write = Callable[[Sequence[float], str], str]  # (box, name of the image) → text of a zoom call

ORIGINAL = "original_image"
FIRST, HINTED, NEXT = "Too small to read.", "A light patch.", "Not here."
FRAMED, AGAIN = "A frame.", "I correct it."
# Coordinates as text, by `env.coordinates`; not `absolute`, as the size of the resized image is unknown here.
NUMBERS = {"relative": lambda edge: f"{edge:g}", "milli": lambda edge: f"{1000 * edge:.0f}"}


def call(box: Sequence[float], source: str, *, coordinates: str = "relative", named: bool = False) -> str:
    """The text of a zoom call in the given coordinates; `named`: in the syntax of env.call=tool_call."""
    numbers = ", ".join(map(NUMBERS[coordinates], box))
    arguments = f'{{"bbox_2d": [{numbers}], "source": "{source}"}}'
    if named:
        return f'<tool_call>{{"name": "zoom", "arguments": {arguments}}}</tool_call>'
    return f"<grounding>{arguments}</grounding>"


def demonstration(
    sample: Sample, rng: np.random.Generator, *, turns: int, mistakes: float, write: Write = call
) -> list[str]:
    """The assistant's turns, at most `turns`, the last one with the answer. A call is wrong with probability
    `mistakes`, if a turn is left for its correction; the next turn says that it corrects it.
    """
    calls: list[tuple[str, Fractions, str]] = []
    thought = HINTED if sample.extra["level"] == "easy" else FIRST
    for looks in _path(sample.extra, sample.media[0].width, rng, turns - 1, mistakes):
        outer = f"observation_{len(calls) + 1}"
        for depth, box in enumerate(looks):
            calls.append((FRAMED, box, outer) if depth else (thought, box, ORIGINAL))
        thought = NEXT
    spare, written = turns - 1 - len(calls), list[str]()
    for thought, box, source in calls:
        if spare and rng.random() < mistakes:
            spare -= 1
            written.append(f"<think>{thought}</think>{_wrong_call(box, source, rng, write)}")
            thought = AGAIN
        written.append(f"<think>{thought}</think>{write(box, source)}")
    return [*written, f"<think>It reads {sample.answer}.</think><answer>{sample.answer}</answer>"]


def place_boxes(grid: int) -> list[Fractions]:
    """The boxes of all places, row by row."""
    edges = [*pairwise(n / grid for n in range(grid + 1))]
    return [(left, top, right, bottom) for top, bottom in edges for left, right in edges]


def _path(
    extra: Mapping[str, Any], side: int, rng: np.random.Generator, most: int, mistakes: float
) -> list[list[Fractions]]:
    """The zooms at each place on the way to the target, at most `most` in all. The number of places before the target's
    is uniform; in easy scenes it is 0, or 1 with probability `mistakes`.
    """
    grid = extra["grid"]
    place = side // grid
    looks = [[box] for box in place_boxes(grid)]
    for x, y, _, _ in extra["framed"]:
        column, row = (2 * (v % place) // place / 2 for v in (x, y))
        quarter = (column, row, column + 0.5, row + 0.5)
        looks[y // place * grid + x // place].append(quarter)
    x, y = extra["box"][:2]
    home = y // place * grid + x // place
    paths = [[looks[home]]]
    for back in range(1, grid * grid):
        longer = [looks[(home - back) % (grid * grid)], *paths[-1]]
        if sum(map(len, longer)) > most:
            break
        paths.append(longer)
    if extra["level"] == "easy":
        paths = paths[: 1 + (rng.random() < mistakes)]
    return paths[int(rng.integers(len(paths)))]


def _wrong_call(box: Fractions, source: str, rng: np.random.Generator, write: Write) -> str:
    """A random wrong call: an unknown image, a box outside the image, or invalid JSON."""
    right = write(box, source)
    outside = (box[0] + 1, box[1], box[2] + 1, box[3])
    return str(rng.choice([write(box, "observation_99"), write(outside, source), right.replace("]", "", 1)]))
