"""Reward models end to end: pairs of pictures are learned, folders score again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import saccade
from saccade.config import load
from saccade.errors import ConfigError, DataError
from saccade.plugins.reward_models import reward_evaluation, reward_training
from saccade.plugins.reward_models.learned_reward import LearnedReward
from saccade.plugins.reward_models.reward_card import Card, read_card
from saccade.plugins.reward_models.reward_rows import rows_of
from saccade.recipes import model_setup
from saccade.run.console import Console
from saccade.run.statistics import wilson
from tests.recipes.reward_model.judged import DEEP, MARK, PROCESS, Make, Read, scores_of


def test_pairs_of_pictures_are_learned_and_the_folder_scores_again(
    trained: Path, config: Make, tmp_path: Path, numbers: Read
) -> None:
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


def test_eval_of_a_reward_model_judges_the_rows(
    trained: Path, deep: Path, config: Make, rows: Path, tmp_path: Path, numbers: Read
) -> None:
    """Its folder alone says what it is; nothing of its training is given."""
    held = rows / "held-pairs.jsonl"
    wording = {"prompt.format": "direct", "prompt.instruction": "", "run.device": "cpu"}
    options = wording | {"model.path": str(trained), "data.val": str(held)}
    [(name, found)] = saccade.evaluate(options, out=tmp_path / "held").items()
    last = numbers(trained.parents[1])[-1]
    assert found["items"] == 12 and found["accuracy"] == last["val/held-pairs/accuracy"] == 1
    assert (found["ci_low"], found["ci_high"]) == wilson(12, 12)
    for key in ("loss", "gap", "mean", "std"):
        assert found[key] == pytest.approx(last[f"val/{name}/{key}"], rel=1e-5)
    lines = (tmp_path / "held" / "samples.jsonl").read_text().splitlines()
    gaps = [row["chosen"]["preference"] - row["rejected"]["preference"] for row in map(json.loads, lines)]
    assert len(gaps) == 12 and np.mean(gaps) == pytest.approx(found["gap"], rel=1e-5)
    options |= {"model.path": str(deep), "data.val": str(rows / "train-pairs.jsonl")}
    options["val.every"] = 0  # training looked at no set
    [found] = saccade.evaluate(options, out=tmp_path / "deep").values()
    assert found["accuracy"] == (np.diff(scores_of(deep, config(tmp_path))) < 0).mean()
    card = read_card(deep)
    assert card is not None
    with pytest.raises(ConfigError, match=r"judges rows; try data\.val="), Console(None, "eval") as c:
        reward_evaluation.compare(load({"model.path": str(deep)}), card, tmp_path, c)  # suites have none


def test_a_deep_head_learns_and_its_folder_is_a_whole_model(
    deep: Path, config: Make, tmp_path: Path, word_model: str
) -> None:
    scores = scores_of(deep, config(tmp_path))
    assert (scores[:, 0] > scores[:, 1]).all() and 0 < scores.min() < scores.max() < 1
    card = read_card(deep)
    assert card == Card(
        kind="scalar",
        heads=("preference",),
        pooling="attention",
        pooling_heads=4,
        probe_layer=0,
        head="mlp",
        bounded=True,
        statistics=card.statistics if card else {},
        statistics_step=12,
    )
    from transformers import AutoModelForImageTextToText

    models = [AutoModelForImageTextToText.from_pretrained(path) for path in (word_model, deep)]
    moved = {
        name
        for (name, before), after in zip(models[0].named_parameters(), models[1].parameters(), strict=True)
        if not torch.equal(before, after)
    }
    assert any(".layers.0." in name for name in moved)
    assert not any("language_model.layers.1." in name for name in moved)


def test_statistics_are_those_of_the_weights_beside_them(deep: Path, config: Make) -> None:
    """Without held-out rows, of the last step's: here a quarter of all."""
    card = read_card(deep)
    assert card is not None
    mean, std = card.statistics["preference"]
    scores = scores_of(deep, config(deep))
    assert mean == pytest.approx(scores.mean(), abs=0.05)
    assert std == pytest.approx(scores.std(), rel=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"reward_model.loss": "hps", "reward_model.pooling": "attention"},
        {"reward_model.loss": "logexp", "reward_model.pooling": "mean"},
    ],
    ids=["hps", "logexp"],
)
def test_other_losses_and_poolings_learn(tmp_path: Path, config: Make, changes: dict[str, Any]) -> None:
    last = reward_training.run(config(tmp_path, run__max_steps=12) | changes)
    assert last["rm/accuracy"] == 1
    folder = tmp_path / "run" / "checkpoints" / "step-12"
    scores = scores_of(folder, config(tmp_path))
    assert (scores[:, 0] > scores[:, 1]).all()
    stored = load_file(folder / "reward_head.safetensors")
    scale, query = stored["score.log_scale"].item(), stored["score.query"].abs().max().item()
    assert (scale != 0 and query > 0) if "hps" in changes.values() else scale == query == 0


def test_candidates_may_be_pictures(tmp_path: Path, config: Make, rows: Path) -> None:
    held = str(rows / "held-media.jsonl")
    options = config(tmp_path, "media", run__max_steps=20, data__val=held, val__every=20)
    last = reward_training.run(options)
    assert last["val/held-media/accuracy"] >= 0.9
    scores = scores_of(tmp_path / "run" / "checkpoints" / "step-20", options)
    assert (scores[:, 0] > scores[:, 1]).mean() >= 0.9


def test_heads_learn_what_their_labels_say(tmp_path: Path, config: Make) -> None:
    both = {"preference": 1.0, "size": 0.5}
    last = reward_training.run(config(tmp_path, "heads", run__max_steps=15, reward_model__heads=both))
    assert last["rm/preference/accuracy"] == 1  # whichever side the better one stands on
    assert {"rm/size/gap", "rm/size/std", "rm/accuracy"} <= last.keys()
    folder = tmp_path / "run" / "checkpoints" / "step-15"
    card = read_card(folder)
    assert card is not None and card.heads == ("preference", "size")
    model = LearnedReward.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"set args.head"):
        model.check()
    with pytest.raises(ConfigError, match="has no head 'taste'"):
        model.check(head="taste")
    two = [scores_of(folder, config(tmp_path), head=head) for head in both]
    assert not np.allclose(two[0], two[1])


def test_a_head_without_labels_is_refused(tmp_path: Path, config: Make) -> None:
    with pytest.raises(ConfigError, match="no row says which side is better by coherence"):
        reward_training.run(config(tmp_path, reward_model__heads=["preference", "coherence"]))
    with pytest.raises(ConfigError, match=r"better by taste; rows label preference, size"):
        reward_training.run(config(tmp_path, "heads", reward_model__heads=["taste", "size"]))


PAIR = {"prompt": "how many ?", "chosen": "red", "rejected": "blue"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (PAIR | {"rejected": "red"}, "better by preference; all 1 that label it are ties: add"),
        (PAIR | {"labels": {"taste": "A"}}, "no usable row:\n.*\n1 row left out: it labels taste,"),
        ({"input": f"red {MARK}", "label": ["1"]}, "reward_model.kind=process learns from"),
        ({"input": "how ?", "output": "red", "label": 1}, "one labelled response; rows need cho"),
    ],
)
def test_rows_that_compare_nothing(tmp_path: Path, config: Make, row: dict[str, Any], words: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises((ConfigError, DataError), match=words):
        reward_training.run(config(tmp_path, data__train=str(path)))
    assert not (tmp_path / "run").exists()


def test_rows_that_are_not_trained_on_are_listed(tmp_path: Path, config: Make) -> None:
    path = tmp_path / "some.jsonl"
    listed = [PAIR, PAIR | {"labels": {"taste": "A"}}, PAIR | {"chosen": "red " * 3000}]
    path.write_text("".join(json.dumps(row) + "\n" for row in listed))
    options = {"run.max_steps": 1, "train.prompts_per_step": 1}
    reward_training.run(config(tmp_path, data__train=str(path)) | options)
    aside = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    reasons = {row["row"]: row["reason"] for row in map(json.loads, aside)}
    assert reasons[2] == "it labels taste, and reward_model.heads are preference"
    assert "reward_model.max_tokens is" in reasons[3]
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(PAIR | {"margin": "big"}) + "\n")
    with pytest.raises(DataError, match=r"^data.val: 1 of 1 rows are bad"):
        reward_training.run(config(tmp_path, data__val=str(bad), run__name="val"))


@pytest.mark.parametrize(
    "changes",
    [DEEP | {"train.ema": 0.9}, {"model.train": "lora", "model.lora.rank": 4, "reward_model.probe_layer": -2}],
    ids=["full", "lora"],
)
def test_stopped_and_resumed_is_the_same_run(
    tmp_path: Path, config: Make, numbers: Read, same_weights: Callable[..., bool], changes: dict[str, Any]
) -> None:
    options = config(tmp_path, train__prompts_per_step=12, run__max_steps=5) | changes
    reward_training.run(options | {"run.name": "whole"})  # an epoch ends within the third step
    reward_training.run(options | {"run.name": "parts", "run.max_steps": 2})
    reward_training.run(options | {"run.name": "parts", "run.resume": "auto"})
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")
    ends = [tmp_path / name / "checkpoints" / "step-5" for name in ("whole", "parts")]
    assert same_weights(*ends)
    assert read_card(ends[0]) == read_card(ends[1])
    heads = [(end / "reward_head.safetensors") for end in ends]
    assert heads[0].read_bytes() == heads[1].read_bytes()


def test_a_reward_model_is_trained_further_with_its_head(tmp_path: Path, config: Make, trained: Path) -> None:
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


def test_the_card_says_whose_scores_it_keeps(tmp_path: Path, config: Make, rows: Path) -> None:
    held = {"data.val": str(rows / "held-pairs.jsonl"), "save.every": 1, "val.every": 2}
    reward_training.run(config(tmp_path, run__max_steps=3) | held)
    reward_training.run(config(tmp_path, run__max_steps=2, run__name="bare"))
    steps = {}
    for folder in tmp_path.glob("*/checkpoints/step-*"):
        card = read_card(folder)
        assert card is not None and card.statistics
        steps[f"{folder.parents[1].name}/{folder.name}"] = card.statistics_step
    wanted = {"run/step-1": 1, "run/step-2": 2, "run/step-3": 3, "bare/step-2": 2}
    assert steps == wanted


@pytest.mark.parametrize("margin", ["high", float("nan"), float("inf"), -1, "-0.5"])
def test_a_margin_that_asks_for_no_lead_is_a_bad_row(tmp_path: Path, config: Make, rows: Path, margin: Any) -> None:
    good = [json.loads(line) for line in (rows / "train-pairs.jsonl").read_text().splitlines()[:8]]
    lines = [row | {"images": [str(rows / image) for image in row["images"]]} for row in good]
    path = tmp_path / "margins.jsonl"
    listed = [lines[0] | {"margin": margin}, lines[1] | {"margin": "0.5"}, *lines[2:]]
    path.write_text("".join(json.dumps(row) + "\n" for row in listed))
    options = config(tmp_path, data__train=str(path), data__max_bad_fraction=0.5)
    resolved = load(options, command="reward-model")
    task = rows_of(resolved, model_setup.family_of(resolved, resolved.model.path))
    data = task.load(resolved.data.train)
    assert [(bad.row, "margin" in bad.reason) for bad in data.quarantined] == [(1, True)]
    _, loss = task.prepare(data.samples)
    row = loss.rating
    assert list(row.margins.values()) == [0.5]


def test_the_average_is_a_reward_model_of_its_own(tmp_path: Path, config: Make) -> None:
    reward_training.run(config(tmp_path, train__ema=0.5))
    folder = tmp_path / "run" / "checkpoints" / "step-4"
    mine = scores_of(folder, config(tmp_path))
    average = scores_of(folder / "state" / "ema", config(tmp_path))
    assert not np.allclose(mine, average)
    reward_training.run(config(tmp_path, train__ema=0.5, run__max_steps=5, run__resume="auto"))
    cards = [read_card(folder.parent / "step-5" / own) for own in ("", "state/ema")]
    assert [card and bool(card.statistics) for card in cards] == [True, False]


def test_stock_transformers_loads_the_folder_and_export_takes_the_head_along(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    _, info = AutoModelForImageTextToText.from_pretrained(trained, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    out = saccade.export(trained, tmp_path / "out", "bfloat16", verify=False)
    assert read_card(out) == read_card(trained)
    kept = [load_file(folder / "reward_head.safetensors") for folder in (trained, out)]
    assert torch.equal(kept[0]["score.weight"], kept[1]["score.weight"])
