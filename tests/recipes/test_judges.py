"""A model learns to judge two pictures: supervised, then by RL with the verdict reward."""

import json
import math

import pytest

from benchmarks.generative_judge import PHRASES, SAID, write_rows
from saccade.config import DataSource, load
from saccade.errors import DataError
from saccade.plugins.families.tiny import build
from saccade.recipes import model_setup, questions, rl, sft

STEPS = 28
STORED = ("track.trajectories_every=1", "track.trajectories_groups=16")
ROWS = {"train": 256, "held": 48}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The redder picture is better, in the layout of HPDv3; held-out pairs have other colours."""
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder, 0, ROWS)
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return build("qwen2_vl", tmp_path_factory.mktemp("model"), phrases=PHRASES)


@pytest.fixture(scope="module")
def taught(rows, start, tmp_path_factory):
    """The run of a judge that learned from written verdicts."""
    out = tmp_path_factory.mktemp("taught")
    more = {"run": {"max_steps": STEPS}, "train": {"prompts_per_step": 32}, "val": {"every": STEPS}}
    config = config_of(rows, start, out, **more)
    sft.run(load(config, ["val.before=true"]))
    return out / "judge"


def checkpoint(run):
    return str(run / "checkpoints" / f"step-{STEPS}")


def config_of(rows, model, out, **changes):
    options = {
        "run": {"name": "judge", "out": str(out), "max_steps": 2, "device": "cpu"},
        "model": {"path": model},
        "data": {
            "train": str(rows / "train.json"), "val": {"path": str(rows / "held.json"), "name": "held"},
            "mapping": "hpdv3", "pair_view": "verdict", "min_pixels": 784, "max_pixels": 784,
        },
        "prompt": {"instruction": ""}, "reward": {"terms": ["verdict"], "self_test": "off"},
        "rollout": {"max_tokens": 8}, "train": {"prompts_per_step": 4, "lr": 3e-3},
        "val": {"every": 2, "before": False}, "save": {"every": 0}, "track": {"tensorboard": False},
    }  # fmt: skip
    for section, values in changes.items():
        options[section] = {**options[section], **values}
    return load(options)


def test_a_judge_learns_to_rank_pictures_that_it_has_not_seen(taught, numbers):
    found = [row for row in numbers(taught) if "val/held/accuracy" in row]
    before, after = (row["val/held/accuracy"] for row in found)
    assert before == 0 and after > 0.75  # guessing is right on half of them


def test_sft_learns_from_the_better_text_and_sends_media_to_judges(rows, start, tmp_path):
    texts = [
        {"prompt": "2+2?", "a": a, "b": b, "labels": {"preference": side}}
        for a, b, side in (("4", "5", "A"), ("5", "4", "B"))
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    config = config_of(rows, start, tmp_path)
    family = model_setup.family_of(config, model_setup.start_folder(config))
    plain = load(config, ["data.mapping=null", "data.pair_view=apart"])
    data = questions.load_dialogues(plain, [DataSource(path=str(path))], family)
    assert [sample.messages[-1].text for sample in data.samples] == ["4", "4"]
    apart = load(config, ["data.pair_view=apart"])
    with pytest.raises(DataError, match=r"data\.pair_view=verdict teaches to judge them"):
        questions.load_dialogues(apart, apart.data.train, family)


def test_rl_pays_one_for_the_right_verdict_and_nothing_for_others(rows, taught, tmp_path):
    few = {"prompts_per_step": 16, "samples_per_prompt": 4, "lr": 1e-4}
    config = config_of(rows, checkpoint(taught), tmp_path, train=few, val={"every": 0})
    last = rl.run(load(config, ["run.max_steps=1", *STORED]))
    assert last["reward/mean"] > 0.6 and math.isfinite(last["policy/loss"])
    records = [
        json.loads(line)
        for file in (tmp_path / "judge" / "trajectories").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert len(records) == 16 * 4
    paid = {f"<answer>{verdict}</answer>": set[tuple[str, float]]() for verdict in SAID}
    clean = 0
    for record in records:
        said = "".join(s["text"] for s in record["segments"] if s["source"] == "policy")
        said = said.removesuffix("<|im_end|>")
        clean += said in paid
        paid.get(said, set()).add((record["gold"], record["reward"]))
    assert clean > 0.75 * len(records)
    first, second, _ = paid.values()  # no thought was written, so none is paid for its shape
    assert {("A", 1.0)} <= first <= {("A", 1.0), ("B", 0.0)}
    assert {("B", 1.0)} <= second <= {("B", 1.0), ("A", 0.0)}
    assert any(record["reward"] == 0 for record in records)
