"""Experiments with pictures: their questions, and their tiny variants on a CPU."""

import io
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from experiments import scenes
from experiments.counting import run as counting
from experiments.foundation import run as foundation
from experiments.foundation.asked import FORMS, GROUPS, draw_asked
from experiments.pages import read
from experiments.rl_or_sft import run as rl_or_sft
from experiments.rl_or_sft.pictures import rows_of
from experiments.row_files import read_rows
from experiments.text_first import run as text_first
from experiments.text_first.rows import rows_of as text_rows
from saccade.media.blob_file import encoded
from saccade.plugins.quickstart.counting import MID_GREY, TRAINING_COLOURS
from saccade.plugins.verifiers.response_shape import FORMATS
from saccade.plugins.verifiers.text_match import exact
from saccade.rewards.reward_sample import RewardSample


def things(drawn: scenes.Drawing) -> list[str]:
    return [one.partition(" (")[0] for one in drawn.more["facts"].partition("top. ")[2].split("; ")]


def test_answers_are_those_of_the_facts_and_worked_ones_are_read_as_them() -> None:
    draw, splits = scenes.draw_scene, [(split, kind) for split in scenes.SPLITS for kind in scenes.KINDS]
    drawn = [draw(Random(n), n, split=split, kinds=(kind,), side=64) for split, kind in splits for n in range(4)]
    drawn += [draw_asked(Random(n), n, group=group, side=64) for group in GROUPS for n in range(20)]
    for one in drawn:
        said = RewardSample(id="a", response=one.more.get("worked", one.answer), answer=one.answer)
        assert exact(said, order=FORMATS["none"].order).value == 1, said
        if one.category in ("all", "count"):
            word = one.question.split()[2].removesuffix("s")
            named = [name for name in things(one) if one.category == "all" or word in name.split()]
            assert int(one.answer) == len(named), one
        elif one.category == "charts difference":
            a, _, b = one.question.removeprefix("How much higher is ").removesuffix("?").partition(" than ")
            values = dict(pair.split() for pair in one.more["facts"].partition(": ")[2].removesuffix(".").split(", "))
            assert int(one.answer) == int(values[a]) - int(values[b])


def test_kinds_of_pictures_hold_what_training_does_not() -> None:
    found = {
        split: [things(scenes.draw_scene(Random(n), n, split=split, kinds=("all",), side=64)) for n in range(40)]
        for split in scenes.SPLITS
    }
    words = {split: {word for named in of for name in named for word in name.split()} for split, of in found.items()}
    assert {len(named) for named in found["same"]} == {*range(2, 7)}
    assert {len(named) for named in found["more"]} == {7, 8, 9}
    assert words["same"] & words["colours"] == {*scenes.FLAT.values()}
    assert words["same"] & words["solids"] == {*scenes.TRAINING_COLOURS}


def test_counting_runs_from_nothing_and_says_what_is_missing(tmp_path: Path) -> None:
    counting.main(["--tiny", "--out", str(tmp_path), "--seeds", "0", "--arms", "rl_4", "answers_4"])
    found, page = read(tmp_path / "results"), (tmp_path / "RESULTS.md").read_text()
    assert found["rl_4"][0]["rollouts"] == 4
    assert found["rl_4"][0]["curves"].keys() >= {f"val/{name}/accuracy" for name in ("choice", *scenes.SPLITS)}
    assert "| RL | 4 | 1 | " in page and "| SFT on worked answers | 4 | 0 | - |" in page
    assert (tmp_path / "counting-same.svg").read_text().count(">SFT on") == 1
    said = [row["conversations"][1]["value"] for row in read_rows(tmp_path / "rows" / "worked-0.jsonl")]
    assert all("\nAnswer: " in text for text in said) and len(said) == 4


def test_pictures_of_the_small_comparison_differ_from_those_of_training_in_one_thing() -> None:
    def drawn(look: str) -> list[np.ndarray]:
        return [np.asarray(Image.open(io.BytesIO(encoded(row.media[0])))) for row in rows_of(look, 12, seed=3)]

    same, striped, outlined = (drawn(look) for look in ("same", "backgrounds", "outlines"))
    for plain, stripes, lines in zip(same, striped, outlined, strict=True):
        behind = (plain == MID_GREY).all(-1)
        assert {*np.unique(stripes[behind])} == {96, 160} and (stripes[~behind] == plain[~behind]).all()
        left = ~(lines == MID_GREY).all(-1)
        assert 0 < left.sum() < (~behind).sum() and (lines[left] == plain[left]).all()
    assert {row.answer for row in rows_of("more", 12, seed=3)} == {"7", "8", "9"}
    colours = {name for row in rows_of("colours", 12, seed=3) for name in row.extra["colours"]}
    assert not colours & {*TRAINING_COLOURS}


def test_rl_and_sft_are_compared_on_the_same_questions(tmp_path: Path) -> None:
    rl_or_sft.main(["--tiny", "--out", str(tmp_path), "--seeds", "0"])
    found, page = read(tmp_path / "results"), (tmp_path / "RESULTS.md").read_text()
    assert found.keys() == {"cold", "base", "rl_4", "answers_4", "worked_4"}
    assert found["rl_4"][0]["rollouts"] == 16
    assert "| SFT on worked answers | 4 | 1 | 0.0 |" in page and "| `rl@2e-4` |" in page
    asked, *taught = (read_rows(tmp_path / "rows-0" / f"{form}-0.jsonl") for form in ("rl", "answers", "worked"))
    for question, answer, worked in zip(asked, *taught, strict=True):
        assert question["images"] == answer["images"] == worked["images"]
        said = f"<answer> {question['answer']} </answer>"
        assert answer["conversations"][1]["value"] == said and worked["conversations"][1]["value"].endswith(said)


def test_foundation_runs_from_nothing_at_equal_rollouts(tmp_path: Path) -> None:
    foundation.main(["--tiny", "--out", str(tmp_path), "--seeds", "0", "--arms", "both"])
    found, page = read(tmp_path / "results"), (tmp_path / "RESULTS.md").read_text()
    assert found.keys() == {"cold", "foundation", "both"}
    assert found["both"][0]["curves"].keys() >= {f"val/{g}_{form}/accuracy" for g in GROUPS for form in FORMS}
    assert "| RL in text, then with pictures | 1 | " in page and "Not all arms have been run." in page
    steps = {arm: steps for arm, (_, _, steps, _) in foundation.ARMS.items()}
    assert steps["foundation"] + steps["both"] == steps["text"] == steps["pictures"] == steps["mixed"]
    pictures, words = (read_rows(tmp_path / "rows" / f"train-{form}.jsonl") for form in ("pictures", "text"))
    assert {row["category"] for row in pictures} == {f"{about} {kind}" for about, kind in GROUPS["seen"]}
    for shown, said in zip(pictures, words, strict=True):
        assert shown["answer"] == said["answer"] and "images" not in said
        assert said["problem"] == shown["problem"].replace("<image>", f"{shown['facts']}\n")


def test_text_first_asks_the_same_in_words_and_with_pictures(tmp_path: Path) -> None:
    text_first.main(["--tiny", "--dev", "--out", str(tmp_path)])
    found, page = read(tmp_path / "results" / "dev"), (tmp_path / "RESULTS.md").read_text()
    assert found.keys() == {"cold", "text@2e-4", "pictures@2e-4"} and "| `text@2e-4` |" in page
    words, shown = (text_rows("held", form, 12, seed=3) for form in FORMS)
    for said, seen in zip(words, shown, strict=True):
        listed, asked = said.messages[0].text.split(" how many ")
        colour = asked.removesuffix(" objects?")
        assert seen.messages[0].text == f"how many {asked}" and seen.answer == said.answer
        assert int(said.answer) == listed.split().count(colour) > 0
    assert {row.answer for row in text_rows("far", "text", 12, seed=3)} == {"7", "8", "9"}
    steps = {arm: steps for arm, (_, steps, _) in text_first.ARMS.items()}
    assert steps["foundation"] + steps["both"] == steps["text"] == steps["pictures"] == steps["mixed"]
