"""Preference sets of other people: a mapping says where a row keeps prompt, candidates, labels.

A mapped row has the format `sides`: candidate `a`, candidate `b`, and in `labels` for each named
head which of them is better (`C`: neither). Which of the two given candidates becomes `a` is drawn
for each row: a set that always names the better one first would tell the label by the place.
Opens no media and runs no code (`expressions.py`).

    >>> mapping = load_mapping("hpdv3")
    >>> row = {"prompt": "a cat", "path1": "good.png", "path2": "bad.png", "confidence": 1}
    >>> [(number, mapped["extra"]["labels"]) for number, mapped in apply(mapping, [(1, row)])]
    [(1, {'preference': 'A'})]
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from saccade.data.chats import PLACEHOLDER, RowError, escape
from saccade.data.comparisons import OTHER
from saccade.data.expressions import Expression, Scope, number_of, parse
from saccade.data.records import plain
from saccade.data.sources import Row
from saccade.errors import ConfigError, DataError

SHIPPED = Path(__file__).with_name("mappings.yaml")
MODALITIES = {
    "t2i": "image",
    "t2v": "video",
    "i2v": "video",
    "t2a": "audio",
    "series": "series",
    "text": "text",
}
MAIN = "preference"  # the head that every mapping labels
WITHIN = re.compile(r"all_non_tied_within\((.+)\)")
Labeller = Callable[[Scope], str | None]


@dataclass(frozen=True, kw_only=True)
class PreferenceMapping:
    """One entry of a mapping file, its expressions parsed."""

    name: str
    modality: str
    prompt: Expression
    sides: tuple[Expression, Expression] | None = None  # of pairing=given
    labels: Mapping[str, Labeller] = field(default_factory=dict)
    within: Expression | None = None  # rows with the same value are paired with each other
    media: Expression | None = None  # of a member of such a group
    ratings: Mapping[str, tuple[Expression, int]] = field(default_factory=dict)  # (value, sign)
    image: Expression | None = None  # that the prompt shows
    criteria: Expression | None = None
    critique: Expression | None = None
    keep_if: Expression | None = None
    task_instruction: str | None = None
    tables: Mapping[str, str] = field(default_factory=dict)  # name → JSON file beside the rows


# -- reading a mapping -----------------------------------------------------------------------------


def load_mapping(name: str) -> PreferenceMapping:
    """A shipped mapping by its name, or FILE.yaml[:NAME] of your own."""
    path, _, entry = name.partition(":")
    if Path(path).suffix not in (".yaml", ".yml"):
        return _read(name, _entry(_file(SHIPPED), name, "data.mapping"))
    if not Path(path).is_file():
        raise ConfigError(f"data.mapping={name}: the file does not exist")
    found = _file(Path(path))
    if not entry and "modality" in found:
        return _read(Path(path).stem, found)
    return _read(entry or path, _entry(found, entry, f"data.mapping={name}"))


@cache
def _file(path: Path) -> Mapping[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a mapping file holds fields such as prompt, a, b and label")
    return found


def _entry(found: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(found.get(name), dict):
        raise ConfigError(
            f"{where}: no mapping {name!r}; there are {', '.join(found)}, or give FILE.yaml:NAME"
        )
    return found[name]


def _read(name: str, given: Mapping[str, Any]) -> PreferenceMapping:
    def refuse(why: str) -> ConfigError:
        return ConfigError(f"mapping {name}: {why}")

    if unknown := set(given) - FIELDS:
        raise refuse(f"unknown field {min(unknown)}; fields are {', '.join(sorted(FIELDS))}")
    if given.get("modality") not in MODALITIES:
        raise refuse(f"modality must be one of {', '.join(MODALITIES)}")
    pairing = str(given.get("pairing", "given"))
    found = WITHIN.fullmatch(pairing)
    needed = ("prompt",) if found else ("prompt", "a", "b")
    if not found and pairing != "given":
        raise refuse(f"pairing={pairing}: write given, or all_non_tied_within(prompt_id)")
    for role in needed:
        if role not in given:
            raise refuse(f"needs {role}, an expression such as {role}: {role}")
    parsed = {role: parse(str(given[role])) for role in EXPRESSIONS if role in given}
    labels = {
        head: _labeller(spec, f"mapping {name}: {head}")
        for part in ("label", "heads")
        for head, spec in dict(given.get(part, {})).items()
    }
    ratings = {
        head: (parse(str(value)), sign)
        for part, sign in (("rating", 1), ("rank", -1))
        for head, value in _by_head(given.get(part)).items()
    }
    if MAIN not in (ratings if found else labels):
        raise refuse(
            f"no label for the head {MAIN}; write "
            + ("rating: score" if found else f"label: {{{MAIN}: A}}")
        )
    if "critique" in given and (found or isinstance(dict(given.get("label", {})).get(MAIN), str)):
        raise refuse("a critique speaks of the first and the second, so rows must name the better")
    return PreferenceMapping(
        name=name,
        modality=given["modality"],
        prompt=parsed["prompt"],
        sides=None if found else (parsed["a"], parsed["b"]),
        labels=labels,
        within=parse(found[1]) if found else None,
        ratings=ratings,
        task_instruction=given.get("task_instruction"),
        tables=dict(given.get("tables", {})),
        **{
            role: parsed.get(role) for role in ("media", "image", "criteria", "critique", "keep_if")
        },
    )


EXPRESSIONS = ("prompt", "a", "b", "media", "image", "criteria", "critique", "keep_if")
FIELDS = {
    *EXPRESSIONS,
    *("modality", "label", "heads", "rating", "rank", "pairing", "task_instruction", "tables"),
}


def _by_head(value: Any) -> Mapping[str, Any]:
    return {} if value is None else value if isinstance(value, dict) else {MAIN: value}


def _labeller(spec: Any, where: str) -> Labeller:
    """A constant side, two values of which the higher wins, conditions of which one must hold (a
    third one: a tie), or a column that names the side.
    """
    if isinstance(spec, str) and spec in OTHER:
        return lambda scope: spec
    if isinstance(spec, list) and len(spec) in (2, 3):
        parsed = [parse(str(value)) for value in spec]

        def compared(scope: Scope) -> str | None:
            values = [value(scope) for value in parsed]
            if len(values) == 2 and not all(isinstance(value, bool) for value in values):
                return better(*values)
            holding = [side for side, value in zip("ABC", values, strict=False) if value is True]
            return holding[0] if len(holding) == 1 else None

        return compared
    if isinstance(spec, dict) and "from" in spec and set(spec) <= {"from", *OTHER}:
        column = parse(str(spec["from"]))
        sides = {
            str(value): side
            for side in OTHER
            for value in (spec[side] if isinstance(spec.get(side), list) else [spec.get(side)])
            if value is not None
        }

        def named(scope: Scope) -> str | None:
            value = column(scope)
            return None if value is None else sides.get(str(value), sides.get("*"))

        return named
    raise ConfigError(
        f"{where}: {spec!r} is no label; write A, two expressions [score_a, score_b], or "
        "{from: winner, A: left, B: right, C: same}"
    )


def better(first: Any, second: Any, sign: int = 1) -> str | None:
    """The side of the higher value; None where one is missing."""
    numbers = number_of(first), number_of(second)
    if numbers[0] is None or numbers[1] is None:
        return None
    gap = sign * (numbers[0] - numbers[1])
    return "A" if gap > 0 else "B" if gap < 0 else "C"


def tables_of(mapping: PreferenceMapping, folder: Path | None) -> dict[str, Any]:
    """The JSON files that a mapping looks things up in, from the folder of its rows."""
    tables = {}
    for name, file in mapping.tables.items():
        path = (folder or Path()) / file
        if not path.is_file():
            raise DataError(f"mapping {mapping.name}: {path} does not exist; it holds {name}")
        tables[name] = json.loads(path.read_text(encoding="utf-8"))
    return tables


# -- applying it -----------------------------------------------------------------------------------


def apply(
    mapping: PreferenceMapping,
    rows: Iterable[tuple[int, Row]],
    *,
    tables: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Iterator[tuple[int, Row | None]]:
    """Numbered rows of the format `sides`; None stands for a row that `keep_if` leaves out."""
    groups: dict[str, list[tuple[int, Scope]]] = {}
    for number, row in rows:
        if isinstance(row, RowError):
            yield number, row
            continue
        scope = {**(tables or {}), **row}
        if mapping.keep_if is not None and not mapping.keep_if(scope):
            yield number, None
        elif mapping.within is None:
            yield number, _row(mapping, scope, row, seed)
        else:
            group = groups.setdefault(repr(mapping.within(scope)), [])
            group += [(number, member) for member in _members(mapping, scope)]
    for group in groups.values():
        for (number, first), (_, second) in combinations(group, 2):
            pair = _pair(mapping, first, second, seed)
            if pair is not None:
                yield number, pair


def _members(mapping: PreferenceMapping, scope: Scope) -> Iterator[Scope]:
    """A row is one member, or, where it rates a record of things by name, one for each of them."""
    values = {head: value(scope) for head, (value, _) in mapping.ratings.items()}
    main = values[MAIN]
    names = (
        [None]
        if not isinstance(main, Mapping)
        else [n for n, v in main.items() if v not in (None, "", [])]
    )
    for name in names:
        one = {h: v.get(name) if isinstance(v, Mapping) else v for h, v in values.items()}
        inside = scope if name is None else {**scope, "key": name}
        shown = mapping.media(inside) if mapping.media else scope.get(str(name))
        yield {**inside, _RATED: one, _SHOWN: shown}


_RATED, _SHOWN = "\0rated", "\0shown"  # names that no column has


def _pair(mapping: PreferenceMapping, first: Scope, second: Scope, seed: int) -> Row | None:
    rated = first[_RATED], second[_RATED]
    found = {h: better(rated[0][h], rated[1][h], s) for h, (_, s) in mapping.ratings.items()}
    if found[MAIN] in (None, "C"):
        return None
    row = {name: value for name, value in first.items() if name not in (_RATED, _SHOWN, "key")}
    names = [member["key"] for member in (first, second) if "key" in member]
    given = row.get("id")
    if names:
        row["models"] = names
        row["id"] = None if given is None else f"{given}:{'-'.join(map(str, names))}"
    elif given is not None and second.get("id") is not None:
        row["id"] = f"{given}:{second['id']}"
    shown = first[_SHOWN], second[_SHOWN]
    return _compared(mapping, first, row, shown, found, seed)


def _row(mapping: PreferenceMapping, scope: Scope, row: Mapping[str, Any], seed: int) -> Row:
    assert mapping.sides is not None
    labels = {head: label(scope) for head, label in mapping.labels.items()}
    return _compared(
        mapping, scope, row, tuple(side(scope) for side in mapping.sides), labels, seed
    )


def _compared(
    mapping: PreferenceMapping,
    scope: Scope,
    row: Mapping[str, Any],
    shown: tuple[Any, ...],
    found: Mapping[str, str | None],
    seed: int,
) -> Row:
    prompt = mapping.prompt(scope)
    missing = [name for name, value in zip(("a", "b"), shown, strict=True) if value is None]
    labels = {head: side for head, side in found.items() if side is not None}
    if prompt is None or missing or not labels:
        what = "prompt" if prompt is None else missing[0] if missing else "label"
        return RowError(f"the row has no {what} where mapping {mapping.name} looks for it")
    critique = mapping.critique(scope) if mapping.critique else None
    drawn = hashlib.sha256(json.dumps([seed, plain([prompt, *shown])]).encode()).digest()[0] % 2
    swapped = bool(drawn) and critique is None  # a critique names the sides as they were given
    kept = {n: v for n, v in row.items() if n != "id" and n not in mapping.tables and not _raw(v)}
    if swapped:
        shown, labels = shown[::-1], {head: OTHER[side] for head, side in labels.items()}
        kept |= {"models": kept["models"][::-1]} if "models" in kept else {}
    kind = MODALITIES[mapping.modality]
    question: list[dict[str, Any]] = []
    if mapping.image is not None:
        question.append({"type": "image", "image": mapping.image(scope)})
    criteria = mapping.criteria(scope) if mapping.criteria else None
    question.append({"type": "text", "text": escape(_worded(mapping, str(prompt), criteria))})
    added = {"labels": labels, "sides": {"seed": seed, "swapped": swapped}}
    texts = {"critique": critique, "criteria": criteria}
    named = {} if row.get("id") is None else {"id": row["id"]}
    return {
        **named,
        "messages": [{"role": "user", "content": question}],
        "a": [_item(kind, shown[0])],
        "b": [_item(kind, shown[1])],
        "extra": kept | added | {name: t for name, t in texts.items() if t is not None},
    }


def _worded(mapping: PreferenceMapping, prompt: str, criteria: Any) -> str:
    """What the candidates were asked for. The mapping places the media, so marks of them go."""
    prompt = PLACEHOLDER.sub("", prompt).strip()
    text = mapping.task_instruction or ("{prompt}\n{criteria}" if criteria else "{prompt}")
    values = {"prompt": prompt, "criteria": "" if criteria is None else str(criteria)}
    return re.sub(r"\{(prompt|criteria)\}", lambda found: values[found[1]], text)


def _item(kind: str, value: Any) -> dict[str, Any]:
    return {"type": kind, kind: escape(str(value)) if kind == "text" else value}


def _raw(value: Any) -> bool:
    """Whether a column holds encoded media, which the record keeps once."""
    if isinstance(value, Mapping):
        return any(_raw(item) for item in value.values())
    return isinstance(value, bytes) or (isinstance(value, list) and any(map(_raw, value)))
