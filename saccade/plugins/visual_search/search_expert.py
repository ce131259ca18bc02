"""A scripted searcher for search_scenes.py: what a patient person would write, turn by turn.

It looks at one place after the other, row by row from some place on, and answers when it sees the
target; in hard scenes it zooms into every frame. It knows the scene, so it starts where the turns
that are allowed suffice. Now and then a call is wrong and is written again, so that a model
learns from it how to recover. Writes text only: the environment answers.

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
Write = Callable[[Sequence[float], str], str]  # a zoom into a box of a picture

ORIGINAL = "original_image"
FIRST, HINTED, NEXT = "Too small to read.", "A light patch.", "Not here."
FRAMED, AGAIN = "A frame.", "I correct it."
# How an edge is written; pixels as a model sees them are unknown here.
NUMBERS: Mapping[str, Callable[[float], str]] = {
    "relative": lambda edge: f"{edge:g}",
    "milli": lambda edge: f"{1000 * edge:.0f}",
}


def call(box: Sequence[float], source: str, *, coordinates: str = "relative", named: bool = False) -> str:
    """A zoom, as `env.coordinates` and, with a name, `env.call=tool_call` want it written."""
    numbers = ", ".join(map(NUMBERS[coordinates], box))
    arguments = f'{{"bbox_2d": [{numbers}], "source": "{source}"}}'
    if named:
        return f'<tool_call>{{"name": "zoom", "arguments": {arguments}}}</tool_call>'
    return f"<grounding>{arguments}</grounding>"


def demonstration(
    sample: Sample, rng: np.random.Generator, *, turns: int, mistakes: float, write: Write = call
) -> list[str]:
    """The assistant's turns, at most `turns` of them, the last one with the answer. A call is wrong
    with probability `mistakes`; the turn after a wrong one says that it corrects it.
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
    """All places, row by row."""
    edges = [*pairwise(n / grid for n in range(grid + 1))]
    return [(left, top, right, bottom) for top, bottom in edges for left, right in edges]


def _path(
    extra: Mapping[str, Any], side: int, rng: np.random.Generator, most: int, mistakes: float
) -> list[list[Fractions]]:
    """The looks at each place on the way to the target, at most so many in all. How many places
    lie before the target's is drawn uniformly; an easy target is missed by mistake only.
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
    """One of the errors that an environment explains: no such picture, a box outside, no JSON."""
    right = write(box, source)
    outside = (box[0] + 1, box[1], box[2] + 1, box[3])
    return str(rng.choice([write(box, "observation_99"), write(outside, source), right.replace("]", "", 1)]))
