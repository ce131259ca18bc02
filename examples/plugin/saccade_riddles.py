"""Rows for four tables of saccade; pyproject.toml says which is which.

A file of your own (`reward.terms=[my_reward.py:score]`, `env.name=my_env.py:Class`) needs no
package. A package is for what you share: its names work in every config of whoever installs it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.types import Message, Sample

# A preset: cells that differ from the defaults. `about` and `paper` are shown by the command
# `saccade algorithms`.
GRPO_WIDE = {
    "about": "GRPO without a KL term and with a wider upper clip. An example.",
    "paper": "",
    "advantage": "grpo",
    "aggregation": "seq_mean",
    "loss_args": {"clip_high": 0.4},
}


def palindrome(sample: Any, *, least: int = 3) -> float:
    """A verifier: 1 for a response that reads the same backwards and has `least` letters."""
    letters = [letter for letter in sample.response.lower() if letter.isalnum()]
    return float(len(letters) >= least and letters == letters[::-1])


class Guess:
    """An environment: guess a number, told "higher" or "lower" after every guess."""

    def __init__(self, most: int = 8) -> None:
        self.most = most

    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        self.number = random.Random(seed).randint(1, self.most)
        return (Message(role="user", parts=(f"Guess my number between 1 and {self.most}.",)),)

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool, dict]:
        digits = "".join(letter for letter in message.text if letter.isdigit())[:4]
        if not digits or int(digits) == self.number:
            return (), float(bool(digits)), True, {}
        hint = "higher" if int(digits) < self.number else "lower"
        return (Message(role="user", parts=(hint,)),), 0.0, False, {}

    def close(self) -> None:
        pass


def riddles(out: Path, rows: int = 8) -> None:
    """Write questions for the verifier palindrome."""
    with out.open("w", encoding="utf-8") as file:
        for number in range(rows):
            row = {"id": f"riddle-{number}", "question": "Say a palindrome.", "answer": "level"}
            file.write(json.dumps(row) + "\n")
    print(f"wrote {rows} rows to {out}")
