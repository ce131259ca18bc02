"""Converts rows of public test sets to canonical rows, by the columns that suites.yaml lists.

Options may be a list, the text of a list, or lettered inside a text; letters are removed, as the prompt adds its own.
Pictures are placed where the question first mentions them.

    >>> lettered("Which?\\n(A) one\\n(B) two")
    ('Which?', ['one', 'two'])
"""

import ast
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from saccade.data.chats import RowError
from saccade.data.dataset import ROTATION_OF
from saccade.data.formats import LETTERS

Row = Mapping[str, Any]
MENTION = re.compile(r"<image ?(\d+)>")
MARKED = re.compile(r"(?:^|\n|;\s*)[ \t]*\(?([A-Z])[).:\uff1a][ \t]*")
IN_LINE = re.compile(r"(?:(?:options|choices):|,)\s*([A-Z]):[ \t]*", re.IGNORECASE)  # Options: A: one, B: two
HEADING = re.compile(r"\s*(?:choices|options)\s*:?\s*\Z", re.IGNORECASE)
IN_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
IN_PICTURE = "Answer the question that the picture shows."
# Hints about the answer's format, by its type and number of decimals.
TYPES = {
    ("integer", 0): "The answer is a whole number.",
    ("float", 1): "The answer is a number with one decimal.",
    ("float", 2): "The answer is a number with two decimals.",
    ("list", 0): "The answer is a list, such as [1, 2, 3].",
}


def read_suite_row(
    row: Row,
    columns: Mapping[str, Any],
    *,
    folder: str,
    needs_options: bool,
    rotated: int,
    shuffled: bool,
    numbered: bool,
) -> Row:
    """`folder`: prefix to remove from paths; `needs_options`: refuse a row without options; `shuffled`: the first
    option is correct and is moved; `numbered`: the answer is the number of an option, from 0; `rotated`: rows repeat
    a question with its options in several orders; above 1: their ids differ by multiples of it.
    """
    found = {part: _value(row, where) for part, where in columns.items()}
    if isinstance(found.get("category"), list):
        found["category"] = ", ".join(map(str, found["category"]))
    problem = str(found.get("problem") or "").strip()
    inside = columns.get("choices") is not None and columns["choices"] == columns.get("problem")
    if inside:
        problem, choices = lettered(problem)
    else:
        choices = options_of(found.get("choices"))
    if needs_options and len(choices) < 2:
        raise RowError("its text lists no options (A), (B) …")
    if shuffled:
        choices, found["answer"] = _shuffled(choices, problem)
    if numbered:
        found["answer"] = LETTERS[int(found["answer"])]
    if [*LETTERS[: len(choices)]] == [choice.strip() for choice in choices]:  # they name parts of the picture
        choices = []
    if any(MENTION.search(choice) for choice in choices):
        problem = "\n".join([problem, *(f"({letter}) {text}" for letter, text in zip(LETTERS, choices, strict=False))])
        choices = []
    pictures = [_picture(one, folder) for one in _listed(found.get("images"))]
    if unit := found.get("unit"):
        problem = f"{problem} (unit: {unit})"
    if not choices and (hint := TYPES.get((str(found.get("answer_type")), int(found.get("precision") or 0)))):
        problem = f"{problem} {hint}"
    problem, pictures = _placed(problem or IN_PICTURE, pictures)
    made: dict[str, Any] = {**found, "problem": problem, "choices": choices, "answer": _gold(found.get("answer"))}
    made |= {"images": pictures, "audios": [_picture(one, folder) for one in _listed(found.get("audios"))]}
    if rotated:
        made[ROTATION_OF] = _same_question(problem, pictures) if rotated == 1 else str(int(found["id"]) % rotated)
    return {name: value for name, value in made.items() if value not in (None, [], "")}


def _value(row: Row, where: Any) -> Any:
    """The value of a column, the list of several columns, or a text with {column} filled in."""
    if isinstance(where, list):
        return [row[name] for name in where if row.get(name) not in (None, "nan")]
    if "{" in where:
        return re.sub(r"\{(\w+~?)\}", lambda named: _text(_value(row, named[1])), where)
    for name in where.removesuffix("~").split("|"):
        value: Any = row
        for step in [name] if name in row else name.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    if not where.endswith("~"):
        raise RowError(f"no column {where!r}")
    return None


def _text(value: Any) -> str:
    return "" if value in (None, "nan") else str(value)


def category_of(row: Row, where: str) -> str:
    return str(_value(row, where) or "")


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


# -- options ----------------------------------------------------------------------------------------


def lettered(text: str) -> tuple[str, list[str]]:
    """A text, and the options (A), B. or C: at its end."""
    marks = next((marks for pattern in (MARKED, IN_LINE) if len(marks := _marks(pattern, text)) > 1), [])
    if not marks:
        return text, []
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    # What follows the last option, such as how to answer, is no part of it.
    inside = [text[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)]
    options = [option.split("\n")[0].strip(" ;,") for option in inside]
    return HEADING.sub("", text[: marks[0].start()]).strip(), options


def _marks(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """The marks of options from A on, as far as they follow each other."""
    marks: list[re.Match[str]] = []
    for mark in pattern.finditer(text):
        if mark[1] == LETTERS[len(marks)]:
            marks.append(mark)
        elif mark[1] == "A":
            marks = [mark]
    return marks


def options_of(value: Any) -> list[str]:
    """Options without letters, from a list, the text of a list, or lettered options in one text."""
    if isinstance(value, str):
        if not value.lstrip().startswith("["):
            return lettered(value)[1]
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise RowError(f"options {value[:60]!r} cannot be read: {error}") from None
    options = [str(one).strip() for one in _listed(value)]
    marked = [MARKED.match(option) for option in options]
    letters = [mark[1] if mark else "" for mark in marked]
    if options and letters == [*LETTERS[: len(options)]]:
        return [option[mark.end() :].strip() for option, mark in zip(options, marked, strict=True) if mark]
    return options


def _shuffled(options: list[str], problem: str) -> tuple[list[str], str]:
    digest = hashlib.sha256(problem.encode(errors="surrogatepass")).digest()
    order = np.random.default_rng(int.from_bytes(digest[:8], "big")).permutation(len(options)).tolist()
    return [options[old] for old in order], LETTERS[order.index(0)]


# -- pictures and answers ---------------------------------------------------------------------------


def _picture(value: Any, folder: str) -> Any:
    if isinstance(value, str):  # base64, or a path
        return re.sub(rf"^(?:\./)?(?:{re.escape(folder)}/)?", "", value)
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        return value["bytes"]
    if not isinstance(value, bytes | Mapping):
        raise RowError("a picture or sound is neither base64, bytes nor a path")
    return value


def _placed(problem: str, pictures: list[Any]) -> tuple[str, list[Any]]:
    """Place each picture at its first mention. Unmentioned ones are dropped, unless no picture is mentioned."""
    shown: list[int] = []

    def place(mention: re.Match[str]) -> str:
        number = int(mention[1])
        if number in shown or number > len(pictures):
            return f"image {number}"
        shown.append(number)
        return "<image>"

    placed = MENTION.sub(place, problem)
    return placed, [pictures[number - 1] for number in shown] or pictures


def _gold(value: Any) -> Any:
    """The answer without the solution before #### or the tag around it; a list of texts means alternatives."""
    if not isinstance(value, str):
        return value
    if tagged := IN_TAG.findall(value):
        value = tagged[-1]
    value = value.rpartition("####")[2].strip()
    if value.startswith("['"):
        try:
            return [str(one) for one in ast.literal_eval(value)]
        except (ValueError, SyntaxError):
            return value
    return value


def _same_question(problem: str, pictures: list[Any]) -> str:
    known = [one.encode() if isinstance(one, str) else one for one in pictures]
    if not known or not isinstance(known[0], bytes):
        raise RowError("column 'image' holds neither base64 nor bytes")
    return hashlib.sha256(problem.encode(errors="surrogatepass") + b"\0" + known[0]).hexdigest()[:16]
