"""Whether two expressions have the same value: exactly for rationals, else to thirty digits.

Expressions with symbols are compared at seeded random rational points, where equal values mean
equal expressions (Schwartz-Zippel). Every operation has a bounded cost: what would grow beyond
the limits raises `TooLarge`.

    >>> from saccade.rewards.latex import parse
    >>> same_value(parse("(x+1)^2"), parse("x^2+2x+1"))
    True
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from saccade.rewards.latex import Node, Unparseable
from saccade.rewards.spelling import TooLarge

__all__ = ["proportional", "same_value"]

DIGITS = 60
CLOSE = Fraction(1, 10**30)
TINY = Fraction(1, 10**50)  # what cancellation leaves of zero
CLOSE_FLOAT, TINY_FLOAT = float(CLOSE), float(TINY)
EXACT_BITS = 40_000  # larger rationals become floats
MOST_DIGITS = 100_000  # of the integer part of a value
LARGEST_ANGLE = 10**30
LARGEST_FACTORIAL = 5_000
POINTS_COMPARED, POINTS_TRIED = 5, 24

CONSTANTS = ("pi", "e", "i")
Value = Any  # Fraction, or a number of mpmath


def same_value(left: Node, right: Node, tolerance: Fraction = Fraction(0)) -> bool:
    """`tolerance` is relative to the right side; 0 means equal."""
    pairs = _value_pairs(left, right)
    return _all_agree(pairs, lambda a, b: _close(a, b, tolerance))


def proportional(left: Node, right: Node) -> bool:
    """Whether left = c·right for a constant c ≠ 0, as for two equations with the same solutions."""
    ratios: list[Value] = []

    def same_ratio(a: Value, b: Value) -> bool:
        if not a or not b:
            return not a and not b
        ratios.append(_divide(a, b))
        return _close(ratios[-1], ratios[0], Fraction(0))

    return _all_agree(_value_pairs(left, right), same_ratio) and bool(ratios)


def _all_agree(pairs: Iterator[tuple[Value, Value]], agree: Callable[[Value, Value], bool]) -> bool:
    compared = 0
    for a, b in pairs:
        if not agree(a, b):
            return False
        compared += 1
    return compared > 0


def _value_pairs(left: Node, right: Node) -> Iterator[tuple[Value, Value]]:
    """Values of both sides at points where both exist and both are real, or both are not."""
    names = sorted(symbols(left) | symbols(right))
    if not names:
        yield _value(left, {}), _value(right, {})
        return
    draw, found = random.Random(0), 0
    for _ in range(POINTS_TRIED):
        point = {name: Fraction(draw.randint(-4000, 4000) or 1, 1009) for name in names}
        try:
            a, b = _value(left, point), _value(right, point)
        except ZeroDivisionError:
            continue
        if _is_real(a) == _is_real(b):
            found += 1
            yield a, b
        if found == POINTS_COMPARED:
            return


def symbols(node: Node) -> set[str]:
    if node[0] == "sym":
        return set() if node[1] in CONSTANTS else {node[1]}
    if node[0] not in ("num", "call") and node[0] not in OPERATIONS:
        raise Unparseable(f"a {node[0]} inside an expression")
    return set().union(*(symbols(part) for part in node[1:] if isinstance(part, tuple)))


def _value(node: Node, point: Mapping[str, Fraction]) -> Value:
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind == "sym":
        return point[node[1]] if node[1] in point else _constant(node[1])
    if kind == "call":
        return FUNCTIONS[node[1]](*(_value(part, point) for part in node[2:]))
    return _bounded(OPERATIONS[kind](*(_value(part, point) for part in node[1:])))


# -- arithmetic --------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _mp() -> Any:
    import mpmath  # slow to import, and only irrational values need it

    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


@lru_cache(maxsize=8)
def _constant(name: str) -> Value:
    return {"pi": +_mp().pi, "e": +_mp().e, "i": _mp().mpc(0, 1)}[name]


def _float(value: Value) -> Value:
    if isinstance(value, Fraction):
        return _mp().mpf(value.numerator) / value.denominator
    return value


def _is_real(value: Value) -> bool:
    return (
        isinstance(value, Fraction) or abs(value.imag) <= abs(value.real) * CLOSE_FLOAT + TINY_FLOAT
    )


def _close(a: Value, b: Value, tolerance: Fraction) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        whole = a.denominator == b.denominator == 1  # 1000000.0 is not 1000001
        return a == b or (not whole and abs(a - b) <= tolerance * abs(b))
    a, b = _float(a), _float(b)
    limit = _float(max(tolerance, CLOSE)) * abs(b) + _float(TINY)
    return bool(abs(a - b) <= limit)


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        return value if bits <= EXACT_BITS else _bounded(_float(value))
    if value and abs(_mp().log10(abs(value))) > MOST_DIGITS:
        raise TooLarge("a value with too many digits")
    return value


def _binary(operation: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    def apply(a: Value, b: Value) -> Value:
        exact = isinstance(a, Fraction) and isinstance(b, Fraction)
        return operation(a, b) if exact else operation(_float(a), _float(b))

    return apply


def _divide(a: Value, b: Value) -> Value:
    if not b or (not isinstance(b, Fraction) and abs(b) < TINY_FLOAT):
        raise ZeroDivisionError
    return _binary(lambda x, y: x / y)(a, b)


def _power(base: Value, exponent: Value) -> Value:
    if not base:
        if not _is_real(exponent) or _float(exponent).real <= 0:
            raise ZeroDivisionError
        return Fraction(0)
    size = abs(_mp().log10(abs(_float(base))))
    if abs(_float(exponent)) * size > MOST_DIGITS or abs(_float(exponent)) > 10**9:
        raise TooLarge("a power with too many digits")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) <= EXACT_BITS:
            return base ** int(exponent)
    return _mp().power(_float(base), _float(exponent))


def _root(value: Value, degree: Value) -> Value:
    if not value:
        return Fraction(0)
    if isinstance(degree, Fraction) and degree.denominator == 1 and 2 <= degree <= 100:
        if isinstance(value, Fraction) and degree == 2 and value > 0:
            top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
            if top * top == value.numerator and bottom * bottom == value.denominator:
                return Fraction(top, bottom)
        if degree % 2 and _is_real(value) and _float(value).real < 0:  # the real cube root of -8
            return -_mp().root(-_float(value).real, int(degree))
    return _power(value, _divide(Fraction(1), degree))


def _factorial(value: Value) -> Value:
    if abs(_float(value)) > LARGEST_FACTORIAL:
        raise TooLarge("a large factorial")
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise ZeroDivisionError
        return Fraction(math.factorial(int(value)))
    return _mp().gamma(_float(value) + 1)


def _binomial(n: Value, k: Value) -> Value:
    if max(abs(_float(n)), abs(_float(k))) > LARGEST_FACTORIAL:
        raise TooLarge("a large binomial")
    whole = (
        isinstance(n, Fraction) and isinstance(k, Fraction) and n.denominator == k.denominator == 1
    )
    if whole and n >= 0 and k >= 0:
        return Fraction(math.comb(int(n), int(k)))
    return _mp().binomial(_float(n), _float(k))


def _rounded(value: Value, rounding: Callable[[Any], int]) -> Value:
    if not _is_real(value):
        raise Unparseable("a complex number has no floor")
    return Fraction(int(rounding(value if isinstance(value, Fraction) else value.real)))


def _smooth(name: str) -> Callable[[Value], Value]:
    def apply(value: Value) -> Value:
        if abs(_float(value)) > LARGEST_ANGLE:
            raise TooLarge("a large argument")
        return getattr(_mp(), name)(_float(value))

    return apply


def _logarithm(value: Value, base: int | None = None) -> Value:
    if not value:
        raise ZeroDivisionError
    natural = _mp().log(_float(value))
    return natural if base is None else natural / _mp().log(base)


OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": _binary(lambda a, b: a + b),
    "mul": _binary(lambda a, b: a * b),
    "div": _divide,
    "pow": _power,
    "neg": lambda a: -a,
}
FUNCTIONS: dict[str, Callable[..., Value]] = {
    **{name: _smooth(name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{f"arc{name}": _smooth(f"a{name}") for name in ("sin", "cos", "tan")},
    "exp": lambda a: _power(_constant("e"), a),
    "ln": _logarithm,
    "log": lambda a: _logarithm(a, 10),
    "lg": lambda a: _logarithm(a, 10),
    "root": _root,
    "abs": abs,
    "floor": lambda a: _rounded(a, math.floor),
    "ceil": lambda a: _rounded(a, math.ceil),
    "factorial": _factorial,
    "binomial": _binomial,
}
