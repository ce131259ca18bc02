"""Process reward models: steps are judged one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import saccade
from saccade.config import load
from saccade.errors import DataError
from saccade.models.families import load_family
from saccade.plugins.reward_models import reward_training
from saccade.plugins.reward_models.learned_reward import LearnedReward
from saccade.plugins.reward_models.process_steps import stepped, with_marks
from saccade.plugins.reward_models.reward_card import Card
from saccade.plugins.reward_models.reward_rows import rows_of
from saccade.recipes import model_setup
from saccade.rewards.reward_sample import reward_sample
from saccade.run.statistics import wilson
from saccade.types import Message, replace
from tests.recipes.reward_model.judged import MARK, OTHER, PROCESS, Make


def test_steps_are_judged_and_a_response_by_its_steps(tmp_path: Path, config: Make, rows: Path) -> None:
    held = {"data.val": str(rows / "held-steps.jsonl"), "val.every": 40}
    options = config(tmp_path, "steps", run__max_steps=40) | PROCESS | held
    last = saccade.reward_model(options)
    assert last["rm/accuracy"] == 1 and last["val/held-steps/accuracy"] == 1
    assert last["rm/label_mean"] == pytest.approx(0.5)
    folder = tmp_path / "run" / "checkpoints" / "step-40"
    assert not (folder / "reward_head.safetensors").exists()
    model = LearnedReward.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    resolved = load(options, command="reward-model")
    task = rows_of(resolved, model_setup.family_of(resolved, resolved.model.path))
    for sample in task.load(resolved.data.train).samples[:4]:
        asked = replace(sample, messages=sample.messages[:1])
        right = sample.messages[1].text.split()[0 if sample.extra["label"][0] == "1" else 2]
        two = reward_sample(asked, f"{right}\n{OTHER[right]}")
        one = reward_sample(asked, right)
        least, mean, end = (model.score([two], steps=s)[0] for s in ("min", "mean", "last"))
        assert least < 0.2 and end == least and 0.3 < mean < 0.7 and model.score([one])[0] > 0.8
    wording = {"prompt.format": "direct", "prompt.instruction": "", "run.device": "cpu"}
    wording |= {"model.path": str(folder), "data.val": held["data.val"]}
    [found] = saccade.evaluate(wording, out=tmp_path / "held").values()
    assert found["accuracy"] == 1 and found["loss"] == pytest.approx(last["val/held-steps/loss"])
    assert (found["ci_low"], found["ci_high"]) == wilson(int(found["items"]), int(found["items"]))


def test_soft_labels_are_probabilities(tmp_path: Path, config: Make) -> None:
    path = tmp_path / "soft.jsonl"
    row = {"input": f"red {MARK} blue {MARK}", "label": [0.8, 0.3]}
    path.write_text("".join(json.dumps(row | {"id": n}) + "\n" for n in range(8)))
    options = config(tmp_path, data__train=str(path), run__max_steps=40) | PROCESS
    last = reward_training.run(options)
    entropy = -sum(p * np.log(p) + (1 - p) * np.log(1 - p) for p in (0.8, 0.3)) / 2
    assert last["rm/loss"] == pytest.approx(entropy, abs=0.01)
    assert last["rm/good_mean"] == pytest.approx(0.55, abs=0.03)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input": f"red {MARK}", "label": ["1", "2"]}, "1 placeholders 'black' but 2 labels"),
        ({"input": f"red {MARK}", "label": ["3"]}, "write one of 1, 2, or a probability"),
        ({"input": "red", "label": "1"}, "no list of labels"),
        ({"input": f"red {MARK}", "label": "[+, bad"}, "column 'label' is not valid JSON"),
    ],
)
def test_rows_of_steps_that_are_set_aside(tmp_path: Path, config: Make, row: dict[str, Any], words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=words):
        reward_training.run(config(tmp_path, data__train=str(path)) | PROCESS)


def test_a_later_row_whose_placeholder_is_joined_is_set_aside(tmp_path: Path, config: Make) -> None:
    path = tmp_path / "joined.jsonl"
    listed = [{"id": n, "input": f"red {MARK} blue {MARK}", "label": ["1", "2"]} for n in range(8)]
    listed[5]["input"] = f"red {MARK}blue {MARK}"
    path.write_text("".join(json.dumps(row) + "\n" for row in listed))
    options = config(tmp_path, data__train=str(path), data__max_bad_fraction=0.5) | PROCESS
    resolved = load(options, command="reward-model")
    task = rows_of(resolved, model_setup.family_of(resolved, resolved.model.path))
    for _ in range(2):  # lengths are remembered
        data = task.load(resolved.data.train)
        assert len(data) == 7 and data.quarantined[0].row == 6
        assert "1 of 2 placeholders" in data.quarantined[0].reason


def test_marks_of_a_policy_are_not_read(word_model: str) -> None:
    card = Card(kind="process", placeholder=MARK, tokens=("1", "2"))
    asked = (Message(role="user", parts=(f"how many {MARK} objects ?",)),)
    for said in ("red\nblue", f"red {MARK} {MARK}\n{MARK}\nblue bla{MARK}ck"):
        for chat in (True, False):
            messages = with_marks(asked, said, replace(card, chat=chat))
            read = stepped("a", 0, messages, load_family(word_model), MARK)
            assert read.response_length == 2
