r"""Mathematical text: normalises spelling, parses containers into trees, and reads plain numbers as exact rationals.

The leaves of a tree are text: formulas are parsed in symbolic.py. Brackets, commas and relations outside of formulas
are parsed here, and so are plain numbers.

    >>> normalise(r"$\dfrac12\text{ cm}^2$.")
    '\\frac{1}{2} cm ^{2}'
    >>> rational(r"1\frac{1}{2}"), read(r"x \in [0, 1)").items[1].kind
    (Fraction(3, 2), '[)')
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

LONGEST = 2000  # characters
BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
ROUND = r"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"
END = r"(?![a-zA-Z])"
CJK = r"\u4e00-\u9fff"  # for the inside of a character class


class TooLarge(ValueError):
    """The expression is too long, too deep, or its value has too many digits."""


class Unparseable(ValueError):
    """The text is not mathematics that is supported."""


# Zero-width characters, except those that change the visible order of characters.
INVISIBLE = dict.fromkeys([*range(0x200B, 0x2010), 0x202A, 0x202C, 0x2060, 0x2066, 0x2069, 0xFEFF])
# Full-width signs, letters and digits, and Chinese punctuation.
NARROW = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | str.maketrans(
    {"\u3000": " ", "\u3001": ",", "\u3002": ".", "\uff1a": ": ", **INVISIBLE}
)
SIGNS = NARROW | str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00f7": "/", "\u00b7": r"\cdot ",
        "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u221e": r"\infty ",
        "\u03c0": r"\pi ", "\u222a": r"\cup ", "\u2208": r"\in ", "\u00b1": r"\pm ",
        "\u00b0": r"^\circ ", "\u2032": "'", "\u00a0": " ", "\u2205": r"\emptyset ",
        "\u221a": r"\sqrt ", "\u03b8": r"\theta ", "\u2044": "/", "\u03a9": r"\Omega ",
        "\u2248": r"\approx ", "\u2026": "...",
    }
)  # fmt: skip
RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u207b]+")  # superscripts
LOWERED = re.compile("[\u2080-\u2089]+")
VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")  # one half as one character
REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"(\d)(?:,\\!|\{,\}|\\,)\s*(?=\d{3})", r"\1"),
        (r"\\\$|\$|(?<!\\)\\[()]", ""),
        (rf"\\(?:left|right|[bB]igg?[lr]?|displaystyle){END}\.?", ""),
        (rf"(?<!\\)\\[!,;:> ]|\\q?quad{END}|(?<!~)~(?!~)", " "),
        (r"\\%", "%"),
        (r"\*\*", "^"),
        (r"\A\s*\{\s*\}\s*\Z", r"\\emptyset"),
        (r"(?<=[\d\s])\\Omega\s*$", " ohm"),
        (r"^\s*\{(?!\d{1,3}(?:,\d{3})+\})([^{}]*[,;][^{}]*)\}\s*$", r"\\{\1\\}"),  # a set
        (rf"\\[dtc](frac|binom){END}", r"\\\1"),
        (rf"\\leq?{END}|<=", r"\\le "),
        (rf"\\geq?{END}|>=", r"\\ge "),
        (rf"\\lt{END}", "<"),
        (rf"\\gt{END}", ">"),
        (rf"\\(?:[lr]?vert|mid){END}", "|"),
        (rf"\^\s*\{{\s*\\(?:circ|degree)\s*\}}|\^\s*\\circ{END}|\\degree{END}", r"^\\circ "),
        (rf"(?<![\\a-zA-Z])(sqrt|pi|(?:arc)?(?:sin|cos|tan)|cot|exp|ln|log){END}", r"\\\1 "),
        # Braces around the arguments of powers, indices, roots and fractions.
        (r"\\log\s*_\s*(\d)", r"\\log_{\1}"),
        (r"\^\s*([-+]?(?:\d+(?:\.\d+)?|[a-zA-Z]))", r"^{\1}"),
        (r"_\s*(\d+|[a-zA-Z])", r"_{\1}"),
        (rf"(\\sqrt|\^)\s*{ROUND}", r"\1{\2}"),
        (r"\\sqrt(\[[^\]]*\])?\s*([0-9a-zA-Z])", r"\\sqrt\1{\2}"),
        (r"\\(frac|binom)\s*(\\pi|[0-9a-zA-Z])", r"\\\1{\2}"),
        (rf"\\(frac|binom)\s*({BRACED})\s*(\\pi|[0-9a-zA-Z])", r"\\\1\2{\3}"),
    ]
]
# Repeating decimals: in 0.1666... the 6 repeats.
REPEATED = re.compile(r"(?<![\d.])(\d{0,40}\.\d{0,40}?)(?:(\d)\2{2,40}|(\d{2,6}?)\3{1,20})(?:\.{3}|\\[lc]?dots)\s*\Z")
TEXT = re.compile(r"\\(?:text|mbox|textrm|textbf|textit|mathrm|mathbf|mathit|operatorname|rm)\s*\{([^{}]*)\}")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")


def normalise(text: str) -> str:
    return unwrap_text(tidy(text))


@lru_cache(maxsize=2048)  # members of a group often give the same answer
def tidy(text: str) -> str:
    r"""Normalise a text but keep \text{}, which marks words, such as units."""
    if len(text) > LONGEST:
        raise TooLarge(f"{len(text)} characters")
    text = RAISED.sub(lambda run: f"^{{{_plain(run[0])}}}", text)
    text = LOWERED.sub(lambda run: f"_{{{_plain(run[0])}}}", text)
    text = VULGAR.sub(lambda sign: f" {_plain(sign[0])}", text).translate(SIGNS)
    if "..." in text or "dots" in text:
        text = REPEATED.sub(r"\1\\overline{\2\3}", text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    if not re.search(r"[(\[]|\\\{", text):  # inside brackets a comma separates items
        text = THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return _trim(text)


def _plain(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs)


def unwrap_text(text: str) -> str:
    return _trim(TEXT.sub(r" \1 ", text))


def compact(text: str) -> str:
    """Remove spaces, except between digits: 1 1/2 is not 11/2."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _trim(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    return text if text.endswith("..") else text.rstrip(".").strip()


class Node(NamedTuple):
    kind: str  # brackets such as [) or {}; list, union, ratio, date, matrix, row, leaf; = equation
    items: tuple[Node, ...] = ()
    text: str = ""  # of a leaf or an equation

    @property
    def name(self) -> str | None:
        """The name that an equation defines: x in x = 5, f in f(x) = 2x, x,y in (x, y) = (1, 2); else None."""
        if self.kind != "=":
            return None
        left = self.items[0]
        names = [NAME.fullmatch(item.text) for item in (left.items if left.kind == "()" else [left])]
        return ",".join(match[1] for match in names if match) if all(names) else None

    def leaves(self) -> list[str]:
        return [self.text] if self.kind == "leaf" else [leaf for item in self.items for leaf in item.leaves()]


MOST_TOKENS = 300
DEEPEST = 10  # nested brackets; parsing time grows with each
MOST_DIGITS, LONGEST_EXPONENT = 1000, 4
PLAIN = r"(?:\d+\.?\d*|\.\d+)"
RATIONAL = re.compile(rf"([-+]?)\s*(?:(\d+)\s+(?=\S+/))?([-+]?{PLAIN}(?:[eE]([-+]?\d+))?)(?:\s*/\s*([-+]?{PLAIN}))?")
FRACTION = re.compile(r"\\frac\{\s*([^{}]*?)\s*\}\{\s*([^{}]*?)\s*\}")
TEN = re.compile(r"(?:\s*(?:\\times|\\cdot|\*)|(?<=\d)\s*x)\s*10\s*\^\{\s*([^{}]*?)\s*\}")
REPEATING = re.compile(r"([-+]?\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
DATE = re.compile(r"\d{4}-\d\d?-\d\d?")
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[a-zA-Z]+|\d+|\S|\s+")
OPENING, CLOSING = {"(", "[", "{", r"\{", r"\begin"}, {")", "]", "}", r"\}", r"\end"}
COMMAS = {",", ";", "or", "and", "或", "和"}  # the last two are Chinese for "or" and "and"
RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\in"}
MIRROR = {">": "<", r"\ge": r"\le"}
BRACKETED = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})")
MATRIX = re.compile(r"\\begin\{[pb]?matrix\}(.*)\\end\{[pb]?matrix\}")
PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
NAME = re.compile(r"((?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\{[^{}]*\})?'*)\s*(?:\([a-zA-Z]\))?")


def rational(leaf: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction, mixed number or scientific notation; else None."""
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
    """Parse a normalised text; several items without brackets are a list."""
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
    """Tokens, each with the number of open brackets after it."""
    depth = 0
    for token in TOKEN.findall(text):
        depth += (token in OPENING) - (token in CLOSING)
        yield token, depth


def _split(text: str, marks: Collection[str]) -> tuple[list[str], list[str]]:
    """Split at marks outside of brackets; returns the parts and the marks."""
    parts, found = [""], []
    for token, depth in _walk(text):
        if depth == 0 and token in marks:
            found.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts], found


def _items(text: str) -> tuple[Node, ...]:
    """Comma-separated items; an item with a plus-minus sign becomes two."""
    found = []
    for part in filter(None, _split(text, COMMAS)[0]):
        node = _item(part)
        if any(PLUS_MINUS.search(leaf) for leaf in node.leaves()):
            found += [_item(part.replace(r"\pm", p).replace(r"\mp", m)) for p, m in ("+-", "-+")]
        else:
            found.append(node)
    return tuple(found)


def _item(text: str) -> Node:
    sides, signs = _split(text, RELATIONS)
    if signs in (["="], [r"\in"]):
        if NAME.fullmatch(sides[1]) and not NAME.fullmatch(sides[0]):
            sides.reverse()
        return Node("=", tuple(map(_item, sides)), "=".join(sides))
    if signs:
        return _interval(sides, signs)
    # 3:30 is a ratio (or a time), not a quotient; 2024-05-01 is a date, not a difference.
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
    """The interval that x < 3 or 1 < x <= 2 describes."""
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
