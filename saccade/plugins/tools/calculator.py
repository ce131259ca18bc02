"""A calculator with a closed grammar: numbers, + - * / ^, parentheses. There is no name to look up.

Exact while it can be: fractions, not floats. Length, depth and size of numbers are bounded.

    >>> calculate("2 * (1/3 + 4)")
    '8.666666667'
"""

from __future__ import annotations

import re
from fractions import Fraction

from saccade.plugins.tools.calls import CallError

LONGEST = 400  # characters
DEEPEST = 40
MOST_BITS = 1024  # of a numerator or denominator
NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
TOKEN = re.compile(rf"[ \t]*(?:({NUMBER})|(\*\*|[-+*/^()]))[ \t]*")


def calculate(expression: str) -> str:
    """Raises CallError("expression") for what is no arithmetic or too large."""
    return _written(_Reader(_tokens(expression)).result())


def _wrong(problem: str) -> CallError:
    return CallError("expression", problem=problem)


def _tokens(text: str) -> list[str]:
    if len(text) > LONGEST:
        raise _wrong(f"longer than {LONGEST} characters")
    tokens, at = [], 0
    while at < len(text):
        token = TOKEN.match(text, at)
        if token is None:
            raise _wrong(f"{text[at : at + 10]!r} is not arithmetic; numbers, + - * / ^ and ( ) are")
        tokens.append(token[1] or token[2].replace("**", "^"))
        at = token.end()
    return tokens


class _Reader:
    """Recursive descent; ^ binds tightest and to the right, a sign looser than ^."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def result(self) -> Fraction:
        value = self.sum()
        if self.at < len(self.tokens):
            raise _wrong(f"{self.tokens[self.at]!r} is out of place")
        return value

    def take(self, *wanted: str) -> str:
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return ""

    def sum(self) -> Fraction:
        value = self.product()
        while sign := self.take("+", "-"):
            other = self.product()
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while sign := self.take("*", "/"):
            other = self.signed()
            if sign == "/" and not other:
                raise _wrong("division by zero")
            value = _bounded(value * other if sign == "*" else value / other)
        return value

    def signed(self) -> Fraction:
        self.depth += 1
        if self.depth > DEEPEST:
            raise _wrong("too deeply nested")
        sign = self.take("+", "-")
        value = self.signed() if sign else self.power()
        self.depth -= 1
        return -value if sign == "-" else value

    def power(self) -> Fraction:
        value = self.atom()
        if self.take("^"):
            exponent = self.signed()
            if exponent.denominator != 1 or (not value and exponent < 0):
                raise _wrong("only whole powers are known")
            size = max(value.numerator.bit_length(), value.denominator.bit_length())
            if abs(exponent) * size > MOST_BITS:
                raise _wrong("too large")
            value = Fraction(value**exponent)
        return value

    def atom(self) -> Fraction:
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise _wrong("a parenthesis is open")
            return value
        if self.at >= len(self.tokens) or self.tokens[self.at][0] not in "0123456789.":
            raise _wrong("a number is missing")
        self.at += 1
        number = self.tokens[self.at - 1].lower()
        if abs(int(number.partition("e")[2] or 0)) > MOST_BITS:  # before its digits are made
            raise _wrong("too large")
        return _bounded(Fraction(number))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise _wrong("too large")
    return value


def _written(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"
