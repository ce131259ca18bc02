"""Supervised fine-tuning: the loss of stock transformers on the same tokens, however packed."""

import json

import numpy as np
import pytest
import torch
import transformers

from saccade.config import load
from saccade.errors import DataError
from saccade.models.families import load_family
from saccade.recipes import questions, sft
from saccade.run import checkpoint
from saccade.types import Source
from tests.engines.decoders import build
from tests.recipes.documented import unnamed


@pytest.fixture(scope="module")
def talks(tmp_path_factory, scenes):
    """Three conversations of two turns: two pictures, one picture, none."""
    folder = tmp_path_factory.mktemp("talks")
    for number, picture in enumerate(sorted((scenes / "images").iterdir())[:3]):
        (folder / f"{number}.png").write_bytes(picture.read_bytes())
    said = {
        "two": (["0.png", "1.png"], "<image>how many ?", "3 objects", "<image>how many red ?", "red 2"),
        "one": (["2.png"], "<image>how many objects ?", "blue blue 2", "many ?", "2"),
        "none": ([], "how many red ?", "1 2 3 red", "how ?", "assistant 4 5 6"),
    }
    rows = []
    for name, (images, *texts) in said.items():
        turns = [{"from": who, "value": text} for who, text in zip(("human", "gpt") * 2, texts, strict=True)]
        rows.append({"id": name, "images": images, "conversations": turns})
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stock_loss(config, model_path, loss_on):
    """Means over the trained tokens of all rows, one by one: transformers' own cross-entropy, and likeliest tokens."""
    resolved = load(config)
    family = load_family(model_path)
    data = questions.load_dialogues(resolved, resolved.data.train, family)
    auto = getattr(transformers, family.spec.auto_class)
    model = auto.from_pretrained(model_path, dtype=torch.float32).eval()
    total, count = np.zeros(2), 0
    for sample in data.samples:
        (member,) = sft.dialogue(sample, family, loss_on).trajectories
        labels = np.where(member.sources == Source.POLICY, member.ids, -100)
        vision = family.vision(member.media, torch.device("cpu"), torch.float32)
        if member.media:
            kinds = torch.from_numpy((member.ids == family.chat.placeholder).astype(np.int64))[None]
            vision = {**vision, "mm_token_type_ids": kinds}
        ids = torch.from_numpy(member.ids)[None]
        trained = int((labels != -100).sum())
        with torch.no_grad():
            output = model(input_ids=ids, labels=torch.from_numpy(labels)[None], **vision)
        right = (output.logits[0, :-1].argmax(-1).numpy() == labels[1:]).sum()
        total, count = total + np.array([float(output.loss) * trained, right]), count + trained
    return *total / count, count


TRAINED = {"assistant": "3objects<|im_end|>red2<|im_end|>", "last_turn": "red2<|im_end|>", "all": "howmanyred"}


@pytest.mark.parametrize("loss_on", TRAINED)
def test_the_loss_is_that_of_transformers(tmp_path, sft_config, talks, word_model, loss_on):
    config = sft_config(tmp_path, run__max_steps=1, data__train=str(talks), train__prompts_per_step=3)
    row = sft.run(config | {"sft.loss_on": loss_on})
    loss, right, tokens = stock_loss(config, word_model, loss_on)
    assert row["sft/loss"] == pytest.approx(loss, rel=1e-5)
    assert (row["sft/tokens"], row["sft/token_accuracy"]) == (tokens, pytest.approx(right))
    assert row["sft/ppl"] == pytest.approx(np.exp(loss), rel=1e-4)
    family, resolved = load_family(word_model), load(config)
    sample = questions.load_dialogues(resolved, resolved.data.train, family).samples[0]
    (member,) = sft.dialogue(sample, family, loss_on).trajectories
    ids = member.ids[member.sources == Source.POLICY].tolist()
    assert family.chat.placeholder not in ids and len(member.media) == 2
    text = family.chat.tokenizer.decode(ids).replace(" ", "")
    assert TRAINED[loss_on] in text and (loss_on == "all" or TRAINED[loss_on] == text)


def test_the_loss_falls_and_validation_generates_with_the_weights_of_the_step(tmp_path, sft_config, scenes, numbers):
    sets = [{"path": str(scenes / "val.jsonl"), "max_samples": 4}]
    config = sft_config(tmp_path, data__val=sets, val__every=5, save__every=10, run__max_steps=10)
    config |= {"train.lr": 5e-3, "train.schedule": "cosine"}
    sft.run(config | {"reward.terms": ["count"], "rollout.max_tokens": 12})
    before, *rows = numbers(tmp_path / "run")
    assert unnamed([before, *rows]) == []
    assert rows[-1]["sft/loss"] < 0.6 * rows[0]["sft/loss"]
    assert rows[0]["policy/lr"] == 5e-3 and rows[-1]["policy/lr"] < 2e-4
    assert {"policy/grad_norm", "policy/grad_norm_vision", "guard/nonfinite", "data/epoch"} <= rows[0].keys()
    assert [row["step"] for row in (before, *rows) if "val/val/accuracy" in row] == [0, 5, 10]
    assert rows[-1]["val/val/think_rate"] >= before["val/val/think_rate"]
    assert checkpoint.read_progress(tmp_path / "run/checkpoints/step-10")["best_step"] in (5, 10)
    # Without a reward no accuracy is claimed.
    config |= {"run.name": "bare", "run.max_steps": 1, "val.every": 1, "rollout.max_tokens": 6}
    sft.run(config)
    rows = numbers(tmp_path / "bare")
    assert "val/val/think_rate" in rows[0] and "val/val/parse_rate" not in rows[0]
    assert not any(name.endswith(("/accuracy", "val/reward")) for row in rows for name in row)


def test_rows_without_an_answer_or_over_the_limit_are_set_aside(tmp_path, sft_config, talks):
    file = talks.parent / "more.jsonl"
    rows = talks.read_text() + json.dumps({"id": "silent", "conversations": [{"from": "human", "value": "how many ?"}]})
    rows += "\n" + json.dumps({"id": "eager", "conversations": [{"from": "gpt", "value": "2"}]}) + "\n"
    file.write_text(rows)
    config = sft_config(tmp_path, data__train=str(file), run__max_steps=1, sft__max_tokens=32)
    with pytest.raises(DataError, match=r"2 of 5 rows are bad.*\n  silent \(row 4 of more\): no assistant turn"):
        sft.run(config)
    assert not (tmp_path / "run").exists()
    sft.run(config | {"data.max_bad_fraction": 1})
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "more: 2 of 5 rows" in log and "2 bad rows excluded" in log and "1 row over sft.max_tokens (" in log


def test_a_model_that_scales_its_logits_learns(tmp_path, sft_config, talks):
    family, _ = build("granite", tmp_path)
    (text,) = (row for row in talks.read_text().splitlines(keepends=True) if '"none"' in row)
    (rows := tmp_path / "text.jsonl").write_text(text)
    given = {"data__train": str(rows), "model__path": family.path, "train__prompts_per_step": 1}
    row = sft.run(sft_config(tmp_path, run__max_steps=1, **given))
    assert row["policy/grad_norm"] > 0 and 0 <= row["sft/token_accuracy"] <= 1
