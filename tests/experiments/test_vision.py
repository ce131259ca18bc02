"""Experiments that begin with the small model that sees: their questions, and their tiny variants on a CPU."""

import json
from functools import partial
from pathlib import Path
from random import Random

import pytest

from experiments import scenes
from experiments.counting import run as counting
from experiments.foundation import run as foundation
from experiments.foundation.asked import FORMS, GROUPS, draw_asked
from experiments.pages import read
from saccade.plugins.verifiers.response_shape import FORMATS
from saccade.plugins.verifiers.text_match import exact
from saccade.rewards.reward_sample import RewardSample

SCENES = [
    scenes.draw_scene(Random(f"{split}/{n}"), n, split=split, kinds=(kind,), side=64)
    for split in scenes.SPLITS
    for kind in scenes.KINDS
    for n in range(4)
]
ASKED = [draw_asked(Random(f"{group}/{n}"), n, group=group, side=64) for group in GROUPS for n in range(20)]


def things(facts: str) -> list[str]:
    return [one.partition(" (")[0] for one in facts.removeprefix("Places from the left and from the top. ").split("; ")]


def test_worked_answers_are_right_and_read_as_the_answer() -> None:
    for drawn in SCENES + [one for one in ASKED if "worked" in one.more]:
        said = RewardSample(id="a", response=drawn.more["worked"], answer=drawn.answer)
        assert exact(said, order=FORMATS["none"].order).value == 1, said
        assert drawn.answer in ("yes", "no", "0") or drawn.answer in drawn.more["facts"] or drawn.answer.isdigit()


def test_numbers_are_those_of_the_facts() -> None:
    for drawn in SCENES:
        named = things(drawn.more["facts"])
        if drawn.category == "all":
            assert int(drawn.answer) == len(named)
        elif drawn.category == "count":
            word = drawn.question.split()[2].removesuffix("s")
            assert int(drawn.answer) == sum(word in name.split() for name in named)
    for drawn in ASKED:
        if drawn.category == "charts difference":
            a, _, b = drawn.question.removeprefix("How much higher is ").removesuffix("?").partition(" than ")
            values = dict(one.split() for one in drawn.more["facts"].partition(": ")[2].removesuffix(".").split(", "))
            assert int(drawn.answer) == int(values[a]) - int(values[b])


def test_kinds_of_pictures_hold_what_training_does_not() -> None:
    for split, wanted in {"more": range(7, 10), "same": range(2, 7), "cartoon": range(2, 7)}.items():
        draw = partial(scenes.draw_scene, split=split, kinds=("all",), side=64)
        assert {len(things(draw(Random(n), n).more["facts"])) for n in range(40)} == {*wanted}
    words = {split: set[str]() for split in ("same", "colours", "solids")}
    for split, seen in words.items():
        for n in range(10):
            drawn = scenes.draw_scene(Random(n), n, split=split, kinds=("most",), side=64)
            seen |= {*" ".join(things(drawn.more["facts"])).split()}
    assert words["same"] & words["colours"] == {*scenes.FLAT.values()}
    assert words["same"] & words["solids"] == {*scenes.TRAINING_COLOURS}


def test_counting_runs_from_nothing_and_says_what_is_missing(tmp_path: Path) -> None:
    counting.main(["--tiny", "--out", str(tmp_path), "--seeds", "0", "--arms", "rl_4", "answers_4"])
    found = read(tmp_path / "results")
    assert found["rl_4"][0]["rollouts"] == 4
    assert found["rl_4"][0]["curves"].keys() >= {f"val/{name}/accuracy" for name in ("choice", *scenes.SPLITS)}
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| RL | 4 | 1 | " in page and "| SFT on worked answers | 4 | 0 | - |" in page
    assert "2 runs" in page and (tmp_path / "counting-same.svg").read_text().count(">SFT on") == 1
    rows = [json.loads(line) for line in (tmp_path / "rows" / "worked-0.jsonl").read_text().splitlines()]
    assert all("\nAnswer: " in row["conversations"][1]["value"] for row in rows)


def test_foundation_runs_from_nothing_at_equal_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    foundation.main(["--tiny", "--out", str(tmp_path), "--seeds", "0", "--arms", "both"])
    assert "both-0: done" in capsys.readouterr().out
    found = read(tmp_path / "results")
    assert found.keys() == {"cold", "foundation", "both"}
    measured = {f"val/{group}_{form}/accuracy" for group in GROUPS for form in FORMS}
    assert found["both"][0]["curves"].keys() >= measured
    assert sum(found[arm][0]["rollouts"] for arm in ("foundation", "both")) == 8
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| RL in text, then with pictures | 1 | " in page and "Not all arms have been run." in page
    pictures, words = (
        [json.loads(line) for line in (tmp_path / "rows" / f"train-{form}.jsonl").read_text().splitlines()]
        for form in ("pictures", "text")
    )
    seen = {f"{about} {kind}" for about, kind in GROUPS["seen"]}
    for shown, said in zip(pictures, words, strict=True):
        assert shown["category"] in seen and shown["answer"] == said["answer"] and "images" not in said
        assert said["problem"] == shown["problem"].replace("<image>", f"{shown['facts']}\n")


def test_equal_rollouts_are_equal_steps_of_the_same_size() -> None:
    steps = {arm: steps for arm, (_, _, steps, _) in foundation.ARMS.items()}
    assert steps["foundation"] + steps["both"] == steps["text"] == steps["pictures"] == steps["mixed"]
