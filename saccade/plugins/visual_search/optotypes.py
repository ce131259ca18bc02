"""Drawings that vanish when a picture is shrunk: vanishing optotypes, as eye charts know them.

An object is drawn as ink, then all that survives shrinking by a given factor is taken away from it.
The shrunk picture is then, to the grey level, what it would be without the object, while the full
picture shows it sharply. Objects have names: a digit, a letter, `ring:up`, `spots:red`, a shape.

    >>> detail("7", 8, 8, shrink=4).shape
    (48, 48)
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from PIL import Image

TILE = 28  # side of an object
MARGIN = 4  # shrunk pixels around an object inside its window, where its overshoot fades
STEPS = 30  # after so many, less than a thousandth of a grey level survives shrinking

# Rows of five bits, top to bottom.
DIGITS = {
    "0": (14, 17, 17, 17, 17, 17, 14),
    "1": (4, 12, 4, 4, 4, 4, 14),
    "2": (14, 17, 1, 6, 8, 16, 31),
    "3": (30, 1, 1, 14, 1, 1, 30),
    "4": (2, 6, 10, 18, 31, 2, 2),
    "5": (31, 16, 30, 1, 1, 17, 14),
    "6": (6, 8, 16, 30, 17, 17, 14),
    "7": (31, 1, 2, 4, 8, 8, 8),
    "8": (14, 17, 17, 14, 17, 17, 14),
    "9": (14, 17, 17, 15, 1, 2, 12),
}
LETTERS = {
    "A": (4, 10, 17, 17, 31, 17, 17),
    "C": (14, 17, 16, 16, 16, 17, 14),
    "E": (31, 16, 16, 30, 16, 16, 31),
    "F": (31, 16, 16, 30, 16, 16, 16),
    "H": (17, 17, 17, 31, 17, 17, 17),
    "K": (17, 18, 20, 24, 20, 18, 17),
    "L": (16, 16, 16, 16, 16, 16, 31),
    "P": (30, 17, 17, 30, 16, 16, 16),
    "T": (31, 4, 4, 4, 4, 4, 4),
    "U": (17, 17, 17, 17, 17, 17, 14),
}
TURNS = {"right": 0, "up": 1, "left": 2, "down": 3}  # quarter turns of an opening
COLOURS = {
    "red": (1, -1, -1),
    "green": (-1, 1, -1),
    "blue": (-1, -1, 1),
    "yellow": (1, 1, -1),
    "cyan": (-1, 1, 1),
    "pink": (1, -1, 1),
}
SHAPES = ("plus", "dots", "bars", "corner")  # none is like a glyph, a ring or coloured spots
FRAME = "frame"


@cache
def ink(name: str) -> np.ndarray:
    """Where an object is drawn: 0 or 1, [TILE, TILE]."""
    if name in DIGITS or name in LETTERS:
        rows = (DIGITS | LETTERS)[name]
        bits = np.array([[row >> (4 - bit) & 1 for bit in range(5)] for row in rows])
        return np.pad(np.kron(bits, np.ones((3, 3))), ((3, 4), (6, 7)))
    y, x = np.mgrid[:TILE, :TILE] - (TILE - 1) / 2
    square, radius = np.maximum(abs(x), abs(y)), np.hypot(x, y)
    sort, _, value = name.partition(":")
    if sort == "ring":
        opening = (x > 0) & (abs(y) < 3) & (value in TURNS)
        ring = (radius < 12) & (radius > 7.5) & ~opening
        return np.rot90(ring, TURNS.get(value, 0)).astype(float)
    drawn = {
        "spots": ((x + 10.5) % 6 < 3) & ((y + 10.5) % 6 < 3) & (square < 11),
        "plus": ((abs(x) < 2) | (abs(y) < 2)) & (square < 11),
        "dots": (abs(abs(x) - 6) < 2.5) & (abs(abs(y) - 6) < 2.5),
        "bars": (np.floor(x / 3) % 2 == 0) & (square < 11),
        "corner": (np.maximum(x, y) > 5) & (square < 10),
        FRAME: square > TILE / 2 - 2,
    }
    return drawn[sort].astype(float)


def tint(name: str) -> np.ndarray:
    """[3]: the direction in which its ink leaves grey."""
    return np.array(COLOURS.get(name.removeprefix("spots:"), (1, 1, 1)), np.float32)


@cache
def detail(name: str, x: int, y: int, shrink: int) -> np.ndarray:
    """The object at (x, y) of a window on the lattice of `shrink`, without what survives it."""
    side = (math.ceil(TILE / shrink) + 1 + 2 * MARGIN) * shrink
    drawn = np.zeros((side, side), np.float32)
    drawn[y : y + TILE, x : x + TILE] = ink(name)
    for _ in range(STEPS):
        drawn -= resized(resized(drawn, side // shrink), side)
    return drawn


def resized(image: np.ndarray, side: int) -> np.ndarray:
    """As model families resize: bicubic, smoothed where it shrinks."""
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC))
