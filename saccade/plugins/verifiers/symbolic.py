r"""Formulas and whether they are equal: a careful border around latex2sympy and math-verify.

They are imported on first use, so that a process without formulas never pays for them, and their
timeouts (signals) are off. Here text is refused that they would read as something else, and
formulas whose value would be too large; what takes long all the same is ended by the deadline of
the worker process.

    >>> same(r"2\sqrt{3}", r"\sqrt{12}")
    True
"""

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from saccade.plugins.verifiers.math_text import BRACED, END, TooLarge, Unparseable, near

MOST_DIGITS = 20_000  # of a number in the course of evaluation
LARGEST_FACTORIAL = 5_000
MOST_TERMS = 2_000  # of an expanded power of a sum
MOST_BARS = 8  # each may open or close: the parser tries all
PRECISION = 40  # digits at which constants are compared
CLOSE = Fraction(1, 10**30)
ROUNDING = 0.01  # how far apart, relatively, what is called nearly equal may be

FUNCTIONS = r"\\(?:(?:arc)?(?:sin|cos|tan)|cot|sec|csc|exp|ln|log)"
UNKNOWN = re.compile(r"\s*(?:[A-DF-Za-df-hj-z]|\\(?!pi\b)[a-z]+)?\s*")  # or nothing
PROSE = frozenset(["is", "if", "no", "yes", "the", "not", "are", "to", "of", "in", "at", "by", "be", "it", "so"])
# What the parser takes for something else: x' for x, `2 3` for 5, 2^2^3 for (2^2)^3; a word for a
# product of letters, equal to its anagrams; and functions that it evaluates while it reads.
MISREAD = re.compile(
    rf"'|\d\s+[\d.]|\.\d*\.|\^\s*{BRACED}\s*\^|\\(?:begin|gcd|lcm|det){END}"
    rf"|(?<![\\a-zA-Z])[a-zA-Z]{{5,}}|^(?=.*[aeiouAEIOU])[a-zA-Z]{{2,}}$"
)


def _binomial(match: re.Match[str]) -> str:
    n, k = match[1][1:-1], match[2][1:-1]  # factorials are not evaluated by the parser
    return rf"\frac{{({n})!}}{{({k})!(({n})-({k}))!}}"


REWRITES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (rf"\\lg{END}", r"\\log"),
        (r"(\d+)\s*\^\\circ", r"(\1\\cdot\\frac{\\pi}{180})"),
        (r"(\d+)\s*_\{(\w+)\}", r"\\beta_{\1,\2}"),  # a numeral in another base is a symbol
        (r"(\d)[eE]([-+]?\d+)", r"\1\\cdot 10^{\2}"),
        (r"(?<![\d.])(\d+)\s*(\\frac\{\d+\}\{\d+\})", r"(\1+\2)"),
        (r"(?<![\w.}])(\d+)\s*/\s*(\d+)(?!\s*[\d.^!])", r"\\frac{\1}{\2}"),
        (r"(\d*)\.(\d+)", lambda m: rf"\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}"),
        (rf"\\binom\s*({BRACED})\s*({BRACED})", _binomial),
        # A product of numbers needs a sign: the parser reads 2(3) as a mixed number, 5.
        (
            rf"({FUNCTIONS}\s*(?:[_^]\s*{BRACED}\s*)+\(?)"
            r"|(?<=\d)\s*(?=\(|\\frac)|(?<=[)}])\s*(?=[\d(]|\\frac)",
            lambda m: m[1] or r" \cdot ",
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
        return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=letters)

    return sympy, parse, verify


@lru_cache(maxsize=4096)
def formula(text: str) -> Any:
    """A leaf as an expression of sympy; raises `Unparseable` or `TooLarge`."""
    if text.count("|") > MOST_BARS:
        raise TooLarge("too many bars")
    if MISREAD.search(text) or PROSE & set(re.findall(r"(?<!\\)\b[a-z]+\b", text.lower())):
        raise Unparseable(f"cannot read {text!r}")
    exact, sign, rounded = text.partition(r"\approx")
    if sign:
        named = UNKNOWN.fullmatch(exact)
        return formula(rounded) if named else _rounded(formula(exact), formula(rounded))
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    sympy, parse, _ = load()
    try:
        expression = parse(text)
    except Exception as error:  # it raises plain Exception where the text is not mathematics
        raise Unparseable(str(error)) from None
    if not isinstance(expression, sympy.Expr):
        raise Unparseable("no single expression")
    _digits(expression)
    expression = expression.replace(sympy.Pow, _real_power)
    if (i := sympy.Symbol("i", real=True)) in expression.free_symbols:  # not where it counts
        expression = expression.xreplace({i: sympy.I})
    if expression.has(sympy.zoo, sympy.nan):
        raise Unparseable("a division by zero")
    return expression


def _rounded(exact: Any, rounded: Any) -> Any:
    """The value itself where another is its rounding, which the parser drops."""
    gap = abs(exact - rounded).evalf() - abs(exact).evalf() * ROUNDING
    if gap.is_nonpositive is not True:
        raise Unparseable("two values that are not nearly equal")
    return exact


def same(left: str, right: str, tolerance: Fraction = Fraction(0)) -> bool:
    """Equal, or constants at most `tolerance` apart, relative to the right one. Two equations are
    the same when the differences of their sides are multiples of one another."""
    if "=" in left and "=" in right:
        return _proportional(*(part for text in (left, right) for part in text.split("=", 1)))
    a, b = formula(left), formula(right)
    sympy, _, verify = load()
    if not a.free_symbols | b.free_symbols:
        x, y = a.doit(), b.doit()
        if x.is_Rational and y.is_Rational:
            return near(Fraction(x.p, x.q), Fraction(y.p, y.q), tolerance)
        x, y, limit = x.evalf(PRECISION), y.evalf(PRECISION), max(tolerance, CLOSE)
        if (abs(x - y) - abs(y) * sympy.Rational(*limit.as_integer_ratio())).is_nonpositive:
            return True
    if isinstance(a, sympy.Symbol) or isinstance(b, sympy.Symbol):
        a, b = a - b, sympy.Integer(0)  # math-verify compares a lone symbol by its letters
    return bool(verify(b, a, numeric_precision=PRECISION, timeout_seconds=None))


def _proportional(*sides: str) -> bool:
    a, b, c, d = map(formula, sides)
    ratio = load()[0].simplify((a - b) / (c - d))
    return bool(not ratio.free_symbols and ratio.is_finite and ratio.is_zero is False)


def _digits(node: Any) -> float:
    """An upper bound of the decimal digits that numbers inside grow to."""
    parts = [_digits(part) for part in node.args]
    kind = type(node).__name__
    if node.is_Rational:
        digits = math.log10(max(abs(int(node.p)), int(node.q)) + 1)
    elif kind in ("Pow", "exp"):
        digits = (parts[0] if kind == "Pow" else 0.5) * 10 ** min(parts[-1], 9.0)
        if digits <= MOST_DIGITS and node.base.is_Add and node.exp.is_Integer:
            others = len(node.base.args) - 1
            digits += MOST_DIGITS * (math.comb(others + abs(int(node.exp)), others) > MOST_TERMS)
    elif kind == "factorial":
        value = 10 ** min(parts[0], 9.0)
        digits = value * parts[0] if value <= LARGEST_FACTORIAL + 1 else math.inf
    else:
        digits = sum(parts) if kind == "Mul" else max(parts, default=0) + math.log10(1 + len(parts))
    if digits > MOST_DIGITS:
        raise TooLarge("a value with too many digits")
    return digits


def _real_power(base: Any, exponent: Any) -> Any:
    """The cube root of -8 is -2."""
    odd_root = exponent.is_Rational and exponent.p == 1 and exponent.q % 2
    return -((-base) ** exponent) if odd_root and base.is_negative else base**exponent
