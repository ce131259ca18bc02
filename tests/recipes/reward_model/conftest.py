"""Rows that are judged, and two reward models that have learned from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import saccade
from saccade.plugins.quickstart import counting
from saccade.plugins.reward_models import reward_training
from tests.recipes.reward_model.judged import DEEP, MARK, OTHER, Make


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One big shape each. Replies, pictures and steps are judged; some heads have few labels."""
    folder = tmp_path_factory.mktemp("judged")
    for split, n in {"train": 32, "held": 12}.items():
        scenes = counting.counting_split(n, seed=n, colours=tuple(OTHER), counts=(1, 1), radius=(16, 20))
        drawn = counting.write_jsonl(scenes, folder, name="drawn").read_text().splitlines()
        listed = [json.loads(line) for line in drawn]
        by = {colour: [r for r in listed if r["colours"] == [colour]] for colour in OTHER}
        found: dict[str, list[dict[str, Any]]] = {"pairs": [], "media": [], "heads": [], "steps": []}
        for number, scene in enumerate(listed):
            [right] = scene["colours"]
            wrong = OTHER[right]
            asked = {"id": scene["id"], "images": scene["images"], "answer": right}
            asked["prompt"] = "<image>how many objects ?"
            found["pairs"].append(asked | {"chosen": right, "rejected": wrong})
            other = by[wrong][number % len(by[wrong])]
            found["media"].append(
                {"id": scene["id"], "prompt": right, "images": [*scene["images"], *other["images"]]}
                | {"chosen": "<image>", "rejected": "<image>"}
            )
            said = {"preference": "AB"[number % 2]} | ({"size": "C"} if number % 3 else {"size": "A"})
            sides = [right, wrong] if number % 2 == 0 else [wrong, right]
            found["heads"].append(asked | {"chosen": sides[0], "rejected": sides[1], "labels": said})
            steps = [right, wrong] if number % 2 else [wrong, right]
            labels = ["1" if step == right else "2" for step in steps]
            found["steps"].append(
                {"id": scene["id"], "images": scene["images"], "label": labels}
                | {
                    "input": [
                        {"role": "user", "content": "<image>how many objects ?"},
                        {"role": "assistant", "content": "\n".join(f"{s} {MARK}" for s in steps)},
                    ]
                }
            )
        for kind, lines in found.items():
            text = "".join(json.dumps(row) + "\n" for row in lines)
            (folder / f"{split}-{kind}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="session")
def config(rows: Path, word_model: str) -> Make:
    def make(out: Path, kind: str = "pairs", **changes: Any) -> dict[str, Any]:
        options = {
            "run.out": str(out),
            "run.max_steps": 4,
            "run.device": "cpu",
            "model.path": word_model,
            "data.train": str(rows / f"train-{kind}.jsonl"),
            "prompt.format": "direct",
            "prompt.instruction": "",
            "train.prompts_per_step": 8,
            "train.lr": 3e-3,
            "train.schedule": "constant",
            "train.warmup": 0,
            "track.tensorboard": False,
        }
        return options | {name.replace("__", "."): value for name, value in changes.items()}

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, config: Make, rows: Path) -> Path:
    """The folder of a reward model that knows the colours."""
    out = tmp_path_factory.mktemp("trained")
    held = str(rows / "held-pairs.jsonl")
    saccade.reward_model(config(out, run__max_steps=15, data__val=held, val__every=15))
    return out / "run" / "checkpoints" / "step-15"


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory, config: Make) -> Path:
    """One whose score is no linear function of the last states."""
    out = tmp_path_factory.mktemp("deep")
    reward_training.run(config(out, run__max_steps=12) | DEEP)
    return out / "run" / "checkpoints" / "step-12"
