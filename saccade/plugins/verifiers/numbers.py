r"""Verifiers of numbers: of answers with exactly one number, compared exactly or with a tolerance, and of values from a
chart, which are numbers or words; and parsing of units.

A unit is a known word or sign (`100 cm`, `3 m/s^2`, `30^\circ`, `50\%`), or any word in `\text{}` after a value. A bare
single letter is a unit only after a plain number and a space: `5m` may be five times m.

    >>> single_number("There are seven items"), split_unit("100 cm")[1].factor
    (Fraction(7, 1), Fraction(1, 100))
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from saccade.plugins.verifiers import wording
from saccade.plugins.verifiers.extract import NUMBER, Scope, answer_of, answering, score_of
from saccade.plugins.verifiers.math_text import CJK, NARROW, TEXT, TooLarge, normalise, rational, tidy
from saccade.plugins.verifiers.text_match import plain_text
from saccade.plugins.verifiers.wording import BOUND, BOUND_BEHIND, NUMERAL, SCALE, in_digits, peel_number, unsettled
from saccade.rewards.reward_sample import RewardSample, no_gold
from saccade.rewards.verifiers import Verifier
from saccade.types import Score


class Unit(NamedTuple):
    r"""Units convert if `dimensions` are equal; `factor`/\pi^`per_pi` converts to the base unit."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction = Fraction(1)
    per_pi: int = 0


PERCENT = Unit(dimensions=(("percent", 1),))

# By dimension: factor to the base unit, then names; a plural s may follow.
TABLE = {
    "length": "1e-9 nm, 1e-6 um micrometer micron, 1e-3 mm millimeter millimetre 毫米, 0.01 cm centimeter centimetre "
    "厘米, 0.1 dm decimeter 分米, 1 m meter metre 米, 1000 km kilometer kilometre 千米 公里, "
    "0.0254 in inch inches, 0.3048 ft foot feet, 0.9144 yd yard, 1609.344 mi mile",
    "mass": "1e-3 mg milligram 毫克, 1 g gram 克, 1000 kg kilogram 千克 公斤, 1e6 t ton tonne 吨, 453.59237 lb pound, "
    "28.349523125 oz ounce",
    "time": "1e-3 ms millisecond, 1 s sec second 秒, 60 min minute 分钟, 3600 h hr hour 小时, 86400 day 天, "
    "604800 week 周",
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
# Words after a number that are no unit: they change the number, or belong to a sentence.
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
SINGLE = re.compile(rf"(?:(square|sq|cubic)\s+|(平方|立方))?([A-Za-z]+|[{CJK}]+)(?:\s*\^\{{\s*([23])\s*\}})?")
PLAIN_NUMBER = re.compile(r"[-+]?[\d.,]*\d\.?(?:\s*/\s*\d+)?")
DEGREES = re.compile(r"\s*\^\\circ\s*")
TEMPERATURE = re.compile(r"(?:\bdegrees?|\^\\circ)\s*(?:(c)(?:elsius)?|(f)(?:ahrenheit)?)\Z", re.I)
SEVERAL = re.compile(r"(\d+)\s*([A-Za-z]+),?\s+(?:and\s+)?(\d+(?:\.\d+)?)\s*([A-Za-z]+)")  # 5 feet 2 inches


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""Split a text into value and unit; the text is the result of `tidy`, with its `\text{}`."""
    if text.endswith("%") or text.lower().endswith("percent"):
        return text.removesuffix("%").removesuffix("percent").strip(), PERCENT
    text = TEMPERATURE.sub(lambda t: rf"^\circ {(t[1] or t[2]).upper()}", text)
    if several := SEVERAL.fullmatch(text):
        large, small = _known_unit(several[2]), _known_unit(several[4])
        if large and small and large.dimensions == small.dimensions and large.factor > small.factor:
            total = int(several[1]) * large.factor / small.factor + Fraction(several[3])
            return str(total), small
    if not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        value, *scale = DEGREES.split(text)
        if scale and scale[-1] in ("", "C", "F"):
            dimension = f"degrees {scale[-1]}" if scale[-1] else "angle"
            return " ".join((value, *scale[:-1])), Unit(dimensions=((dimension, 1),))
        text = " ".join((value, *scale))
    if len(text) <= LONGEST_QUANTITY and (match := UNIT.fullmatch(text)):
        words, named = match["words"], bool(match["text"])
        plain = PLAIN_NUMBER.fullmatch(match["value"]) and (match["space"] or not words.isascii())
        noun = named or not words.isascii() or (plain and BARE_NOUN.fullmatch(words))
        unit = _known_unit(words + (match["power"] or "")) or (_own_unit(words) if noun else None)
        if unit and (named or plain or len(words) > 1):
            return match["value"], unit
    return text, None


def _known_unit(words: str) -> Unit | None:
    """The unit of words such as `square cm`, `cm^{2}`, `km/h`, `m/s^{2}`, `feet per second`, `mph`, or None."""
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
    lower = word.lower() if len(word) > 1 else word  # so 7 M is not 7 metres
    singular = lower.removesuffix("s") if len(word) > 2 else ""
    return UNITS.get(word) or UNITS.get(lower) or UNITS.get(singular)


def _own_unit(words: str) -> Unit | None:
    """A unit for any other noun, such as `students`, that does not convert to others."""
    words = words.lower()
    short = len(words) < (2 if words.isascii() else 1) or len(words) > 40
    if short or QUANTITY.search(words) or unsettled(words):
        return None
    return Unit(dimensions=((re.sub(r"(?<=[^s\W])s\b", "", words), 1),))


NUMBER_ORDER = ("answer_tag", "boxed", "answer_line", "whole")
GSM8K_ORDER = ("hash", "answer_tag", "boxed")
GSM8K_ORDERS = {"strict": ("hash",), "boxed": ("boxed",), "flexible": ("last_number",)}

NUMBER_OR_WORD = re.compile(rf"{NUMBER.pattern}|{NUMERAL}", re.IGNORECASE)
# Signs of a formula, whose value is not the number that it contains.
FORMULA = re.compile(
    r"\\(?!circ|degree)[a-zA-Z]+|\^(?!\s*\{?\s*\\circ)|[\u221a\u03c0\u00b2\u00b3\u00b9\u2070-\u209f]"
    r"|[\u00bc-\u00be\u2150-\u215e]"
)
# Right before a number, these change it: a sign, a bound, a function, the rest of a larger number.
BEFORE = re.compile(
    rf"(?:\b(?:{SCALE}(?:\s+and)?|{BOUND}|sqrt|log|ln|exp)"
    r"|!=?|[-+/\u2010-\u2015<>\u2264\u2265\u2260\u00b1]|\\(?:[gl]eq?|[gl]t|neq?|pm)"
    r"|至[少多]|最[少多]|超过|[高低多少]于|[十百千万])\s*[($]?\s*\Z",
    re.IGNORECASE,
)
# Right after a number, these change it: more digits, a scale, a bound, an operator.
BEHIND = re.compile(
    rf"[\s-]*(?:and\s+an?\s+)?{SCALE}\b|,?\s*{BOUND_BEHIND}\b"
    r"|[.,]+\d|[_!+\u2030]|-[a-z]|\s(?-i:[kKMB])\b|\s*(?:个?半|以[上下内]|[十百万亿兆多几]|千(?![克米瓦]))",
    re.IGNORECASE,
)
CONTRAST = re.compile(  # 7, not 8
    rf"(?<=\w),\s{{0,9}}(?:and\s+)?not\s+(?:{NUMBER.pattern}|{NUMERAL})(?=\s{{0,9}}(?:[.!]\s{{0,9}})?\Z)", re.IGNORECASE
)
NEAR = 40  # characters before a number that are searched for `BEFORE`
LONGEST_NUMBER = 64  # characters; a longer number is no answer

Number = int | Fraction


@answering(*NUMBER_ORDER)
def count(sample: RewardSample, found: str | None, *, tolerance: float = 0) -> Score:
    """1 if the answer has exactly one number, an integer at most `tolerance` away from the gold."""
    return _judge(sample, found, lambda v, g: v.denominator == 1 and -tolerance <= v - g <= tolerance, percent=False)


@answering(*NUMBER_ORDER)
def number(sample: RewardSample, found: str | None, *, rel_tol: float = 1e-6, decimals: int | None = None) -> Score:
    """1 if the answer has exactly one number, within `rel_tol` of the gold or equal when rounded to `decimals`."""
    if decimals is not None:
        return _judge(sample, found, lambda value, gold: round(value, decimals) == round(gold, decimals))
    return _judge(sample, found, lambda value, gold: near(value, gold, rel_tol))


@answering(*NUMBER_ORDER)
def relaxed(sample: RewardSample, found: str | None, *, rel_tol: float = 0.05) -> Score:
    """ChartQA's score: within `rel_tol` of the gold if both are numbers, else the same text."""
    value, text = _reading(found or ""), plain_text(found or "")
    golds = [(_reading(gold), plain_text(gold)) for gold in sample.golds]
    right = any(text == words if value is None or gold is None else near(value, gold, rel_tol) for gold, words in golds)
    return score_of(found, right)


def gsm8k(
    sample: RewardSample, *, mode: str = "default", order: Sequence[str] = GSM8K_ORDER, scope: Scope = "after_think"
) -> Score:
    """1 if the number after `####` is right; `mode` strict, boxed or flexible selects one other place."""
    if mode != "default" and mode not in GSM8K_ORDERS:
        raise ValueError(f"mode is default, {', '.join(GSM8K_ORDERS)}, not {mode!r}")
    found = answer_of(sample, GSM8K_ORDERS.get(mode, order), scope)
    return _judge(sample, found, lambda value, gold: value == gold)


def single_number(text: str) -> Number | None:
    """The value of the only number in a text, or None."""
    if text.isdecimal() and len(text) <= LONGEST_NUMBER:
        return int(text)
    text = peel_number(text.translate(NARROW))
    if (value := _rational(text)) is not None:
        return value
    text = CONTRAST.sub("", wording.ASIDE.sub("", TEXT.sub(r"\1", text)))
    hits = list(NUMBER_OR_WORD.finditer(text))
    if len(hits) != 1 or FORMULA.search(text) or unsettled(text) or wording.TAKEN_BACK.search(text):
        return None
    start, end = hits[0].span()
    before, behind = text[max(0, start - NEAR) : start], text[end:]
    word = re.match(r"[A-Za-z]+", behind)  # 12kg, not 12th or 12k
    if BEFORE.search(before) or BEHIND.match(behind) or (word and _entry(word[0]) is None):
        return None
    return _rational(in_digits(hits[0][0]))


def _rational(text: str) -> Number | None:
    """The value of a text that is only a number, fraction, mixed number or power of ten, else None."""
    try:
        return rational(normalise(text)) if len(text) <= LONGEST_NUMBER else None
    except TooLarge:
        return None


def near(value: Number, gold: Number, rel_tol: float) -> bool:
    """Whether value is within `rel_tol`, relative to the gold; only 0 matches a gold of 0."""
    allowed = Fraction(str(rel_tol)) * max(gold, -gold)
    return -allowed <= value - gold <= allowed


@lru_cache(maxsize=4096)
def _reading(text: str) -> Number | None:
    """The value of a text that is only a number, else None; p% is p/100, currency signs are ignored."""
    text = peel_number(text.translate(NARROW).replace("\\%", "%"))
    bare = text.removesuffix("%").strip(" $\u20ac\u00a3\u00a5")
    value = _rational(bare)
    return Fraction(value, 100) if value is not None and text.endswith("%") else value


def _judge(
    sample: RewardSample, found: str | None, right: Callable[[Number, Number], bool], *, percent: bool = True
) -> Score:
    """Compare the only number of an answer with the golds. `percent`: p% on one side also matches p."""
    golds = _golds(sample.golds)
    if not golds:
        return no_gold(sample)
    value = single_number(found or "")
    if found is None or value is None:
        return replace(score_of(found, False, "not_one_number"), extracted=None)
    unit = _unit_of(found)
    fitting = [
        gold for gold, its in golds if unit == its or (None in (unit, its) and (percent or PERCENT not in (unit, its)))
    ]
    return score_of(found, any(right(value, gold) for gold in fitting))


@lru_cache(maxsize=4096)
def _golds(texts: tuple[str, ...]) -> tuple[tuple[Number, Unit | None], ...]:
    texts = tuple(text.rpartition("####")[2] for text in texts)
    numbers = [(single_number(text), _unit_of(text)) for text in texts]
    return tuple((number, unit) for number, unit in numbers if number is not None)


def _unit_of(text: str) -> Unit | None:
    """The unit in an answer or gold. If both have one they must be equal: `_judge` does not convert."""
    bare = text.isdecimal() or len(text) > LONGEST_NUMBER
    return None if bare else split_unit(tidy(peel_number(text)))[1]


ROWS = {each.__name__: Verifier(function=each) for each in (count, number, relaxed, gsm8k)}
