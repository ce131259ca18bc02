"""Preference sets in layouts of their own: a function per set reads prompt, candidates and labels.

A function returns a `Pair`, a list of `Rated` candidates that are compared within their group, or
None for a row to leave out. The result has the format `sides`. Which candidate of a pair becomes
`a` is drawn for each row: in a set that always names the better one first, the position would give
the label away.

    >>> row = {"prompt": "a cat", "path1": "good.png", "path2": "bad.png", "confidence": 1}
    >>> [found["extra"]["labels"] for _, found in mapped("hpdv3", [(1, row)])]
    [{'preference': 'A'}]
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from saccade.data.chats import PLACEHOLDER, RowError, escape
from saccade.data.records import plain
from saccade.data.sources import Row
from saccade.errors import ConfigError, SaccadeError
from saccade.plugins.preferences.preference_rows import OTHER
from saccade.registry import Table
from saccade.user_code import own_module, raised_at

MAIN = "preference"  # the head that every row labels
EXAMPLE = (
    "write file.py with `from saccade.plugins.preferences.mappings import Pair` and `def NAME(row): return "
    "Pair(kind='image', prompt=row['caption'], a=row['left'], b=row['right'], "
    "labels={'preference': row['winner']})`, then data.mapping=file.py:NAME"
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two candidates and the better one for each head: A, B, C for a tie, None for unknown."""

    kind: str  # of the candidates: text or a kind of media, such as image
    prompt: Any
    a: Any
    b: Any
    labels: Mapping[str, str | None]
    image: Any = None  # that the prompt shows
    criteria: Any = None  # shown below the prompt
    critique: Any = None  # what somebody wrote about the two; a row with it keeps its order


@dataclass(frozen=True, kw_only=True)
class Rated:
    """One candidate with a rating for each head, higher is better. It makes a pair with every
    candidate of its group that is not tied with it.
    """

    kind: str
    prompt: Any
    media: Any
    group: Any
    ratings: Mapping[str, Any]
    name: Any = None  # such as the model that made it


MAPPINGS: Table[Callable[..., Any]] = Table("mappings", {})


def load_mapping(name: str) -> Callable[..., Any]:
    """A function of a row, or of a row and its folder: a shipped mapping by its name, or
    file.py:function of the user.
    """
    if name in MAPPINGS:
        return MAPPINGS[name]
    where, (path, _, symbol) = f"data.mapping={name}", name.rpartition(":")
    if Path(path).suffix != ".py":
        raise ConfigError(f"{where}: expected one of {', '.join(MAPPINGS)}, or file.py:function; {EXAMPLE}")
    if not Path(path).is_file():
        raise ConfigError(f"{where}: the file does not exist; expected file.py:function")
    try:
        module = own_module(path)
    except Exception as error:
        raise ConfigError(f"{where}: the file raised {raised_at(error, path)}") from error
    if not callable(function := getattr(module, symbol, None)):
        found = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        raise ConfigError(f"{where}: expected file.py:function; the file has {', '.join(found) or 'none'}")
    return function


def mapped(
    name: str, rows: Iterable[tuple[int, Row]], *, folder: Path | None = None, seed: int = 0
) -> Iterator[tuple[int, Row | None]]:
    """Numbered rows of the format `sides`; None stands for a row that the mapping leaves out."""
    function, groups = load_mapping(name), dict[str, list[tuple[int, Rated, Mapping[str, Any]]]]()
    file = None if name in MAPPINGS else name.rpartition(":")[0]
    arguments = [folder or Path()] if len(inspect.signature(function).parameters) > 1 else []
    for number, row in rows:
        if isinstance(row, RowError):
            yield number, row
            continue
        try:
            found = function(row, *arguments)
        except SaccadeError:
            raise
        except Exception as error:
            id = "" if row.get("id") is None else f", id {row['id']}"
            reason = f"mapping {name} raised {raised_at(error, file)}{id}"
            yield number, error if isinstance(error, RowError) else RowError(reason)
            continue
        if found is None:
            yield number, None
            continue
        for one in found if isinstance(found, list) else [found]:
            heads = getattr(one, "labels", getattr(one, "ratings", None))
            if isinstance(one, Pair | Rated) and not (isinstance(heads, Mapping) and MAIN in heads):
                where = f"mapping {name}, row {row.get('id', number)}"
                raise ConfigError(f"{where}: {heads!r} lacks the head {MAIN}; return {{{MAIN!r}: …}}")
            if isinstance(one, Pair):
                yield number, _compared(name, one, row, seed)
            elif isinstance(one, Rated):
                groups.setdefault(repr(one.group), []).append((number, one, row))
            else:
                raise ConfigError(
                    f"mapping {name}, row {row.get('id', number)}: returned {type(one).__name__}; expected "
                    "Pair(…), Rated(…), a list of Rated, or None to leave the row out"
                )
    for group in groups.values():
        for (number, first, row), (_, second, other) in combinations(group, 2):
            labels = {h: better(value, second.ratings.get(h)) for h, value in first.ratings.items()}
            if labels.get(MAIN) in ("A", "B"):
                pair = Pair(kind=first.kind, prompt=first.prompt, labels=labels, a=first.media, b=second.media)
                yield number, _compared(name, pair, _named(row, other, first, second), seed)


def _named(row: Mapping[str, Any], other: Mapping[str, Any], first: Rated, second: Rated) -> Mapping[str, Any]:
    """The row of the first candidate, with an id for the pair."""
    names, id = [one.name for one in (first, second) if one.name is not None], row.get("id")
    rest = "-".join(map(str, names)) if names else other.get("id")
    models = {"models": names} if names else {}
    return {**row, **models, "id": id if None in (id, rest) else f"{id}:{rest}"}


def _compared(name: str, pair: Pair, row: Mapping[str, Any], seed: int) -> Row:
    labels = {head: side for head, side in pair.labels.items() if side is not None}
    needed = {"prompt": pair.prompt, "a": pair.a, "b": pair.b, "label": labels or None}
    if missing := [what for what, value in needed.items() if value is None]:
        return RowError(f"the row has no {missing[0]} where mapping {name} looks for it")
    shown = pair.a, pair.b
    drawn = hashlib.sha256(json.dumps([seed, plain([pair.prompt, *shown])]).encode()).digest()[0] % 2
    swapped = bool(drawn) and pair.critique is None  # a critique names the sides as they were given
    extra = {n: v for n, v in row.items() if n != "id" and not _raw(v)}
    if swapped:
        shown, labels = shown[::-1], {head: OTHER.get(side, side) for head, side in labels.items()}
        if isinstance(models := extra.get("models"), list):
            extra["models"] = models[::-1]
    # The mapping places the media, so marks of them in the prompt go.
    text = PLACEHOLDER.sub("", str(pair.prompt)).strip()
    text = f"{text}\n{pair.criteria}" if pair.criteria else text
    image = [] if pair.image is None else [{"type": "image", "image": pair.image}]
    texts = {"critique": pair.critique, "criteria": pair.criteria}
    a, b = (escape(str(side)) if pair.kind == "text" else side for side in shown)
    return {
        **({} if row.get("id") is None else {"id": row["id"]}),
        "messages": [{"role": "user", "content": [*image, {"type": "text", "text": escape(text)}]}],
        "a": [{"type": pair.kind, pair.kind: a}],
        "b": [{"type": pair.kind, pair.kind: b}],
        "extra": extra
        | {"labels": labels, "sides": {"seed": seed, "swapped": swapped}}
        | {name: t for name, t in texts.items() if t is not None},
    }


def better(first: Any, second: Any) -> str | None:
    """The side of the higher value, C for a tie; None where one is missing."""
    a, b = number_of(first), number_of(second)
    if a is None or b is None:
        return None
    return "A" if a > b else "B" if b > a else "C"


def number_of(value: Any) -> float | None:
    """The number that a value stands for: a list counts as its mean, a CSV cell is a text."""
    if isinstance(value, list | tuple):
        numbers = [number for item in value if (number := number_of(item)) is not None]
        return sum(numbers) / len(numbers) if numbers and len(numbers) == len(value) else None
    if isinstance(value, str):
        found = re.fullmatch(r"\s*-?\d+(\.\d+)?([eE]-?\d+)?\s*", value)
        return float(value) if found else None
    return float(value) if isinstance(value, bool | int | float) else None


def _raw(value: Any) -> bool:
    """Whether a column holds encoded media, which the record keeps once."""
    if isinstance(value, Mapping):
        return any(map(_raw, value.values()))
    return isinstance(value, bytes) or (isinstance(value, list) and any(map(_raw, value)))
