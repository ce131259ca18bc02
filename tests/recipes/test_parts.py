"""What a run says of its rows before it starts."""

from __future__ import annotations

import json
from pathlib import Path

from saccade.config import DataConfig, DataSource, load
from saccade.data import datasets
from saccade.data.stream import Stream
from saccade.recipes import parts


def read(folder: Path, name: str, *questions: str) -> datasets.Dataset:
    path = folder / name
    rows = [{"question": question, "answer": "2"} for question in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return datasets.load([DataSource(path=str(path))], DataConfig())


def test_rows_that_repeat_in_a_step_or_in_validation_are_told(tmp_path: Path) -> None:
    train, val = (
        read(tmp_path, "a.jsonl", "1+1?", "3-1?"),
        read(tmp_path, "b.jsonl", "1+1?", "4-2?"),
    )
    stream = Stream(train, seed=0, config=DataConfig())
    said: list[str] = []
    parts.warn_of_rows(load({"train.prompts_per_step": 2}), stream, [train], said.append)
    assert said == []  # who names one file twice knows it
    parts.warn_of_rows(load({"train.prompts_per_step": 5}), stream, [val], said.append)
    assert "a step takes each 2.5 times; try train.prompts_per_step=2" in said[0]
    assert (
        f"1 of 2 different rows of {tmp_path / 'b.jsonl'} (data.val) are in data.train" in said[1]
    )
