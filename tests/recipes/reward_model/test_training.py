"""Reward models end to end: pairs of pictures are learned, folders score again."""

import json
from math import nan
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import saccade
from saccade.config import load
from saccade.errors import ConfigError, DataError
from saccade.plugins.evaluation.results import read_lines, write_numbers
from saccade.plugins.reports.eval_report import eval_report
from saccade.plugins.reward_models import reward_training
from saccade.plugins.reward_models.learned_reward import LearnedReward
from saccade.plugins.reward_models.reward_card import RewardCard, read_card
from saccade.plugins.reward_models.reward_losses import RatingLoss, StepsLoss
from saccade.plugins.reward_models.reward_rows import rows_of
from saccade.recipes import model_setup
from saccade.run.statistics import mean_interval, wilson
from tests.browser import page_data
from tests.public_sets import write_all
from tests.recipes.reward_model.judged import DEEP, MARK, PROCESS, scores_of


def test_pairs_of_pictures_are_learned_and_the_folder_scores_again(trained, config, tmp_path, numbers):
    first, *steps = numbers(trained.parents[1])
    assert first["val/held-pairs/accuracy"] < 0.8
    last = steps[-1]
    assert last["rm/accuracy"] == 1 and last["val/held-pairs/accuracy"] == 1
    assert last["rm/chosen_mean"] - last["rm/rejected_mean"] == pytest.approx(last["rm/gap"])
    scores = scores_of(trained, config(tmp_path))
    assert (scores[:, 0] > scores[:, 1]).all()
    card = read_card(trained)
    assert card is not None and card.heads == ("preference",)
    mean, std = card.statistics["preference"]
    assert card.statistics_step == 15
    assert (mean, std) == pytest.approx((last["val/held-pairs/mean"], last["val/held-pairs/std"]))
    normal = scores_of(trained, config(tmp_path), normalise=True)
    np.testing.assert_allclose(normal, (scores - mean) / std, rtol=1e-5)


def test_eval_of_a_reward_model_judges_the_rows(trained, deep, config, rows, tmp_path, numbers, monkeypatch, capsys):
    """Its folder alone says what it is; nothing of its training is given. After a stop it goes on."""
    name, out = "held-pairs", tmp_path / "held"
    wording = {"prompt.format": "direct", "prompt.instruction": "", "run.device": "cpu"}
    sets = [str(rows / f"{name}.jsonl") for name in (name, "train-pairs")]
    options = wording | {"model.path": str(trained), "data.val": sets}
    monkeypatch.setattr(reward_training, "write_numbers", lambda *told: write_numbers(*told) or int("stop"))
    with pytest.raises(ValueError, match="stop"):
        saccade.evaluate(options, out=out)
    monkeypatch.undo()
    found, other = saccade.evaluate(options, out=out).values()
    assert f"{name}: done before this evaluation was broken off" in capsys.readouterr().out and other["items"] == 32
    last = numbers(trained.parents[1])[-1]
    assert found["items"] == 12 and found["accuracy"] == last["val/held-pairs/accuracy"] == 1
    assert (found["ci_low"], found["ci_high"]) == wilson(12, 12)
    for key in ("loss", "gap", "mean", "std"):
        assert found[key] == pytest.approx(last[f"val/{name}/{key}"], rel=1e-5)
    facts = {"model": str(trained), "prompt": "direct"}
    assert page_data(out / "report.html")["facts"] == eval_report(out).facts == facts
    assert load(out / "config.yaml") == load(options)
    lines = [row for row in read_lines(out / "samples.jsonl") if row["set"] == name]
    gaps = [row["chosen"]["preference"] - row["rejected"]["preference"] for row in lines]
    assert len(gaps) == 12 and np.mean(gaps) == pytest.approx(found["gap"], rel=1e-5)
    options |= {"model.path": str(deep), "data.val": str(rows / "train-pairs.jsonl")}
    options["val.every"] = 0  # training looked at no set
    [found] = saccade.evaluate(options, out=tmp_path / "deep").values()
    assert found["accuracy"] == (np.diff(scores_of(deep, config(tmp_path))) < 0).mean()
    with pytest.raises(ConfigError, match=r"judges rows; try data\.val="):
        reward_training.evaluate(load({"model.path": str(deep)}), tmp_path, {}, {})  # suites have none


def test_eval_of_a_reward_model_on_public_pairs(trained, tmp_path, image):
    folder = write_all(tmp_path / "data", image, ["rewardbench", "gsm8k"])
    own = {"prompt.format": "direct", "prompt.instruction": "", "run.device": "cpu", "model.path": str(trained)}
    own |= {"eval.folder": str(folder), "eval.suites": ["rewardbench"]}
    [(name, found)] = saccade.evaluate(own, out=tmp_path / "eval").items()
    assert (name, found["items"]) == ("rewardbench", 1) and found["by_category"]["Chat"]["items"] == 1
    assert found["by_category"]["Chat"]["accuracy"] == found["accuracy"]
    with pytest.raises(ConfigError, match="compares pairs, and gsm8k has none; try one of rewardbench, vl_rewardbench"):
        saccade.evaluate(own | {"eval.suites": ["gsm8k"]}, out=tmp_path / "none")


def test_a_deep_head_learns_and_its_folder_is_a_whole_model(deep, config, tmp_path, word_model):
    scores = scores_of(deep, config(tmp_path))
    assert (scores[:, 0] > scores[:, 1]).all() and 0 < scores.min() < scores.max() < 1
    card = read_card(deep)
    mean, std = card.statistics["preference"]  # of the last step's rows, a quarter of all
    assert (mean, std) == (pytest.approx(scores.mean(), abs=0.05), pytest.approx(scores.std(), rel=0.1))
    assert card == RewardCard(
        kind="scalar", heads=("preference",), pooling="attention", pooling_heads=4, probe_layer=0, head="mlp",
        bounded=True, statistics=card.statistics, statistics_step=12,
    )  # fmt: skip
    models = [AutoModelForImageTextToText.from_pretrained(path) for path in (word_model, deep)]
    moved = {
        name
        for (name, before), after in zip(models[0].named_parameters(), models[1].parameters(), strict=True)
        if not torch.equal(before, after)
    }
    assert any(".layers.0." in name for name in moved)
    assert not any("language_model.layers.1." in name for name in moved)


def test_candidates_may_be_pictures(tmp_path, config, rows):
    held = str(rows / "held-media.jsonl")
    options = config(tmp_path, "media", run__max_steps=15, data__val=held, val__every=15)
    last = reward_training.run(options)
    assert last["val/held-media/accuracy"] >= 0.9
    scores = scores_of(tmp_path / "run" / "checkpoints" / "step-15", options)
    assert (scores[:, 0] > scores[:, 1]).mean() >= 0.9


def test_heads_learn_what_their_labels_say(tmp_path, config):
    both = {"preference": 1.0, "size": 0.5}
    last = reward_training.run(config(tmp_path, "heads", run__max_steps=10, reward_model__heads=both))
    assert last["rm/preference/accuracy"] == 1  # whichever side the better one stands on
    assert {"rm/size/gap", "rm/size/std", "rm/accuracy"} <= last.keys()
    folder = tmp_path / "run" / "checkpoints" / "step-10"
    card = read_card(folder)
    assert card is not None and card.heads == ("preference", "size")
    model = LearnedReward.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"set args.head"):
        model.check()
    with pytest.raises(ConfigError, match="has no head 'taste'"):
        model.check(head="taste")
    two = [scores_of(folder, config(tmp_path), head=head) for head in both]
    assert not np.allclose(two[0], two[1])


PAIR = {"prompt": "how many ?", "chosen": "red", "rejected": "blue"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (PAIR | {"rejected": "red"}, "better by preference: 1 rows call it a tie"),
        (PAIR | {"labels": {"taste": "A"}}, "no usable row:\n.*\n1 row left out: it labels taste,"),
        ({"input": f"red {MARK}", "label": ["1"]}, "reward_model.kind=process learns from"),
        ({"input": "how ?", "output": "red", "label": 1}, "one labelled response; rows need cho"),
        (PAIR, "better by coherence: 0 rows .* rows label preference"),
    ],
)
def test_rows_that_compare_nothing(tmp_path, config, row, words):
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps(row) + "\n")
    heads = ["preference", *(["coherence"] if row == PAIR else [])]
    with pytest.raises((ConfigError, DataError), match=words):
        reward_training.run(config(tmp_path, data__train=str(path), reward_model__heads=heads))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes",
    [DEEP | {"train.ema": 0.9}, {"model.train": "lora", "model.lora.rank": 4, "reward_model.probe_layer": -2}],
    ids=["full", "lora"],
)
def test_stopped_and_resumed_is_the_same_run(tmp_path, config, changes, resumed):
    """An epoch ends within the third step."""
    ends = resumed(reward_training.run, config(tmp_path, train__prompts_per_step=12, run__max_steps=3) | changes)
    assert read_card(ends[0]) == read_card(ends[1])
    heads = [(end / "reward_head.safetensors") for end in ends]
    assert heads[0].read_bytes() == heads[1].read_bytes()


def test_a_reward_model_is_trained_further_with_its_head(tmp_path, config, trained):
    further = config(tmp_path, model__path=str(trained), run__max_steps=1, train__lr=1e-9)
    assert reward_training.run(further | {"run.name": "bt"})["rm/accuracy"] == 1
    folders = [trained, tmp_path / "bt" / "checkpoints" / "step-1"]
    kept = [load_file(f / "reward_head.safetensors")["score.weight"] for f in folders]
    torch.testing.assert_close(kept[0], kept[1], atol=1e-7, rtol=0)
    reward_training.run(further | {"run.name": "hps", "reward_model.loss": "hps"})
    stored = load_file(tmp_path / "hps" / "checkpoints" / "step-1" / "reward_head.safetensors")
    assert stored["score.log_scale"].item() == pytest.approx(np.log(1 / 0.07), abs=1e-4)
    steps = config(tmp_path, "steps", model__path=str(trained)) | PROCESS
    for options in (further | {"reward_model.pooling": "mean"}, steps):
        with pytest.raises(ConfigError, match=r"is a trained reward model \((pooling: last|kind)"):
            reward_training.run(options)
    assert not (tmp_path / "run").exists()


def test_a_margin_that_asks_for_no_lead_is_a_bad_row(tmp_path, config):
    margins = ["high", float("nan"), -1, "0.5", None]
    path = tmp_path / "margins.jsonl"
    path.write_text("".join(json.dumps(PAIR | {"id": n, "margin": m}) + "\n" for n, m in enumerate(margins)))
    resolved = load(config(tmp_path, data__train=str(path), data__max_bad_fraction=0.9), command="reward-model")
    task = rows_of(resolved, model_setup.family_of(resolved, resolved.model.path))
    data = task.load(resolved.data.train)
    assert [(bad.row, "margin" in bad.reason) for bad in data.quarantined] == [(n, True) for n in range(1, 4)]
    _, loss = task.prepare(data.samples)
    assert loss.margins == {"3": 0.5}


def test_the_average_is_a_reward_model_of_its_own_and_cards_say_whose_scores_they_keep(tmp_path, config, rows):
    held = {"data.val": str(rows / "held-pairs.jsonl"), "save.every": 1, "val.every": 2}
    options = config(tmp_path, train__ema=0.5, run__max_steps=2) | held
    reward_training.run(options)
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    mine, average = (scores_of(each, config(tmp_path)) for each in (folder, folder / "state" / "ema"))
    assert not np.allclose(mine, average)
    reward_training.run(options | {"run.max_steps": 3, "run.resume": "auto"})
    cards = [read_card(folder.with_name(f"step-{n}")) for n in (1, 2, 3)]
    assert [card and card.statistics_step for card in cards] == [1, 2, 3]
    card = read_card(folder.with_name("step-3") / "state" / "ema")
    assert card and not card.statistics


def test_stock_transformers_loads_the_folder_and_export_takes_the_head_along(trained, tmp_path):
    _, info = AutoModelForImageTextToText.from_pretrained(trained, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    out = saccade.export(trained, tmp_path / "out", "bfloat16", verify=False)
    assert read_card(out) == read_card(trained)
    kept = [load_file(folder / "reward_head.safetensors") for folder in (trained, out)]
    assert torch.equal(kept[0]["score.weight"], kept[1]["score.weight"])


def batch_of(*ids, sides=1):
    return SimpleNamespace(keys=[(uid, side) for uid in ids for side in range(sides)])


def test_each_head_has_the_interval_of_its_decided_pairs():
    labels = {"a": (1.0, nan), "b": (-1.0, 1.0), "c": (0.0, 1.0), "d": (1.0, 1.0)}
    batches = [batch_of("a", "b", sides=2), batch_of("c", "d", sides=2)]
    first = np.array([[2, 0], [1, 0], [2, 0], [1, 3]], np.float32)  # a: 2 > 1, b: 2 > 1, 0 < 3
    second = np.array([[1, 1], [1, 0], [1, 2], [0, 3]], np.float32)  # c: tied label, d: 1 > 0
    outputs = [first, second]
    loss = RatingLoss(loss="bt", heads={"x": 1.0, "y": 1.0}, labels=labels)
    found = reward_training.intervals(loss, batches, outputs)
    assert (found["x/ci_low"], found["x/ci_high"]) == wilson(2, 3)  # b is judged the other way
    assert (found["y/ci_low"], found["y/ci_high"]) == wilson(1, 3)
    assert len(found) == 5 and found["x/accuracy_with_ties"] == 3 / 4  # c, whose gap is 0, is a tie
    alone = RatingLoss(loss="bt", heads={"x": 1.0}, labels={k: v[:1] for k, v in labels.items()})
    found = reward_training.intervals(alone, batches, [scores[:, :1] for scores in outputs])
    assert (found["ci_low"], found["ci_high"]) == wilson(2, 3)


def test_rows_of_steps_are_drawn_as_a_whole():
    good, bad = [1.0, 0.0], [0.0, 1.0]
    labels = {"a": np.array([good, good]), "b": np.array([good, bad]), "c": np.array([bad, bad])}
    outputs = [np.array([good, good, good, good]), np.array([bad, good])]
    loss = StepsLoss(labels=labels, count=6)
    found = reward_training.intervals(loss, [batch_of("a", "b"), batch_of("c")], outputs)
    assert tuple(found.values()) == pytest.approx(mean_interval([1.0, 0.5, 0.5]))
