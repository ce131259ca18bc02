"""Draws solids as in CLEVR: cubes, spheres, cylinders and cones of two materials, lit from the upper left.

Each solid is shaded once per shape, size and material (cached) and pasted into scenes. `cartoon` is a second renderer:
few tones, black outlines, no shadows.

    draw_solids([Solid("cube", "red", "metal", "large", 0.4, 0.5)], 224, BACKGROUNDS["plain"], Random(0))
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image

from saccade.plugins.quickstart.counting import COLOURS

SIZES = {"small": 0.055, "large": 0.095}  # radius as a share of the picture's side
MATERIALS = ("rubber", "metal")
SHAPES = ("cube", "sphere", "cylinder", "cone")
SCALE = 4  # supersampling per axis
LIGHT = np.array([-0.45, -0.65, 0.61])  # direction to the light
BLACK = 22.0  # grey level of black, above 0 so that shading is visible


class Solid(NamedTuple):
    shape: str
    colour: str
    material: str
    size: str
    x: float  # centre, as a share of the picture's side
    y: float


def draw_solids(
    solids: Sequence[Solid], side: int, background: "Background", rng: Random, cartoon: bool = False
) -> Image.Image:
    """Draw the solids on a background; those further down cover the others."""
    canvas = background(side, np.random.default_rng(rng.getrandbits(32)))
    ordered = sorted(solids, key=lambda one: one.y)
    for solid in () if cartoon else ordered:
        shade = _shadow(radius := SIZES[solid.size] * side)
        top, left = (int(v) - len(shade) // 2 for v in (solid.y * side + 0.75 * radius, solid.x * side + 0.25 * radius))
        inside = canvas[max(top, 0) : top + len(shade), max(left, 0) : left + len(shade)]
        inside *= shade[max(-top, 0) :, max(-left, 0) :][: len(inside), : inside.shape[1], None]
    for solid in ordered:
        cover, tone, gloss = _look(solid.shape, solid.material, SIZES[solid.size] * side, cartoon)
        top, left = (int(v) - len(cover) // 2 for v in (solid.y * side, solid.x * side))
        paint = (BLACK + np.array(COLOURS[solid.colour], np.float32) * (1 - BLACK / 255)) * tone + 255 * gloss
        inside = canvas[top : top + len(cover), left : left + len(cover)]
        inside += (np.minimum(paint, 255) - inside) * cover
    return Image.fromarray(canvas.astype(np.uint8))


@cache
def _look(shape: str, material: str, radius: float, cartoon: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per pixel: the share that the solid covers, the brightness of its colour, and the white highlight."""
    reach = int(radius) + 1
    steps = (np.arange(2 * reach * SCALE) + 0.5) / SCALE - reach
    x, y = np.meshgrid(steps / radius, steps / radius)
    inside, normal = FORMS[shape](x, y)
    lit = np.clip(np.tensordot(LIGHT, np.stack(np.broadcast_arrays(*normal)), 1), 0, 1)
    shining = material == "metal"
    tone = 0.25 + 0.75 * lit**1.5 if shining else 0.45 + 0.55 * lit
    gloss = 0.6 * np.exp(-(((0.8 * x + 0.6 * y + 0.42) / 0.14) ** 2)) if shining else np.zeros_like(x)
    if cartoon:
        near = range(1, SCALE)
        edge = np.any([np.roll(inside, s * n, a) != inside for n in near for s in (1, -1) for a in (0, 1)], axis=0)
        faces = np.any([abs(np.roll(lit, 1, axis) - lit) > 0.12 for axis in (0, 1)], axis=0)
        tone, gloss = np.ceil(tone * 3) / 3 * ~(edge | faces), 0.9 * (gloss > 0.3) * ~edge
    small = [part.reshape(2 * reach, SCALE, 2 * reach, SCALE) for part in (inside, tone * inside, gloss * inside)]
    cover, tone, gloss = (part.mean(axis=(1, 3), dtype=np.float32)[:, :, None] for part in small)
    whole = np.maximum(cover, 1e-6)
    return cover, tone / whole, gloss / whole


@cache
def _shadow(radius: float) -> np.ndarray:
    reach = int(1.6 * radius) + 1
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1] / radius
    return (1 - 0.45 * np.exp(-(x**2 + (2.2 * y) ** 2) * 1.3)).astype(np.float32)


# -- forms: coordinates in -1..1 → (mask of the solid, surface normal) --------------------------------

Normal = tuple[np.ndarray | float, ...]


def _sphere(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, Normal]:
    rest = 1 - x**2 - y**2
    return rest >= 0, (x, y, np.sqrt(np.maximum(rest, 0)))


def _cylinder(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, Normal]:
    round = np.sqrt(np.maximum(1 - (x / 0.8) ** 2, 0))
    top = abs(y + 0.6) <= 0.28 * round
    inside = (abs(x) <= 0.8) & (y >= -0.6) & (y <= 0.65 + 0.28 * round) | top & (abs(x) <= 0.8)
    return inside, (np.where(top, 0, x / 0.8), np.where(top, -0.9, 0.0), np.where(top, 0.44, round))


def _cone(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, Normal]:
    width = 0.88 * np.clip((y + 1) / 1.65, 0, 1)
    across = np.clip(x / np.maximum(width, 1e-6), -1, 1)
    foot = (x / 0.88) ** 2 + ((y - 0.65) / 0.3) ** 2 <= 1
    inside = (abs(x) <= width) & (y >= -1) & (y <= 0.65) | foot & (y > 0.65)
    return inside, (0.9 * across, -0.3 * np.ones_like(x), np.sqrt(1 - across**2))


def _cube(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, Normal]:
    slope = -0.5 * abs(x) / 0.87
    top = abs(x) / 0.87 + abs(y + 0.5) / 0.5 <= 1
    inside = top | (abs(x) <= 0.87) & (y >= slope) & (y <= slope + 1)
    side = np.where(x < 0, -0.75, 0.75)
    return inside, (np.where(top, 0, side), np.where(top, -0.9, 0.1), np.where(top, 0.44, 0.6))


FORMS = {"cube": _cube, "sphere": _sphere, "cylinder": _cylinder, "cone": _cone}

# -- backgrounds: float32 [side, side, 3] -----------------------------------------------------------

Background = Callable[[int, np.random.Generator], np.ndarray]


def _plain(side: int, rng: np.random.Generator) -> np.ndarray:
    """Grey, lighter at the top, like a distant floor."""
    light = np.linspace(0, 1, side, dtype=np.float32)[:, None, None]
    return (rng.uniform(170, 205) - 35 * light) * np.ones((1, side, 3), np.float32)


def _patterned(side: int, rng: np.random.Generator) -> np.ndarray:
    """Stripes, checks or clouds in two pale colours."""
    y, x = np.mgrid[:side, :side] / side
    waves = rng.integers(3, 9)
    noise = Image.fromarray(rng.random((6, 6)).astype(np.float32))
    cloud = np.asarray(noise.resize((side, side), Image.Resampling.BICUBIC))
    angle = rng.uniform(0, np.pi)
    pattern = [
        np.sin(2 * np.pi * waves * (x * np.cos(angle) + y * np.sin(angle))) > 0,
        (np.floor(x * waves) + np.floor(y * waves)) % 2,
        cloud,
    ][rng.integers(3)]
    first, second = rng.uniform(130, 225, (2, 3))
    return (first + (second - first) * np.asarray(pattern, np.float32)[:, :, None]).clip(0, 255).astype(np.float32)


BACKGROUNDS: Mapping[str, Background] = {
    "plain": _plain,
    "patterned": _patterned,
    "paper": lambda side, rng: np.full((side, side, 3), 250, np.float32),
}
