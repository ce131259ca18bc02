"""Load the rows of all sources as one data set, and record which rows were excluded and why.

Reads image headers, not pixels. A bad row is quarantined with its id and reason, never replaced; too many of them
stop the run. Prompt lengths depend on the model, so the caller passes the function that counts tokens.

    >>> data = load([DataSource(path="train.jsonl")], DataConfig(), length=count_tokens)
    >>> print(data.summary)
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from saccade.config import DataConfig, DataSource
from saccade.data.chats import RowError
from saccade.data.dataset import PROMPT_LIMIT, BadRow, Dataset, Part, leave_out, refuse_first, too_many
from saccade.data.formats import FOR_REWARDS, FORMATS, OpenImage, detect, read_row, row_id, writable
from saccade.data.records import content_hash
from saccade.data.sources import Row, open_source
from saccade.data.stream import Stream
from saccade.errors import ConfigError, DataError
from saccade.media.blob_file import Spill
from saccade.media.images import ImageError
from saccade.media.kinds import open_any
from saccade.media.media_files import resolve_path, source_kind
from saccade.registry import HOOKS, Table
from saccade.types import Media, Sample

__all__ = ["BadRow", "Dataset", "Part", "Stream", "leave_out", "load"]

DETECTION_ROWS = 100
FILE_NAME = re.compile(r".+\.\w{2,5}")
LONGEST_NAME = 1024  # longest file name; longer text is the file's content
# By data.overlong: (sample, function that counts tokens, limit) → a sample that fits, or None.
POLICIES: Table[Callable[..., Sample | None]] = Table("overlong", {"drop": lambda sample, length, limit: None})
# Called as (path, first rows, format, data.keys, samples, whether media were found); they raise DataError.
SET_CHECKS: Table[Callable[..., None]] = Table("set_checks", {})


def load(
    sources: Sequence[DataSource],
    config: DataConfig,
    *,
    length: Callable[[Sample], int] | None = None,
    change: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    limit: str = PROMPT_LIMIT,
    marks: Collection[str] = (),
) -> Dataset:
    """Read the sources. `length` counts tokens; prompts over the limit follow `config.overlong`. `change` converts
    rows of another layout to a supported format. `limit` is the name of the option behind max_prompt_tokens, for
    commands with another one, whose `length` may refuse rows that others accept. `marks`: kinds of media whose
    placeholder is never plain text, as the model is made for them.
    """
    unweighted = [source.path for source in sources if source.weight is None]
    if 0 < len(unweighted) < len(sources):
        raise ConfigError(f"data: {unweighted[0]} has no weight but others have; give all of them one, or none")
    reader = _Reader(config, length, change, limit, marks)
    parts: list[Part] = []
    for source in sources:
        most = _limit(source, sources, config, rows=sum(part.rows for part in parts))
        parts.append(reader.read(source, most))
    rows = sum(part.rows for part in parts)
    if reader.refused and not reader.samples:
        raise ConfigError(reader.refused)
    if len(reader.bad) > config.max_bad_fraction * rows:
        paths = [source.path for source in sources]
        none_left = len(reader.bad) == rows
        raise DataError(too_many(reader.bad, rows, paths, config, none_left=none_left, ours=change is None))
    samples, duplicates = _with_unique_ids(reader.samples)
    hashes = [content_hash(sample, everything=True) for sample in samples]
    return Dataset(
        samples=tuple(samples),
        parts=tuple(replace(p, hash=_hash(hashes[p.start : p.stop])) for p in parts),
        quarantined=tuple(reader.bad),
        overlong=tuple(reader.overlong),
        limit=f"{limit} ({config.max_prompt_tokens} tokens, data.overlong={config.overlong})",
        shortened=reader.shortened,
        filtered=reader.filtered,
        lengths=tuple(reader.lengths),
        duplicate_ids=duplicates,
        renamed=sum(a.id != b.id for a, b in zip(samples, reader.samples, strict=True)),
        media_kinds=dict(reader.kinds),
        row_numbers=tuple(reader.row_numbers),
        hash=_hash(hashes),
        contents=frozenset(content_hash(sample)[:16] for sample in samples),
    )


def _limit(source: DataSource, sources: Sequence[DataSource], config: DataConfig, *, rows: int) -> int | None:
    """Rows to read: the smaller of the source's limit and its share of the mixture's limit; None: all."""
    limits = [source.max_samples]
    if config.max_samples is not None and source.weight is None:
        limits.append(max(0, config.max_samples - rows))
    elif config.max_samples is not None:
        share = (source.weight or 0) / sum(other.weight or 0 for other in sources)
        limits.append(max(1, round(config.max_samples * share)))
    return min((limit for limit in limits if limit is not None), default=None)


# -- rows ------------------------------------------------------------------------------------------


@dataclass
class _Reader:
    """Collects the good, bad and overlong rows of all sources."""

    config: DataConfig
    length: Callable[[Sample], int] | None
    change: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None
    limit: str
    marks: Collection[str]
    samples: list[Sample] = field(default_factory=list)
    row_numbers: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    overlong: list[BadRow] = field(default_factory=list)
    refused: str = ""  # error of the chat template about the first row that it refuses
    shortened: int = 0
    filtered: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    spill: Spill = field(default_factory=Spill)

    def read(self, source: DataSource, limit: int | None) -> Part:
        container = open_source(source, allow_network=self.config.allow_network)
        name, start = source.name or container.stem, len(self.samples)
        rest = iter(container.rows)
        passed = sum(1 for _ in islice(rest, source.offset))
        rows = map(self._changed, islice(rest, limit))
        first = list(islice(rows, DETECTION_ROWS))
        readable = [row for row in first if not isinstance(row, RowError)]
        columns = {column for row in readable for column in row}
        if not columns and limit != 0:
            reason = f"no row can be read: {first[0]}" if first else "it holds no rows"
            behind = f" behind offset={source.offset}, of {passed} rows" if source.offset and not first else ""
            raise DataError(f"{source.path}: {reason}{behind}")
        open_image = self._opener(container.folder)
        # Row numbers in the file, from 1. After the last row, the next number tells how many were read.
        numbers, seen = count(passed + 1), self.kinds.total()
        counted = ((number, row) for row, number in zip(chain(first, rows), numbers, strict=False))
        mapping, seed = source.mapping or self.config.mapping or "none", self.config.pair_order_seed
        format, numbered = FORMATS["qa"], counted
        if mapping != "none":
            format = FORMATS["sides"]
            numbered = HOOKS["mapped_rows"](mapping, counted, folder=container.folder, seed=seed)
        elif columns:
            format = detect(columns, self.config, name)
        for number, row in numbered:
            if row is None:
                self.filtered += 1
                continue
            try:
                if isinstance(row, RowError):
                    raise row
                sample = read_row(
                    row, format, self.config, open_image=open_image, default_source=container.stem, marks=self.marks
                )
                sample = self._with_files(sample, container.folder)
                if source.data_source is not None:
                    sample = replace(sample, data_source=source.data_source)
                if self.config.pair_view == "verdict":
                    sample = HOOKS["verdict"](sample, seed=seed)
                self._keep(sample, name, number)
            except (RowError, ImageError) as error:
                self._exclude(row, name, number, str(error))
            except ConfigError as error:  # a template that refuses this row, or every row
                bad = self._exclude(row, name, number, str(error))
                self.refused = self.refused or f"{error} ({bad.id}, row {number} of {name})"
        for check in SET_CHECKS.values() if mapping == "none" else ():
            check(source.path, readable, format, self.config.keys, self.samples[start:], self.kinds.total() > seen)
        facts: dict[str, Any] = {"name": name, "format": format.name, "weight": source.weight, "path": source.path}
        return Part(start=start, stop=len(self.samples), rows=next(numbers) - passed - 1, **facts)

    def _changed(self, row: Row) -> Row:
        if self.change is None or isinstance(row, RowError):
            return row
        try:
            return self.change(row)
        except RowError as error:
            return error

    def _opener(self, folder: Path | None) -> OpenImage:
        """Returns a function that opens media of one source, each file once."""
        opened: dict[Any, Media] = {}

        def open_image(source: Any, *, kind: str = "image", **options: Any) -> Media:
            self.kinds[source_kind(source, folder) if kind == "image" else kind] += 1
            named = isinstance(source, str) and len(source) < LONGEST_NAME
            key: Any = (source, kind, repr(options)) if named else None
            if key not in opened:
                media = open_any(kind, source, options, base=folder, limits=self.config)
                key = key or media.key  # open equal bytes once
                if key not in opened:
                    opened[key] = self.spill(media)
            return opened[key]

        return open_image

    def _with_files(self, sample: Sample, folder: Path | None) -> Sample:
        """Resolve names of files that rewards read, relative to the folder of the row's media."""
        found = {
            name: str(path)
            for name in FOR_REWARDS
            if isinstance(given := sample.extra.get(name), str)
            and FILE_NAME.fullmatch(given)  # a level may be a text of many lines
            and os.path.isfile(path := resolve_path(given, folder, self.config))
        }
        return replace(sample, extra={**sample.extra, **found}) if found else sample

    def _exclude(self, row: Row, name: str, number: int, reason: str) -> BadRow:
        id = (None if isinstance(row, RowError) else row_id(row, self.config)) or f"row-{number}"
        problem = BadRow(id=id, source=name, row=number, reason=writable(reason))
        refuse_first(problem, self.config)
        self.bad.append(problem)
        return problem

    def _keep(self, sample: Sample, name: str, number: int) -> None:
        """Adds a sample, shortened where its prompt is too long and the policy allows it."""
        if self.length is not None:
            tokens, limit = self.length(sample), self.config.max_prompt_tokens
            if tokens > limit:
                reason = f"{tokens} tokens, {self.limit} is {limit}"
                row = BadRow(id=sample.id, source=name, row=number, reason=reason)
                if self.config.overlong == "error":
                    raise DataError(f"overlong row {row}; data.overlong=drop leaves such rows out")
                shorter = POLICIES[self.config.overlong](sample, self.length, limit)
                if shorter is None:
                    self.overlong.append(row)
                    return
                self.shortened += 1
                sample, tokens = shorter, self.length(shorter)
            self.lengths.append(tokens)
        self.samples.append(sample)
        self.row_numbers.append(number)


# -- the whole set ---------------------------------------------------------------------------------


def _with_unique_ids(samples: Sequence[Sample]) -> tuple[list[Sample], tuple[str, ...]]:
    """Make ids unique, as noise and records are keyed by id: a second row with the same id becomes id#2."""
    taken = {sample.id for sample in samples}
    seen: Counter[str] = Counter()
    unique: list[Sample] = []
    for sample in samples:
        id = sample.id
        while seen[sample.id] and id in taken:
            seen[sample.id] += 1
            id = f"{sample.id}#{seen[sample.id]}"
        seen[sample.id] += not seen[sample.id]
        taken.add(id)
        unique.append(sample if id == sample.id else replace(sample, id=id))
    return unique, tuple(id for id, count in seen.items() if count > 1)


def _hash(hashes: Iterable[str]) -> str:
    return hashlib.sha256(b"".join(map(bytes.fromhex, hashes))).hexdigest()
