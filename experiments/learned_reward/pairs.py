"""Pairs for a reward model: a right answer is preferred to a wrong one that the model itself gave.

rows = pairs_of(read_rows(Path("train.jsonl")), read_rows(Path("answers/generations.jsonl")))
rows += spoiled_pairs(rows, seed=0)
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from experiments.row_files import Rows

WRONG = 2  # pairs per question, with its most frequent wrong answers
# Ways to spoil a right response; `other` is the right one to another question.
SPOILS: Mapping[str, Callable[[str, str], str]] = {
    "twice": lambda right, other: f"{right} {right}",
    "two answers": lambda right, other: f"{right} {_answer(other)}",
    "goes on": lambda right, other: f"{right} {other} {right}",
    "no thought": lambda right, other: _answer(right),
}


def _answer(response: str) -> str:
    return response.rpartition("</think>")[2].strip()


def pairs_of(questions: Rows, answered: Rows) -> list[dict[str, Any]]:
    """The chosen side is a right response of the model, or the demonstration if it gave none."""
    asked, pairs = {row["id"]: row for row in questions}, []
    for row in answered:
        said = [(response["text"].strip(), response["reward"]) for response in row["responses"]]
        right = next((text for text, reward in said if reward == 1), asked[row["id"]]["demonstration"])
        wrong = [text for text, reward in said if reward == 0 and text]
        for number, text in enumerate(sorted({*wrong}, key=lambda one: (-wrong.count(one), one))[:WRONG]):
            about = {"id": f"{row['id']}/{number}", "images": asked[row["id"]]["images"]}
            pairs.append({**about, "prompt": asked[row["id"]]["problem"], "chosen": right, "rejected": text})
    return pairs


def spoiled_pairs(pairs: Rows, *, seed: int) -> list[dict[str, Any]]:
    """One more pair for each given pair: the rejected side is the chosen one, spoiled."""
    rng, ways = Random(seed), [*SPOILS.items()]
    found = []
    for number, row in enumerate(pairs):
        way, spoil = ways[number % len(ways)]
        other = rng.choice([one["chosen"] for one in pairs if one["chosen"] != row["chosen"]] or ["none"])
        found.append({**row, "id": f"{row['id']}/{way}", "rejected": spoil(row["chosen"], other)})
    return found
