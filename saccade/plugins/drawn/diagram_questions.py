"""Diagrams with questions: named boxes, and arrows between them that cross no other box.

drawn = draw_diagram_row(Random(0), 0, split="same", kinds=("next",), side=224)
"""

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw

from saccade.plugins.drawn.chart_questions import LETTERS, SCALE
from saccade.plugins.drawn.drawn_sets import Drawing
from saccade.plugins.drawn.text_pages import font_of

OUTLINES = ("square", "circle", "diamond")
FILLS = ((255, 255, 255), (226, 236, 250), (252, 236, 214), (228, 244, 224))
INK = (25, 25, 25)
HALF_BOX = 0.085  # half the side of a box, as a share of the picture's side
CELLS = 3  # grid cells per side, with at most one box each
TRIES = 2000  # diagrams drawn until one fits the question
DIAGRAM_SPLITS: Mapping[str, tuple[int, int]] = {"same": (3, 5), "more": (6, 8)}  # fewest and most boxes

Arrow = tuple[int, int]  # (from, to), indices of boxes


class Diagram(NamedTuple):
    names: Sequence[str]
    outlines: Sequence[str]
    places: Sequence[tuple[float, float]]
    arrows: Sequence[Arrow]


def draw_diagram_row(rng: Random, index: int, *, split: str, kinds: Sequence[str], side: int) -> Drawing:
    kind = kinds[index % len(kinds)]
    wanted = rng.choice(("yes", "no")) if kind in ("exist", "reach") else None
    for _ in range(TRIES):
        diagram = _diagram(rng, rng.randint(*DIAGRAM_SPLITS[split]))
        asked = DIAGRAM_KINDS[kind](rng, diagram)
        if asked and wanted in (None, asked[1]):
            break
    else:
        raise AssertionError(f"no diagram of {split} has the answer {wanted} to {kind}")
    arrows = [[diagram.names[a], diagram.names[b]] for a, b in diagram.arrows]
    more = {"boxes": dict(zip(diagram.names, diagram.outlines, strict=True)), "arrows": arrows}
    return Drawing(_picture(rng, diagram, side), *asked, kind, more)


def _diagram(rng: Random, count: int) -> Diagram:
    cells = rng.sample(range(CELLS * CELLS), count)

    def near(place: int) -> float:
        return (place + 0.5) / CELLS + rng.uniform(-0.05, 0.05)

    places = [(near(cell % CELLS), near(cell // CELLS)) for cell in cells]
    pairs = [(a, b) for a in range(count) for b in range(count) if a < b and _is_clear(places, a, b)]
    chosen = rng.sample(pairs, min(len(pairs), rng.randint(2, count + 1)))
    arrows = [pair if rng.random() < 0.5 else pair[::-1] for pair in chosen]
    return Diagram(rng.sample(LETTERS, count), [rng.choice(OUTLINES) for _ in cells], places, arrows)


def _is_clear(places: Sequence[tuple[float, float]], a: int, b: int) -> bool:
    """Whether the line between boxes `a` and `b` crosses no other box."""
    (x0, y0), (x1, y1) = places[a], places[b]
    length = math.hypot(x1 - x0, y1 - y0)
    for n, (x, y) in enumerate(places):
        along = ((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / length
        aside = abs((x - x0) * (y1 - y0) - (y - y0) * (x1 - x0)) / length
        if n not in (a, b) and 0 < along < length and aside < 1.4 * HALF_BOX:
            return False
    return True


# -- drawing ----------------------------------------------------------------------------------------


def _picture(rng: Random, diagram: Diagram, side: int) -> Image.Image:
    scale = side * SCALE
    picture, half = Image.new("RGB", (scale, scale), (255, 255, 255)), HALF_BOX * scale
    pen, font, fill = ImageDraw.Draw(picture), font_of("", max(10, side // 14) * SCALE), rng.choice(FILLS)
    places = [(x * scale, y * scale) for x, y in diagram.places]
    width = max(2, scale // 150)
    for a, b in diagram.arrows:
        (x0, y0), (x1, y1) = places[a], places[b]
        angle = math.atan2(y1 - y0, x1 - x0)
        # The arrow starts and ends just outside the outlines.
        starts, ends = _reach(diagram.outlines[a], angle) * half, _reach(diagram.outlines[b], angle) * half
        tip = (x1 - ends * math.cos(angle), y1 - ends * math.sin(angle))
        pen.line((x0 + starts * math.cos(angle), y0 + starts * math.sin(angle), *tip), INK, width)
        turned = (angle + 0.45, angle - 0.45)
        wings = [(tip[0] - 0.4 * half * math.cos(turn), tip[1] - 0.4 * half * math.sin(turn)) for turn in turned]
        pen.polygon([tip, *wings], INK)
    for name, outline, (x, y) in zip(diagram.names, diagram.outlines, places, strict=True):
        box = (x - half, y - half, x + half, y + half)
        if outline == "circle":
            pen.ellipse(box, fill, INK, width)
        elif outline == "square":
            pen.rectangle(box, fill, INK, width)
        else:
            pen.polygon([(x, box[1]), (box[2], y), (x, box[3]), (box[0], y)], fill, INK, width)
        pen.text((x, y), name, INK, font, anchor="mm")
    return picture.reduce(SCALE)


def _reach(outline: str, angle: float) -> float:
    """Distance from the centre of a box to just outside its outline at `angle`, in units of half a box."""
    across, down = abs(math.cos(angle)), abs(math.sin(angle))
    return {"circle": 1.0, "square": 1 / max(across, down), "diamond": 1 / (across + down)}[outline] + 0.08


# -- questions --------------------------------------------------------------------------------------

QuestionAnswer = tuple[str, str] | None


def _next(rng: Random, diagram: Diagram) -> QuestionAnswer:
    single = [n for n in range(len(diagram.names)) if sum(a == n for a, _ in diagram.arrows) == 1]
    if not single:
        return None
    start = rng.choice(single)
    end = next(b for a, b in diagram.arrows if a == start)
    return f"To which box does the arrow from {diagram.names[start]} lead?", diagram.names[end]


def _exist(rng: Random, diagram: Diagram) -> QuestionAnswer:
    a, b = rng.sample(range(len(diagram.names)), 2)
    found = "yes" if (a, b) in diagram.arrows else "no"
    return f"Is there an arrow from {diagram.names[a]} to {diagram.names[b]}?", found


def _reachable(rng: Random, diagram: Diagram) -> QuestionAnswer:
    start, end = rng.sample(range(len(diagram.names)), 2)
    seen, waiting = {start}, [start]
    while waiting:
        here = waiting.pop()
        new = {b for a, b in diagram.arrows if a == here} - seen
        seen |= new
        waiting += new
    if (start, end) in diagram.arrows:  # the same as a question of `exist`
        return None
    words = f"Can you get from {diagram.names[start]} to {diagram.names[end]} along the arrows?"
    return words, "yes" if end in seen else "no"


def _count(rng: Random, diagram: Diagram) -> QuestionAnswer:
    outline = rng.choice(OUTLINES)
    things = {"arrows": len(diagram.arrows), "boxes": len(diagram.names)}
    things[f"{outline}s"] = diagram.outlines.count(outline)
    thing = rng.choice((*things,))
    return f"How many {thing} are there?", str(things[thing])


def _outline(rng: Random, diagram: Diagram) -> QuestionAnswer:
    n = rng.randrange(len(diagram.names))
    return f"What shape is {diagram.names[n]}?", diagram.outlines[n]


DIAGRAM_KINDS = {"next": _next, "exist": _exist, "reach": _reachable, "count": _count, "shape": _outline}
