"""Rows of train, dev (for trials) and test: questions of GSM8K with solutions, and generated sums."""

import gzip
import json
import random
import re
from collections.abc import Collection
from itertools import chain, zip_longest
from pathlib import Path

from experiments.row_files import write_rows

LEVELS = ("{i} + {j}", "{i} * {j}", "{a} + {i}", "{a} + {b}", "{a} - {b}", "{a} * {i}")
NUMBERS = {"i": (1, 9), "j": (1, 9), "a": (10, 99), "b": (10, 99)}
SUMS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
DEV_ROWS, ITEMS, FEW = 500, 200, 20  # held out of train; sums of each level, of which there are 81 with single digits


def questions_of(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Questions of GSM8K with worked solutions, without calculator marks; the last rows of train are for trials."""
    found = {}
    for split in ("train", "test"):
        (path,) = folder.glob(f"*{split}.jsonl*")
        text = (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8").read()
        rows = [json.loads(line) for line in text.strip().split("\n")]
        found[split] = [(row["question"], re.sub(r"<<.*?>>", "", row["answer"])) for row in rows]
    return {"train": found["train"][:-DEV_ROWS], "dev": found["train"][-DEV_ROWS:], "test": found["test"]}


def sums(count: int, seed: str, taken: Collection[str] = (), few: int | None = None) -> list[list[tuple[str, str]]]:
    """So many sums of each level, `few` of those with single digits; none is `taken`, and without that none comes
    twice.
    """
    rng, seen, drawn = random.Random(seed), set(taken), list[list[tuple[str, str]]]()
    for level in LEVELS:
        drawn.append(found := [])
        while len(found) < (few or count if "{i} " in level else count):
            text = level.format(**{name: rng.randint(*bounds) for name, bounds in NUMBERS.items()})
            if f"What is {text}?" in seen:
                continue
            first, sign, second = text.split()
            found.append((f"What is {text}?", f"#### {SUMS[sign](int(first), int(second))}"))
            if not taken:
                seen.add(found[-1][0])
    return drawn


def write_sets(out: Path, data: Path | None) -> None:
    """Rows of every set; without data sums stand for the questions of GSM8K. No sum of train is in another set."""
    out.mkdir(parents=True, exist_ok=True)
    held = sums(2 * ITEMS, "held out", few=2 * FEW) if data else sums(4, "held out")
    by_split = {
        "test": [level[: len(level) // 2] for level in held],
        "dev": [level[len(level) // 2 :] for level in held],
        "train": sums(2000 if data else 8, "train", {question for level in held for question, _ in level}),
    }
    together = {split: [row for row in chain(*zip_longest(*levels)) if row] for split, levels in by_split.items()}
    worded = questions_of(data) if data else {split: rows[:6] for split, rows in together.items()}
    for split, levels in by_split.items():
        named = {f"level{n}": rows for n, rows in enumerate(levels, 1)}
        for name, chosen in {"gsm8k": worded[split], "sums": together[split], **named}.items():
            write_rows(out / f"{name}-{split}.jsonl", [{"question": q, "answer": a} for q, a in chosen])
    shown = [[{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in worded["train"]]
    write_rows(out / "solutions.jsonl", [{"conversations": turns, "answer": turns[1]["value"]} for turns in shown])
