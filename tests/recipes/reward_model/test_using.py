"""RL, sft and eval with a reward model; folders and options that are refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import saccade
from saccade.config import load
from saccade.data import datasets
from saccade.errors import ConfigError
from saccade.plugins.families.tiny import build
from saccade.plugins.quickstart.quickstart import WORDS
from saccade.plugins.reports.trajectories import read_trajectories
from saccade.plugins.reward_models import reward_training
from saccade.plugins.reward_models.learned_reward import LearnedReward
from saccade.plugins.reward_models.reward_card import read_card
from saccade.rewards.reward_sample import reward_sample


def test_models_of_two_families_and_a_rule_by_source_in_one_run(tmp_path, config, rl_config, deep, trained, scenes):
    """Each response has the weighed scores of each folder alone; a critic that cannot take a head draws its own."""
    start = build("qwen2_vl", tmp_path / "model", words=WORDS, seed=7)
    reward_training.run(config(tmp_path, run__max_steps=2) | {"run.name": "other", "model.path": start})
    folders = {"taste": trained, "other": tmp_path / "other" / "checkpoints" / "step-2", "scaled": trained}
    weights = {"taste": 0.25, "other": -2.0, "scaled": 1.0}
    terms = [
        {"verifier": "model", "name": name, "weight": weights[name], "args": {"path": str(folder)}}
        for name, folder in folders.items()
    ]
    terms[2]["args"]["normalise"] = True
    terms.append({"verifier": "exact", "weight": 0.0})
    mixed = [json.loads(line) for line in (scenes / "train.jsonl").read_text().splitlines()[:8]]
    for number, row in enumerate(mixed):
        row["data_source"] = ("learned", "ruled")[number % 2]
        row["images"] = [str(scenes / image) for image in row["images"]]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in mixed))
    options = rl_config(tmp_path, data__train=str(path), run__max_steps=1, train__prompts_per_step=8)
    options |= {"reward.terms": [], "reward.by_source": {"learned": terms, "ruled": "count"}}
    options |= {"reward.self_test": "warn", "track.trajectories_every": 1}
    last = saccade.rl(options | {"algorithm.preset": "ppo", "algorithm.critic.path": str(deep)})
    assert np.isfinite(last["critic/loss"])
    assert "draws a head of its own" in (tmp_path / "run" / "log.txt").read_text()
    (file,) = (tmp_path / "run" / "trajectories").glob("*.jsonl")
    stored = [json.loads(line) for line in file.read_text().splitlines()]
    assert {tuple(row["parts"]) for row in stored if row["data_source"] == "ruled"} == {("count",)}
    stored = [row for row in stored if row["data_source"] == "learned"]
    row_of = {sample.id: sample for sample in datasets.load(load(options).data.train, load(options).data).samples}

    def said(row):
        texts = [part["text"] for part in row["segments"] if part["source"] == "policy"]
        return "".join(texts).removesuffix("<|im_end|>").strip()

    for name in ("taste", "other"):
        model = LearnedReward.load(folders[name], device=torch.device("cpu"), dtype=torch.float32)
        alone = model.score([reward_sample(row_of[r["id"]], said(r)) for r in stored])
        assert [r["parts"][name] for r in stored] == pytest.approx(alone, abs=1e-4), name
        assert np.std(alone) > 1e-3
    card = read_card(trained)
    mean, std = card.statistics["preference"]
    for row in stored:
        parts = row["parts"]
        assert parts["scaled"] == pytest.approx((parts["taste"] - mean) / std, abs=1e-4)
        assert row["reward"] == pytest.approx(sum(weights[n] * parts[n] for n in weights), abs=1e-4)


def test_eval_scores_with_a_model_and_rescore_refuses(tmp_path, rl_config, trained, scenes):
    learned = {"verifier": "model", "args": {"path": str(trained)}}
    options = rl_config(tmp_path, data__val=str(scenes / "val.jsonl"))
    options |= {"reward.terms": [learned]}
    found = saccade.evaluate(options, out=tmp_path / "eval")
    assert np.isfinite(found["val"]["score"]) and "accuracy" not in found["val"]
    stored = list(read_trajectories(tmp_path / "eval", "val/val", 0))
    assert stored and all(record["outcome_is_score"] for record in stored)
    with pytest.raises(ConfigError, match="remove `model`"):
        saccade.evaluate(options, rescore=tmp_path / "eval" / "samples.jsonl", out=tmp_path / "b")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{}", "is no reward model"),
        ("reward_head.safetensors", None, "reward_head.safetensors is missing"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("config.json", b"{", "config.json cannot be read"),
    ],
)
def test_a_damaged_reward_model_is_refused_before_the_run_begins(tmp_path, rl_config, trained, name, content, words):
    copied = Path(shutil.copytree(trained, tmp_path / "rm"))
    (copied / name).unlink(missing_ok=True)
    if content is not None:
        (copied / name).write_bytes(content)
    term = {"verifier": "model", "args": {"path": str(copied)}}
    with pytest.raises(ConfigError, match=words):
        saccade.rl(rl_config(tmp_path) | {"reward.terms": [term]})
    assert not (tmp_path / "run").exists()


def test_what_starts_from_a_reward_model_is_none(tmp_path, rl_config, trained):
    learned = {"verifier": "model", "name": "taste", "args": {"path": str(trained)}}
    options = rl_config(tmp_path, run__max_steps=1, model__path=str(trained))
    last = saccade.rl(options | {"reward.terms": [learned, "exact"], "reward.self_test": "off"})
    assert last["reward/accuracy"] == last["reward/exact"]  # a rule goes before a learned score
    saved = tmp_path / "run" / "checkpoints" / "step-1"
    assert read_card(saved) is None and not (saved / "reward_head.safetensors").exists()
    learned["args"] = {"path": str(trained), "steps": "min"}
    with pytest.raises(ConfigError, match=r"scores whole responses; drop steps=min"):
        saccade.rl(rl_config(tmp_path, run__name="b") | {"reward.terms": [learned]})


def test_a_block_that_the_model_does_not_have_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match="is none of the 2 blocks of this model; give -2 to 1"):
        reward_training.run(config(tmp_path, reward_model__probe_layer=-3))
    assert not (tmp_path / "run").exists()
