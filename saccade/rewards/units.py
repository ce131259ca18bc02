r"""Units at the end of an answer: what they are, and whether one converts into the other.

A unit is a known word or sign (`100 cm`, `3 m/s^2`, `30^\circ`, `50\%`), or any word in `\text{}`
after a value. A bare single letter is a unit only after a plain number and a space: `5m` may be
five times m.

    >>> split_unit("100 cm")[1].factor
    Fraction(1, 100)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["PERCENT", "Unit", "split_unit"]


@dataclass(frozen=True, kw_only=True)
class Unit:
    r"""`dimensions` must agree; `factor`/\pi^`per_pi` converts to the base unit."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction = Fraction(1)
    per_pi: int = 0


PERCENT = Unit(dimensions=(("percent", 1),))

# Factor to the base unit, then its words; a plural s is understood.
TABLE = {
    "length": "1e-9 nm, 1e-6 um micrometer micron, 1e-3 mm millimeter millimetre, 1000 km "
    "kilometer kilometre, 0.01 cm centimeter centimetre, 0.1 dm decimeter, 1 m meter metre, "
    "0.0254 in inch inches, 0.3048 ft foot feet, 0.9144 yd yard, 1609.344 mi mile",
    "mass": "1e-3 mg milligram, 1 g gram, 1000 kg kilogram, 1e6 t ton tonne, 453.59237 lb pound, "
    "28.349523125 oz ounce",
    "time": "1e-3 ms millisecond, 1 s sec second, 60 min minute, 3600 h hr hour, 86400 day, "
    "604800 week",
    "months": "1 month, 12 year yr",
    "angle": "1 deg degree, 180 rad radian",
    "volume": "1e-3 ml milliliter, 1 L l liter litre",
    "money": "0.01 cent, 1 dollar USD",
    "unit": "1 unit",
}
UNITS = {
    word: (dimension, Fraction(entry.split()[0]))
    for dimension, entries in TABLE.items()
    for entry in entries.split(",")
    for word in entry.split()[1:]
}
QUANTITY_WORDS = {"or", "and", "to", "million", "thousand", "billion", "hundred", "dozen", "half"}
POWERS = {None: 1, "square": 2, "sq": 2, "cubic": 3}

POWER = r"(?:\s*\^\{\s*[23]\s*\})?"
UNIT = re.compile(
    r"(?P<value>.*?(?:[^A-Za-z\s\\]|\\pi|[\d}].*[A-Za-z](?=\s*\\text)))(?P<space>\s*)"
    r"(?P<text>\\(?:text|mbox|textrm|mathrm|rm|textbf)\s*\{)?\s*"
    rf"(?P<words>[A-Za-z][A-Za-z ]*{POWER}(?:\s*/\s*[A-Za-z]+{POWER})?)"
    rf"(?(text)\s*\}}(?P<power>{POWER}))"
)
SINGLE = re.compile(r"(?:(square|sq|cubic)\s+)?([A-Za-z]+)(?:\s*\^\{\s*([23])\s*\})?")
PLAIN_NUMBER = re.compile(r"[-+]?[\d.,]+(?:\s*/\s*\d+)?")
DEGREES = re.compile(r"\s*\^\\circ\s*")


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""A tidied text (`\text{}` still in it) as value and unit."""
    if text.endswith("%") or text.lower().endswith("percent"):
        return text.removesuffix("%").removesuffix("percent").strip(), PERCENT
    if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        value, *scale = DEGREES.split(text)
        if scale and scale[-1] in ("", "C", "F"):
            dimension = f"degrees {scale[-1]}" if scale[-1] else "angle"
            return " ".join((value, *scale[:-1])), Unit(dimensions=((dimension, 1),))
        text = " ".join((value, *scale))
    match = UNIT.fullmatch(text)
    if match:
        words, named = match["words"], bool(match["text"])
        unit = _unit(words + (match["power"] or "")) or (_own_unit(words) if named else None)
        plain = match["space"] and PLAIN_NUMBER.fullmatch(match["value"])
        if unit and (named or plain or len(words) > 1):
            return match["value"], unit
    return text, None


def _unit(words: str) -> Unit | None:
    """`square cm`, `cm^{2}`, `km/h`, `m/s^{2}`, `feet per second`."""
    dimensions: dict[str, int] = {}
    factor, per_pi = Fraction(1), 0
    for index, text in enumerate(re.sub(r"\s+per\s+", "/", words).split("/", 1)):
        match = SINGLE.fullmatch(text.strip())
        entry = _entry(match[2]) if match else None
        if match is None or entry is None:
            return None
        power = int(match[3] or POWERS[match[1]]) * (-1 if index else 1)
        dimensions[entry[0]] = dimensions.get(entry[0], 0) + power
        factor *= entry[1] ** power
        per_pi += power * (entry == UNITS["rad"])
    return Unit(dimensions=tuple(sorted(dimensions.items())), factor=factor, per_pi=per_pi)


def _entry(word: str) -> tuple[str, Fraction] | None:
    singular = word.lower().removesuffix("s") if len(word) > 2 else ""
    return UNITS.get(word) or UNITS.get(word.lower()) or UNITS.get(singular)


def _own_unit(words: str) -> Unit | None:
    """Any other noun, such as `students`, is a unit that converts into nothing."""
    noun = 2 <= len(words) <= 40 and not set(words.lower().split()) & QUANTITY_WORDS
    return Unit(dimensions=((words.lower(), 1),)) if noun else None
