"""Charts with questions: bars, rows (horizontal bars), lines and pies of a few named numbers.

A number is written at its mark (bar, point or slice), or is a multiple of the tick. Splits other than `same` test
generalisation of a model that was trained on `same`: more marks, or a dark page in other colours.

    drawn = draw_chart_row(Random(0), 0, split="same", kinds=("value",), side=224)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from PIL import Image, ImageDraw

from saccade.plugins.drawn.drawn_sets import Drawing
from saccade.plugins.drawn.text_pages import Font, font_of

Colour = tuple[int, int, int]
SCALE = 2  # supersampling per axis
NAMES = (
    ("apples", "pears", "plums", "figs", "limes", "dates", "kiwis"),
    ("cats", "dogs", "birds", "fish", "mice", "cows", "pigs"),
    ("tea", "milk", "juice", "water", "soda", "coffee", "cocoa"),
    ("Rome", "Oslo", "Lima", "Bonn", "Cairo", "Paris", "Seoul"),
    ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul"),
    ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"),
)
LETTERS = tuple("ABCDEFGHIJ")
TITLES = ("Sales", "Visitors", "Votes", "Points", "Orders", "Hours")


class Look(NamedTuple):
    paper: Colour
    ink: Colour
    marks: Sequence[Colour]


LIGHT = Look(
    (255, 255, 255), (20, 20, 20), ((66, 114, 196), (222, 118, 38), (86, 150, 66), (188, 58, 58), (128, 84, 170))
)
NIGHT = Look(
    (28, 30, 38), (235, 235, 235), ((240, 200, 80), (90, 210, 200), (240, 130, 160), (150, 220, 110), (200, 200, 210))
)


# Fewest and most marks, and the look.
CHART_SPLITS = {"same": ((3, 5), LIGHT), "more": ((7, 10), LIGHT), "style": ((3, 5), NIGHT)}


class Chart(NamedTuple):
    kind: str
    title: str
    names: Sequence[str]
    values: Sequence[int]
    top: int  # highest value of the axis
    tick: int
    written: bool  # whether numbers are written at their marks


def draw_chart_row(rng: Random, index: int, *, split: str, kinds: Sequence[str], side: int) -> Drawing:
    (marks, look), kind = CHART_SPLITS[split], kinds[index % len(kinds)]
    chart = _chart(rng, rng.choice((*DRAWN,)), rng.randint(*marks))
    asked, answer = CHART_KINDS[kind](rng, chart)
    picture = Image.new("RGB", (side * SCALE, side * SCALE), look.paper)
    pen, font = ImageDraw.Draw(picture), font_of("", max(9, side // 20) * SCALE)
    pen.text((side * SCALE // 2, side * SCALE // 50), chart.title, look.ink, font, anchor="ma")
    shift = rng.randrange(len(look.marks))
    colours = [look.marks[(n + shift) % len(look.marks)] for n in range(len(chart.names))]
    DRAWN[chart.kind](Page(pen, font, side * SCALE, look, colours, rng.random() < 0.5), chart)
    more = {"chart": chart.kind, "names": [*chart.names], "values": [*chart.values], "title": chart.title}
    return Drawing(picture.reduce(SCALE), asked, answer, kind, more)


def _chart(rng: Random, kind: str, marks: int) -> Chart:
    ticks = rng.randint(4, 5)
    tick = rng.choice((1, 2, 5, 10, 20)) * (2 if marks > ticks * 2 else 1)
    written = kind == "pie" or marks > ticks or rng.random() < 0.5
    top = tick * ticks
    possible = range(1, max(top, marks) + 1) if written else range(tick, top + 1, tick)
    values = rng.sample(possible, marks)
    top = max(top, math.ceil(max(values) / tick) * tick)
    pool = rng.choice(NAMES) if len(values) <= 5 else LETTERS
    names = rng.sample(pool, len(values)) if len(values) <= 5 else pool[: len(values)]
    return Chart(kind, rng.choice(TITLES), names, values, top, tick, written)


# -- drawing ----------------------------------------------------------------------------------------


class Page(NamedTuple):
    pen: ImageDraw.ImageDraw
    font: Font
    side: int
    look: Look
    colours: Sequence[Colour]
    lined: bool  # ticks are grid lines across the chart


def _upright(page: Page, chart: Chart, joined: bool) -> None:
    pen, side, ink = page.pen, page.side, page.look.ink
    left, right, top, bottom = 0.13 * side, 0.97 * side, 0.16 * side, 0.87 * side
    for value in range(0, chart.top + 1, chart.tick):
        y = bottom - (bottom - top) * value / chart.top
        pen.line((left, y, right if page.lined else left + 6, y), (150, 150, 150) if page.lined else ink, 1)
        pen.text((left - 5, y), str(value), ink, page.font, anchor="rm")
    pen.line((left, top, left, bottom, right, bottom), ink, 2)
    slot = (right - left) / len(chart.names)
    points = []
    for n, (name, value) in enumerate(zip(chart.names, chart.values, strict=True)):
        x, y = left + slot * (n + 0.5), bottom - (bottom - top) * value / chart.top
        points.append((x, y))
        if not joined:
            pen.rectangle((x - 0.32 * slot, min(y, bottom - 1), x + 0.32 * slot, bottom - 1), page.colours[n])
        pen.text((x, bottom + 4), name, ink, page.font, anchor="ma")
    if joined:
        pen.line(points, page.colours[0], 5, joint="curve")
        for x, y in points:
            pen.ellipse((x - 7, y - 7, x + 7, y + 7), page.colours[0])
    for (x, y), value in zip(points, chart.values, strict=True) if chart.written else ():
        high = y - (9 if joined else 3)
        pen.text((x, high), str(value), ink, page.font, anchor="mb", stroke_width=3, stroke_fill=page.look.paper)


def _rows(page: Page, chart: Chart) -> None:
    pen, side, ink = page.pen, page.side, page.look.ink
    left, top, bottom = 0.2 * side, 0.13 * side, 0.9 * side
    right = min(0.92 * side, side - page.font.getlength(f" {chart.top} "))  # room for the number of the longest bar
    for value in range(0, chart.top + 1, chart.tick):
        x = left + (right - left) * value / chart.top
        pen.line((x, top if page.lined else bottom - 6, x, bottom), (150, 150, 150) if page.lined else ink, 1)
        pen.text((x, bottom + 4), str(value), ink, page.font, anchor="ma")
    pen.line((left, top, left, bottom, right, bottom), ink, 2)
    slot = (bottom - top) / len(chart.names)
    for n, (name, value) in enumerate(zip(chart.names, chart.values, strict=True)):
        y, x = top + slot * (n + 0.5), left + (right - left) * value / chart.top
        pen.rectangle((left + 2, y - 0.32 * slot, max(x, left + 2), y + 0.32 * slot), page.colours[n])
        pen.text((left - 5, y), name, ink, page.font, anchor="rm")
        if chart.written:
            pen.text((x + 4, y), str(value), ink, page.font, anchor="lm")


def _pie(page: Page, chart: Chart) -> None:
    """A pie with a legend of names and numbers, in the order of the slices."""
    pen, side = page.pen, page.side
    box, angle = (0.04 * side, 0.2 * side, 0.6 * side, 0.76 * side), -90.0
    step = min(0.1 * side, 0.76 * side / len(chart.names))
    for n, (name, value) in enumerate(zip(chart.names, chart.values, strict=True)):
        turn = 360 * value / sum(chart.values)
        pen.pieslice(box, angle, angle + turn, page.colours[n], page.look.ink, 2)
        angle += turn
        y = 0.16 * side + step * (n + 0.5)
        pen.rectangle((0.65 * side, y - 8, 0.65 * side + 16, y + 8), page.colours[n], page.look.ink)
        pen.text((0.65 * side + 22, y), f"{name} {value}", page.look.ink, page.font, anchor="lm")


DRAWN: Mapping[str, Callable[[Page, Chart], None]] = {
    "bar": lambda page, chart: _upright(page, chart, joined=False),
    "line": lambda page, chart: _upright(page, chart, joined=True),
    "row": _rows,
    "pie": _pie,
}

# -- questions --------------------------------------------------------------------------------------

QuestionAnswer = tuple[str, str]


def _value(rng: Random, chart: Chart) -> QuestionAnswer:
    n = rng.randrange(len(chart.names))
    return f"What is the value of {chart.names[n]}?", str(chart.values[n])


def _which(rng: Random, chart: Chart) -> QuestionAnswer:
    word, pick = rng.choice((("highest", max), ("lowest", min)))
    return f"Which has the {word} value?", chart.names[chart.values.index(pick(chart.values))]


def _difference(rng: Random, chart: Chart) -> QuestionAnswer:
    pair = rng.sample(range(len(chart.names)), 2)
    more, less = sorted(pair, key=lambda n: -chart.values[n])
    gap = chart.values[more] - chart.values[less]
    return f"How much higher is {chart.names[more]} than {chart.names[less]}?", str(gap)


def _compare(rng: Random, chart: Chart) -> QuestionAnswer:
    a, b = rng.sample(range(len(chart.names)), 2)
    return f"Is {chart.names[a]} higher than {chart.names[b]}?", "yes" if chart.values[a] > chart.values[b] else "no"


def _count(rng: Random, chart: Chart) -> QuestionAnswer:
    thing = {"bar": "bars", "row": "bars", "line": "points", "pie": "slices"}[chart.kind]
    return f"How many {thing} does the chart have?", str(len(chart.names))


def _describe(rng: Random, chart: Chart) -> QuestionAnswer:
    """All names and values, for alignment training; no verifier can check it."""
    said = ", ".join(f"{name} {value}" for name, value in zip(chart.names, chart.values, strict=True))
    return "What does the chart show?", f"{chart.title}: {said}"


ASKED = (_value, _which, _difference, _compare, _count, _describe)
CHART_KINDS = {ask.__name__.removeprefix("_"): ask for ask in ASKED}
