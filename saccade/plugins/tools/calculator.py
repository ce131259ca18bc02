"""A calculator with a closed grammar: numbers, + - * / ^, parentheses; no names, no eval.

Computes exactly, with fractions. Length, depth and size of numbers are bounded.

    >>> calculate("2 * (1/3 + 4)")
    '8.666666667'
"""

import re
from collections.abc import Callable
from fractions import Fraction
from operator import add, mul, sub, truediv

from saccade.plugins.tools.calls import CallError

LONGEST = 400  # characters of an expression
DEEPEST = 40  # nesting
MOST_BITS = 1024  # of a numerator or denominator
NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
TOKEN = re.compile(rf"({NUMBER})|(\*\*|[-+*/^()])|([^ \t].*)", re.DOTALL)  # the last group: an invalid rest
SIGN = 3  # precedence of a sign: below ^, above *


def calculate(expression: str) -> str:
    """Returns the value as a decimal string. Raises CallError("expression") if it is not arithmetic or too large."""
    tokens = _tokens(expression)
    try:
        value = _value(tokens, least=1, depth=1)
    except ZeroDivisionError:
        raise _wrong("division by zero") from None
    if tokens:
        raise _wrong(f"{tokens[0]!r} is out of place")
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _wrong(problem: str) -> CallError:
    return CallError("expression", problem=problem)


def _tokens(text: str) -> list[str]:
    if len(text) > LONGEST:
        raise _wrong(f"longer than {LONGEST} characters")
    tokens = []
    for number, sign, rest in TOKEN.findall(text):
        if rest:
            raise _wrong(f"{rest[:10]!r} is not arithmetic; numbers, + - * / ^ and ( ) are")
        tokens.append(number or sign.replace("**", "^"))
    return tokens


def _value(tokens: list[str], least: int, depth: int) -> Fraction:
    """Precedence climbing: consume an operand and the operators of precedence `least` or more; ^ associates right."""
    if depth > DEEPEST:
        raise _wrong("too deeply nested")
    token = tokens.pop(0) if tokens else ""
    if token in ("+", "-"):
        value = _value(tokens, SIGN, depth + 1)
        value = -value if token == "-" else value
    elif token == "(":
        value = _value(tokens, 1, depth + 1)
        if not tokens or tokens.pop(0) != ")":
            raise _wrong("a parenthesis is open")
    elif token in ("", ")", *OPERATORS):
        raise _wrong("a number is missing")
    else:
        if abs(int(token.lower().partition("e")[2] or 0)) > MOST_BITS:  # before Fraction expands the digits
            raise _wrong("too large")
        value = _bounded(Fraction(token))
    while tokens and tokens[0] in OPERATORS and (binds := BINDS[tokens[0]]) >= least:
        name = tokens.pop(0)
        value = _bounded(OPERATORS[name](value, _value(tokens, binds + (name != "^"), depth + 1)))
    return value


def _power(value: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _wrong("only whole powers are possible")
    if abs(exponent) * _bits(value) > MOST_BITS:
        raise _wrong("too large")
    return Fraction(value**exponent)


Operate = Callable[[Fraction, Fraction], Fraction]
BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 4}  # precedence
OPERATORS: dict[str, Operate] = {"+": add, "-": sub, "*": mul, "/": truediv, "^": _power}


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MOST_BITS:
        raise _wrong("too large")
    return value
