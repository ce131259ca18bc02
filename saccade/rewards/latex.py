r"""Mathematical text, LaTeX or plain, as a tree. Reads what answers contain and refuses the rest.

Nodes are tuples: ("num", Fraction) ("sym", name) ("add" a b) ("mul" a b) ("div" a b) ("pow" a b)
("neg" a) ("call" name a…) and, never inside arithmetic: ("tuple" open close items) ("set" items)
("list" items) ("union" items) ("matrix" rows) ("eq" left right) ("assign" name value). Nothing is
evaluated here.

    >>> parse(r"\frac12")
    ('div', ('num', Fraction(1, 1)), ('num', Fraction(2, 1)))
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from saccade.rewards.spelling import TooLarge

__all__ = ["Node", "Unparseable", "parse"]

Node = tuple[Any, ...]

MOST_TOKENS = 400
MOST_STEPS = 10_000  # brackets and plus-minus are read twice, which doubles with each nesting
DEEPEST = 40  # nested brackets, fractions, exponents


class Unparseable(ValueError):
    """The text is not mathematics that this file reads."""


TOKEN = re.compile(
    r"\s*(?:\\(?:begin|end)\{[a-z]+\}|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+(?![\d.]))?"
    r"|\\[a-zA-Z]+|\\.|(?P<word>[a-zA-Z]+'*)|[-+*/:^_!=<>,;()\[\]{}|&%])",
    re.DOTALL,
)
FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan",
    "exp", "ln", "log", "lg",
}  # fmt: skip
GREEK = frozenset(
    re.findall(
        r"\w+",
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu "
        "xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi "
        "Psi Omega ell",
    )
)
PROSE = {
    "is", "if", "no", "yes", "the", "not", "are", "to", "of", "in", "at", "by", "be", "it", "so",
}  # fmt: skip
SPELLINGS = {"or": ",", "and": ",", "\\cdot": "*", "\\times": "*", "\\div": "/", ";": ","}
RELATIONS = {"=", "<", ">", "\\le", "\\ge", "\\in"}
SIGNS = {"+", "-", "\\pm", "\\mp"}
CLOSING = {"(": ")]", "[": ")]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
# What cannot begin a factor, so that no product is implied before it.
BETWEEN = RELATIONS | SIGNS | set("*/:^_!%)]}|,&") | {
    "", "\\}", "\\\\", "\\rfloor", "\\rceil", "\\cup",
    "\\end{pmatrix}", "\\end{bmatrix}", "\\end{matrix}",
}  # fmt: skip


def parse(text: str) -> Node:
    """The tree of a normalised text."""
    if re.fullmatch(r"[A-Za-z]{2,}", text) and re.search(r"[aeiouAEIOU]", text):
        raise Unparseable("a word")  # as a product of letters it would equal its anagrams
    text = re.sub(r"^([a-zA-Z])\([a-zA-Z]\)\s*=", r"\1=", text)  # f(x) = … names f
    parser = _Parser(_tokens(text))
    items = parser.items()
    if parser.token:
        raise Unparseable(f"cannot read {parser.token!r}")
    return items[0] if len(items) == 1 else ("list", tuple(items))


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise Unparseable(f"cannot read {text[position : position + 10]!r}")
        position = match.end()
        word = match["word"]
        if word and word not in ("or", "and", "pi", "sqrt", "infty", *FUNCTIONS):
            if len(word) > 4 or word.lower() in PROSE:
                raise Unparseable(f"the word {word!r}")
            tokens += re.findall(r"[a-zA-Z]'*", word)
        else:
            tokens.append(match[0].strip())
    if len(tokens) > MOST_TOKENS:
        raise TooLarge(f"{len(tokens)} tokens")
    return [SPELLINGS.get(token, token) for token in tokens]


def _is_number(token: str) -> bool:
    return token[:1].isdigit() or (token[:1] == "." and token[1:2].isdigit())


def _number(token: str) -> Fraction:
    mantissa, _, exponent = token.lower().partition("e")
    if len(mantissa) > 1000 or len(exponent) > 4:
        raise TooLarge("a number with too many digits")
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def _interval(sides: list[Node], signs: list[str]) -> Node:
    """x < 3 and 1 < x <= 2 as the intervals that they describe."""
    if signs[0] in (">", "\\ge"):
        mirror = {">": "<", "\\ge": "\\le"}
        if not all(sign in mirror for sign in signs):
            raise Unparseable("relations in both directions")
        sides, signs = sides[::-1], [mirror[sign] for sign in reversed(signs)]
    infinity: Node = ("sym", "infty")
    if len(sides) == 2 and sides[0][0] == "sym":
        sides, signs = [("neg", infinity), *sides], ["<", *signs]
    elif len(sides) == 2:
        sides, signs = [*sides, infinity], [*signs, "<"]
    if len(sides) != 3 or sides[1][0] != "sym" or not set(signs) <= {"<", "\\le"}:
        raise Unparseable("a relation that is no interval")
    opening, closing = "(["[signs[0] == "\\le"], ")]"[signs[1] == "\\le"]
    return ("tuple", opening, closing, (sides[0], sides[2]))


class _Parser:
    """Recursive descent. `sign` is what a plus-minus means in the current reading of an item."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.sign, self.saw_plus_minus = "+", False
        self.bars = 0  # open absolute values
        self.steps = 0

    @property
    def token(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.token
        if not token or (expected is not None and token != expected):
            raise Unparseable(f"expected {expected or 'more'}, found {token or 'the end'}")
        self.at += 1
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooLarge("too many readings")
        return token

    def items(self) -> list[Node]:
        """Comma-separated items; one with a plus-minus gives two."""
        found: list[Node] = []
        while True:
            start, self.sign, self.saw_plus_minus = self.at, "+", False
            found.append(self.relation())
            if self.saw_plus_minus:
                self.at, self.sign = start, "-"
                found.append(self.relation())
            if self.token != ",":
                return found
            while self.token == ",":  # "1, and 2" has two
                self.take()

    def relation(self) -> Node:
        sides, signs = [self.union()], []
        while self.token in RELATIONS:
            signs.append(self.take())
            sides.append(self.union())
        if not signs:
            return sides[0]
        if signs in (["="], ["\\in"]):
            left, right = sides
            if left[0] == "sym":
                return ("assign", left[1], right)
            if right[0] == "sym":
                return ("assign", right[1], left)
            return ("eq", left, right)
        return _interval(sides, signs)

    def union(self) -> Node:
        parts = [self.sum()]
        while self.token == "\\cup":
            self.take()
            parts.append(self.sum())
        return parts[0] if len(parts) == 1 else ("union", tuple(parts))

    def sum(self) -> Node:
        value = self.product()
        while self.token in SIGNS:
            sign = self.plus_or_minus()
            term = self.product()
            value = ("add", value, term if sign == "+" else ("neg", term))
        return value

    def plus_or_minus(self) -> str:
        token = self.take()
        if token in "+-":
            return token
        self.saw_plus_minus = True
        return self.sign if token == "\\pm" else {"+": "-", "-": "+"}[self.sign]

    def product(self) -> Node:
        value = self.factor()
        while True:
            if self.token in ("*", "/", ":"):
                kind = "mul" if self.take() == "*" else "div"
                value = (kind, value, self.factor())
            elif not self.starts_factor():
                return value
            elif _is_number(self.token):
                value = self.mixed_number(value)
            elif value[0] == "num" and value[1].denominator == 1 and self.token == "\\frac":
                value = self.mixed_fraction(value)
            else:
                value = ("mul", value, self.power())

    def starts_factor(self) -> bool:
        return self.token not in BETWEEN or (self.token == "|" and not self.bars)

    def mixed_number(self, whole: Node) -> Node:
        """1 1/2; any other number right after a number is refused."""
        if whole[0] != "num":
            return ("mul", whole, self.power())
        top = _number(self.take())
        if whole[1].denominator == 1 and self.token == "/":
            self.take()
            bottom = _number(self.take()) if _is_number(self.token) else Fraction(0)
            if 0 < top < bottom:
                return ("num", whole[1] + top / bottom)
        raise Unparseable("two numbers in a row")

    def mixed_fraction(self, whole: Node) -> Node:
        fraction = self.power()
        parts = fraction[1:]
        if fraction[0] == "div" and all(p[0] == "num" and p[1].denominator == 1 for p in parts):
            return ("add", whole, fraction)
        return ("mul", whole, fraction)

    def factor(self) -> Node:
        negative = False
        while self.token in SIGNS:
            negative ^= self.plus_or_minus() == "-"
        value = self.power()
        return ("neg", value) if negative else value

    def power(self) -> Node:
        value = self.postfix(self.atom())
        if self.token != "^":
            return value
        self.take()
        if self.token == "\\circ":
            self.take()
            return ("mul", value, ("div", ("sym", "pi"), ("num", Fraction(180))))
        return self.postfix(("pow", value, self.exponent()))

    def exponent(self) -> Node:
        self.deeper()
        value = self.factor()  # 2^3^4 is 2^(3^4)
        self.depth -= 1
        return value

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise TooLarge("nested too deeply")

    def postfix(self, value: Node) -> Node:
        while self.token in ("!", "%"):
            if self.take() == "!":
                value = ("call", "factorial", value)
            else:
                value = ("div", value, ("num", Fraction(100)))
        return value

    def atom(self) -> Node:
        self.deeper()
        token = self.take()
        value = self.numeral(token) if _is_number(token) else self.named(token)
        self.depth -= 1
        return value

    def numeral(self, token: str) -> Node:
        if self.token == "_":  # a base: 52_8 is a numeral of its own
            return ("sym", token + self.subscript())
        return ("num", _number(token))

    def named(self, token: str) -> Node:
        name = token.removeprefix("\\")
        if token == "\\{":
            return self.braces()
        if token in CLOSING:
            return self.bracket(token)
        if name in COMMANDS:
            return COMMANDS[name](self)
        if name in FUNCTIONS:
            return self.function(name)
        if name in GREEK if token[0] == "\\" else token[0].isalpha():
            return ("sym", name + (self.subscript() if self.token == "_" else ""))
        raise Unparseable(f"cannot read {token!r}")

    def subscript(self) -> str:
        self.take("_")
        if self.token != "{":
            return "_" + self.take()
        start = self.at + 1
        while self.take() != "}":
            pass
        return "_" + "".join(self.tokens[start : self.at - 1])

    def braces(self) -> Node:
        outer = self.sign, self.saw_plus_minus
        items = [] if self.token == "\\}" else self.items()
        self.take("\\}")
        self.sign, self.saw_plus_minus = outer
        return ("set", tuple(items))

    def bracket(self, opening: str) -> Node:
        start = self.at
        self.bars += opening == "|"
        value = self.relation() if opening in "([" else self.sum()
        self.bars -= opening == "|"
        if opening in "([" and self.token == ",":
            # Several items: read them again, each with its own plus-minus.
            outer = self.sign, self.saw_plus_minus
            self.at = start
            items = self.items()
            self.sign, self.saw_plus_minus = outer
            value = ("tuple", opening, self.token, tuple(items))
        if self.take() not in CLOSING[opening]:
            raise Unparseable(f"{opening} is not closed")
        calls = {"|": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}
        return ("call", calls[opening], value) if opening in calls else value

    def argument(self) -> Node:
        r"""What \frac and \sqrt read: a group or a single character."""
        if self.token == "{":
            self.take()
            return self.bracket("{")
        if _is_number(self.token) and len(self.token) > 1 and self.token.isdigit():
            self.tokens[self.at : self.at + 1] = [self.token[0], self.token[1:]]
        return self.atom()

    def function(self, name: str) -> Node:
        base = power = None
        while self.token in ("_", "^"):
            if self.take() == "_":
                base = self.argument()
            else:
                power = self.exponent()
        inner = self.power() if self.token in ("(", "{", "[") else self.juxtaposed()
        if name == "log" and base is not None:
            value: Node = ("div", ("call", "ln", inner), ("call", "ln", base))
        else:
            value = ("call", name, inner)
        return value if power is None else ("pow", value, power)

    def juxtaposed(self) -> Node:
        r"""The argument of \sin 2x: a product without signs or further functions."""
        value = self.factor()
        while self.starts_factor() and self.token.removeprefix("\\") not in FUNCTIONS:
            value = ("mul", value, self.power())
        return value

    def fraction(self) -> Node:
        top = self.argument()
        return ("div", top, self.argument())

    def binomial(self) -> Node:
        top = self.argument()
        return ("call", "binomial", top, self.argument())

    def root(self) -> Node:
        degree: Node = ("num", Fraction(2))
        if self.token == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        return ("call", "root", self.argument(), degree)

    def matrix(self) -> Node:
        rows: list[list[Node]] = [[]]
        while not self.token.startswith("\\end"):
            rows[-1].append(self.sum())
            if self.token == "\\\\":
                self.take()
                rows.append([])
            elif not self.token.startswith("\\end"):
                self.take("&")
        self.take()
        return ("matrix", tuple(tuple(row) for row in rows if row))


COMMANDS: dict[str, Callable[[_Parser], Node]] = {
    "frac": _Parser.fraction,
    "binom": _Parser.binomial,
    "sqrt": _Parser.root,
    "begin{pmatrix}": _Parser.matrix,
    "begin{bmatrix}": _Parser.matrix,
    "begin{matrix}": _Parser.matrix,
    "pi": lambda parser: ("sym", "pi"),
    "infty": lambda parser: ("sym", "infty"),
    "emptyset": lambda parser: ("set", ()),
    "varnothing": lambda parser: ("set", ()),
}
