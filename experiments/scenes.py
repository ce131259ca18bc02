"""Scenes of coloured objects with questions about counts or positions, each with its answer, a worked answer, and the
scene as text. The same scene can be drawn flat, as solids, or as a cartoon of solids.

    drawn = draw_scene(Random(0), 0, split="same", kinds=("count",), side=224)
    drawn.question, drawn.answer, drawn.more["worked"], drawn.more["facts"]
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from saccade.plugins.drawn.drawn_sets import Drawing
from saccade.plugins.drawn.scene_questions import MARGIN, SCENE_SPLITS, SIDES, SUPERLATIVES, SceneSplit, place_solids
from saccade.plugins.drawn.solids import BACKGROUNDS, SIZES, Solid, draw_solids
from saccade.plugins.quickstart.counting import COLOURS, TRAINING_COLOURS, UNSEEN_COLOURS

FLAT = {"cube": "square", "sphere": "circle", "cylinder": "bar", "cone": "triangle"}  # solid → flat shape
TRIES = 2000  # scenes tried for one question


class Look(NamedTuple):
    about: str
    scene: SceneSplit
    flat: bool = True


SPLITS: Mapping[str, Look] = {
    "same": Look("2 to 6 flat objects, six colours", SceneSplit()),
    "more": Look("7 to 9 objects", SceneSplit(objects=(7, 9))),
    "colours": Look("four other colours", SceneSplit(colours=UNSEEN_COLOURS)),
    "backgrounds": Look("patterned backgrounds", SceneSplit(background="patterned")),
    "cartoon": Look("another renderer: a cartoon of solids", SCENE_SPLITS["renderer"], flat=False),
    "solids": Look("another renderer: lit solids, which the model knew before", SCENE_SPLITS["same"], flat=False),
}


class Thing(NamedTuple):
    noun: str
    colour: str
    x: float
    y: float

    @property
    def name(self) -> str:
        return f"{self.colour} {self.noun}"


class Asked(NamedTuple):
    question: str
    answer: str
    worked: str  # the reasoning before the answer


def draw_scene(rng: Random, index: int, *, split: str, kinds: Sequence[str], side: int) -> Drawing:
    kind, look = kinds[index % len(kinds)], SPLITS[split]
    wanted = rng.choice(WANTED[kind]) if kind in WANTED else None
    for _ in range(TRIES):
        solids = place_solids(rng, look.scene)
        things = [Thing(FLAT[one.shape] if look.flat else one.shape, one.colour, one.x, one.y) for one in solids]
        asked = KINDS[kind](rng, things)
        if asked and wanted in (None, asked.answer):
            break
    else:
        raise AssertionError(f"no scene of {split} has the answer {wanted} to {kind}")
    background = BACKGROUNDS[look.scene.background]
    picture = (
        draw_flat(solids, side, background(side, np.random.default_rng(rng.getrandbits(32))))
        if look.flat
        else draw_solids(solids, side, background, rng, look.scene.cartoon)
    )
    listed = "; ".join(f"{one.name} ({one.x:.0%}, {one.y:.0%})" for one in things)
    more = {"worked": worked(asked.worked, asked.answer), "facts": f"Places from the left and from the top. {listed}."}
    return Drawing(picture, asked.question, asked.answer, kind, more)


def worked(steps: str, answer: str) -> str:
    return f"{steps}.\nAnswer: {answer}"


def draw_flat(solids: Sequence[Solid], side: int, background: np.ndarray) -> Image.Image:
    picture = Image.fromarray(background.astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for one in solids:
        x, y, r = one.x * side, one.y * side, SIZES[one.size] * side
        paint = COLOURS[one.colour]
        if one.shape == "sphere":
            pen.ellipse((x - r, y - r, x + r, y + r), paint)
        elif one.shape == "cone":
            pen.polygon([(x, y - r), (x + 0.9 * r, y + 0.8 * r), (x - 0.9 * r, y + 0.8 * r)], paint)
        else:
            wide = {"cube": 0.8, "cylinder": 0.4}[one.shape] * r
            pen.rectangle((x - wide, y - 0.8 * r, x + wide, y + 0.8 * r), paint)
    return picture


# -- kinds of questions -----------------------------------------------------------------------------


def _all(rng: Random, things: Sequence[Thing]) -> Asked:
    return Asked("How many objects are there?", str(len(things)), _listed(things))


def _count(rng: Random, things: Sequence[Thing]) -> Asked:
    field = rng.choice(("noun", "colour"))
    values = (*FLAT.values(),) if things[0].noun in FLAT.values() else (*FLAT,)
    if field == "colour":
        values = UNSEEN_COLOURS if things[0].colour in UNSEEN_COLOURS else TRAINING_COLOURS
    value = rng.choice(values)
    found = [one for one in things if getattr(one, field) == value]
    name = f"{value}s" if field == "noun" else f"{value} objects"
    return Asked(f"How many {name} are there?", str(len(found)), _listed(found))


def _compare(rng: Random, things: Sequence[Thing]) -> Asked | None:
    field = rng.choice(("noun", "colour"))
    values = sorted({getattr(one, field) for one in things})
    if len(values) < 2:
        return None
    pair = rng.sample(values, 2)
    a, b = (sum(getattr(one, field) == value for one in things) for value in pair)
    names = [f"{value}s" if field == "noun" else f"{value} objects" for value in pair]
    steps = f"{names[0]}: {a}, {names[1]}: {b}"
    return Asked(f"Are there more {names[0]} than {names[1]}?", _yes(a > b), steps)


def _side(rng: Random, things: Sequence[Thing]) -> Asked | None:
    names = [one.name for one in things]
    single = [one for one in things if names.count(one.name) == 1]
    if len(single) < 2:
        return None
    one, other = rng.sample(single, 2)
    side = rng.choice((*SIDES,))
    apart = SIDES[side](other) - SIDES[side](one)
    first, second = (one, other) if apart > 0 else (other, one)
    asked = f"Is the {one.name} {side} the {other.name}?"
    return Asked(asked, _yes(apart > 0), f"{first.name}, {second.name}") if abs(apart) > MARGIN else None


def _most(rng: Random, things: Sequence[Thing]) -> Asked | None:
    side = rng.choice((*SIDES,))
    ordered = sorted(things, key=SIDES[side])
    if SIDES[side](ordered[1]) - SIDES[side](ordered[0]) < MARGIN:
        return None
    word, answer = rng.choice((("colour", ordered[0].colour), ("shape", ordered[0].noun)))
    return Asked(f"What {word} is the {SUPERLATIVES[side]} object?", answer, ", ".join(one.name for one in ordered))


def _listed(things: Sequence[Thing]) -> str:
    return ", ".join(one.name for one in sorted(things, key=lambda one: one.x)) or "none"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


KINDS: Mapping[str, Callable[[Random, Sequence[Thing]], Asked | None]] = {
    "all": _all,
    "count": _count,
    "compare": _compare,
    "side": _side,
    "most": _most,
}
WANTED = {"count": ("0", "1", "2", "3"), "compare": ("yes", "no"), "side": ("yes", "no")}  # equally frequent
