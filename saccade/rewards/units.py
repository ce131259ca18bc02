r"""Units at the end of an answer: what they are, and whether one converts into the other.

A unit is a known word or sign (`100 cm`, `3 m/s^2`, `30^\circ`, `50\%`), or any word in `\text{}`
after a value. A bare single letter is a unit only after a plain number and a space: `5m` may be
five times m.

    >>> value, unit = split_unit("100 cm")
    >>> value, unit.factor
    ('100', '(1/100)^1')
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from saccade.rewards.spelling import unwrap_text

__all__ = ["PERCENT", "Unit", "split_unit"]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """`dimensions` must agree; `factor`, an expression, converts to the base unit."""

    dimensions: tuple[tuple[str, int], ...]
    factor: str = "1"


PERCENT = Unit(dimensions=(("percent", 1),))

# word forms -> (dimension, factor to the base unit)
_TABLE = {
    "nm": ("length", "1/1000000000"),
    "um micrometer micrometers micron microns": ("length", "1/1000000"),
    "mm millimeter millimeters millimetre millimetres": ("length", "1/1000"),
    "cm centimeter centimeters centimetre centimetres": ("length", "1/100"),
    "dm decimeter decimeters": ("length", "1/10"),
    "m meter meters metre metres": ("length", "1"),
    "km kilometer kilometers kilometre kilometres": ("length", "1000"),
    "in inch inches": ("length", "254/10000"),
    "ft foot feet": ("length", "3048/10000"),
    "yd yard yards": ("length", "9144/10000"),
    "mi mile miles": ("length", "1609344/1000"),
    "mg milligram milligrams": ("mass", "1/1000"),
    "g gram grams": ("mass", "1"),
    "kg kilogram kilograms": ("mass", "1000"),
    "t ton tons tonne tonnes": ("mass", "1000000"),
    "lb lbs pound pounds": ("mass", "45359237/100000"),
    "oz ounce ounces": ("mass", "45359237/1600000"),
    "ms millisecond milliseconds": ("time", "1/1000"),
    "s sec second seconds": ("time", "1"),
    "min minute minutes": ("time", "60"),
    "h hr hrs hour hours": ("time", "3600"),
    "day days": ("time", "86400"),
    "week weeks": ("time", "604800"),
    "month months": ("months", "1"),
    "year years yr yrs": ("months", "12"),
    "deg degree degrees": ("angle", "1"),
    "rad radian radians": ("angle", "180/\\pi"),
    "degC": ("celsius", "1"),
    "degF": ("fahrenheit", "1"),
    "ml mL milliliter milliliters": ("volume", "1/1000"),
    "L l liter liters litre litres": ("volume", "1"),
    "cent cents": ("money", "1/100"),
    "dollar dollars USD": ("money", "1"),
    "euro euros EUR": ("euro", "1"),
    "N newton newtons": ("force", "1"),
    "J joule joules": ("energy", "1"),
    "kJ": ("energy", "1000"),
    "W watt watts": ("power", "1"),
    "kW": ("power", "1000"),
    "V volt volts": ("voltage", "1"),
    "A amp amps ampere amperes": ("current", "1"),
    "Hz hertz": ("frequency", "1"),
    "unit units": ("units", "1"),
}
UNITS = {word: entry for words, entry in _TABLE.items() for word in words.split()}
QUANTITY_WORDS = {"or", "and", "to", "million", "thousand", "billion", "hundred", "dozen", "half"}

POWER = r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?"
TEXT_UNIT = re.compile(
    rf"^(?P<value>.*\S)\s*\\(?:text|mbox|textrm|mathrm|rm|textbf)\s*\{{\s*(?P<words>[^{{}}]+?)\s*\}}(?P<power>{POWER})$"
)
BARE_UNIT = re.compile(
    r"^(?P<value>.*(?:[\d)}\]]|\\pi))(?P<space>\s*)"
    rf"(?P<words>[A-Za-z][A-Za-z ]*{POWER}(?:\s*/\s*[A-Za-z]+{POWER})?)$"
)
PLAIN_NUMBER = re.compile(r"[-+]?[\d.,]+(?:\s*/\s*\d+)?")
DEGREES = re.compile(r"^(?P<value>.*?)\s*\^\\circ\s*(?P<scale>[CF]?)$")
TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)")


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""A tidied text (`\text{}` still in it) as value and unit."""
    if text.endswith("%") or text.lower().endswith("percent"):
        return text.removesuffix("%").removesuffix("percent").strip(), PERCENT
    if not TRIGONOMETRY.search(text):
        degrees = DEGREES.match(text)
        text = re.sub(r"\s*\^\\circ", "", text)
        if degrees:
            scale = degrees["scale"]
            dimension = UNITS[f"deg{scale}"][0]
            return re.sub(rf"{scale}$", "", text).strip(), Unit(dimensions=((dimension, 1),))
    named = TEXT_UNIT.match(text)
    if named and re.search(r"[\d}]", named["value"]):
        unit = _unit(named["words"] + named["power"]) or _own_unit(named["words"])
        return (named["value"], unit) if unit else (text, None)
    bare = BARE_UNIT.match(unwrap_text(text))
    if bare:
        unit = _unit(bare["words"])
        sure = len(bare["words"]) > 1 or (bare["space"] and PLAIN_NUMBER.fullmatch(bare["value"]))
        if unit and sure:
            return bare["value"], unit
    return text, None


def _unit(words: str) -> Unit | None:
    """`square cm`, `cm^2`, `km/h`, `m/s^2`, `feet per second`."""
    above, _, below = re.sub(r"\s+per\s+", "/", words.strip()).partition("/")
    dimensions: dict[str, int] = {}
    factors = []
    for text, sign in ((above, 1), (below, -1)):
        if not text and sign < 0:
            continue
        entry = _single(text)
        if entry is None:
            return None
        (dimension, factor), power = entry
        dimensions[dimension] = dimensions.get(dimension, 0) + sign * power
        factors.append(f"({factor})^{power}")
    return Unit(dimensions=tuple(sorted(dimensions.items())), factor="/".join(factors))


def _single(text: str) -> tuple[tuple[str, str], int] | None:
    match = re.fullmatch(
        r"(?P<pre>(?:square|sq|cubic)\s+)?(?P<word>[A-Za-z]+)(?:\s*\^\s*\{?\s*(?P<power>[23])\s*\}?)?",
        text.strip(),
    )
    if match is None:
        return None
    entry = UNITS.get(match["word"]) or UNITS.get(match["word"].lower())
    named_power = {None: 1, "square": 2, "sq": 2, "cubic": 3}[(match["pre"] or "").strip() or None]
    return None if entry is None else (entry, int(match["power"] or named_power))


def _own_unit(words: str) -> Unit | None:
    """Any other noun, such as `students`, is a unit that converts into nothing."""
    known = (
        re.fullmatch(r"[A-Za-z ]{2,40}", words) and not set(words.lower().split()) & QUANTITY_WORDS
    )
    return Unit(dimensions=((words.lower(), 1),)) if known else None
