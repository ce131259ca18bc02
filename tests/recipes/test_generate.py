"""Batch inference: n responses per row, an exact resume after a kill, and rows to train on chosen from them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import saccade
from saccade.config import load
from saccade.errors import ConfigError
from saccade.models.families import load_family
from saccade.plugins.evaluation.results import read_lines
from saccade.plugins.generate import generate
from saccade.plugins.generate.selection import write_selected
from saccade.plugins.preferences import pairs
from saccade.plugins.preferences.pairs import candidate_group
from saccade.recipes import model_setup, questions
from saccade.types import Message, Sample


@pytest.fixture(scope="module")
def config(rl_config):
    return lambda out, **changes: rl_config(out, generate__n=3, rollout__max_tokens=5, **changes)


@pytest.fixture(scope="module")
def written(tmp_path_factory, config):
    out = tmp_path_factory.mktemp("generate")
    result = saccade.generate(config(out))
    assert result == {"path": str(out / "run" / "generations.jsonl"), "rows": 24, "skipped": 0}
    return Path(result["path"])


def test_every_row_has_its_responses(written):
    rows = read_lines(written)
    assert len(rows) == 24 and len({row["id"] for row in rows}) == 24
    for row in rows:
        assert set(row) == {*("id", "data_source", "prompt", "answer", "responses", "row", "model", "settings")}
        assert len(row["responses"]) == 3 and len({r["text"] for r in row["responses"]}) > 1
        for response in row["responses"]:
            assert set(response) == {"text", "tokens", "end_reason", "reward", "score", "extracted"}
            assert 1 <= response["tokens"] <= 5 and response["score"] in (0.0, 1.0)


def test_a_cut_file_is_completed_exactly(tmp_path, config, written, capsys):
    path = tmp_path / "run" / "generations.jsonl"
    path.parent.mkdir()
    whole = written.read_bytes()
    for lost in (900, 0):
        path.write_bytes(whole[: len(whole) - lost])
        kept = path.read_bytes().count(b"\n")
        assert generate.run(config(tmp_path)) == {"path": str(path), "rows": 24 - kept, "skipped": kept}
        assert path.read_bytes() == whole
    answers = [answer for row in read_lines(path) for answer in row["responses"]]
    reward, right = (np.mean([a[name] for a in answers]) for name in ("reward", "score"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"24 rows with 72 responses are in {path}  reward {reward:.3f}  ")
    assert f"  accuracy {right:.3f} [" in last and "  avg@3 " in last and "  pass@3 " in last


def test_a_cut_inside_a_character_and_odd_line_breaks(tmp_path, config, written):
    path = tmp_path / "run" / "generations.jsonl"
    path.parent.mkdir()
    row = read_lines(written)[0]
    row["responses"][0]["text"] = "\u2028\x85"
    path.write_bytes(json.dumps(row, ensure_ascii=False).encode() + b'\n{"id": "x", "prompt": "\xc3')
    assert generate.run(config(tmp_path, data__max_samples=2))["skipped"] == 1
    assert [row["id"] for row in read_lines(path)] == [row["id"] for row in read_lines(written)[:2]]


def test_without_rewards_nothing_is_scored(tmp_path, config):
    result = generate.run(config(tmp_path, reward__terms=[], data__max_samples=1))
    (row,) = read_lines(Path(result["path"]))
    assert {r["reward"] for r in row["responses"]} == {None}


def test_rows_that_changed_are_answered_again(config, tmp_path, capsys):
    def write(gold=1, colour="red"):
        Image.new("RGB", (56, 56), colour).save(tmp_path / "0.png")
        lines = [
            {"id": "picture", "question": "<image> count", "answer": "1", "images": ["0.png"]},
            {"id": "gold", "question": "how many", "answer": str(gold)},
            {"id": "same", "question": "how many red", "answer": "2"},
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))

    def made(**options):
        result = generate.run(config(tmp_path, data__train=str(tmp_path / "rows.jsonl"), **options))
        return result["rows"], result["skipped"]

    write()
    assert made() == (3, 0) and made() == (0, 3)
    path = tmp_path / "run" / "generations.jsonl"
    first = {row["id"]: row for row in read_lines(path)}
    write(gold=5)
    assert made() == (1, 2)
    assert "of these 1 are answered again, such as gold: they changed" in capsys.readouterr().out
    write(gold=5, colour="blue")
    assert made() == (1, 2)
    second = {row["id"]: row for row in read_lines(path)}
    assert second["gold"]["answer"] == "5" and len(read_lines(path)) == 3
    assert [id for id, row in second.items() if row == first[id]] == ["same"]
    assert made(data__max_pixels=3136) == (1, 2)  # the picture is seen otherwise
    assert made(data__max_pixels=3136, data__max_samples=1) == (0, 3)


def test_scores_of_other_rewards_or_weights_are_not_taken_for_done(config, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(config(tmp_path)["model.path"], model)
    own = tmp_path / "own.py"
    own.write_text("def score(sample):\n    return 1.0\n")
    few = config(tmp_path) | {"data.max_samples": 1, "model.path": str(model)}
    few |= {"reward.terms": [f"{own}:score"], "reward.self_test": "off"}
    saccade.generate(few)
    how = {"rollout.memory_share": 0.3, "rollout.parity_max": 1.0, "rollout.max_sequences": 7}
    assert saccade.generate(few | how | {"reward.workers": 1, "reward.deadline": 20.0})["skipped"] == 1
    with pytest.raises(ConfigError, match=r"other settings.*max_tokens: \d+ there, 4 now.*run\.name"):
        saccade.generate(few | {"rollout.max_tokens": 4})
    for change in ({"reward.terms": ["exact"]}, {"reward.combine": "min"}):
        with pytest.raises(ConfigError, match="other settings, rewards or weights"):
            saccade.generate(few | change)
    own.write_text("def score(sample):\n    return 0.0\n")
    with pytest.raises(ConfigError, match=r"other settings, rewards or weights \(.*own.py.*changed\)"):
        saccade.generate(few)
    own.write_text("def score(sample):\n    return 1.0\n")
    assert saccade.generate(few)["skipped"] == 1
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(ConfigError, match="other settings, rewards or weights"):
        saccade.generate(few)


def test_right_episodes_become_conversations_to_learn_from(tmp_path, config, capsys):
    worded = tmp_path / "prompt.jinja"
    worded.write_text("Look well. {{ content }}")
    chosen = config(tmp_path, generate__select="correct", rollout__stop=list("23456"))
    chosen |= {"prompt.template": str(worded)}
    result = generate.run(chosen)
    path = Path(result["path"])
    right = [
        (row["id"], repeat, response["text"])
        for row in read_lines(path)
        for repeat, response in enumerate(row["responses"])
        if response["score"] == 1 and response["end_reason"] == "answered"
    ]
    taught = path.parent / "coldstart" / "train.jsonl"
    rows = read_lines(taught)
    assert len(rows) > 3
    assert (result["selected"], result["selected_rows"]) == (str(taught), len(rows))
    told = f"{len(rows)} of 72 episodes were right, to train on in {taught}"
    assert told in capsys.readouterr().out
    assert [(row["id"], row["conversations"][-1]["value"]) for row in rows] == [
        (f"{id}/{repeat}", text) for id, repeat, text in right
    ]
    learn = load({"model.path": chosen["model.path"], "data.train": str(taught), "prompt.template": str(worded)})
    family = model_setup.family_of(learn, learn.model.path)
    samples = questions.load_dialogues(learn, learn.data.train, family).samples
    assert [sample.messages[-1].role for sample in samples] == ["assistant"] * len(rows)
    for sample in samples:  # no prompt is worded a second time
        assert "".join(message.text for message in sample.messages).count("Look well.") == 1

    whole, made = path.read_bytes(), taught.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    generate.run(chosen)
    assert (path.read_bytes(), taught.read_bytes()) == (whole, made)


def response(text, reward, end_reason="answered"):
    return {"text": text, "reward": reward, "end_reason": end_reason}


@pytest.fixture
def scored(tmp_path):
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


def text(messages):
    return messages[-1]["content"][0]["text"]


@pytest.mark.parametrize(
    ("threshold", "wanted"), [(None, {"clear": ("a", "c"), "cut": ("short", "bad")}), (0.9, {"clear": ("a", "c")})]
)
def test_best_and_worst(scored, threshold, wanted):
    path, count = write_selected("best_worst", scored, SAMPLES, threshold)
    assert path.name == "generations.best_worst.jsonl" and count == len(wanted)
    found = {r["id"]: (text(r["chosen"]), text(r["rejected"])) for r in read_lines(path)}
    assert found == wanted


def test_the_best_and_all_good_ones(scored):
    path, _ = write_selected("best", scored, SAMPLES, None)
    found = {row["id"]: (text(row["messages"]), row["extra"]["reward"]) for row in read_lines(path)}
    assert found == {"clear": ("a", 1.0), "tie": ("x", 1.0), "cut": ("short", 0.2)}
    path, _ = write_selected("threshold", scored, SAMPLES, 0.5)
    ids = [(row["id"], text(row["messages"])) for row in read_lines(path)]
    assert ids == [("clear/0", "a"), ("clear/1", "b"), ("tie/0", "x"), ("tie/1", "y")]


def test_chosen_responses_stand_behind_the_prompts_that_were_asked(tmp_path, rl_config, scenes):
    """With pictures, token by token; tests/test_configs trains on such rows."""
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
        for member in candidate_group(sample, family).trajectories:
            start = member.prompt_length
            assert member.ids[:start].tolist() == known[sample.id] and member.media
