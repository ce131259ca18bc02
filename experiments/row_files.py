"""Files of drawn rows: questions about pictures, the same questions with the facts in words, conversations for SFT.

rows = questions(partial(draw_scene, split="same", kinds=("count",), side=224), Path("train.jsonl"), 1000)
taught(Path("answers.jsonl"), rows, "answer")
in_words(Path("text.jsonl"), rows)
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.plugins.drawn.drawn_sets import Draw, Plan, write_set

Rows = Sequence[dict[str, Any]]


def questions(draw: Draw, file: Path, rows: int, *, seed: int = 0, workers: int = 1) -> Rows:
    """The rows of the file, which is drawn if missing; another seed or file name gives other rows."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_set(draw, Plan(command=file.stem, file=file, rows=rows, seed=seed, workers=workers))
    return read_rows(file)


def in_words(file: Path, rows: Rows) -> Rows:
    """Write the same questions with the column `facts` in place of the picture."""
    asked = [{name: value for name, value in row.items() if name != "images"} for row in rows]
    for row in asked:
        row |= {"id": f"{row['id']}-text", "problem": row["problem"].replace("<image>", f"{row['facts']}\n")}
    return write_rows(file, asked)


def taught(file: Path, rows: Rows, column: str) -> Rows:
    """Write conversations in which the assistant says the text of this column."""
    said = [
        {
            **{name: row[name] for name in ("id", "images") if name in row},
            "conversations": [{"from": "human", "value": row["problem"]}, {"from": "gpt", "value": row[column]}],
        }
        for row in rows
    ]
    return write_rows(file, said)


def read_rows(file: Path) -> Rows:
    with file.open(encoding="utf-8") as lines:  # not splitlines(): a model's text may hold U+2028 and the like
        return [json.loads(line) for line in lines]


def write_rows(file: Path, rows: Rows) -> Rows:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return rows
