"""Drawings that vanish when a picture is shrunk (vanishing optotypes, known from eye charts).

An object is drawn as ink, then everything that survives shrinking by a given factor is subtracted. The shrunk
picture then equals, to the grey level, the one without the object, while the full picture shows it sharply.
Objects have names: a digit, a letter, `ring:up`, `spots:red`, a shape.

    >>> detail("7", 8, 8, shrink=4).shape
    (48, 48)
"""

import math
from functools import cache

import numpy as np
from PIL import Image

TILE = 28  # side of an object in pixels
MARGIN = 4  # shrunk pixels around an object in its window, in which the overshoot fades out
STEPS = 30  # iterations, after which less than a thousandth of a grey level survives shrinking

# Glyphs: seven rows of five bits from top to bottom, each row a digit to the base 32.
_DIGITS = "EHHHHHE 4C4444E EH168GV U11E11U 26AIV22 VGU11HE 68GUHHE V124888 EHHEHHE EHHF12C"
_LETTERS = "4AHHVHH EHGGGHE VGGUGGV VGGUGGG HHHVHHH HIKOKIH GGGGGGV UHHUGGG V444444 HHHHHHE"
DIGITS = dict(zip("0123456789", _DIGITS.split(), strict=True))
LETTERS = dict(zip("ACEFHKLPTU", _LETTERS.split(), strict=True))
TURNS = {"right": 0, "up": 1, "left": 2, "down": 3}  # quarter turns of the ring's opening
TINTS = {  # colour of spots: sign of the change from grey per RGB channel
    "red": (1, -1, -1),
    "green": (-1, 1, -1),
    "blue": (-1, -1, 1),
    "yellow": (1, 1, -1),
    "cyan": (-1, 1, 1),
    "pink": (1, -1, 1),
}
SHAPES = ("plus", "dots", "bars", "corner")  # distractors: unlike glyphs, rings and coloured spots
FRAME = "frame"


@cache
def ink(name: str) -> np.ndarray:
    """The mask of an object: 0 or 1, [TILE, TILE]."""
    if name in DIGITS or name in LETTERS:
        rows = (DIGITS | LETTERS)[name]
        bits = np.array([[int(row, 32) >> (4 - bit) & 1 for bit in range(5)] for row in rows])
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


@cache
def detail(name: str, x: int, y: int, shrink: int) -> np.ndarray:
    """A window with the object at (x, y), aligned to blocks of `shrink` pixels, minus what survives shrinking."""
    side = (math.ceil(TILE / shrink) + 1 + 2 * MARGIN) * shrink
    drawn = np.zeros((side, side), np.float32)
    drawn[y : y + TILE, x : x + TILE] = ink(name)
    for _ in range(STEPS):
        drawn -= resized(resized(drawn, side // shrink), side)
    return drawn


def resized(image: np.ndarray, side: int) -> np.ndarray:
    """Resize as model families do: bicubic, antialiased when shrinking."""
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC))
