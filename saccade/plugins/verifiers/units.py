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

from saccade.plugins.verifiers.hedging import BOUND, BOUND_BEHIND, SCALE, unsettled
from saccade.plugins.verifiers.latex_normalise import CJK
from saccade.plugins.verifiers.peel import NUMERAL


@dataclass(frozen=True, kw_only=True)
class Unit:
    r"""`dimensions` must agree; `factor`/\pi^`per_pi` converts to the base unit."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction = Fraction(1)
    per_pi: int = 0


PERCENT = Unit(dimensions=(("percent", 1),))

# Factor to the base unit, then its words; a plural s is understood.
TABLE = {
    "length": "1e-9 nm, 1e-6 um micrometer micron, 1e-3 mm millimeter millimetre 毫米, 1000 km "
    "kilometer kilometre 千米 公里, 0.01 cm centimeter centimetre 厘米, "
    "0.1 dm decimeter 分米, 1 m meter metre 米, "
    "0.0254 in inch inches, 0.3048 ft foot feet, 0.9144 yd yard, 1609.344 mi mile",
    "mass": "1e-3 mg milligram 毫克, 1 g gram 克, 1000 kg kilogram 千克 公斤, "
    "1e6 t ton tonne 吨, 453.59237 lb pound, 28.349523125 oz ounce",
    "time": "1e-3 ms millisecond, 1 s sec second 秒, 60 min minute 分钟, "
    "3600 h hr hour 小时, 86400 day 天, 604800 week 周",
    "months": "1 month 个月, 12 year yr 年",
    "angle": "1 deg degree 度, 180 rad radian 弧度",
    "volume": "1e-6 ml milliliter 毫升, 1e-3 L l liter litre 升",  # in cubic metres
    "money": "0.01 cent, 1 dollar USD",
    "euros": "1 euro EUR",
    "pounds": "1 GBP",
    "yen": "1 yen JPY",
    "cups": "1 cup",
    "force": "1 N newton, 1000 kN",
    "energy": "1 J joule, 1000 kJ kilojoule",
    "power": "1 W watt, 1000 kW kilowatt",
    "voltage": "1e-3 mV millivolt, 1 V volt",
    "current": "1e-3 mA milliampere, 1 A amp ampere",
    "resistance": "1 ohm, 1000 kohm",
    "frequency": "1 Hz hertz, 1000 kHz kilohertz",
    "pressure": "1 Pa pascal, 1000 kPa kilopascal",
    "unit": "1 unit",
}
UNITS = {
    word: (dimension, Fraction(entry.split()[0]))
    for dimension, entries in TABLE.items()
    for entry in entries.split(",")
    for word in entry.split()[1:]
}
# Words behind a number that are no unit of it: they make another one, or a sentence.
QUANTITY = re.compile(
    rf"\b(?:{SCALE}|{BOUND}|{BOUND_BEHIND}|and|to|is|score|gross|grand|kilo|mega|times|doubled|tripled"
    rf"|base|more|less|about|around|approx\w*|roughly|ish|i think)s?\b|{NUMERAL}"
    r"|[万亿千百十半多和到至]"
)
BARE_NOUN = re.compile(r"(?=.*[aeiouy])[A-Za-z]{4,}")
SPEEDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
POWERS = {None: 1, "square": 2, "sq": 2, "cubic": 3, "平方": 2, "立方": 3}

LONGEST_QUANTITY = 500  # characters
POWER = r"(?:\s*\^\{\s*[23]\s*\})?"
UNIT = re.compile(
    r"(?P<value>.*?(?:[^A-Za-z\s\\]|\\pi|[\d}].*[A-Za-z](?=\s*\\text)))(?P<space>\s*)"
    r"(?P<text>\\(?:text|mbox|textrm|mathrm|rm|textbf)\s*\{)?\s*"
    rf"(?P<words>[A-Za-z{CJK}][A-Za-z{CJK} ]*{POWER}(?:\s*/\s*[A-Za-z{CJK}]+{POWER})?)"
    rf"(?(text)\s*\}}(?P<power>{POWER}))"
)
SINGLE = re.compile(
    r"(?:(square|sq|cubic)\s+|(平方|立方))?"
    rf"([A-Za-z]+|[{CJK}]+)(?:\s*\^\{{\s*([23])\s*\}})?"
)
PLAIN_NUMBER = re.compile(r"[-+]?[\d.,]*\d\.?(?:\s*/\s*\d+)?")
DEGREES = re.compile(r"\s*\^\\circ\s*")
TEMPERATURE = re.compile(r"(?:\bdegrees?|\^\\circ)\s*(?:(c)(?:elsius)?|(f)(?:ahrenheit)?)\Z", re.I)
SEVERAL = re.compile(  # 5 feet 2 inches
    r"(\d+)\s*([A-Za-z]+),?\s+(?:and\s+)?(\d+(?:\.\d+)?)\s*([A-Za-z]+)"
)


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""A tidied text (`\text{}` still in it) as value and unit."""
    if text.endswith("%") or text.lower().endswith("percent"):
        return text.removesuffix("%").removesuffix("percent").strip(), PERCENT
    text = TEMPERATURE.sub(lambda t: rf"^\circ {(t[1] or t[2]).upper()}", text)
    if several := SEVERAL.fullmatch(text):
        large, small = _unit(several[2]), _unit(several[4])
        if large and small and large.dimensions == small.dimensions and large.factor > small.factor:
            total = int(several[1]) * large.factor / small.factor + Fraction(several[3])
            return str(total), small
    if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        value, *scale = DEGREES.split(text)
        if scale and scale[-1] in ("", "C", "F"):
            dimension = f"degrees {scale[-1]}" if scale[-1] else "angle"
            return " ".join((value, *scale[:-1])), Unit(dimensions=((dimension, 1),))
        text = " ".join((value, *scale))
    match = UNIT.fullmatch(text) if len(text) <= LONGEST_QUANTITY else None
    if match:
        words, named = match["words"], bool(match["text"])
        plain = PLAIN_NUMBER.fullmatch(match["value"]) and (match["space"] or not words.isascii())
        noun = named or not words.isascii() or (plain and BARE_NOUN.fullmatch(words))
        unit = _unit(words + (match["power"] or "")) or (_own_unit(words) if noun else None)
        if unit and (named or plain or len(words) > 1):
            return match["value"], unit
    return text, None


def _unit(words: str) -> Unit | None:
    """`square cm`, `cm^{2}`, `km/h`, `m/s^{2}`, `feet per second`, `mph`."""
    dimensions: dict[str, int] = {}
    factor, per_pi = Fraction(1), 0
    words = SPEEDS.get(words.lower(), words)
    for index, text in enumerate(re.sub(r"\s+per\s+", "/", words).split("/", 1)):
        match = SINGLE.fullmatch(text.strip())
        entry = _entry(match[3]) if match else None
        if match is None or entry is None:
            return None
        power = int(match[4] or POWERS[match[1] or match[2]]) * (-1 if index else 1)
        base, each = ("length", 3) if entry[0] == "volume" else (entry[0], 1)
        dimensions[base] = dimensions.get(base, 0) + power * each
        factor *= entry[1] ** power
        per_pi += power * (entry == UNITS["rad"])
    return Unit(dimensions=tuple(sorted(dimensions.items())), factor=factor, per_pi=per_pi)


def _entry(word: str) -> tuple[str, Fraction] | None:
    lower = word.lower() if len(word) > 1 else word  # 7 M is no length
    singular = lower.removesuffix("s") if len(word) > 2 else ""
    return UNITS.get(word) or UNITS.get(lower) or UNITS.get(singular)


def is_unit(word: str) -> bool:
    return _entry(word) is not None


def _own_unit(words: str) -> Unit | None:
    """Any other noun, such as `students`, is a unit that converts into nothing."""
    words = words.lower()
    short = len(words) < (2 if words.isascii() else 1) or len(words) > 40
    if short or QUANTITY.search(words) or unsettled(words):
        return None
    return Unit(dimensions=((re.sub(r"(?<=[^s\W])s\b", "", words), 1),))
