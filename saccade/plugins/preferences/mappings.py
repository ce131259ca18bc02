"""Mappings of public preference sets: one function per set reads prompt, candidates and labels of a row.

A function returns a `Pair`, a `Rated` or a list of them (candidates that are compared within their group), or
None to leave the row out. The resulting rows have the format `sides`. Which candidate becomes `a` is random
per row: in a set that always has the better one first, the position would give the label away.

    >>> row = {"prompt": "a cat", "path1": "good.png", "path2": "bad.png", "confidence": 1}
    >>> [found["extra"]["labels"] for _, found in mapped("hpdv3", [(1, row)])]
    [{'preference': 'A'}]
"""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

from saccade.data.chats import PLACEHOLDER, RowError, escape
from saccade.data.records import json_data
from saccade.data.sources import Row
from saccade.errors import ConfigError, DataError, SaccadeError
from saccade.plugins.preferences.preference_rows import OTHER
from saccade.registry import Table
from saccade.user_code import raised_at, user_symbol

MAIN = "preference"  # the head that every row must label


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two candidates and the better one for each head: A, B, C for a tie, None for unknown."""

    kind: str  # of the candidates: "text" or a kind of media, such as "image"
    prompt: Any
    a: Any
    b: Any
    labels: Mapping[str, str | None]
    image: Any = None  # an image of the prompt
    criteria: Any = None  # appended to the prompt
    critique: Any = None  # a text that compares the two by position; the sides are then never swapped


@dataclass(frozen=True, kw_only=True)
class Rated:
    """One candidate with a rating per head, higher is better. It is paired with every candidate of its group whose
    rating for the head `preference` differs.
    """

    kind: str
    prompt: Any
    media: Any
    group: Any
    ratings: Mapping[str, Any]
    name: Any = None  # for the ids of pairs, such as the model that generated the candidate


MAPPINGS: Table[Callable[..., Any]] = Table("mappings", {})


def load_mapping(name: str) -> Callable[..., Any]:
    """Returns the mapping function of (row) or (row, folder): ours by name, or the user's as file.py:function."""
    if name in MAPPINGS:
        return MAPPINGS[name]
    if not name.rpartition(":")[0].endswith(".py"):
        helps = "write `def NAME(row): return Pair(…)` in file.py (docs/data.md has an example), then file.py:NAME"
        raise ConfigError(f"data.mapping={name}: expected one of {', '.join(MAPPINGS)}, or file.py:function; {helps}")
    return user_symbol(name, f"data.mapping={name}")


def mapped(
    name: str, rows: Iterable[tuple[int, Row]], *, folder: Path | None = None, seed: int = 0
) -> Iterator[tuple[int, Row | None]]:
    """Map numbered rows to numbered rows of the format `sides`; None for a row that the mapping leaves out."""
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
        except RowError as error:
            found = error
        except Exception as error:
            found = RowError(f"mapping {name} raised {raised_at(error, file)}, row {row.get('id', number)}")
        if found is None or isinstance(found, RowError):
            yield number, found
            continue
        where = f"mapping {name}, row {row.get('id', number)}"
        for one in found if isinstance(found, list) else [found]:
            if not isinstance(one, Pair | Rated):
                expected = "expected Pair(…), Rated(…), a list of Rated, or None to leave the row out"
                raise ConfigError(f"{where}: returned {type(one).__name__}; {expected}")
            heads = one.labels if isinstance(one, Pair) else one.ratings
            if not (isinstance(heads, Mapping) and MAIN in heads):
                raise ConfigError(f"{where}: {heads!r} lacks the head {MAIN}; return {{{MAIN!r}: …}}")
            if isinstance(one, Pair):
                yield number, _compared(name, one, row, seed)
            else:
                groups.setdefault(repr(one.group), []).append((number, one, row))
    for group in groups.values():
        for (number, first, row), (_, second, other) in combinations(group, 2):
            labels = {h: better(value, second.ratings.get(h)) for h, value in first.ratings.items()}
            if labels.get(MAIN) in ("A", "B"):
                pair = Pair(kind=first.kind, prompt=first.prompt, labels=labels, a=first.media, b=second.media)
                yield number, _compared(name, pair, _named(row, other, first, second), seed)


def _named(row: Mapping[str, Any], other: Mapping[str, Any], first: Rated, second: Rated) -> Mapping[str, Any]:
    """The row of the first candidate, with the names of both and an id for the pair."""
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
    drawn = hashlib.sha256(json.dumps([seed, json_data([pair.prompt, *shown])]).encode()).digest()[0] % 2
    swapped = bool(drawn) and pair.critique is None  # a critique names the sides as they were given
    extra = {n: v for n, v in row.items() if n != "id" and not _raw(v)}
    if swapped:
        shown, labels = shown[::-1], {head: OTHER.get(side, side) for head, side in labels.items()}
        if isinstance(models := extra.get("models"), list):
            extra["models"] = models[::-1]
    # The mapping decides where media go, so placeholders in the prompt are removed.
    text = PLACEHOLDER.sub("", str(pair.prompt)).strip()
    text = f"{text}\n{pair.criteria}" if pair.criteria else text
    image = [] if pair.image is None else [{"type": "image", "image": pair.image}]
    extra |= {"labels": labels, "sides": {"seed": seed, "swapped": swapped}}
    extra |= {n: getattr(pair, n) for n in ("critique", "criteria") if getattr(pair, n) is not None}
    a, b = (escape(str(side)) if pair.kind == "text" else side for side in shown)
    return {
        **({} if row.get("id") is None else {"id": row["id"]}),
        "messages": [{"role": "user", "content": [*image, {"type": "text", "text": escape(text)}]}],
        "a": [{"type": pair.kind, pair.kind: a}],
        "b": [{"type": pair.kind, pair.kind: b}],
        "extra": extra,
    }


def better(first: Any, second: Any) -> str | None:
    """The side of the higher value, C for a tie; None if a value is missing."""
    a, b = number_of(first), number_of(second)
    if a is None or b is None:
        return None
    return "A" if a > b else "B" if b > a else "C"


def number_of(value: Any) -> float | None:
    """Converts a value to a number: the mean of a list, a parsed string (CSV cells); None if it is not a number."""
    if isinstance(value, list | tuple):
        numbers = [number for item in value if (number := number_of(item)) is not None]
        return sum(numbers) / len(numbers) if numbers and len(numbers) == len(value) else None
    if isinstance(value, str):
        found = re.fullmatch(r"\s*-?\d+(\.\d+)?([eE]-?\d+)?\s*", value)
        return float(value) if found else None
    return float(value) if isinstance(value, bool | int | float) else None


def _raw(value: Any) -> bool:
    """Whether a column holds encoded media, which are not copied into `extra`."""
    if isinstance(value, Mapping):
        return any(map(_raw, value.values()))
    return isinstance(value, bytes) or (isinstance(value, list) and any(map(_raw, value)))


# -- public sets -----------------------------------------------------------------------------------
# Media paths start from the folder of the file, or from image_dir of the source. A missing column is None, and
# `mapped` skips a row whose prompt, candidate or label is missing.

Record = Mapping[str, Any]


def _pair(kind: str, row: Record, a: str, b: str, labels: Mapping[str, str | None]) -> Pair:
    """The pair of a row with a column `prompt` and the columns `a` and `b` for the candidates."""
    return Pair(kind=kind, prompt=row.get("prompt"), a=row.get(a), b=row.get(b), labels=labels)


def hpdv3(row: Record) -> Pair | None:
    """The first image is the better one; rows of low confidence are left out."""
    if not (number_of(row.get("confidence")) or 0) >= 0.95:
        return None
    return _pair("image", row, "path1", "path2", {MAIN: "A"})


def hpdv3_test(row: Record) -> Pair:
    """The first image is the better one; the test set is used whole."""
    return _pair("image", row, "path1", "path2", {MAIN: "A"})


def rewardbench(row: Record) -> Pair:
    """The chosen text is the better one."""
    return _pair("text", row, "chosen", "rejected", {MAIN: "A"})


def vl_rewardbench(row: Record) -> Pair:
    """Two replies to a question about an image; the better one has rank 0."""
    replies, ranks = row.get("response") or [None, None], row.get("human_ranking") or []
    label = {0: "A", 1: "B"}.get(ranks.index(0)) if 0 in ranks else None
    a, b, *_ = replies
    return Pair(kind="text", prompt=row.get("query"), a=a, b=b, labels={MAIN: label}, image=row.get("image"))


def imagerewarddb(row: Record) -> Rated:
    rank, prompt, media = number_of(row.get("rank")), row.get("prompt"), row.get("image_path")
    ratings = {"alignment": row.get("image_text_alignment_rating"), "fidelity": row.get("fidelity_rating")}
    ratings[MAIN] = None if rank is None else -rank
    return Rated(kind="image", prompt=prompt, media=media, group=row.get("prompt_id"), ratings=ratings)


def imagegen_cot(row: Record) -> Pair:
    """The label is read from <answer> only: the reasoning may say the same words about the other image."""
    turns = [turn.get("value") for turn in row.get("conversations") or [{}]]
    verdicts = ("Image 1 is better", "Image 2 is better", "Both images are equally good")
    sides = [s for s, v in zip("ABC", verdicts, strict=True) if f"<answer>{v}" in str(turns[-1])]
    label = sides[0] if len(sides) == 1 else None
    images: list[Any] = row.get("images") or []
    a, b, *_ = [*images, None, None]
    return Pair(kind="image", prompt=turns[0], a=a, b=b, labels={MAIN: label}, critique=turns[-1])


def rapidata_t2v(row: Record) -> Pair:
    """Three heads; for each, the side with the higher share of votes is better."""
    columns = {head: f"weighted_results%d_{head.capitalize()}" for head in (MAIN, "coherence", "alignment")}
    labels = {head: better(row.get(column % 1), row.get(column % 2)) for head, column in columns.items()}
    return _pair("video", row, "file_name1", "file_name2", labels)


def rapidata_i2v(row: Record) -> Pair:
    if row.get("prompt_asset") is None:
        raise RowError("the row has no prompt_asset, the image of its prompt")
    return replace(rapidata_t2v(row), image=row["prompt_asset"])


def _omnireward(kind: str, column: str) -> Callable[[Record], Pair]:
    """A mapping: every value other than response1, response2 and None is a tie."""

    def read(row: Record) -> Pair:
        side = {"response1": "A", "response2": "B", "None": None}
        labels = {MAIN: side.get(str(row.get("criteria_preference")), "C")}
        pair = _pair(kind, row, f"response1{column}", f"response2{column}", labels)
        return replace(pair, criteria=row.get("criteria"))

    return read


omnireward_t2i, omnireward_t2v = _omnireward("image", "_path"), _omnireward("video", "")
omnireward_t2a = _omnireward("audio", "_path")


def _rated(kind: str, prompt: Any, group: Any, ratings: Any, media: Callable[[str], Any]) -> list[Rated]:
    """The rated candidates of several models; `media` returns the path of a model's candidate."""
    rated = partial(Rated, kind=kind, prompt=prompt, group=group)
    given = {n: value for n, value in (ratings or {}).items() if value not in (None, "", [])}
    return [rated(media=media(n), ratings={MAIN: value}, name=n) for n, value in given.items()]


def genai_bench(row: Record) -> list[Rated]:
    """A row holds the images of several models, each in a column with the model's name."""
    return _rated("image", row.get("Prompt"), row.get("Prompt"), row.get("HumanRatings"), row.get)


def genai_bench_video(row: Record) -> list[Rated]:
    """A row holds ratings of several models; their videos are MODEL/ID.mp4."""
    id = row.get("id")
    media = lambda name: None if id is None else f"{name}/{id}.mp4"  # noqa: E731
    return _rated("video", row.get("prompt"), id, row.get("models"), media)


def videodpo(row: Record, folder: Path) -> Pair:
    """The first clip is the better one; metadata.json in the folder of the rows has the paths of clips."""
    path = folder / "metadata.json"
    if not path.is_file():
        raise DataError(f"mapping videodpo: {path} does not exist; it holds clips")
    clips = _table(path, path.stat().st_mtime_ns)
    a, b = (clips[row[name]]["basic"]["clip_path"] for name in ("video1", "video2"))
    return Pair(kind="video", prompt=row.get("frame_caption"), a=a, b=b, labels={MAIN: "A"})


@lru_cache(maxsize=2)
def _table(path: Path, changed: int) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def videogen_rewardbench(row: Record) -> Pair | None:
    """Four heads, each with the better side; rows without an overall label are left out."""
    if row.get("Overall") in (None, ""):
        return None
    heads = {MAIN: "Overall", "visual_quality": "VQ", "motion_quality": "MQ", "alignment": "TA"}
    sides = {"A": "A", "B": "B", "same": "C"}
    labels = {head: sides.get(str(row.get(column))) for head, column in heads.items()}
    return _pair("video", row, "path_A", "path_B", labels)


def audio_alpaca(row: Record) -> Pair:
    """The chosen sound is the better one."""
    return _pair("audio", row, "chosen", "rejected", {MAIN: "A"})
