r"""Parses formulas and tests whether they are equal: a safe wrapper of latex2sympy and math-verify.

These libraries are imported on first use, so that processes without formulas start fast, and their
timeouts (signals) are disabled. Text that they would misread is refused, and so are formulas whose
value would be too large; the worker process's deadline ends anything else that takes too long.

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

MOST_DIGITS = 20_000  # of a number during evaluation
LARGEST_FACTORIAL = 5_000
MOST_TERMS = 2_000  # of an expanded power of a sum
MOST_BARS = 8  # vertical bars: the parser tries each as opening and closing
PRECISION = 40  # digits with which constants are compared
CLOSE = Fraction(1, 10**30)
ROUNDING = 0.01  # largest relative difference of the two sides of \approx

FUNCTIONS = r"\\(?:(?:arc)?(?:sin|cos|tan)|cot|sec|csc|exp|ln|log)"
UNKNOWN = re.compile(r"\s*(?:[A-DF-Za-df-hj-z]|\\(?!pi\b)[a-z]+)?\s*")  # or nothing
PROSE = frozenset(["is", "if", "no", "yes", "the", "not", "are", "to", "of", "in", "at", "by", "be", "it", "so"])
# Text that the parser misreads: x' as x, `2 3` as 5, 2^2^3 as (2^2)^3; a word as a product of letters,
# which equals its anagrams; and functions that it evaluates while parsing.
MISREAD = re.compile(
    rf"'|\d\s+[\d.]|\.\d*\.|\^\s*{BRACED}\s*\^|\\(?:begin|gcd|lcm|det){END}"
    rf"|(?<![\\a-zA-Z])[a-zA-Z]{{5,}}|^(?=.*[aeiouAEIOU])[a-zA-Z]{{2,}}$"
)


def _binomial(match: re.Match[str]) -> str:
    n, k = match[1][1:-1], match[2][1:-1]  # as factorials, which the parser does not evaluate
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
        # Insert a sign into products of numbers: the parser reads 2(3) as a mixed number, 5.
        (
            rf"({FUNCTIONS}\s*(?:[_^]\s*{BRACED}\s*)+\(?)"
            r"|(?<=\d)\s*(?=\(|\\frac)|(?<=[)}])\s*(?=[\d(]|\\frac)",
            lambda m: m[1] or r" \cdot ",
        ),
    ]
]


@lru_cache(maxsize=1)
def load() -> tuple[Any, Any, Any]:
    """Returns sympy, the parser and the verifier; the first call takes about a second."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that timeouts are off
    letters = ConversionConfig(lowercase_symbols=False)  # so X differs from x

    def parse(text: str) -> Any:
        return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=letters)

    return sympy, parse, verify


@lru_cache(maxsize=4096)
def formula(text: str) -> Any:
    """Parse a leaf into a sympy expression; raises `Unparseable` or `TooLarge`."""
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
    except Exception as error:  # it raises plain Exception if the text is not mathematics
        raise Unparseable(str(error)) from None
    if not isinstance(expression, sympy.Expr):
        raise Unparseable("no single expression")
    _digits(expression)
    expression = expression.replace(sympy.Pow, _real_power)
    if (i := sympy.Symbol("i", real=True)) in expression.free_symbols:  # not an index of summation
        expression = expression.xreplace({i: sympy.I})
    if expression.has(sympy.zoo, sympy.nan):
        raise Unparseable("a division by zero")
    return expression


def _rounded(exact: Any, rounded: Any) -> Any:
    """Returns `exact` if `rounded` is nearly equal, else raises: the parser would drop `rounded` unchecked."""
    gap = abs(exact - rounded).evalf() - abs(exact).evalf() * ROUNDING
    if gap.is_nonpositive is not True:
        raise Unparseable("two values that are not nearly equal")
    return exact


def same(left: str, right: str, tolerance: Fraction = Fraction(0)) -> bool:
    """Whether two formulas are equal, or are constants at most `tolerance` apart, relative to the right one.
    Two equations are the same if the differences of their sides are multiples of one another."""
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
    """An upper bound of the digits of any number that evaluating the expression produces."""
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
    """The real odd root of a negative number: the cube root of -8 is -2."""
    odd_root = exponent.is_Rational and exponent.p == 1 and exponent.q % 2
    return -((-base) ** exponent) if odd_root and base.is_negative else base**exponent
