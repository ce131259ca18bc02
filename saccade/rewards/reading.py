r"""A mathematical answer as containers of leaves, and leaves as exact rationals.

A leaf stays text: what a formula means is the business of `symbolic`. Brackets, commas and
relations outside of formulas are read here, and so are plain numbers.

    >>> read(r"x \in [0, 1)").items[1]
    Group(kind='[)', items=('0', '1'))
    >>> rational(r"1\frac{1}{2}")
    Fraction(3, 2)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Union

from saccade.rewards.spelling import TooLarge, Unparseable

__all__ = ["Group", "Tree", "leaves", "name_of", "rational", "read"]


@dataclass(frozen=True)
class Group:
    """`kind` is the brackets, such as `[)` and `{}`, or list, union, matrix, row, or `=`."""

    kind: str
    items: tuple[Tree, ...]


Tree = Union[str, Group]  # noqa: UP007 (evaluated at run time, where Group is still a name)

MOST_DIGITS, LONGEST_EXPONENT = 1000, 4
PLAIN = r"(?:\d+\.?\d*|\.\d+)"
RATIONAL = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s*(?:\\frac\{{(?P<a>\d+)\}}\{{(?P<b>\d+)\}}"
    r"|\s(?P<c>\d+)\s*/\s*(?P<d>\d+))"  # mixed
    rf"|\\frac\{{\s*(?P<top>[-+]?{PLAIN})\s*\}}\{{\s*(?P<bottom>[-+]?{PLAIN})\s*\}}"
    rf"|(?P<above>{PLAIN})\s*/\s*(?P<below>{PLAIN})"
    rf"|(?P<mantissa>{PLAIN})"
    r"(?:[eE](?P<e>[-+]?\d+)|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\{\s*(?P<ten>[-+]?\d+)\s*\})?)"
)
TOKEN = re.compile(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+|\\.|[a-zA-Z]+|.", re.DOTALL)
OPENING, CLOSING = {"(", "[", "{", r"\{"}, {")", "]", "}", r"\}"}
COMMAS = {",", ";", "or", "and"}
RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\in"}
MIRROR = {">": "<", r"\ge": r"\le"}
BRACKETED = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", re.DOTALL)
MATRIX = re.compile(r"\\begin\{[pb]?matrix\}(.*)\\end\{[pb]?matrix\}", re.DOTALL)
NAME = re.compile(r"((?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\{[^{}]*\})?'*)\s*(?:\([a-zA-Z]\))?")
DEEPEST = 10  # nested brackets


def rational(leaf: str) -> Fraction | None:
    """Integers, decimals, fractions, mixed numbers, scientific notation; exact."""
    match = RATIONAL.fullmatch(leaf)
    if match is None:
        return None
    part = match.groupdict()
    exponent = part["e"] or part["ten"] or "0"
    if len(leaf) > MOST_DIGITS or len(exponent.lstrip("-+0")) > LONGEST_EXPONENT:
        raise TooLarge("a number with too many digits")
    top = Fraction(part["a"] or part["c"] or part["top"] or part["above"] or part["mantissa"])
    bottom = Fraction(part["b"] or part["d"] or part["bottom"] or part["below"] or 1)
    if not bottom or (part["whole"] and top >= bottom):
        return None
    value = int(part["whole"] or 0) + top / bottom * Fraction(10) ** int(exponent)
    return -value if part["sign"] == "-" else value


def read(text: str, depth: int = 0) -> Tree:
    """The tree of a normalised text; several items without brackets are a list."""
    if depth > DEEPEST:
        raise TooLarge("nested too deeply")
    items = _items(text, depth)
    if not items:
        raise Unparseable("nothing to read")
    return items[0] if len(items) == 1 else Group("list", items)


def leaves(tree: Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for item in tree.items:
            yield from leaves(item)


def name_of(tree: Tree) -> str | None:
    """The variable that an equation gives a value to: `x` for x = 5, `f` for f(x) = 2x."""
    if isinstance(tree, str) or tree.kind != "=" or not isinstance(tree.items[0], str):
        return None
    match = NAME.fullmatch(tree.items[0])
    return match[1] if match else None


def _split(text: str, marks: Collection[str]) -> tuple[list[str], list[str]]:
    """The parts between marks outside of all brackets, and the marks."""
    parts: list[str] = [""]
    found: list[str] = []
    depth = 0
    for token in TOKEN.findall(text):
        depth += _step(token)
        if depth == 0 and token in marks:
            found.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts], found


def _step(token: str) -> int:
    opened = token in OPENING or token.startswith(r"\begin{")
    return opened - (token in CLOSING or token.startswith(r"\end{"))


def _items(text: str, depth: int) -> tuple[Tree, ...]:
    """Comma-separated items; one with a plus-minus gives two."""
    found: list[Tree] = []
    for part in filter(None, _split(text, COMMAS)[0]):
        container = _container(part, depth)
        if container is None and re.search(r"\\(?:pm|mp)(?![a-zA-Z])", part):
            plus = re.sub(r"\\pm(?![a-zA-Z])", "+", part)
            minus = re.sub(r"\\pm(?![a-zA-Z])", "-", part)
            found.append(_item(re.sub(r"\\mp(?![a-zA-Z])", "-", plus), depth))
            found.append(_item(re.sub(r"\\mp(?![a-zA-Z])", "+", minus), depth))
        else:
            found.append(container or _item(part, depth))
    return tuple(found)


def _item(text: str, depth: int) -> Tree:
    sides, signs = _split(text, RELATIONS)
    if signs in (["="], [r"\in"]):
        if NAME.fullmatch(sides[1]) and not NAME.fullmatch(sides[0]):
            sides.reverse()
        return Group("=", tuple(_item(side, depth) for side in sides))
    if signs:
        return _interval(sides, signs)
    parts, unions = _split(text, {r"\cup"})
    if unions:
        return Group("union", tuple(_item(part, depth) for part in parts))
    return _container(text, depth) or text


def _container(text: str, depth: int) -> Group | None:
    if text in (r"\emptyset", r"\varnothing"):
        return Group("{}", ())
    if matrix := MATRIX.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\", matrix[1]) if row.strip()]
        cells = [tuple(read(cell.strip(), depth + 1) for cell in row) for row in rows]
        return Group("matrix", tuple(Group("row", row) for row in cells))
    match = BRACKETED.fullmatch(text)
    if match is None or not _balanced(match[2]):
        return None
    kind = (match[1] + match[3]).replace("\\", "")
    if kind == "{}" or len(_split(match[2], COMMAS)[0]) > 1:
        if depth > DEEPEST:
            raise TooLarge("nested too deeply")
        return Group(kind, _items(match[2], depth + 1))
    return None


def _balanced(text: str) -> bool:
    depth = 0
    for token in TOKEN.findall(text):
        depth += _step(token)
        if depth < 0:
            return False
    return depth == 0


def _interval(sides: list[str], signs: list[str]) -> Group:
    """x < 3 and 1 < x <= 2 as the intervals that they describe."""
    if all(sign in MIRROR for sign in signs):
        sides, signs = sides[::-1], [MIRROR[sign] for sign in reversed(signs)]
    if len(sides) == 2 and NAME.fullmatch(sides[0]):
        sides, signs = [r"-\infty", *sides], ["<", *signs]
    elif len(sides) == 2:
        sides, signs = [*sides, r"\infty"], [*signs, "<"]
    if len(sides) != 3 or not NAME.fullmatch(sides[1]) or not set(signs) <= {"<", r"\le"}:
        raise Unparseable("a relation that is no interval")
    opening, closing = "(["[signs[0] == r"\le"], ")]"[signs[1] == r"\le"]
    return Group(opening + closing, (sides[0], sides[2]))
