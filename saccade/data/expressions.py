"""What a mapping file may compute from a row: fields, sums and one comparison. Nothing else.

    expression = sum [(== | != | < | <= | > | >= | contains) sum]
    sum        = value {+ value}
    value      = number | 'text' | name {.name | [value]}

An expression is parsed into functions when a mapping is read; text of a file or of a row is never
run as code. What is missing is None, and a comparison with it is false. A list counts as the mean
of its numbers.

    >>> parse("votes.a + 'x'")({"votes": {"a": 3}})
    '3x'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saccade.errors import ConfigError

Scope = Mapping[str, Any]
Expression = Callable[[Scope], Any]

TOKEN = re.compile(
    r"\s*(?:(?P<number>-?\d+(?:\.\d+)?)|'(?P<text>[^']*)'|(?P<name>[^\W\d]\w*)"
    r"|(?P<sign>==|!=|<=|>=|[<>+.\[\]]))"
)
DEEPEST = 20


def parse(text: str) -> Expression:
    """A function of the row; a text outside the grammar is refused with the place."""
    reader = _Reader(text)
    found = reader.comparison()
    reader.expect_end()
    return found


def number_of(value: Any) -> float | None:
    """The number that a value stands for; cells of a CSV file are texts."""
    if isinstance(value, list | tuple):
        numbers = [number_of(item) for item in value]
        known = [number for number in numbers if number is not None]
        return sum(known) / len(known) if known and len(known) == len(numbers) else None
    if isinstance(value, str):
        found = re.fullmatch(r"\s*-?\d+(\.\d+)?([eE]-?\d+)?\s*", value)
        return float(value) if found else None
    return float(value) if isinstance(value, bool | int | float) else None


class _Reader:
    """Tokens from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.at, self.depth = text, list[tuple[str, str]](), 0, 0
        place = 0
        while text[place:].strip():
            found = TOKEN.match(text, place)
            if found is None:
                raise self._error(text[place:].strip())
            self.tokens.append((found.lastgroup or "", found[found.lastgroup or 0]))
            place = found.end()

    def _error(self, rest: str) -> ConfigError:
        return ConfigError(
            f"{self.text!r}: cannot be read at {rest!r}; write fields, numbers, 'text', +, and one "
            "of == != < <= > >= contains, such as confidence >= 0.95"
        )

    def _peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def _take(self, *signs: str) -> str | None:
        kind, value = self._peek()
        if kind not in ("sign", "name") or value not in signs:
            return None
        self.at += 1
        return value

    def expect_end(self) -> None:
        if self._peek()[0] != "end":
            raise self._error(" ".join(value for _, value in self.tokens[self.at :]))

    def comparison(self) -> Expression:
        left = self.sum()
        sign = self._take(*COMPARISONS)
        if sign is None:
            return left
        right, compare = self.sum(), COMPARISONS[sign]
        return lambda scope: _compared(compare, left(scope), right(scope))

    def sum(self) -> Expression:
        terms = [self.value()]
        while self._take("+"):
            terms.append(self.value())
        return terms[0] if len(terms) == 1 else lambda scope: _added([t(scope) for t in terms])

    def value(self) -> Expression:
        kind, value = self._peek()
        if kind not in ("number", "text", "name"):
            raise self._error(value or "the end")
        self.at += 1
        if kind == "text":
            return lambda scope: value
        if kind == "number":
            number = float(value) if "." in value else int(value)
            return lambda scope: number
        return self._field(lambda scope: scope.get(value))

    def _field(self, outer: Expression) -> Expression:
        while True:
            if self._take("."):
                kind, name = self._peek()
                if kind != "name":
                    raise self._error(name or "the end")
                self.at += 1
                outer = _inside(outer, lambda scope, name=name: name)  # type: ignore[misc]
            elif self._take("["):
                self.depth += 1
                if self.depth > DEEPEST:
                    raise self._error("[")
                outer = _inside(outer, self.value())
                if not self._take("]"):
                    raise self._error(self._peek()[1] or "the end")
            else:
                return outer


def _inside(outer: Expression, key: Expression) -> Expression:
    def look(scope: Scope) -> Any:
        whole, part = outer(scope), key(scope)
        if isinstance(whole, Mapping):
            return whole.get(part)
        fits = isinstance(whole, Sequence) and isinstance(part, int) and not isinstance(whole, str)
        return whole[part] if fits and -len(whole) <= part < len(whole) else None

    return look


def _added(values: list[Any]) -> Any:
    if any(value is None for value in values):
        return None
    numbers = [number for value in values if (number := number_of(value)) is not None]
    return sum(numbers) if len(numbers) == len(values) else "".join(map(str, values))


def _compared(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    if left is None or right is None:
        return False
    numbers = number_of(left), number_of(right)
    pair = (str(left), str(right)) if None in numbers or compare is _contains else numbers
    return compare(*pair)


def _contains(left: str, right: str) -> bool:
    return right in left


COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "contains": _contains,
}
