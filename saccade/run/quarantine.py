"""Rows that turn out bad when they are used: an image with a valid header and broken pixels, or a file that changed
since it was read.

The same rule in training, validation, `eval` and `generate`: such a row is left out, logged and listed by id. If more
than `data.max_bad_fraction` of a set is bad, rows that were bad when it was read included, the command stops.

    quarantine = Quarantine(folder, config.data)
    samples = quarantine.whole(dataset, family)
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from saccade.config import DataConfig
from saccade.data.dataset import BadRow, Dataset, refuse_first, too_many
from saccade.data.stream import Stream
from saccade.errors import DataError
from saccade.media.images import ImageError
from saccade.media.pixel_cache import DECODED, ImageCache, in_threads
from saccade.models.families import Family
from saccade.run.folder import QUARANTINE
from saccade.types import Media, Sample

log = logging.getLogger(__name__)


class Quarantine:
    """Remembers the bad rows that were found, so that each counts once however often it is drawn."""

    def __init__(self, folder: Path, config: DataConfig) -> None:
        self.file, self._config = folder / QUARANTINE, config
        self._found: dict[tuple[str, str], BadRow] = {}  # by hash of the set and id
        self._looked_at: set[str] = set()  # hashes of the sets that were checked in full

    def sound(self, samples: Sequence[Sample], dataset: Dataset, family: Family) -> list[Sample]:
        """Returns the samples whose media can be decoded. They are decoded into the cache that the model reads, and
        what is cached is not decoded again.
        """
        reasons = in_threads(partial(decode_error, cache=family.cache), samples)
        for sample, reason in zip(samples, reasons, strict=True):
            if reason is not None and (dataset.hash, sample.id) not in self._found:
                self._exclude(dataset.row_of(sample.id, reason), dataset)
        return [s for s, reason in zip(samples, reasons, strict=True) if reason is None]

    def take(self, stream: Stream, count: int, family: Family) -> list[Sample]:
        """Take the next usable rows; a bad row is replaced by the one after it."""
        taken: list[Sample] = []
        while len(taken) < count:
            taken += self.sound(stream.take(count - len(taken)), stream.dataset, family)
        return taken

    def whole(self, dataset: Dataset, family: Family) -> list[Sample]:
        """The usable rows of a set; its media are checked once, however often it is measured."""
        if dataset.hash not in self._looked_at:
            self._looked_at.add(dataset.hash)
            self.sound(dataset.samples, dataset, family)
        bad = {row.id for row in self.found(dataset)}
        return [sample for sample in dataset.samples if sample.id not in bad]

    def found(self, dataset: Dataset) -> list[BadRow]:
        """Rows of the set that were found bad after it was read."""
        return [row for (of, _), row in self._found.items() if of == dataset.hash]

    def left_out(self, dataset: Dataset) -> int:
        """How many rows of the set are not used, for whatever reason."""
        return len(dataset.excluded_rows) + len(self.found(dataset))

    def record(self, rows: Iterable[BadRow]) -> None:
        """Append rows to the file, each once, also in a resumed run; no rows, no file."""
        earlier = self.file.read_text(encoding="utf-8").splitlines() if self.file.is_file() else []
        lines = [json.dumps(asdict(row), ensure_ascii=False) for row in rows]
        if new := [line for line in lines if line not in earlier]:
            with self.file.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in new)

    def _exclude(self, row: BadRow, dataset: Dataset) -> None:
        refuse_first(row, self._config)
        self._found[dataset.hash, row.id] = row
        self.record([row])
        log.info(f"row {row.id} is excluded: {row.reason}")
        found = self.found(dataset)
        bad, none_left = [*found, *dataset.quarantined], len(found) == len(dataset)
        if none_left or len(bad) > self._config.max_bad_fraction * dataset.rows:
            paths = [part.path for part in dataset.parts]
            raise DataError(too_many(bad, dataset.rows, paths, self._config, none_left=none_left))


def decode_error(sample: Sample, cache: Callable[[Media], ImageCache] = lambda media: DECODED) -> str | None:
    """Returns why an image or another medium of the row cannot be decoded, or None."""
    for media in sample.every_media:
        try:
            cache(media).get(media)
        except ImageError as error:
            return str(error)
    return None
