"""Curves, bars and intervals as inline SVG: no script, colours from the page's style sheet.

A hover shows values through <title>. Everything that comes from outside is escaped here. Knows
numbers and labels, nothing of runs.

    >>> line_chart("reward", [Series(name="mean", points=((0, 0.0), (1, 1.0)))])[:4]
    '<svg'
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from saccade.tracking.markup import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 380.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 12.0, 26.0
MOST_POINTS = 160  # of one curve; more would neither be seen nor be hit by a pointer
SMOOTH_FROM = 30  # points from which a running mean is drawn over the raw curve
NO_BREAK = "\u00a0"  # keeps a number and its unit on one line
COLOURS = 8  # classes c0 … c7 of the style sheet


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve, with the interval around each point where it is known."""

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()  # (x, low, high)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Maps data to the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def line_chart(title: str, series: Sequence[Series], *, percent: bool = False) -> str:
    """A chart with axes; empty when no series has a finite point."""
    drawn = [_thinned(one) for one in series]
    drawn = [one for one in drawn if one.points]
    if not drawn:
        return ""
    frame = _frame(drawn, percent)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" '
        f'aria-label="{escape(title)}">',
        *_axes(frame, percent),
        *(_band(frame, one, index) for index, one in enumerate(drawn) if one.band),
        *(line for index, one in enumerate(drawn) for line in _curve(frame, one, index)),
        *_hits(frame, drawn, percent),
        "</svg>",
    ]
    return "".join(parts)


def legend(names: Sequence[str]) -> str:
    entries = (
        f'<span class="key"><i class="c{index % COLOURS}"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def share_bar(seconds: Mapping[str, float]) -> str:
    """One bar split by name, with its legend."""
    total = sum(seconds.values())
    if total <= 0:
        return ""
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    x, rects = 0.0, []
    for index, (name, value) in enumerate(ordered):
        width = 100 * value / total
        hint = f"{escape(name)}: {number(value)} s ({width:.1f} %)"
        rects.append(
            f'<rect class="f{index % COLOURS}" x="{x:.3f}" y="0" width="{width:.3f}" height="4">'
            f"<title>{hint}</title></rect>"
        )
        x += width
    names = [f"{name} {100 * value / total:.0f} %" for name, value in ordered]
    svg = (
        f'<svg class="shares" viewBox="0 0 100 4" preserveAspectRatio="none">{"".join(rects)}</svg>'
    )
    return svg + legend(names)


def interval_bar(value: float, low: float | None, high: float | None) -> str:
    """Where a share and its interval lie between 0 and 1."""
    body = '<rect class="track" x="0" y="3" width="100" height="2" rx="1"/>'
    if low is not None and high is not None:
        width = max(0.5, 100 * (high - low))
        place = f'x="{100 * low:.2f}" y="1.5" width="{width:.2f}" height="5"'
        body += f'<rect class="range" {place} rx="1.5"/>'
    body += f'<rect class="dot" x="{100 * value - 0.6:.2f}" y="0" width="1.2" height="8"/>'
    return f'<svg class="interval" viewBox="0 0 100 8" preserveAspectRatio="none">{body}</svg>'


def number(value: float, percent: bool = False) -> str:
    """A value as a reader wants it: 4 digits, or per cent."""
    if percent:
        return f"{100 * value:.1f}{NO_BREAK}%"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2e}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = unit * next((m for m in (1, 2, 2.5, 5, 10) if raw <= m * unit * 1.001), 10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


# -- pieces of a chart -----------------------------------------------------------------------------


def _thinned(series: Series) -> Series:
    """Finite points in order of x, neighbours averaged down to what can be seen."""
    points = sorted((x, y) for x, y in series.points if math.isfinite(x) and math.isfinite(y))
    size = math.ceil(len(points) / MOST_POINTS) or 1
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    means = tuple((chunk[-1][0], sum(y for _, y in chunk) / len(chunk)) for chunk in bins)
    band = tuple(sorted(edge for edge in series.band if all(map(math.isfinite, edge))))
    return Series(name=series.name, points=means, band=band)


def _frame(series: Sequence[Series], percent: bool) -> Frame:
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    ys += [edge for one in series for _, low, high in one.band for edge in (low, high)]
    x0, x1 = min(xs), max(xs)
    low, high = min(ys), max(ys)
    if percent or 0 <= low < 0.5 * high:
        low = min(low, 0.0)  # a share, or something near zero, is judged from zero
    ticks = nice_ticks(low, high)
    top = min(ticks[-1], 1.0) if percent and high <= 1 else ticks[-1]
    bottom = max(ticks[0], 0.0) if low >= 0 else ticks[0]
    return Frame(x0=x0, x1=x1 if x1 > x0 else x0 + 1, y0=bottom, y1=max(top, bottom + 1e-12))


def _axes(frame: Frame, percent: bool) -> Iterator[str]:
    for value in nice_ticks(frame.y0, frame.y1, 4):
        if frame.y0 - 1e-12 <= value <= frame.y1 + 1e-12:
            y = frame.y(value)
            label = f"{100 * value:g} %" if percent else _tick(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>'
    for value in nice_ticks(frame.x0, frame.x1, 5):
        if frame.x0 <= value <= frame.x1:
            x = frame.x(value)
            yield (
                f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{_tick(value)}</text>'
            )
    base = HEIGHT - BOTTOM
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'


def _tick(value: float) -> str:
    if value and (abs(value) >= 1e4 or abs(value) < 1e-3):
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{value / 1000:g}k" if 1e4 <= abs(value) < 1e6 else f"{mantissa}e{int(exponent)}"
    return f"{value:g}"


def _path(frame: Frame, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _band(frame: Frame, series: Series, index: int) -> str:
    upper = [(x, high) for x, _, high in series.band]
    lower = [(x, low) for x, low, _ in reversed(series.band)]
    return f'<path class="band f{index % COLOURS}" d="{_path(frame, upper + lower)}Z"/>'


def _curve(frame: Frame, series: Series, index: int) -> Iterator[str]:
    colour = f"c{index % COLOURS}"
    if len(series.points) == 1:
        yield f'<circle class="point {colour}" {_centre(frame, series.points[0])} r="3"/>'
        return
    smooth = len(series.points) >= SMOOTH_FROM
    raw = "raw" if smooth else "line"
    yield f'<path class="{raw} {colour}" d="{_path(frame, series.points)}"/>'
    if smooth:
        yield f'<path class="line {colour}" d="{_path(frame, _running_mean(series.points))}"/>'


def _running_mean(points: Sequence[Point]) -> list[Point]:
    reach = max(2, len(points) // 20)
    smooth = []
    for index, (x, _) in enumerate(points):
        near = points[max(0, index - reach) : index + reach + 1]
        smooth.append((x, sum(y for _, y in near) / len(near)))
    return smooth


def _hits(frame: Frame, series: Sequence[Series], percent: bool) -> Iterator[str]:
    """Invisible strips around each x that show the values there."""
    at = [dict(one.points) for one in series]
    xs = sorted({x for points in at for x in points})
    if len(xs) > 2 * MOST_POINTS:  # curves logged at different steps
        xs = sorted(at[0])
    edges = [
        LEFT,
        *((frame.x(a) + frame.x(b)) / 2 for a, b in pairwise(xs)),
        WIDTH - RIGHT,
    ]
    for index, x in enumerate(xs):
        values = [
            (position, one.name, _nearest(one.points, x)) for position, one in enumerate(series)
        ]
        title = "\n".join(
            [f"step {x:g}", *(f"{name}: {number(y, percent)}" for _, name, (_, y) in values)]
        )
        marks = "".join(
            f'<circle class="mark c{position % COLOURS}" {_centre(frame, point)} r="3"/>'
            for position, _, point in values
        )
        left, width = edges[index], max(0.5, edges[index + 1] - edges[index])
        yield (
            f'<g class="hit"><rect x="{left:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"/>'
            f"{marks}<title>{escape(title)}</title></g>"
        )


def _centre(frame: Frame, point: Point) -> str:
    return f'cx="{frame.x(point[0]):.1f}" cy="{frame.y(point[1]):.1f}"'


def _nearest(points: Sequence[Point], x: float) -> Point:
    place = bisect_left(points, (x, -math.inf))
    around = points[max(0, place - 1) : place + 1]
    return min(around, key=lambda point: abs(point[0] - x))
