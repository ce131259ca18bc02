"""Process reward models: steps are judged one by one."""

import json

import pytest
import torch

import saccade
from saccade.config import load
from saccade.models.families import load_family
from saccade.plugins.reward_models.learned_reward import LearnedReward
from saccade.plugins.reward_models.reward_card import RewardCard, steps_trajectory, with_marks
from saccade.plugins.reward_models.reward_rows import rows_of
from saccade.recipes import model_setup
from saccade.rewards.reward_sample import reward_sample
from saccade.run.statistics import wilson
from saccade.types import Message, replace
from tests.recipes.reward_model.judged import MARK, OTHER, PROCESS


def test_steps_are_judged_and_a_response_by_its_steps(tmp_path, config, rows):
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


def test_rows_of_steps_that_are_set_aside(tmp_path, config):
    bad = [
        (f"red {MARK}", ["1", "2"], "1 placeholders 'black' but 2 labels"),
        (f"red {MARK}", ["3"], "write one of 1, 2, or a probability"),
        ("red", "1", "no list of labels"),
        (f"red {MARK}", "[+, bad", "column 'label' is not valid JSON"),
        (f"red {MARK}blue {MARK}", ["1", "2"], "1 of 2 placeholders"),  # joined with its neighbour
        (f"red {MARK} blue {MARK}", ["1", 0.3], ""),  # soft labels are probabilities
    ]
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps({"input": text, "label": label}) + "\n" for text, label, _ in bad))
    options = config(tmp_path, data__train=str(path), data__max_bad_fraction=1.0) | PROCESS
    resolved = load(options, command="reward-model")
    task = rows_of(resolved, model_setup.family_of(resolved, resolved.model.path))
    for _ in range(2):  # lengths are remembered
        data = task.load(resolved.data.train)
        assert len(data) == 1 and [row.row for row in data.quarantined] == [1, 2, 3, 4, 5]
        for row, (_, _, words) in zip(data.quarantined, bad, strict=False):
            assert words in row.reason
    [labels] = task.prepare(data.samples)[1].labels.values()
    assert labels.tolist() == [[1.0, 0.0], [0.3, 0.7]]


def test_marks_of_a_policy_are_not_read(word_model):
    card = RewardCard(kind="process", placeholder=MARK, tokens=("1", "2"))
    asked = (Message(role="user", parts=(f"how many {MARK} objects ?",)),)
    for said in ("red\nblue", f"red {MARK} {MARK}\n{MARK}\nblue bla{MARK}ck"):
        for chat in (True, False):
            messages = with_marks(asked, said, replace(card, chat=chat))
            read = steps_trajectory("a", messages, load_family(word_model), MARK)
            assert read.response_length == 2
