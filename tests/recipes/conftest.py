"""Rows of which one candidate is better, for preference training and reward models."""

import json
from collections import defaultdict

import pytest

from saccade.plugins.quickstart import counting
from tests.recipes.reward_model.judged import MARK, OTHER


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """One big shape each: the right colour is preferred. Replies, pictures and steps are judged."""
    folder = tmp_path_factory.mktemp("judged")
    for split, n in {"train": 32, "held": 12}.items():
        scenes = counting.counting_split(n, seed=n, colours=tuple(OTHER), counts=(1, 1), radius=(16, 20))
        drawn = counting.write_jsonl(scenes, folder, name="drawn").read_text().splitlines()
        listed = [json.loads(line) for line in drawn]
        by = {colour: [r for r in listed if r["colours"] == [colour]] for colour in OTHER}
        found = defaultdict(list)
        for number, scene in enumerate(listed):
            [right] = scene["colours"]
            wrong = OTHER[right]
            row = {"id": scene["id"], "images": scene["images"], "answer": right}
            asked = row | {"prompt": "<image>how many objects ?"}
            found["asked"].append(asked)
            found["pairs"].append(asked | {"chosen": right, "rejected": wrong})
            labelled = {"output": right if number % 2 else wrong, "label": number % 2}
            found["labels"].append(row | {"input": f"<image>how many {number % 5} ?"} | labelled)
            other = by[wrong][number % len(by[wrong])]
            shown = {"id": scene["id"], "prompt": right, "images": [*scene["images"], *other["images"]]}
            found["media"].append(shown | {"chosen": "<image>", "rejected": "<image>"})
            said = {"preference": "AB"[number % 2]} | ({"size": "C"} if number % 3 else {"size": "A"})
            sides = [right, wrong] if number % 2 == 0 else [wrong, right]
            found["heads"].append(asked | {"chosen": sides[0], "rejected": sides[1], "labels": said})
            steps = [right, wrong] if number % 2 else [wrong, right]
            labels = ["1" if step == right else "2" for step in steps]
            said = {"user": "<image>how many objects ?", "assistant": "\n".join(f"{s} {MARK}" for s in steps)}
            turns = [{"role": role, "content": text} for role, text in said.items()]
            found["steps"].append({"id": scene["id"], "images": scene["images"], "label": labels, "input": turns})
        for kind, lines in found.items():
            text = "".join(json.dumps(row) + "\n" for row in lines)
            (folder / f"{split}-{kind}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="session")
def config(rows, word_model):
    def make(out, kind="pairs", **changes):
        options = {
            "run.out": str(out), "run.max_steps": 4, "run.device": "cpu", "model.path": word_model,
            "data.train": str(rows / f"train-{kind}.jsonl"), "prompt.format": "direct", "prompt.instruction": "",
            "train.prompts_per_step": 8, "train.lr": 3e-3, "train.schedule": "constant", "train.warmup": 0,
            "track.tensorboard": False,
        }  # fmt: skip
        return options | {name.replace("__", "."): value for name, value in changes.items()}

    return make
