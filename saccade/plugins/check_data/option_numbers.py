"""Says how whole numbers as answers beside options were read (as indices from 0); refuses a set that counts from 1.

>>> read_as_indices("a.csv", [{"question": "?", "answer": "1"}], FORMATS["qa"], {}, samples, False)
a.csv: answers are indices into choices: 1 = B (1 row)
"""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from saccade.data.formats import LETTERS, Format, columns_of
from saccade.errors import DataError
from saccade.types import Sample

tell = cache(logging.getLogger(__name__).info)  # once, as some commands read a set twice


def read_as_indices(path: str, rows: Any, format: Format, keys: Any, samples: Sequence[Sample], media: bool) -> None:
    """Says so if the answers of the first rows are whole numbers; raises DataError if some are the number of options,
    none is higher and none is 0.
    """
    given = [row[name] for row in rows for name in columns_of(format, keys)["answer"] if row.get(name) is not None]
    asked = [(str(sample.answer), sample.choices) for sample in samples if sample.choices]
    read = Counter(answer for answer, _ in asked if answer in [*LETTERS])
    if not (read and given) or not all(str(answer).isdecimal() for answer in given):
        return
    over = [int(a) - len(choices) for a, choices in asked if a.isdecimal() and a not in choices]
    if over and not any(over) and not read["A"]:
        raise DataError(
            f"{path}: its answers seem to count the options from 1: {len(over)} times it is the number of options, and "
            "never 0. Here 0 is the first option; subtract 1 from each answer, or write letters (A is the first)"
        )
    shown = [f"{LETTERS.index(a)} = {a} ({n} row{'s' * (n > 1)})" for a, n in sorted(read.items())]
    tell(f"{path}: answers are indices into choices: {', '.join(shown)}")
