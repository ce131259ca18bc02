"""Rows of train, dev (for trials) and test: questions of GSM8K with solutions, and generated sums."""

import gzip
import json
import random
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

LEVELS = ("{a} + {i}", "{a} + {b}", "{a} - {b}", "{a} * {i}", "{A} + {B}", "{a} + {b} * {i}")
SUMS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
DEV_ROWS, ITEMS = 500, 200  # rows of train that are held out; sums per level


def questions_of(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Questions of GSM8K with worked solutions, without calculator marks; the last rows of train are for trials."""
    found = {}
    for split in ("train", "test"):
        (path,) = folder.glob(f"*{split}.jsonl*")
        text = (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8").read()
        rows = [json.loads(line) for line in text.strip().split("\n")]
        found[split] = [(row["question"], re.sub(r"<<.*?>>", "", row["answer"])) for row in rows]
    return {"train": found["train"][:-DEV_ROWS], "dev": found["train"][-DEV_ROWS:], "test": found["test"]}


def sums(count: int, seed: str, taken: Collection[str] = ()) -> list[tuple[str, str]]:
    """`count` sums of each level, interleaved by level; none is in `taken`. Only without `taken` none repeats."""
    rng, drawn = random.Random(seed), {level: list[tuple[str, str]]() for level in LEVELS}
    seen = set(taken)
    for level, found in drawn.items():
        while len(found) < count:
            numbers = {"a": (10, 99), "b": (10, 99), "i": (2, 9), "A": (100, 999), "B": (100, 999)}
            text = level.format(**{name: rng.randint(*bounds) for name, bounds in numbers.items()})
            if f"What is {text}?" in seen:
                continue
            first, sign, second, *rest = text.split()
            right = int(second) * int(rest[1]) if rest else int(second)
            found.append((f"What is {text}?", f"#### {SUMS[sign](int(first), right)}"))
            if not taken:
                seen.add(found[-1][0])
    return [row for rows in zip(*drawn.values(), strict=True) for row in rows]


def write_rows(out: Path, data: Path | None) -> None:
    """Write the rows of every set; without data, sums replace GSM8K. No sum of train is in another set."""
    out.mkdir(parents=True, exist_ok=True)
    held = sums(2 * ITEMS if data else 4, "held out")
    half = len(held) // 2
    by_split = {
        "test": held[:half],
        "dev": held[half:],
        "train": sums(2000 if data else 8, "train", {q for q, _ in held}),
    }
    worded = questions_of(data) if data else {split: rows[:6] for split, rows in by_split.items()}
    for split, rows in by_split.items():
        levels = {f"level{n + 1}": rows[n :: len(LEVELS)] for n in range(len(LEVELS))}
        for name, chosen in {"gsm8k": worded[split], "sums": rows, **levels}.items():
            write(out / f"{name}-{split}.jsonl", [{"question": q, "answer": a} for q, a in chosen])
    shown = [[{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in worded["train"]]
    write(out / "solutions.jsonl", [{"conversations": turns, "answer": turns[1]["value"]} for turns in shown])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
