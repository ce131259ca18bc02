"""Drawn scenes of solids with questions as in CLEVR: count, exist, compare, attribute, relation, describe.

Yes and no are equally frequent, and so is each number. Splits other than `same` test generalisation of a model that
was trained on `same`: more objects, new colours, new backgrounds, another renderer.

    drawn = draw_scene_row(Random(0), 0, split="same", kinds=("count",), side=224)
    drawn.question, drawn.answer
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from saccade.plugins.drawn.drawn_sets import Drawing
from saccade.plugins.drawn.solids import BACKGROUNDS, MATERIALS, SHAPES, SIZES, Solid, draw_solids
from saccade.plugins.quickstart.counting import TRAINING_COLOURS, UNSEEN_COLOURS

MIN_GAP = 0.015  # least distance between two solids; this and the next are shares of the picture's side
MARGIN = 0.06  # least difference in position for a question about left, right, above or below
TRIES = 2000  # scenes drawn until one fits the question
ATTRIBUTES = ("size", "colour", "material", "shape")  # in their order in a noun phrase
SIDES: Mapping[str, Callable[[Solid], float]] = {  # sort key: the smaller, the further in that direction
    "left of": lambda one: one.x,
    "right of": lambda one: -one.x,
    "above": lambda one: one.y,
    "below": lambda one: -one.y,
}
SUPERLATIVES = {"left of": "leftmost", "right of": "rightmost", "above": "topmost", "below": "lowest"}
Wanted = Mapping[str, str]  # description of a solid: word of ATTRIBUTES → value
QuestionAnswer = tuple[str, str] | None  # question and answer; None if the scene allows none


@dataclass(frozen=True, kw_only=True)
class SceneSplit:
    objects: tuple[int, int] = (2, 6)
    colours: Sequence[str] = TRAINING_COLOURS
    background: str = "plain"
    cartoon: bool = False


SCENE_SPLITS: Mapping[str, SceneSplit] = {
    "same": SceneSplit(),
    "more": SceneSplit(objects=(7, 10)),
    "colours": SceneSplit(colours=UNSEEN_COLOURS),
    "backgrounds": SceneSplit(background="patterned"),
    "renderer": SceneSplit(background="paper", cartoon=True),
}


def draw_scene_row(rng: Random, index: int, *, split: str, kinds: Sequence[str], side: int) -> Drawing:
    kind, about = kinds[index % len(kinds)], SCENE_SPLITS[split]
    wanted = None
    if kind in ("exist", "compare"):
        wanted = rng.choice(("yes", "no"))
    elif kind == "count":
        wanted = str(rng.randint(0, about.objects[1]))
    for _ in range(TRIES):
        solids = place_solids(rng, about)
        asked = SCENE_KINDS[kind](rng, solids, about)
        if asked and wanted in (None, asked[1]):
            break
    else:
        raise AssertionError(f"no scene of {split} has the answer {wanted} to {kind}")
    picture = draw_solids(solids, side, BACKGROUNDS[about.background], rng, about.cartoon)
    # For a teacher that reads text only; positions in percent from the left and the top.
    words = "; ".join(f"a {_named(_words(one))} at ({one.x:.0%}, {one.y:.0%})" for one in solids)
    more: dict[str, Any] = {"description": words, "objects": [_record(one, side) for one in solids]}
    return Drawing(picture, *asked, kind, more)


def place_solids(rng: Random, about: SceneSplit) -> list[Solid]:
    count = rng.randint(*about.objects)
    solids: list[Solid] = []
    while len(solids) < count:
        solids.clear()
        for _ in range(12 * count):
            size = rng.choice((*SIZES,))
            edge = SIZES[size] + MIN_GAP
            x, y = (edge + rng.random() * (1 - 2 * edge) for _ in range(2))
            if all((x - o.x) ** 2 + (y - o.y) ** 2 > (edge + SIZES[o.size]) ** 2 for o in solids):
                solids.append(Solid(rng.choice(SHAPES), rng.choice(about.colours), rng.choice(MATERIALS), size, x, y))
            if len(solids) == count:
                break
    return solids


def _record(one: Solid, side: int) -> dict[str, Any]:
    radius = SIZES[one.size]
    box = [round(v * side) for v in (one.x - radius, one.y - radius, one.x + radius, one.y + radius)]
    return {**_words(one), "box": box}


def _words(one: Solid) -> Wanted:
    return {word: getattr(one, word) for word in ATTRIBUTES}


def _named(wanted: Wanted, many: bool = False) -> str:
    noun = wanted.get("shape", "object") + "s" * many
    return " ".join([*(wanted[word] for word in ATTRIBUTES[:3] if word in wanted), noun])


def _those(wanted: Wanted, solids: Sequence[Solid]) -> list[Solid]:
    return [one for one in solids if all(getattr(one, word) == value for word, value in wanted.items())]


def _draw_wanted(rng: Random, solids: Sequence[Solid], about: SceneSplit, most: int = 3) -> Wanted:
    """A random description: with probability 0.6 that of a solid in the scene."""
    words = rng.sample(ATTRIBUTES, rng.randint(1, most))
    if rng.random() < 0.6:
        one = rng.choice(solids)
        return {word: getattr(one, word) for word in words}
    values = {"size": (*SIZES,), "colour": about.colours, "material": MATERIALS, "shape": SHAPES}
    return {word: rng.choice(values[word]) for word in words}


def _unique(rng: Random, one: Solid, solids: Sequence[Solid], without: str = "") -> Wanted | None:
    """A description that fits only `one`, adding words in random order until it is unique; None if none is unique."""
    words = [word for word in rng.sample(ATTRIBUTES, len(ATTRIBUTES)) if word != without]
    for count in range(1, len(words) + 1):
        wanted = {word: getattr(one, word) for word in words[:count]}
        if len(_those(wanted, solids)) == 1:
            return wanted
    return None


# -- kinds of questions -----------------------------------------------------------------------------


def _count(rng: Random, solids: Sequence[Solid], about: SceneSplit) -> QuestionAnswer:
    wanted = {} if rng.random() < 0.4 else _draw_wanted(rng, solids, about)
    return f"How many {_named(wanted, many=True)} are there?", str(len(_those(wanted, solids)))


def _exist(rng: Random, solids: Sequence[Solid], about: SceneSplit) -> QuestionAnswer:
    name = _named(wanted := _draw_wanted(rng, solids, about))
    article = "an" if name[0] in "aeiou" else "a"
    return f"Is there {article} {name}?", _yes(bool(_those(wanted, solids)))


def _compare(rng: Random, solids: Sequence[Solid], about: SceneSplit) -> QuestionAnswer:
    first, second = (_draw_wanted(rng, solids, about, most=1) for _ in range(2))
    if first == second:
        return None
    a, b = len(_those(first, solids)), len(_those(second, solids))
    words, holds = rng.choice((("more {} than", a > b), ("fewer {} than", a < b), ("as many {} as", a == b)))
    return f"Are there {words.format(_named(first, many=True))} {_named(second, many=True)}?", _yes(holds)


def _attribute(rng: Random, solids: Sequence[Solid], about: SceneSplit) -> QuestionAnswer:
    one, word = rng.choice(solids), rng.choice(ATTRIBUTES)
    wanted = _unique(rng, one, solids, without=word)
    return (f"What {word} is the {_named(wanted)}?", getattr(one, word)) if wanted else None


def _relation(rng: Random, solids: Sequence[Solid], about: SceneSplit) -> QuestionAnswer:
    side = rng.choice((*SIDES,))
    if rng.random() < 0.5:
        first, second = sorted(solids, key=SIDES[side])[:2]
        word = rng.choice(ATTRIBUTES)
        clear = SIDES[side](second) - SIDES[side](first) > MARGIN
        return (f"What {word} is the {SUPERLATIVES[side]} object?", getattr(first, word)) if clear else None
    one, other = rng.sample(solids, 2)
    names = [_unique(rng, each, solids) for each in (one, other)]
    apart = SIDES[side](other) - SIDES[side](one)
    if None in names or abs(apart) < MARGIN:
        return None
    return f"Is the {_named(names[0] or {})} {side} the {_named(names[1] or {})}?", _yes(apart > 0)


def _describe(rng: Random, solids: Sequence[Solid], about: SceneSplit) -> QuestionAnswer:
    """Caption from left to right, for alignment training; no verifier can check it."""
    named = [_named(_words(one)) for one in sorted(solids, key=lambda one: one.x)]
    return "What is in the picture, from left to right?", ", ".join(named)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


ASKED = (_count, _exist, _compare, _attribute, _relation, _describe)
SCENE_KINDS = {ask.__name__.removeprefix("_"): ask for ask in ASKED}
