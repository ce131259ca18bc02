"""Rows from a file of any other kind: a Python file with `load(split)` is a data set.

This one reads levels of Sokoban as Boxoban writes them: a line with a number, ten lines of a level,
an empty line. Copy it beside the levels, name them in FILES, and give it as data:

    saccade init models/Qwen2.5-VL-3B-Instruct levels/boxoban.py
    saccade rl run.yaml data.val=levels/boxoban.py@valid
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = {"train": "boxoban.train.txt.gz", "valid": "boxoban.valid.txt.gz"}
QUESTION = "Push every box onto a goal. Answer with moves, such as: up, left."


def load(split: str) -> Iterator[dict[str, Any]]:
    path = Path(__file__).parent / FILES[split]
    text = (gzip.open if path.suffix == ".gz" else open)(path, "rt").read()
    for block in text.strip("\n").split("\n\n"):
        name, _, level = block.partition("\n")
        yield {"id": name.removeprefix("; "), "question": QUESTION, "level": level}
