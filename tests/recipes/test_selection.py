"""Scored responses become rows to train on: best of n, pairs of best and worst, all good ones."""

import json

import pytest

from saccade.config import load
from saccade.models.families import load_family
from saccade.plugins.generate import generate
from saccade.plugins.generate.selection import write_selected
from saccade.plugins.preferences import dpo, pairs
from saccade.plugins.preferences.pairs import compared
from saccade.recipes import questions, sft
from saccade.types import Message, Sample


def response(text, reward, end_reason="answered"):
    return {"text": text, "reward": reward, "end_reason": end_reason}


@pytest.fixture
def written(tmp_path):
    rows = {
        "clear": [response("b", 0.5), response("a", 1.0), response("c", 0.0), response("a", 1.0)],
        "tie": [response("x", 1.0), response("y", 1.0)],
        "cut": [response("long", 2.0, "turn_length"), response("short", 0.2), response("bad", -1.0, "eos_no_answer")],
        "failed": [response("x", None), response("", 0.0)],
    }
    path = tmp_path / "generations.jsonl"
    lines = (json.dumps({"id": id, "responses": answers}) for id, answers in rows.items())
    path.write_text("".join(line + "\n" for line in lines))
    return path


SAMPLES = [
    Sample(id=id, messages=(Message(role="user", parts=(f"{id}?",)),), answer="1")
    for id in ("clear", "tie", "cut", "failed")
]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def text(messages):
    return messages[-1]["content"][0]["text"]


@pytest.mark.parametrize(
    ("threshold", "wanted"), [(None, {"clear": ("a", "c"), "cut": ("short", "bad")}), (0.9, {"clear": ("a", "c")})]
)
def test_best_and_worst(written, threshold, wanted):
    path, count = write_selected("best_worst", written, SAMPLES, threshold)
    assert path.name == "generations.best_worst.jsonl" and count == len(wanted)
    found = {r["id"]: (text(r["chosen"]), text(r["rejected"])) for r in rows_of(path)}
    assert found == wanted


def test_the_best_and_all_good_ones(written):
    path, _ = write_selected("best", written, SAMPLES, None)
    found = {row["id"]: (text(row["messages"]), row["extra"]["reward"]) for row in rows_of(path)}
    assert found == {"clear": ("a", 1.0), "tie": ("x", 1.0), "cut": ("short", 0.2)}
    path, _ = write_selected("threshold", written, SAMPLES, 0.5)
    ids = [(row["id"], text(row["messages"])) for row in rows_of(path)]
    assert ids == [("clear/0", "a"), ("clear/1", "b"), ("tie/0", "x"), ("tie/1", "y")]


def test_a_round_of_iterative_dpo_and_of_rejection_sampling(tmp_path, rl_config, scenes):
    """Prompts with pictures are trained on exactly as they were asked."""
    asked = {
        "prompt.format": "think_answer", "prompt.instruction": None, "prompt.system": "how many",
        "rollout.ignore_eos": False, "rollout.max_tokens": 40,
    }  # fmt: skip
    config = rl_config(tmp_path, generate__n=8, run__name="made", data__max_samples=12) | asked
    made = generate.run(config | {"generate.select": "best_worst"})
    assert made["selected_rows"] >= 3
    again = generate.run(config | {"generate.select": "best"})  # from the responses that are there
    assert again["rows"] == 0 and again["selected_rows"] >= made["selected_rows"]

    resolved = load(config | {"data.train": made["selected"]}, command="dpo")
    family = load_family(resolved.model.path)
    prompts = questions.load_prompts(load(config), load(config).data.train, family).samples
    known = {sample.id: family.render(sample.messages).ids.tolist() for sample in prompts}
    chosen = pairs.load_pairs(resolved, resolved.data.train, family, paired=True).samples
    for sample in chosen:
        for member in compared(sample, family).trajectories:
            start = member.prompt_length
            assert member.ids[:start].tolist() == known[sample.id] and member.media

    steps = {"run.max_steps": 2, "train.prompts_per_step": 2}
    options = {k: v for k, v in config.items() if not k.startswith("train.samples")} | steps
    trained = dpo.run(options | {"run.name": "dpo", "data.train": made["selected"]})
    assert trained["dpo/loss"] > 0
    tuned = sft.run(options | {"run.name": "sft", "data.train": again["selected"]})
    assert tuned["sft/loss"] > 0
