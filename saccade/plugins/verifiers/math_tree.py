r"""A mathematical answer as containers of leaves, and leaves as exact rationals.

A leaf stays text: what a formula means is the business of `symbolic`. Brackets, commas and
relations outside of formulas are read here, and so are plain numbers.

    >>> rational(r"1\frac{1}{2}")
    Fraction(3, 2)
    >>> read(r"x \in [0, 1)").items[1].kind
    '[)'
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction

from saccade.plugins.verifiers.latex_normalise import TooLarge, Unparseable


@dataclass(frozen=True)
class Node:
    kind: str  # brackets such as [) or {}; list, union, ratio, date, matrix, row, leaf; = equation
    items: tuple[Node, ...] = ()
    text: str = ""  # of a leaf or an equation

    @property
    def name(self) -> str | None:
        """What an equation gives a value to: x of x = 5, f of f(x) = 2x, x,y of (x, y) = (1, 2)."""
        if self.kind != "=":
            return None
        left = self.items[0]
        names = [NAME.fullmatch(item.text) for item in (left.items if left.kind == "()" else [left])]
        return ",".join(match[1] for match in names if match) if all(names) else None

    def leaves(self) -> Iterator[str]:
        if self.kind == "leaf":
            yield self.text
        for item in self.items:
            yield from item.leaves()


MOST_TOKENS = 300
DEEPEST = 10  # nested brackets; parsers need more time for each
MOST_DIGITS, LONGEST_EXPONENT = 1000, 4
PLAIN = r"(?:\d+\.?\d*|\.\d+)"
RATIONAL = re.compile(rf"([-+]?)\s*(?:(\d+)\s+(?=\S+/))?([-+]?{PLAIN}(?:[eE]([-+]?\d+))?)(?:\s*/\s*([-+]?{PLAIN}))?")
FRACTION = re.compile(r"\\frac\{\s*([^{}]*?)\s*\}\{\s*([^{}]*?)\s*\}")
TEN = re.compile(r"(?:\s*(?:\\times|\\cdot|\*)|(?<=\d)\s*x)\s*10\s*\^\{\s*([^{}]*?)\s*\}")
REPEATING = re.compile(r"([-+]?\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
DATE = re.compile(r"\d{4}-\d\d?-\d\d?")
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[a-zA-Z]+|\d+|\S|\s+")
OPENING, CLOSING = {"(", "[", "{", r"\{", r"\begin"}, {")", "]", "}", r"\}", r"\end"}
COMMAS = {",", ";", "or", "and", "或", "和"}  # the last two mean or, and
RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\in"}
MIRROR = {">": "<", r"\ge": r"\le"}
BRACKETED = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})")
MATRIX = re.compile(r"\\begin\{[pb]?matrix\}(.*)\\end\{[pb]?matrix\}")
PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
NAME = re.compile(r"((?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\{[^{}]*\})?'*)\s*(?:\([a-zA-Z]\))?")


def rational(leaf: str) -> Fraction | None:
    """Integers, decimals, fractions, mixed numbers, scientific notation; exact."""
    if (repeating := REPEATING.fullmatch(leaf.strip())) and len(leaf) <= MOST_DIGITS:
        whole, once, again = repeating.groups()
        nines = 10 ** len(once) * (10 ** len(again) - 1)
        part = Fraction(int(once + again) - int(once or 0), nines)
        return int(f"{whole}0") / Fraction(10) + (-part if whole.startswith("-") else part)
    match = RATIONAL.fullmatch(TEN.sub(r"e\1", FRACTION.sub(r" \1/\2", leaf)).strip())
    if match is None:
        return None
    sign, whole, top, exponent, bottom = match.groups()
    if len(leaf) > MOST_DIGITS or len((exponent or "").lstrip("-+0")) > LONGEST_EXPONENT:
        raise TooLarge("a number with too many digits")
    if bottom and (not Fraction(bottom) or (whole and not 0 < Fraction(top) < Fraction(bottom))):
        return None
    value = int(whole or 0) + Fraction(top) / Fraction(bottom or 1)
    return -value if sign == "-" else value


def near(a: Fraction, b: Fraction, tolerance: Fraction) -> bool:
    whole = a.denominator == b.denominator == 1  # 1000001.0 is not 1000000
    return a == b or (not whole and abs(a - b) <= tolerance * abs(b))


def read(text: str) -> Node:
    """The tree of a normalised text; several items without brackets are a list."""
    depths = [depth for _, depth in _walk(text)]
    if len(depths) > MOST_TOKENS or max(depths, default=0) > DEEPEST:
        raise TooLarge("too many tokens, or nested too deeply")
    items = _items(text)
    if not items:
        raise Unparseable("nothing to read")
    parts, marks = _split(text, COMMAS)
    ranges = all({*_split(part, RELATIONS)[1]} - {"=", r"\in"} for part in parts)
    if marks and ranges and {*marks} <= {"or", "或"}:  # x < -2 or x > 2
        return Node("union", items)
    return items[0] if len(items) == 1 else Node("list", items)


def _walk(text: str) -> Iterator[tuple[str, int]]:
    """Tokens, each with the number of brackets that are open after it."""
    depth = 0
    for token in TOKEN.findall(text):
        depth += (token in OPENING) - (token in CLOSING)
        yield token, depth


def _split(text: str, marks: Collection[str]) -> tuple[list[str], list[str]]:
    """The parts between marks outside of all brackets, and the marks."""
    parts, found = [""], []
    for token, depth in _walk(text):
        if depth == 0 and token in marks:
            found.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts], found


def _items(text: str) -> tuple[Node, ...]:
    """Comma-separated items; one with a plus-minus gives two."""
    found = []
    for part in filter(None, _split(text, COMMAS)[0]):
        node = _item(part)
        double = any(PLUS_MINUS.search(leaf) for leaf in node.leaves())
        signs = (("+", "-"), ("-", "+")) if double else ()
        found += [_item(part.replace(r"\pm", p).replace(r"\mp", m)) for p, m in signs] or [node]
    return tuple(found)


def _item(text: str) -> Node:
    sides, signs = _split(text, RELATIONS)
    if signs in (["="], [r"\in"]):
        if NAME.fullmatch(sides[1]) and not NAME.fullmatch(sides[0]):
            sides.reverse()
        return Node("=", tuple(map(_item, sides)), "=".join(sides))
    if signs:
        return _interval(sides, signs)
    # A ratio is no quotient (3:30 is a time), a date no difference.
    for kind, mark in (("union", r"\cup"), ("ratio", ":"), ("date", "-")):
        parts, marks = _split(text, {mark})
        if marks and (kind != "date" or DATE.fullmatch(text)):
            return Node(kind, tuple(map(_item, parts)))
    return _container(text) or Node("leaf", text=text)


def _container(text: str) -> Node | None:
    if text in (r"\emptyset", r"\varnothing"):
        return Node("{}")
    if matrix := MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[1].split(r"\\") if row.strip()]
        return Node("matrix", tuple(Node("row", tuple(map(_item, row))) for row in rows))
    match = BRACKETED.fullmatch(text)
    if match is None or min((depth for _, depth in _walk(match[2])), default=0) < 0:
        return None
    kind = (match[1] + match[3]).replace("\\", "")
    several = len(_split(match[2], COMMAS)[0]) > 1
    return Node(kind, _items(match[2])) if several or kind == "{}" else None


def _interval(sides: list[str], signs: list[str]) -> Node:
    """x < 3 and 1 < x <= 2 as the intervals that they describe."""
    if all(sign in MIRROR for sign in signs):
        sides, signs = sides[::-1], [MIRROR[sign] for sign in reversed(signs)]
    if len(sides) == 2 and NAME.fullmatch(sides[0]):
        sides, signs = [r"-\infty", *sides], ["<", *signs]
    elif len(sides) == 2:
        sides, signs = [*sides, r"\infty"], [*signs, "<"]
    if len(sides) != 3 or not NAME.fullmatch(sides[1]) or not set(signs) <= {"<", r"\le"}:
        raise Unparseable("a relation that is no interval")
    brackets = "(["[signs[0] == r"\le"] + ")]"[signs[1] == r"\le"]
    return Node(brackets, (_item(sides[0]), _item(sides[2])))
