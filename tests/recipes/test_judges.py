"""A model learns to judge two pictures: supervised, by RL with the verdict reward; evaluated."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saccade.config import DataSource, load
from saccade.errors import DataError
from saccade.recipes import evaluate, models, questions, rl, sft

COLOURS = 8


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The redder picture is better, in the layout of HPDv3."""
    folder = tmp_path_factory.mktemp("rows")
    for n in range(COLOURS):
        Image.new("RGB", (28, 28), (30 * n, 255 - 30 * n, 30)).save(folder / f"{n}.png")
    pairs = [(n, m) for n in range(COLOURS) for m in range(n)]
    listed = [
        {"prompt": "red", "path1": f"{n}.png", "path2": f"{m}.png", "confidence": 1}
        for n, m in pairs
    ]
    (folder / "rows.json").write_text(json.dumps(listed))
    return folder / "rows.json"


def config_of(rows: Path, out: Path, **changes: Any) -> Any:
    options = {
        "run": {"name": "judge", "out": str(out), "max_steps": 2, "device": "cpu"},
        "model": {"path": "tiny:qwen2_vl"},
        "data": {
            "train": str(rows),
            "val": {"path": str(rows), "max_samples": 4},
            "mapping": "hpdv3",
            "compare": "verdict",
            "min_pixels": 784,
            "max_pixels": 784,
        },
        "prompt": {"instruction": ""},
        "reward": {"terms": ["verdict"], "self_test": "off"},
        "rollout": {"max_tokens": 8},
        "train": {"prompts_per_step": 4, "lr": 3e-3},
        "val": {"every": 2, "max_tokens": 40, "before": False},
        "save": {"every": 0},
        "track": {"tensorboard": False},
    }
    for section, values in changes.items():
        options[section] = {**options.get(section, {}), **values}
    return load(options)


def test_verdicts_are_learned_and_their_accuracy_is_reported(rows: Path, tmp_path: Path) -> None:
    config = config_of(rows, tmp_path, run={"max_steps": 8}, train={"prompts_per_step": 8})
    config = load(config, ["val.every=8"])
    last = sft.run(config)
    assert last["sft/loss"] < 3.5  # from 5.6: the phrase is learned first
    assert 0 <= last["val/rows/accuracy"] <= 1


def test_sft_learns_from_the_better_text_and_sends_media_to_judges(
    rows: Path, tmp_path: Path
) -> None:
    texts = [
        {"prompt": "2+2?", "a": a, "b": b, "labels": {"preference": side}}
        for a, b, side in (("4", "5", "A"), ("5", "4", "B"))
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    config = config_of(rows, tmp_path)
    family = models.family_of(config, models.start_folder(config))
    plain = load(config, ["data.mapping=null", "data.compare=apart"])
    data = questions.load_dialogues(plain, [DataSource(path=str(path))], family)
    assert [sample.messages[-1].text for sample in data.samples] == ["4", "4"]
    apart = load(config, ["data.compare=apart"])
    with pytest.raises(DataError, match=r"data\.compare=verdict teaches to judge them"):
        questions.load_dialogues(apart, apart.data.train, family)


def test_rl_pays_for_the_right_verdict(rows: Path, tmp_path: Path) -> None:
    config = config_of(rows, tmp_path, train={"samples_per_prompt": 2}, val={"every": 0})
    last = rl.run(config)
    assert math.isfinite(last["policy/loss"]) and 0 <= last["reward/mean"] <= 2


def test_a_judge_is_evaluated(rows: Path, tmp_path: Path) -> None:
    (found,) = evaluate.run(config_of(rows, tmp_path)).values()
    assert found["accuracy"] == 0  # an untrained model says nothing that is a verdict
