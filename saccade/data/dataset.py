"""A data set in memory: its samples, where they are from, and what was excluded.

>>> print(data.summary); leave_out(data, lambda sample: None if sample.answer else "no answer")
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
from typing import Any

from saccade.config import DataConfig
from saccade.errors import DataError
from saccade.types import Sample

ROTATION_OF = "rotation_of"  # a column of rows that repeat a question with its options in another order
PROMPT_LIMIT = "data.max_prompt_tokens"
POSITIONS = "the model's own limit of length"


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that is excluded. `row` counts from 1 in its source."""

    id: str
    source: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.id} (row {self.row} of {self.source}): {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The samples of one source: `samples[start:stop]`."""

    name: str
    format: str
    start: int
    stop: int
    rows: int  # as read, bad ones included
    weight: float | None = None
    path: str = ""  # its address
    hash: str = ""  # of its samples, with their media


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples in file order, source by source, with the facts for the manifest."""

    samples: tuple[Sample, ...]
    parts: tuple[Part, ...]
    quarantined: tuple[BadRow, ...] = ()
    overlong: tuple[BadRow, ...] = ()
    left_out: tuple[BadRow, ...] = ()  # usable rows left out on purpose (see `leave_out`)
    limit: str = PROMPT_LIMIT  # what overlong rows exceed, with its value
    shortened: int = 0
    filtered: int = 0  # rows that a mapping left out
    lengths: tuple[int, ...] = ()  # tokens of each sample, where a length function was given
    duplicate_ids: tuple[str, ...] = ()  # repeats got a suffix: id, id#2, id#3
    renamed: int = 0  # rows that got a suffix
    media_kinds: Mapping[str, int] = field(default_factory=dict)
    row_numbers: tuple[int, ...] = ()  # of each sample in its source, from 1
    hash: str = ""
    contents: frozenset[str] = frozenset()  # hashes of rows as read, without their ids

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def excluded_rows(self) -> tuple[BadRow, ...]:
        """Every excluded row, except those that a mapping left out."""
        return (*self.quarantined, *self.overlong, *self.left_out)

    def row_of(self, id: str, reason: str) -> BadRow:
        """The BadRow for excluding the sample of that id."""
        index = next(n for n, sample in enumerate(self.samples) if sample.id == id)
        part = next(part for part in self.parts if part.start <= index < part.stop)
        return BadRow(id=id, source=part.name, row=self.row_numbers[index], reason=reason)

    def sample(self, id: str) -> Sample:
        """The sample of that id."""
        return next(sample for sample in self.samples if sample.id == id)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def formats(self) -> dict[str, str]:
        return {part.name: part.format for part in self.parts}

    @property
    def summary(self) -> str:
        lines = [f"{p.name}: {p.stop - p.start} of {p.rows} rows, format {p.format}" for p in self.parts]
        counts = {
            "bad rows excluded": len(self.quarantined),
            f"rows over {self.limit} left out": len(self.overlong),
            "rows shortened": self.shortened,
            "rows left out by the mapping": self.filtered,
            "rows got a suffix, as another one has the same id or, without ids, the same content": self.renamed,
        }
        counts |= Counter(f"rows left out: {row.reason}" for row in self.left_out)
        lines += [f"{n} {what.replace('rows', 'row', 1) if n == 1 else what}" for what, n in counts.items() if n]
        return "\n".join(lines)


def leave_out(dataset: Dataset, reason_of: Callable[[Sample], str | None]) -> Dataset:
    """Remove samples for which `reason_of` returns a reason; they are listed in `left_out`."""
    reasons = [reason_of(sample) for sample in dataset.samples]
    flags = [reason is None for reason in reasons]
    before = [0, *accumulate(flags)]
    moved = tuple(replace(p, start=before[p.start], stop=before[p.stop]) for p in dataset.parts)
    left_out = (
        BadRow(id=dataset.samples[n].id, source=p.name, row=dataset.row_numbers[n], reason=reason)
        for p in dataset.parts
        for n in range(p.start, p.stop)
        if (reason := reasons[n]) is not None
    )
    lists = ("samples", "lengths", "row_numbers")
    kept: dict[str, Any] = {name: tuple(compress(getattr(dataset, name), flags)) for name in lists}
    return replace(dataset, **kept, parts=moved, left_out=(*dataset.left_out, *left_out))


def refuse_first(row: BadRow, config: DataConfig) -> None:
    if config.on_bad_row == "error":
        raise DataError(f"bad row {row}; data.on_bad_row=quarantine excludes it")


def too_many(
    bad: Sequence[BadRow], rows: int, paths: Sequence[str], config: DataConfig, *, none_left: bool, ours: bool = True
) -> str:
    """The message about too many bad rows. `paths`: their sources; `ours`: `check-data` can read such rows."""
    splits = {"data.train: ": config.train, "data.val: ": config.val}
    where = next((key for key, listed in splits.items() if {source.path for source in listed}.issuperset(paths)), "")
    examples = "\n".join(f"  {problem}" for problem in bad[:5])
    lifted = f"data.max_bad_fraction={math.ceil(100 * len(bad) / rows) / 100:g}"
    advice, fixed = "No usable row is left.", ""
    if not none_left:
        advice, fixed = f"{lifted} continues without them.", ", its --fix writes a copy without them"
    if ours:
        advice += f" `saccade check-data` (--for rl, sft, dpo or reward-model) lists all{fixed}."
    if config.format != "auto":
        advice += f" data.format is {config.format}: auto reads what the columns say."
    return (
        f"{where}{len(bad)} of {rows} rows are bad ({len(bad) / rows:.1%}), "
        f"data.max_bad_fraction is {config.max_bad_fraction:g}:\n{examples}\n{advice}"
    )
