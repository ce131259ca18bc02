"""Rows that are set aside, and what to do where they are too many. Knows nothing of files.

>>> str(BadRow(id="7", source="train", row=8, reason="the prompt is empty"))
'7 (row 8 of train): the prompt is empty'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.config import DataConfig, DataSource

TRAIN = "data.train: "


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that was set aside. `row` counts from 1 in its source."""

    id: str
    source: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.id} (row {self.row} of {self.source}): {self.reason}"


def too_many(
    bad: Sequence[BadRow],
    rows: int,
    sources: Sequence[DataSource],
    config: DataConfig,
    *,
    checked: bool,
) -> str:
    """`checked`: `check-data` refuses the same rows."""
    splits = ((TRAIN, config.train), ("data.val: ", config.val))
    where = next((key for key, listed in splits if all(s in listed for s in sources)), "")
    examples = "\n".join(f"  {problem}" for problem in bad[:5])
    lifted = f"data.max_bad_fraction={math.ceil(100 * len(bad) / rows) / 100:g} goes on"
    if len(bad) == rows:
        advice = "No row is left to go on with." + " `saccade check-data` lists all." * checked
    elif checked:
        advice = (
            "`saccade check-data` lists all of them, its --fix writes a copy without them; "
            f"{lifted}."
        )
    else:
        listed = ", and quarantine.jsonl of the run lists all of them" * (where == TRAIN)
        advice = f"{lifted} without them{listed}."
    if config.format != "auto":
        advice += f" data.format is {config.format}: auto reads what the columns say."
    return (
        f"{where}{len(bad)} of {rows} rows are bad ({len(bad) / rows:.1%}), "
        f"data.max_bad_fraction is {config.max_bad_fraction:g}:\n{examples}\n{advice}"
    )
