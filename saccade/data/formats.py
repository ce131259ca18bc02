"""Convert rows of any known format to samples.

A format says which columns hold what; everything else (placeholders, chats, golds, choices) follows one set of rules.
The function that opens images is passed in, so this file does no I/O. A row that cannot be read raises a `RowError`
with the reason; nothing is guessed.

    >>> qa = FORMATS["qa"]
    >>> read_row({"question": "2+2?", "answer": "#### 4"}, qa, DataConfig(), open_image=None).answer
    '4'
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, takewhile
from typing import Any, cast

import numpy as np

from saccade.config import DataConfig
from saccade.data.chats import MediaSource, RowError, Turns, arrange, parse_json, read_chat
from saccade.data.records import CANONICAL, content_hash, json_data
from saccade.errors import ConfigError, DataError
from saccade.media.kinds import KINDS
from saccade.registry import Table
from saccade.types import Media, Message, Sample

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SURROGATE = re.compile("[\ud800-\udfff]")
NUMBERS = {int, float, bool, type(None)}
# Opens (source, **options): `kind` unless it is an image, and the row's options for it.
OpenImage = Callable[..., Media]


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Format:
    """The columns of a format. They are tried in order; a.b looks into a nested record."""

    name: str
    matches: Callable[[Collection[str]], bool]
    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    gold: Callable[[str], str] = str
    data_source: tuple[str, ...] = ("data_source", "datasource")
    thinking: tuple[str, ...] = ()
    candidates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # columns by role
    label: tuple[str, ...] = ()  # of a single candidate
    # (prompt, cells of the candidates) → turns of the question, and of each candidate
    read_candidates: Callable[[Any, list[Any]], tuple[Turns, list[Turns]]] | None = None
    read_label: Callable[[Any], bool] | None = None
    check: Callable[[Sample], None] = lambda sample: None  # refuses rows with a RowError


def _is_chat(columns: Collection[str]) -> bool:
    return any(name in columns for name in ("messages", "message", "input")) and not {"input", "label"} <= set(columns)


_OURS = (
    Format(name="messages", matches=_is_chat, prompt=("messages", "message", "input"), answer=("answer", "solution")),
    Format(
        name="easyr1",
        matches=lambda columns: "problem" in columns and ("answer" in columns or "solution" not in columns),
        prompt=("problem",),
        answer=("answer",),
    ),
    Format(
        name="qa",
        matches=lambda columns: "question" in columns,
        prompt=("question",),
        answer=("answer",),
        gold=lambda text: text.rpartition("####")[2].strip(),
    ),
)
FORMATS: Table[Format] = Table("row_formats", {format.name: format for format in _OURS})
FOR_REWARDS = ("segmentation_path", "mask", "level")  # may name a file that a reward reads
SHARED_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "id": ("id", "doc_id", "unique_id", "question_id"),
    **{kind.columns[0]: kind.columns for kind in KINDS.values()},
    "choices": ("choices", "options"),
    "system": ("system",),
}
COMPARED = ("chosen", "rejected", "output", "label")
# Roles of media columns.
MEDIA_ROLES = {kind.columns[0]: name for name, kind in KINDS.items()}
# How names of columns begin that probably hold a role.
LIKELY = {"prompt": "prompt|quer|question|text", "answer": "answer|gt|label|gold|truth", "images": "image|img|pic"}
ROLES = ("prompt", "answer", *MEDIA_ROLES, "id", "data_source", "choices", "system", *COMPARED)


def columns_of(format: Format, keys: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Columns to try for each role; `keys` replaces them, an empty name means there is none."""
    columns = {
        **SHARED_COLUMNS,
        "prompt": format.prompt,
        "answer": format.answer,
        "data_source": format.data_source,
        "thinking": format.thinking,
        "label": format.label,
        **format.candidates,
    }
    return columns | {role: (column,) if column else () for role, column in keys.items()}


def detect(columns: Collection[str], config: DataConfig, name: str = "data") -> Format:
    """The format of rows with these columns, or the one that the config names."""
    listed = ", ".join(sorted(columns)[:30]) + " …" * (len(columns) > 30)
    for role, column in config.keys.items():
        if role not in ROLES:
            raise ConfigError(f"data.keys.{role}: unknown role; roles are {', '.join(ROLES)}")
        if column and column.partition(".")[0] not in columns:
            raise DataError(f"{name}: data.keys.{role}={column} is no column; there are {listed}")
    if config.format != "auto":
        if config.format not in FORMATS:
            raise ConfigError(f"data.format={config.format}: unknown; choose auto, {', '.join(FORMATS)}")
        return FORMATS[config.format]
    named = {role for role in COMPARED if config.keys.get(role)}
    found = [format for format in FORMATS.values() if format.matches({*columns, *named})]
    comparing = [format for format in found if format.candidates]
    if comparing:  # a preference format wins over others that match
        found = comparing
    elif prompt := config.keys.get("prompt"):
        found = [format for format in found if prompt in format.prompt] or [FORMATS["easyr1"]]
    if (answer := config.keys.get("answer")) and len(found) > 1:
        found = [format for format in found if answer in format.answer] or found
    if len(found) == 1:
        return found[0]
    if not found:
        like = {r: [c for c in columns if re.search(rf"(?i)(?<![a-z])(?:{w})", c)] for r, w in LIKELY.items()}
        hint = " ".join(f"data.keys.{r}={min(c, default='COLUMN')}" for r, c in like.items() if c or r != "images")
        raise DataError(f"{name}: columns {listed} belong to no known format ({', '.join(FORMATS)}); name them: {hint}")
    fitting = f"several formats: {', '.join(format.name for format in found)}"
    raise DataError(f"{name}: columns {listed} fit {fitting}; choose one, for example data.format={found[0].name}")


# -- rows ------------------------------------------------------------------------------------------


def read_row(
    row: Mapping[str, Any],
    format: Format,
    config: DataConfig,
    *,
    open_image: OpenImage,
    default_source: str = "default",
    marks: Collection[str] = (),
) -> Sample:
    """Convert one row to a sample. `marks`: kinds of media whose placeholders are never plain text."""
    columns = columns_of(format, config.keys)
    fields = {role: _field(row, names, str if role == "data_source" else object) for role, names in columns.items()}
    values = {role: value for role, (_, value) in fields.items()}
    if values["prompt"] is None and not format.candidates:
        raise RowError(f"no prompt in column {' or '.join(columns['prompt'])}")
    media = [one for role, kind in MEDIA_ROLES.items() for one in _media_sources(row, *fields[role], kind)]
    asked, candidates = _turns(values, format)
    turns = [*asked, *(turn for candidate in candidates for turn in candidate)]
    roles = [role for role in MEDIA_ROLES if any(name in row for name in columns[role])]
    kinds = {MEDIA_ROLES[role] for role in roles}.union(marks)
    turns = arrange(turns, media, prepend=config.placeholder == "prepend", columns=kinds)
    count = sum(isinstance(piece, MediaSource) for _, pieces in turns for piece in pieces)
    if count > config.max_images:
        raise RowError(f"{count} images, data.max_images is {config.max_images}")
    used = {column for column, _ in fields.values()}
    lettered = [*takewhile(lambda name: name not in used and isinstance(row.get(name), str | int | float), LETTERS)]
    if lettered[1:] and values["choices"] is None and "choices" not in config.keys and not format.candidates:
        values["choices"], used = [row[name] for name in lettered], used.union(lettered)
    choices = _choices(values["choices"])

    def opened(piece: Any) -> Any:
        if not isinstance(piece, MediaSource):
            return piece
        return open_image(piece.source, **({} if piece.kind == "image" else {"kind": piece.kind}), **piece.options)

    messages = [Message(role=cast(Any, role), parts=tuple(map(opened, pieces))) for role, pieces in turns]
    ends = np.cumsum([len(asked), *(len(candidate) for candidate in candidates)]).tolist()
    sample = Sample(
        id="" if values["id"] is None else str(values["id"]),
        messages=tuple(messages[: len(asked)]),
        candidates=tuple(tuple(messages[a:b]) for a, b in pairwise(ends)),
        desirable=format.read_label(values["label"]) if format.read_label else None,
        answer=_gold(values["answer"], format.gold, choices),
        data_source=values["data_source"] or default_source,
        choices=choices,
        extra=_extra(row, used, format),
    )
    format.check(sample)
    _require_characters(sample)
    return sample if sample.id else replace(sample, id=content_hash(sample)[:16])


def _require_characters(sample: Sample) -> None:
    """Refuse lone surrogates: JSON can hold them, but tokenizers and files cannot encode them."""
    messages = [*sample.messages, *chain(*sample.candidates)]
    shown = [part if isinstance(part, str) else part.path for message in messages for part in message.parts]
    fields = {"id": sample.id, "data_source": sample.data_source, "prompt": shown, "answer": sample.answer}
    for name, value in chain(fields.items(), {"choices": sample.choices}.items(), sample.extra.items()):
        if found := _lone_surrogate([name, value]):
            raise RowError(f"{name}: {found[0]!r} is half of a surrogate pair and no character; remove it")


def _lone_surrogate(value: Any) -> re.Match[str] | None:
    if isinstance(value, str):
        return None if value.isascii() else SURROGATE.search(value)
    items = [*value, *value.values()] if isinstance(value, Mapping) else value
    if not isinstance(items, list | tuple) or NUMBERS.issuperset(map(type, items)):  # a column may have many numbers
        return None
    return next(filter(None, map(_lone_surrogate, items)), None)


def row_id(row: Mapping[str, Any], config: DataConfig) -> str | None:
    """The id in the row's id column, even if the rest of the row cannot be read."""
    key = config.keys.get("id")
    _, value = _field(row, (key,) if key else SHARED_COLUMNS["id"])
    return None if value is None else writable(str(value))


def writable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _field(row: Mapping[str, Any], names: Iterable[str], kind: type = object) -> tuple[str, Any]:
    """(column, value) of the first filled column. A nested value has no column here, so its column stays in `extra`."""
    for name in names:
        outer, _, inner = name.partition(".")
        value, column = row.get(name), name
        if value is None and inner and isinstance(row.get(outer), Mapping):
            value, column = row[outer].get(inner), ""
        if value is not None and isinstance(value, kind):
            return column, value
    return "", None


def _filled(value: Any) -> bool:
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)


def _media_sources(row: Mapping[str, Any], column: str, value: Any, kind: str) -> list[MediaSource]:
    other = {f"{kind}s": kind, kind: f"{kind}s"}.get(column, "")
    if _filled(value) and _filled(row.get(other)):
        raise RowError(f"columns '{kind}' and '{kind}s' are both filled; choose with data.keys.{kind}s={kind}s")
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, f"column {column!r}")
    if not _filled(value):
        return []
    frames = column == "video" and isinstance(value, list) and isinstance(value[0], str)
    single = frames or KINDS[kind].is_one(value)
    sources = value if isinstance(value, list | tuple) and not single else [value]
    if any(source is None for source in sources):
        raise RowError(f"column {column!r} holds an empty entry")
    return [MediaSource.of(source, kind=kind) for source in sources]


def _turns(values: Mapping[str, Any], format: Format) -> tuple[Turns, list[Turns]]:
    """Returns the chat of a row, with its system column and, if the row has reasoning, an assistant turn with reasoning
    and answer; and the turns of each candidate that continues it.
    """
    candidates: list[Turns] = []
    if format.read_candidates:
        turns, candidates = format.read_candidates(values["prompt"], [values[role] for role in format.candidates])
    else:
        turns = read_chat(values["prompt"])
    if values["thinking"]:
        worked = {"think": str(values["thinking"]), "answer": str(values["answer"])}
        tagged = [text if f"<{tag}>" in text else f"<{tag}>{text}</{tag}>" for tag, text in worked.items()]
        turns.append(("assistant", ["".join(tagged)]))
    if values["system"] is not None:
        if any(role == "system" for role, _ in turns):
            raise RowError("a system column beside a system message in the chat; keep one of them")
        turns.insert(0, ("system", [str(values["system"])]))
    return turns, candidates


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = parse_json(value, "the choices") if value.strip() else None
    value = list(value.values()) if isinstance(value, Mapping) else value
    if value is None:
        return ()
    if not isinstance(value, list | tuple | np.ndarray) or len(value) > len(LETTERS):
        raise RowError(f"choices must be a list of at most {len(LETTERS)} texts")
    return tuple(str(choice) for choice in value)


def _gold(value: Any, gold: Callable[[str], str], choices: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        return tuple(gold(item) for item in value)
    if value is None:
        return None
    text = gold(value) if isinstance(value, str) else json.dumps(json_data(value), ensure_ascii=False)
    # The text 4 may mean the option "4 cm".
    options = re.findall(r"\d+(?:\.\d+)?", " ".join(choices)) if isinstance(value, str) else choices
    is_index = text in map(str, range(len(choices))) and text not in options
    return LETTERS[int(text)] if is_index else text


def _extra(row: Mapping[str, Any], used: Collection[str], format: Format) -> dict[str, Any]:
    extra = {name: value for name, value in row.items() if name not in used}
    nested = extra.get("extra")
    if format.name in CANONICAL and isinstance(nested, Mapping):  # as `to_row` writes it
        del extra["extra"]
        extra |= nested
    return extra
