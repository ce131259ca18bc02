r"""Formulas and whether they are equal: a careful border around latex2sympy and math-verify.

They are imported on first use only, so that a process without formulas never pays for them. They
have no limits of their own (their timeouts are signals, which a library must not use): here text
is refused that they read as something else, and formulas whose value would be too large. What
takes long all the same is ended by the deadline of the worker.

    >>> same(r"2\sqrt{3}", r"\sqrt{12}")
    True
"""

from __future__ import annotations

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from saccade.rewards.spelling import BRACED, TooLarge, Unparseable

__all__ = ["formula", "load", "proportional", "same"]

MOST_TOKENS = 200
DEEPEST = 10  # nested brackets; the parser's time doubles with each
MOST_DIGITS = 20_000  # of a number in the course of evaluation
LARGEST_FACTORIAL = 5_000
PRECISION = 40  # digits at which constants are compared
CLOSE = Fraction(1, 10**30)

FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|exp|ln|log"
PROSE = frozenset("is if no yes the not are to of in at by be it so".split())
# Texts that the parser takes for something else: x' for x, `2 3` for 5, 52_8 for 52, 2^2^3 for
# (2^2)^3; and functions that it evaluates before we can look at their arguments.
MISREAD = re.compile(
    rf"'|\d\s+[\d.]|\.\d*\.|\d\s*_|\^\s*{BRACED}\s*\^|\\(?:gcd|lcm|det)(?![a-zA-Z])"
)
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")


def _decimal(match: re.Match[str]) -> str:
    return rf"\frac{{{match[1]}{match[2]}}}{{1{'0' * len(match[2])}}}"


def _binomial(match: re.Match[str]) -> str:
    n, k = match[1][1:-1], match[2][1:-1]  # factorials are not evaluated by the parser
    return rf"\frac{{({n})!}}{{({k})!(({n})-({k}))!}}"


REWRITES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (rf"(?<![\\a-zA-Z])({FUNCTIONS})(?![a-zA-Z])", r"\\\1 "),
        (r"\\lg(?![a-zA-Z])", r"\\log"),
        (r"(\d+)\s*\^\\circ", r"(\1\\cdot\\frac{\\pi}{180})"),
        (r"(\d)[eE]([-+]?\d+)", r"\1\\cdot 10^{\2}"),
        (r"(?<![\d.])(\d+)\s*(\\frac\{\d+\}\{\d+\})", r"(\1+\2)"),
        (r"(?<![\w.}])(\d+)\s*/\s*(\d+)(?!\s*[\d.^!])", r"\\frac{\1}{\2}"),
        (r"(\d*)\.(\d+)", _decimal),
        (rf"\\binom\s*({BRACED})\s*({BRACED})", _binomial),
        # A product of numbers without a sign would be read as a mixed number: 2(3) as 5.
        (
            rf"(\\(?:{FUNCTIONS})\s*(?:[_^]\s*{BRACED}\s*)+\(?)"
            r"|(?<=\d)\s*(?=\(|\\frac)|(?<=[)}])\s*(?=[\d(]|\\frac)",
            lambda match: match[1] or r" \cdot ",
        ),
    ]
]


@lru_cache(maxsize=1)
def load() -> tuple[Any, Any, Any]:
    """sympy, the parser and the verifier; the first call takes about a second."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that timeouts are off
    letters = ConversionConfig(lowercase_symbols=False)  # X is not x

    def parse(text: str) -> Any:
        return latex2sympy(
            text, is_real=True, normalization_config=None, conversion_config=letters
        )

    return sympy, parse, verify


@lru_cache(maxsize=4096)
def formula(text: str) -> Any:
    """A leaf as an expression of sympy; raises `Unparseable` or `TooLarge`."""
    words = WORD.findall(re.sub(rf"(?<![\\a-zA-Z])(?:{FUNCTIONS})(?![a-zA-Z])", "", text))
    if any(len(word) > 4 or word.lower() in PROSE for word in words) or MISREAD.search(text):
        raise Unparseable(f"cannot read {text!r}")
    if re.fullmatch(r"[A-Za-z]*[aeiouAEIOU][A-Za-z]*", text) and len(text) > 1:
        raise Unparseable("a word")  # as a product of letters it would equal its anagrams
    _check_text(text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    sympy, parse, _ = load()
    try:
        expression = parse(text)
    except Exception as error:  # it raises plain Exception where the text is not mathematics
        raise Unparseable(str(error)) from None
    if not isinstance(expression, (sympy.Expr, sympy.MatrixBase)):
        raise Unparseable("no single expression")
    _digits(expression)
    return _settled(expression)


def same(left: str, right: str, tolerance: Fraction = Fraction(0)) -> bool:
    """Equal, or constants at most `tolerance` apart, relative to the right one."""
    a, b = formula(left), formula(right)
    sympy, _, verify = load()
    if a == b:
        return True
    if not a.free_symbols and not b.free_symbols and isinstance(a - b, sympy.Expr):
        x, y = a.evalf(PRECISION), b.evalf(PRECISION)
        allowed = max(tolerance, CLOSE)
        limit = abs(y) * sympy.Rational(allowed.numerator, allowed.denominator)
        if (abs(x - y) - limit).is_nonpositive:
            return True
    if isinstance(a, sympy.Symbol) or isinstance(b, sympy.Symbol):
        a, b = a - b, sympy.Integer(0)  # math-verify compares a lone symbol by its letters
    return bool(verify(b, a, numeric_precision=PRECISION, timeout_seconds=None))


def proportional(left: tuple[str, str], right: tuple[str, str]) -> bool:
    """Whether two equations have sides whose differences are multiples of one another."""
    a, b, c, d = map(formula, (*left, *right))
    ratio = load()[0].simplify((a - b) / (c - d))
    return bool(not ratio.free_symbols and ratio.is_finite and ratio.is_zero is False)


def _check_text(text: str) -> None:
    tokens = re.findall(r"\\[a-zA-Z]+|\d+|\S", text)
    if len(tokens) > MOST_TOKENS:
        raise TooLarge(f"{len(tokens)} tokens")
    depth = 0
    for token in tokens:
        depth += (token in "([{") - (token in ")]}")
        if depth > DEEPEST:
            raise TooLarge("nested too deeply")


def _digits(node: Any) -> float:
    """An upper bound of the decimal digits that numbers inside grow to."""
    if node.is_Number:
        digits = _size(node)
    else:
        parts = [_digits(part) for part in node.args]
        kind = type(node).__name__
        if kind in ("Pow", "exp"):
            base, exponent = parts if kind == "Pow" else (0.5, *parts)
            digits = base * 10 ** min(exponent, 9.0)
        elif kind == "factorial":
            value = 10 ** min(parts[0], 9.0)
            digits = MOST_DIGITS + 1 if value > LARGEST_FACTORIAL + 1 else value * parts[0]
        elif kind == "Mul":
            digits = sum(parts)
        else:
            digits = max(parts, default=0.0) + math.log10(len(parts) or 1)
    if digits > MOST_DIGITS:
        raise TooLarge("a value with too many digits")
    return digits


def _size(number: Any) -> float:
    if not number.is_Rational:
        return 0.0  # infinity; decimals have become fractions
    return math.log10(max(abs(int(number.p)), int(number.q)) + 1)


def _settled(expression: Any) -> Any:
    """i is the imaginary unit, and odd roots of negative numbers are real."""
    sympy = load()[0]

    def is_odd_root(node: Any) -> bool:
        return bool(
            node.is_Pow
            and node.exp.is_Rational
            and node.exp.p == 1
            and node.exp.q % 2
            and node.base.is_number
            and node.base.is_negative
        )

    expression = expression.replace(is_odd_root, lambda node: -((-node.base) ** node.exp))
    expression = expression.xreplace({sympy.Symbol("i", real=True): sympy.I})
    if expression.has(sympy.zoo, sympy.nan):
        raise Unparseable("a division by zero")
    return expression
