"""Reward models end to end: pairs of pictures are learned, folders score again, RL and eval use
them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import saccade
from saccade.backends.learned import LearnedReward
from saccade.cli import app
from saccade.config import defaults_for, load
from saccade.data import datasets, synthetic
from saccade.errors import ConfigError, DataError
from saccade.models.families import load_family
from saccade.models.rating import Card, read_card, stepped, with_marks
from saccade.models.tiny import build
from saccade.recipes import comparing, models, reward_model
from saccade.recipes.quickstart import WORDS
from saccade.recipes.rated import task_of
from saccade.rewards.sample import reward_sample
from saccade.tracking.console import Console
from saccade.types import Message, replace

Make = Callable[..., dict[str, Any]]
Read = Callable[[Path], list[dict[str, Any]]]
OTHER = {"red": "blue", "blue": "red"}
MARK = "black"  # a word of the tiny model that no scene of these shows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One big shape each. Replies, pictures and steps are judged; some heads have few labels."""
    folder = tmp_path_factory.mktemp("judged")
    for split, n in {"train": 32, "held": 12}.items():
        scenes = synthetic.counting_split(
            n, seed=n, colours=tuple(OTHER), counts=(1, 1), radius=(16, 20)
        )
        drawn = synthetic.write_jsonl(scenes, folder, name="drawn").read_text().splitlines()
        listed = [json.loads(line) for line in drawn]
        by = {colour: [r for r in listed if r["colours"] == [colour]] for colour in OTHER}
        found: dict[str, list[dict[str, Any]]] = {
            "pairs": [],
            "media": [],
            "heads": [],
            "steps": [],
        }
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
            said = {"preference": "AB"[number % 2]} | (
                {"size": "C"} if number % 3 else {"size": "A"}
            )
            sides = [right, wrong] if number % 2 == 0 else [wrong, right]
            found["heads"].append(
                asked | {"chosen": sides[0], "rejected": sides[1], "labels": said}
            )
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


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, config: Make, rows: Path) -> Path:
    """The folder of a reward model that knows the colours."""
    out = tmp_path_factory.mktemp("trained")
    held = str(rows / "held-pairs.jsonl")
    saccade.reward_model(config(out, run__max_steps=15, data__val=held, val__every=15))
    return out / "run" / "checkpoints" / "step-15"


DEEP = {
    "reward_model.loss": "hps",
    "reward_model.pooling": "attention",
    "reward_model.head": "mlp",
    "reward_model.bounded": True,
    "reward_model.probe_layer": 0,
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, config: Make) -> Path:
    """One whose score is no linear function of the last states."""
    out = tmp_path_factory.mktemp("deep")
    reward_model.run(config(out, run__max_steps=12) | DEEP)
    return out / "run" / "checkpoints" / "step-12"


def scores_of(folder: Path, config: dict[str, Any], **options: Any) -> np.ndarray:
    """[pairs, sides] of the training rows."""
    resolved = defaults_for("reward-model", load(config))
    task = task_of(resolved, models.family_of(resolved, resolved.model.path))
    samples = task.load(resolved.data.train).samples
    model = LearnedReward.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    replies = [
        replace(reward_sample(sample, side[-1].text), replied=side)
        for sample in samples
        for side in sample.candidates
    ]
    return np.array(model.score(replies, **options)).reshape(-1, 2)


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
    for key in ("loss", "gap", "mean", "std"):
        assert found[key] == pytest.approx(last[f"val/{name}/{key}"], rel=1e-5)
    lines = (tmp_path / "held" / "samples.jsonl").read_text().splitlines()
    gaps = [
        row["chosen"]["preference"] - row["rejected"]["preference"]
        for row in map(json.loads, lines)
    ]
    assert len(gaps) == 12 and np.mean(gaps) == pytest.approx(found["gap"], rel=1e-5)
    options |= {"model.path": str(deep), "data.val": str(rows / "train-pairs.jsonl")}
    options["val.every"] = 0  # training looked at no set
    [found] = saccade.evaluate(options, out=tmp_path / "deep").values()
    assert found["accuracy"] == (np.diff(scores_of(deep, config(tmp_path))) < 0).mean()
    card = read_card(deep)
    assert card is not None
    with (
        pytest.raises(ConfigError, match=r"judges rows; try data\.val="),
        Console(None, "eval") as c,
    ):
        comparing.compare(load({"model.path": str(deep)}), card, c)  # suites alone have none


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
        for (name, before), after in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        )
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
def test_other_losses_and_poolings_learn(
    tmp_path: Path, config: Make, changes: dict[str, Any]
) -> None:
    last = reward_model.run(config(tmp_path, run__max_steps=12) | changes)
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
    last = reward_model.run(options)
    assert last["val/held-media/accuracy"] >= 0.9
    scores = scores_of(tmp_path / "run" / "checkpoints" / "step-20", options)
    assert (scores[:, 0] > scores[:, 1]).mean() >= 0.9


def test_heads_learn_what_their_labels_say(tmp_path: Path, config: Make) -> None:
    both = {"preference": 1.0, "size": 0.5}
    last = reward_model.run(config(tmp_path, "heads", run__max_steps=15, reward_model__heads=both))
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
        reward_model.run(config(tmp_path, reward_model__heads=["preference", "coherence"]))
    with pytest.raises(ConfigError, match=r"better by taste; rows label preference, size"):
        reward_model.run(config(tmp_path, "heads", reward_model__heads=["taste", "size"]))


PAIR = {"prompt": "how many ?", "chosen": "red", "rejected": "blue"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (PAIR | {"rejected": "red"}, "better by preference; all 1 that label it are ties: add"),
        (
            PAIR | {"labels": {"taste": "A"}},
            "no usable row:\n.*\n1 rows left out: it labels taste,",
        ),
        ({"input": f"red {MARK}", "label": ["1"]}, "reward_model.kind=process learns from"),
        ({"input": "how ?", "output": "red", "label": 1}, "one labelled response; rows need cho"),
    ],
)
def test_rows_that_compare_nothing(
    tmp_path: Path, config: Make, row: dict[str, Any], words: str
) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises((ConfigError, DataError), match=words):
        reward_model.run(config(tmp_path, data__train=str(path)))
    assert not (tmp_path / "run").exists()


def test_rows_that_are_not_trained_on_are_listed(tmp_path: Path, config: Make) -> None:
    path = tmp_path / "some.jsonl"
    listed = [PAIR, PAIR | {"labels": {"taste": "A"}}, PAIR | {"chosen": "red " * 3000}]
    path.write_text("".join(json.dumps(row) + "\n" for row in listed))
    options = {"run.max_steps": 1, "train.prompts_per_step": 1}
    reward_model.run(config(tmp_path, data__train=str(path)) | options)
    aside = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    reasons = {row["row"]: row["reason"] for row in map(json.loads, aside)}
    assert reasons[2] == "it labels taste, and reward_model.heads are preference"
    assert "reward_model.max_tokens is" in reasons[3]
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(PAIR | {"margin": "big"}) + "\n")
    with pytest.raises(DataError, match=r"^data.val: 1 of 1 rows are bad"):
        reward_model.run(config(tmp_path, data__val=str(bad), run__name="val"))


@pytest.mark.parametrize(
    "changes",
    [
        DEEP | {"train.ema": 0.9},
        {"model.train": "lora", "model.lora.rank": 4, "reward_model.probe_layer": -2},
    ],
    ids=["full", "lora"],
)
def test_stopped_and_resumed_is_the_same_run(
    tmp_path: Path,
    config: Make,
    numbers: Read,
    same_weights: Callable[..., bool],
    changes: dict[str, Any],
) -> None:
    options = config(tmp_path, train__prompts_per_step=12, run__max_steps=5) | changes
    reward_model.run(options | {"run.name": "whole"})  # an epoch ends within the third step
    reward_model.run(options | {"run.name": "parts", "run.max_steps": 2})
    reward_model.run(options | {"run.name": "parts", "run.resume": "auto"})
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")
    ends = [tmp_path / name / "checkpoints" / "step-5" for name in ("whole", "parts")]
    assert same_weights(*ends)
    assert read_card(ends[0]) == read_card(ends[1])
    heads = [(end / "reward_head.safetensors") for end in ends]
    assert heads[0].read_bytes() == heads[1].read_bytes()


def test_a_reward_model_is_trained_further_with_its_head(
    tmp_path: Path, config: Make, trained: Path
) -> None:
    further = config(tmp_path, model__path=str(trained), run__max_steps=1, train__lr=1e-9)
    assert reward_model.run(further | {"run.name": "bt"})["rm/accuracy"] == 1
    folders = [trained, tmp_path / "bt" / "checkpoints" / "step-1"]
    kept = [load_file(f / "reward_head.safetensors")["score.weight"] for f in folders]
    torch.testing.assert_close(kept[0], kept[1], atol=1e-7, rtol=0)
    reward_model.run(further | {"run.name": "hps", "reward_model.loss": "hps"})
    stored = load_file(tmp_path / "hps" / "checkpoints" / "step-1" / "reward_head.safetensors")
    assert stored["score.log_scale"].item() == pytest.approx(np.log(1 / 0.07), abs=1e-4)
    steps = config(tmp_path, "steps", model__path=str(trained)) | PROCESS
    for options in (further | {"reward_model.pooling": "mean"}, steps):
        with pytest.raises(ConfigError, match=r"is a trained reward model \((pooling: last|kind)"):
            reward_model.run(options)
    assert not (tmp_path / "run").exists()


def test_the_card_says_whose_scores_it_keeps(tmp_path: Path, config: Make, rows: Path) -> None:
    held = {"data.val": str(rows / "held-pairs.jsonl"), "save.every": 1, "val.every": 2}
    reward_model.run(config(tmp_path, run__max_steps=3) | held)
    reward_model.run(config(tmp_path, run__max_steps=2, run__name="bare"))
    steps = {}
    for folder in tmp_path.glob("*/checkpoints/step-*"):
        card = read_card(folder)
        assert card is not None and card.statistics
        steps[f"{folder.parents[1].name}/{folder.name}"] = card.statistics_step
    wanted = {"run/step-1": 1, "run/step-2": 2, "run/step-3": 3, "bare/step-2": 2}
    assert steps == wanted


@pytest.mark.parametrize("margin", ["high", float("nan"), float("inf"), -1, "-0.5"])
def test_a_margin_that_asks_for_no_lead_is_a_bad_row(
    tmp_path: Path, config: Make, rows: Path, margin: Any
) -> None:
    good = [json.loads(line) for line in (rows / "train-pairs.jsonl").read_text().splitlines()[:8]]
    lines = [row | {"images": [str(rows / image) for image in row["images"]]} for row in good]
    path = tmp_path / "margins.jsonl"
    listed = [lines[0] | {"margin": margin}, lines[1] | {"margin": "0.5"}, *lines[2:]]
    path.write_text("".join(json.dumps(row) + "\n" for row in listed))
    resolved = defaults_for(
        "reward-model", load(config(tmp_path, data__train=str(path), data__max_bad_fraction=0.5))
    )
    task = task_of(resolved, models.family_of(resolved, resolved.model.path))
    data = task.load(resolved.data.train)
    assert [(bad.row, "margin" in bad.reason) for bad in data.quarantined] == [(1, True)]
    _, row = task.prepare(data.samples)
    assert list(row.margins.values()) == [0.5]


def test_the_average_is_a_reward_model_of_its_own(tmp_path: Path, config: Make) -> None:
    reward_model.run(config(tmp_path, train__ema=0.5))
    folder = tmp_path / "run" / "checkpoints" / "step-4"
    mine = scores_of(folder, config(tmp_path))
    average = scores_of(folder / "state" / "ema", config(tmp_path))
    assert not np.allclose(mine, average)
    reward_model.run(config(tmp_path, train__ema=0.5, run__max_steps=5, run__resume="auto"))
    cards = [read_card(folder.parent / "step-5" / own) for own in ("", "state/ema")]
    assert [card and bool(card.statistics) for card in cards] == [True, False]


def test_stock_transformers_loads_the_folder_and_export_takes_the_head_along(
    trained: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    _, info = AutoModelForImageTextToText.from_pretrained(trained, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    out = saccade.export(trained, tmp_path / "out", "bfloat16", verify=False)
    assert read_card(out) == read_card(trained)
    kept = [load_file(folder / "reward_head.safetensors") for folder in (trained, out)]
    assert torch.equal(kept[0]["score.weight"], kept[1]["score.weight"])


# -- processes -------------------------------------------------------------------------------------

PROCESS = {
    "reward_model.kind": "process",
    "reward_model.placeholder": MARK,
    "reward_model.tokens": ["1", "2"],
}


def test_steps_are_judged_and_a_response_by_its_steps(
    tmp_path: Path, config: Make, rows: Path
) -> None:
    held = {"data.val": str(rows / "held-steps.jsonl"), "val.every": 40}
    options = config(tmp_path, "steps", run__max_steps=40) | PROCESS | held
    last = saccade.reward_model(options)
    assert last["rm/accuracy"] == 1 and last["val/held-steps/accuracy"] == 1
    assert last["rm/label_mean"] == pytest.approx(0.5)
    folder = tmp_path / "run" / "checkpoints" / "step-40"
    assert not (folder / "reward_head.safetensors").exists()
    model = LearnedReward.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    resolved = defaults_for("reward-model", load(options))
    task = task_of(resolved, models.family_of(resolved, resolved.model.path))
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


def test_soft_labels_are_probabilities(tmp_path: Path, config: Make) -> None:
    path = tmp_path / "soft.jsonl"
    row = {"input": f"red {MARK} blue {MARK}", "label": [0.8, 0.3]}
    path.write_text("".join(json.dumps(row | {"id": n}) + "\n" for n in range(8)))
    options = config(tmp_path, data__train=str(path), run__max_steps=40) | PROCESS
    last = reward_model.run(options)
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
def test_rows_of_steps_that_are_set_aside(
    tmp_path: Path, config: Make, row: dict[str, Any], words: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=words):
        reward_model.run(config(tmp_path, data__train=str(path)) | PROCESS)


def test_a_later_row_whose_placeholder_is_joined_is_set_aside(tmp_path: Path, config: Make) -> None:
    path = tmp_path / "joined.jsonl"
    listed = [{"id": n, "input": f"red {MARK} blue {MARK}", "label": ["1", "2"]} for n in range(8)]
    listed[5]["input"] = f"red {MARK}blue {MARK}"
    path.write_text("".join(json.dumps(row) + "\n" for row in listed))
    options = config(tmp_path, data__train=str(path), data__max_bad_fraction=0.5) | PROCESS
    resolved = defaults_for("reward-model", load(options))
    task = task_of(resolved, models.family_of(resolved, resolved.model.path))
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


# -- as rewards ------------------------------------------------------------------------------------


def test_ppo_with_a_critic_raises_the_score_of_the_model(
    tmp_path: Path, config: Make, rows: Path, trained: Path, numbers: Read
) -> None:
    """That the true score rises with it is what benchmarks/reward_model.py shows."""
    learned = {"verifier": "model", "name": "rm", "args": {"path": str(trained), "normalise": True}}
    saccade.rl(
        config(tmp_path, run__max_steps=10, train__lr=2e-3)
        | {
            "rollout.max_tokens": 2,
            "reward.terms": [learned, {"verifier": "exact", "weight": 0.0}],
            "reward.outcome": "exact",  # reported beside it, without a weight
            "algorithm.preset": "ppo",
            "algorithm.critic.path": str(trained),
            "algorithm.critic.lr": 2e-3,
            "train.samples_per_prompt": 4,
        }
    )
    first, *_, last = numbers(tmp_path / "run")
    assert last["reward/mean"] > first["reward/mean"] + 0.1
    assert last["reward/mean"] == pytest.approx(last["reward/rm"])
    assert 0 <= last["reward/accuracy"] <= 1 and np.isfinite(last["critic/loss"])


def test_a_critic_draws_its_own_head_where_it_cannot_take_one(
    tmp_path: Path, config: Make, deep: Path
) -> None:
    learned = {"verifier": "model", "args": {"path": str(deep), "normalise": True}}
    options = config(tmp_path, run__max_steps=1) | {
        "rollout.max_tokens": 2,
        "reward.terms": [learned],
        "algorithm.preset": "ppo",
        "algorithm.critic.path": str(deep),
        "train.samples_per_prompt": 2,
    }
    last = saccade.rl(options)
    assert np.isfinite(last["reward/mean"]) and np.isfinite(last["critic/loss"])
    assert "draws a head of its own" in (tmp_path / "run" / "log.txt").read_text()


def test_rules_and_models_by_source_in_one_run(
    tmp_path: Path, rl_config: Make, trained: Path, scenes: Path, numbers: Read
) -> None:
    """Two models, weighed, on one source; a rule on the other."""
    model = {"verifier": "model", "args": {"path": str(trained)}}
    terms = [
        {"verifier": "exact", "weight": 0.0},
        model | {"name": "raw", "weight": 0.25},
        model | {"name": "scaled", "args": {"path": str(trained), "normalise": True}},
    ]
    lines = (scenes / "train.jsonl").read_text().splitlines()
    mixed = [json.loads(line) for line in lines[:16]]
    for number, row in enumerate(mixed):
        row["data_source"] = ("learned", "ruled")[number % 2]
        row["images"] = [str(scenes / image) for image in row["images"]]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in mixed))
    options = rl_config(tmp_path, data__train=str(path), run__max_steps=2)
    options |= {"reward.terms": [], "reward.by_source": {"learned": terms, "ruled": "count"}}
    options |= {"reward.self_test": "warn", "track.trajectories_every": 1}
    saccade.rl(options)
    stored = [
        json.loads(line)
        for file in sorted((tmp_path / "run" / "trajectories").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    seen = {row["data_source"]: row["parts"].keys() for row in stored}
    assert seen["learned"] == {"exact", "raw", "scaled"} and seen["ruled"] == {"count"}
    card = read_card(trained)
    assert card is not None
    mean, std = card.statistics["preference"]
    for row in (row for row in stored if row["data_source"] == "learned"):
        parts = row["parts"]
        assert parts["scaled"] == pytest.approx((parts["raw"] - mean) / std, abs=1e-4)
        assert row["reward"] == pytest.approx(0.25 * parts["raw"] + parts["scaled"], abs=1e-4)


def test_two_reward_models_of_different_families_in_one_run(
    tmp_path: Path, config: Make, trained: Path, rows: Path
) -> None:
    """Each response has the score that each folder gives it alone, and the weights are kept."""
    start = build("qwen2_vl", tmp_path / "model", words=WORDS, seed=7)
    made = {"run.name": "other", "model.path": start}
    reward_model.run(config(tmp_path, run__max_steps=3) | made)
    folders = {"taste": trained, "other": tmp_path / "other" / "checkpoints" / "step-3"}
    weights = {"taste": 0.25, "other": -2.0}
    terms = [
        {"verifier": "model", "name": name, "weight": weights[name], "args": {"path": str(folder)}}
        for name, folder in folders.items()
    ]
    options = config(tmp_path, run__max_steps=1) | {
        "rollout.max_tokens": 2,
        "reward.terms": terms,
        "train.samples_per_prompt": 4,
        "track.trajectories_every": 1,
    }
    saccade.rl(options)
    (file,) = (tmp_path / "run" / "trajectories").glob("*.jsonl")
    stored = [json.loads(line) for line in file.read_text().splitlines()]
    data = datasets.load(load(options).data.train, load(options).data)

    def said(row: dict[str, Any]) -> str:
        texts = [part["text"] for part in row["segments"] if part["source"] == "policy"]
        return "".join(texts).removesuffix("<|im_end|>").strip()

    for name, folder in folders.items():
        model = LearnedReward.load(folder, device=torch.device("cpu"), dtype=torch.float32)
        alone = model.score([reward_sample(data.sample(r["id"]), said(r)) for r in stored])
        assert [r["parts"][name] for r in stored] == pytest.approx(alone, abs=1e-4), name
        assert np.std(alone) > 1e-3
    for row in stored:
        weighed = sum(weights[name] * row["parts"][name] for name in folders)
        assert row["reward"] == pytest.approx(weighed, abs=1e-4)


def test_a_judge_that_writes_is_trained_by_sft(config: Make, tmp_path: Path) -> None:
    wanted = "`saccade sft RUN.yaml data.compare=verdict train.lr=1e-5`"
    with pytest.raises(ConfigError, match=re.escape(wanted)) as refused:
        saccade.reward_model(config(tmp_path, reward_model__kind="generative"))
    assert "reward_model.kind" in str(refused.value)
    _, command, _, *options = wanted.strip("`").split()
    assert load(None, options).data.compare == "verdict" and command == "sft"


def test_eval_scores_with_a_model_and_rescore_refuses(
    tmp_path: Path, rl_config: Make, trained: Path, scenes: Path
) -> None:
    learned = {"verifier": "model", "args": {"path": str(trained)}}
    options = rl_config(tmp_path, data__val=str(scenes / "val.jsonl"))
    options |= {"reward.terms": [learned]}
    found = saccade.evaluate(options, out=tmp_path / "eval")
    assert np.isfinite(found["val"]["score"]) and "accuracy" not in found["val"]
    with pytest.raises(ConfigError, match="remove the terms of `model`"):
        saccade.evaluate(options, rescore=tmp_path / "eval" / "samples.jsonl", out=tmp_path / "b")


def test_a_folder_that_is_no_reward_model(tmp_path: Path, rl_config: Make, word_model: str) -> None:
    term = {"verifier": "model", "args": {"path": word_model}}
    with pytest.raises(ConfigError, match="is no reward model"):
        saccade.rl(rl_config(tmp_path) | {"reward.terms": [term]})
    with pytest.raises(ConfigError, match=r"nowhere has no config.json"):
        term = {"verifier": "model", "args": {"path": "nowhere"}}
        saccade.rl(rl_config(tmp_path) | {"reward.terms": [term]})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("reward_head.safetensors", None, "reward_head.safetensors is missing"),
        ("reward_head.safetensors", b"\x08\0\0\0\0\0\0\0{}", "is cut short in its header"),
        ("model.safetensors", None, "model.safetensors is missing"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model-2.safetensors"}}',
            "model-2.safetensors is missing",
        ),
        ("config.json", b"{", "config.json cannot be read"),
        ("config.json", b'{"reward_model": {"kind": "scalar"}}', "names neither heads nor tokens"),
    ],
)
def test_a_damaged_reward_model_is_refused_before_the_run_has_a_folder(
    tmp_path: Path, rl_config: Make, trained: Path, name: str, content: bytes | None, words: str
) -> None:
    copied = Path(shutil.copytree(trained, tmp_path / "rm"))
    (copied / name).unlink(missing_ok=True)
    if content is not None:
        (copied / name).write_bytes(content)
    term = {"verifier": "model", "args": {"path": str(copied)}}
    with pytest.raises(ConfigError, match=words):
        saccade.rl(rl_config(tmp_path) | {"reward.terms": [term]})
    assert not (tmp_path / "run").exists()


def test_what_starts_from_a_reward_model_is_none(
    tmp_path: Path, rl_config: Make, trained: Path
) -> None:
    learned = {"verifier": "model", "name": "taste", "args": {"path": str(trained)}}
    options = rl_config(tmp_path, run__max_steps=1, model__path=str(trained))
    last = saccade.rl(options | {"reward.terms": [learned, "exact"], "reward.self_test": "off"})
    assert last["reward/accuracy"] == last["reward/exact"]  # a rule goes before a learned score
    saved = tmp_path / "run" / "checkpoints" / "step-1"
    assert read_card(saved) is None and not (saved / "reward_head.safetensors").exists()
    learned["args"] = {"path": str(trained), "steps": "min"}
    with pytest.raises(ConfigError, match=r"scores whole responses; drop steps=min"):
        saccade.rl(rl_config(tmp_path, run__name="b") | {"reward.terms": [learned]})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward_model.loss=hps; reward_model.margin=0.2", "margin: has no effect with loss=hps"),
        ("reward_model.pooling_heads=2", "pooling_heads: has no effect without"),
        ("reward_model.bounded=true; reward_model.center_coef=0.1", "where a sigmoid cannot go"),
        ("reward_model.probe_layer=2", "is none of the 2 blocks of this model; give -2 to 1"),
        ("reward_model.probe_layer=-3", "is none of the 2 blocks of this model; give -2 to 1"),
        (
            "reward_model.pooling=attention; reward_model.pooling_heads=3",
            "pooling_heads: 3 does not divide the hidden size 64 of this model",
        ),
        ("reward_model.tokens=[1,2]", "reward_model.tokens: has no effect"),
        ("dpo.beta=1", "has no effect in `saccade reward-model`"),
        ("reward.terms=[math]", "has no effect in `saccade reward-model`"),
        ("reward_model.heads={preference: 0}", "weights above 0"),
    ],
)
def test_what_is_refused(config: Make, tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reward_model.run(load(config(tmp_path), override.split("; ")))
    assert words in str(caught.value) and not (tmp_path / "run").exists()


def test_defaults_and_the_dry_run(config: Make, tmp_path: Path) -> None:
    plain = defaults_for("reward-model", load(None))
    assert (plain.train.lr, plain.reward_model.max_tokens) == (9e-6, 512)
    process = defaults_for("reward-model", load({"reward_model.kind": "process"}))
    assert (process.train.lr, process.reward_model.max_tokens) == (1e-6, 2048)
    words = [f"{k}={json.dumps(v)}" for k, v in config(tmp_path).items() if k != "model.path"]
    shown = CliRunner().invoke(
        app, ["reward-model", *words, "model.path=tiny:qwen2_5_vl", "--dry-run"]
    )
    assert shown.exit_code == 0, shown.output
    assert "pairs per step" in shown.output and "512 tokens" in shown.output
