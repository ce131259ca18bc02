"""Writes a drawn data set: NAME.jsonl, its pictures, and NAME.md, a card with the command that reproduces it.

A row depends only on the seed and its index, so the number of worker processes does not change the set.

    write_set(partial(draw_scene_row, split="same", …), Plan(command="scenes", file=Path("scenes/train.jsonl")))
"""

import hashlib
import io
import json
import logging
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import IO, Any, NamedTuple

import PIL
import yaml
from PIL import Image

from saccade import __version__
from saccade.config import Config, to_yaml
from saccade.errors import ConfigError, DataError
from saccade.run.folder import leaves
from saccade.system.disk import require_new

log = logging.getLogger(__name__)

ROWS_PER_TASK = 64  # rows per task of a worker process
MAX_LISTED = 5  # most left-out rows that are listed
LICENCE = re.compile(r"^licen[cs]e(?: of inputs)?:\s*(?:- *)?(\S.*)$", re.IGNORECASE | re.MULTILINE)


class Drawing(NamedTuple):
    """A picture and a question about it. `more`: further columns of the row; it may replace `id` and `data_source`."""

    picture: Image.Image
    question: str
    answer: str
    category: str
    more: Mapping[str, Any]


class Unfit(ValueError):
    """A row cannot be drawn; the message is the reason."""


Draw = Callable[[Random, int], Drawing]  # (random generator of the row, index of the row)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which file to write, how many rows, and what its card says."""

    command: str  # also the data_source of rows
    file: Path
    rows: int
    seed: int = 0
    source: Sequence[str] = ()  # the file whose rows are drawn, then the config arguments for reading it
    reply: str = ""  # template of an assistant turn, with {answer}; empty: rows are questions only
    workers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the command, for the card
    also: str = ""  # what else draws, for the card

    @property
    def folder(self) -> Path:
        return self.file.parent / f"{self.file.stem}-images"


def write_set(draw: Draw, plan: Plan) -> str:
    """Draw and write the rows, the pictures and the card; returns a one-line summary."""
    path = plan.file
    if path.suffix != ".jsonl":
        named = path / "train.jsonl" if path.is_dir() else path.with_suffix(".jsonl")
        raise ConfigError(f"OUT {path}: wants a name that ends in .jsonl; try {named}")
    if plan.reply and "{answer}" not in plan.reply:
        raise ConfigError(f"--reply {plan.reply!r}: does not say where the answer stands; try --reply '{{answer}}'")
    require_new(path, "OUT")
    plan.folder.mkdir(parents=True, exist_ok=True)
    several = ProcessPoolExecutor(plan.workers, get_context("spawn")) if plan.workers > 1 else nullcontext()
    answers, unfit = defaultdict[str, Counter[str]](Counter), list[str]()
    digest, columns = hashlib.sha256(), dict[str, None]()
    with several as processes, finished_file(path) as file:
        work, numbers = partial(_draw_row, draw, plan), range(plan.rows)
        for row, found in processes.map(work, numbers, chunksize=ROWS_PER_TASK) if processes else map(work, numbers):
            if not row:
                unfit.append(found)
                continue
            line = json.dumps(row, ensure_ascii=False, default=str) + "\n"
            digest.update(line.encode() + found.encode())
            answers[row["category"]][row["answer"]] += 1
            columns |= dict.fromkeys(row)
            file.write(line)
        for reason in unfit[:MAX_LISTED]:
            log.warning(reason)
        made = plan.rows - len(unfit)
        if not made:
            raise DataError(f"{path}: no row can be drawn: {unfit[0]}")
    options = {"rows": None if plan.source else plan.rows, "seed": plan.seed, "reply": plan.reply, **plan.options}
    facts = [
        f"Columns: {', '.join(columns)}. SHA-256 of rows and pictures: {digest.hexdigest()}. A row depends on the",
        "seed and its number alone; other fonts, and other versions of Pillow, may give other pixels.\n",
        *answer_lines(answers),
    ]
    words = [plan.command, *plan.source[:1], path.name, *plan.source[1:], *flags(options)]
    what = f"{made:,} rows that saccade {__version__} drew with Pillow {PIL.__version__}{plan.also}"
    write_card(path, what, words, source=next(iter(plan.source), ""), facts=facts)
    left_out = f"; {len(unfit)} rows left out" if unfit else ""
    return f"wrote {path}: {made} rows{left_out}; pictures are in {plan.folder}, the card is {path.with_suffix('.md')}"


@contextmanager
def finished_file(path: Path) -> Iterator[IO[str]]:
    """Context manager: a text file that gets its name only after the block; after an error it stays NAME.unfinished."""
    with path.with_suffix(".unfinished").open("w", encoding="utf-8") as file:
        yield file
    path.with_suffix(".unfinished").replace(path)


def _draw_row(draw: Draw, plan: Plan, index: int) -> tuple[dict[str, Any], str]:
    """Draw a row and write its picture. Returns (row, digest of the picture), or ({}, reason) if it is unfit."""
    try:
        drawn = draw(Random(f"{plan.command}/{plan.seed}/{index}"), index)
    except Unfit as error:
        return {}, f"row {index}: {error}"
    file = io.BytesIO()
    drawn.picture.save(file, "PNG", compress_level=1)
    place = plan.folder / f"{index:06}.png"
    place.write_bytes(file.getvalue())
    row: dict[str, Any] = {"id": f"{plan.command}-{plan.file.stem}-{plan.seed}-{index}", "data_source": plan.command}
    row |= {"images": [f"{plan.folder.name}/{place.name}"]}
    question = f"<image>{drawn.question}"
    if plan.reply:
        said = plan.reply.replace("{answer}", drawn.answer)
        row["conversations"] = [{"from": "human", "value": question}, {"from": "gpt", "value": said}]
    else:
        row["problem"] = question
    row |= {"answer": drawn.answer, "category": drawn.category}
    row |= {name: value for name, value in drawn.more.items() if name in ("id", "data_source") or name not in row}
    return row, hashlib.sha256(file.getvalue()).hexdigest()


# -- the card ---------------------------------------------------------------------------------------


def write_card(
    file: Path, what: str, command: Sequence[str], *, source: str | Path = "", facts: Iterable[str] = ()
) -> None:
    """Write NAME.md beside the rows: what they are, the command, the licence of the rows that they were made of."""
    licence = f"{licence_of(Path(source))} ({source})" if source else "none, as the rows are drawn"
    head = [f"# {file.stem}\n", f"{what}:\n", f"    saccade data {shlex.join(command)}\n"]
    file.with_suffix(".md").write_text("\n".join([*head, f"Licence of inputs: {licence}.", *facts, ""]), "utf-8")


def licence_of(rows: Path) -> str:
    """The licence that a card beside rows names: one of these, or a README, as sets of the hub have."""
    for card in (rows.with_suffix(".md"), rows / "README.md", rows.parent / "README.md"):
        if card.is_file() and (found := LICENCE.search(card.read_text("utf-8", "replace"))):
            return found[1].strip(" .\"'")
    return "not named beside them"


def flags(options: Mapping[str, Any]) -> list[str]:
    """The words of a command line; an option without a value is left out, one with several is repeated."""
    return [
        word
        for name, value in options.items()
        for one in (value if isinstance(value, list | tuple) else [value])
        if one not in ("", None)
        for word in (f"--{name}", str(one))
    ]


def chosen(config: Config) -> list[str]:
    """The options that were given, as KEY=VALUE."""
    given = leaves(yaml.safe_load(to_yaml(config, full=False)) or {})
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given]


def count_lines(counts: Mapping[str, int]) -> list[str]:
    return ["\n| | rows |\n|---|---|", *(f"| {name} | {count:,} |" for name, count in counts.items())]


def answer_lines(answers: Mapping[str, Counter[str]]) -> Iterator[str]:
    """A table: what a constant guess would score, by category."""
    yield "| category | rows | different answers | commonest answer | right if it is always given |"
    yield "|---|---|---|---|---|"
    for category, counts in sorted(answers.items()):
        common, times = counts.most_common(1)[0]
        shown = common.replace("|", "\\|").replace("\n", " ")[:40]
        yield f"| {category} | {counts.total():,} | {len(counts):,} | {shown} | {times / counts.total():.1%} |"
