"""Drawn sets: pictures show what their answers say, rows depend on seed and number alone, cards say how."""

import json
import logging
import re
import sys
from collections import Counter
from functools import partial
from importlib import metadata
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from saccade.cli import app
from saccade.config import DataConfig, DataSource
from saccade.data import datasets
from saccade.plugins.drawn.chart_questions import CHART_KINDS, CHART_SPLITS, LIGHT, draw_chart_row
from saccade.plugins.drawn.diagram_questions import DIAGRAM_KINDS, DIAGRAM_SPLITS, draw_diagram_row
from saccade.plugins.drawn.formulas import typeset
from saccade.plugins.drawn.scene_questions import SCENE_KINDS, SCENE_SPLITS, draw_scene_row
from saccade.plugins.drawn.sokoban_levels import draw_level, written
from saccade.plugins.drawn.text_pages import BORDER, WORD_KINDS, Style, draw_words_row, font_of, page, wrapped
from saccade.plugins.evaluation.results import read_lines
from saccade.plugins.quickstart.counting import COLOURS
from saccade.plugins.sokoban import sokoban


def saccade(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "160", "NO_COLOR": "1"})
    return (result.stdout + result.stderr) if result.exit_code == 0 else f"exit {result.exit_code}: {result.stderr}"


def those(text: str, objects: list[dict]) -> list[dict]:
    """The objects that words such as `large red cubes` name, read anew."""
    words = {word.removesuffix("s") for word in text.split()} - {"object"}
    return [one for one in objects if words <= {value for key, value in one.items() if key != "box"}]


@pytest.mark.parametrize("split", SCENE_SPLITS)
def test_answers_about_scenes_follow_from_their_objects(split: str) -> None:
    seen = set()
    for index in range(60):
        drawn = draw_scene_row(Random(index), index, split=split, kinds=(*SCENE_KINDS,), side=96)
        objects, asked = drawn.more["objects"], drawn.question
        if found := re.fullmatch(r"How many (.+) are there\?", asked):
            assert drawn.answer == str(len(those(found[1], objects)))
        elif found := re.fullmatch(r"Is there an? (.+)\?", asked):
            assert (drawn.answer == "yes") == bool(those(found[1], objects))
        elif found := re.fullmatch(r"What (\w+) is the (?!leftmost|rightmost|topmost|lowest)(.+)\?", asked):
            (one,) = those(found[2], objects)
            assert drawn.answer == one[found[1]]
        elif found := re.fullmatch(r"Is the (.+) (left of|right of|above|below) the (.+)\?", asked):
            (one,), (other,) = those(found[1], objects), those(found[3], objects)
            axis, sign = {"left of": (0, 1), "right of": (0, -1), "above": (1, 1), "below": (1, -1)}[found[2]]
            middles = [each["box"][axis] + each["box"][axis + 2] for each in (one, other)]
            assert (drawn.answer == "yes") == (sign * middles[0] < sign * middles[1])
        else:
            continue
        seen.add(drawn.category)
        assert len(objects) in range(*SCENE_SPLITS[split].objects) or len(objects) == SCENE_SPLITS[split].objects[1]
        assert {one["colour"] for one in objects} <= {*SCENE_SPLITS[split].colours}
    assert seen == {"count", "exist", "attribute", "relation"}


def test_a_solid_has_its_colour_where_its_box_is() -> None:
    for index in range(10):
        drawn = draw_scene_row(Random(index), index, split="same", kinds=("count",), side=224)
        pixels = np.asarray(drawn.picture, float)
        for one in drawn.more["objects"]:
            x0, y0, x1, y1 = one["box"]
            x, y = (x0 + x1) // 2, (y0 + y1) // 2
            middle = pixels[y - 2 : y + 3, x - 2 : x + 3].mean((0, 1))
            colours = {name: np.array(COLOURS[name], float) for name in SCENE_SPLITS["same"].colours}
            hues = {name: colour - colour.mean() for name, colour in colours.items()}
            likeness = {name: hue @ (middle - middle.mean()) / np.linalg.norm(hue) for name, hue in hues.items()}
            assert max(likeness, key=likeness.__getitem__) == one["colour"]


@pytest.mark.parametrize("split", CHART_SPLITS)
def test_answers_about_charts_follow_from_their_numbers(split: str) -> None:
    for index in range(60):
        drawn = draw_chart_row(Random(index), index, split=split, kinds=(*CHART_KINDS,), side=160)
        values = dict(zip(drawn.more["names"], drawn.more["values"], strict=True))
        assert len(values) == len({*values.values()})  # one is highest
        if found := re.fullmatch(r"What is the value of (\w+)\?", drawn.question):
            assert drawn.answer == str(values[found[1]])
        elif found := re.fullmatch(r"How much higher is (\w+) than (\w+)\?", drawn.question):
            assert int(drawn.answer) == values[found[1]] - values[found[2]] > 0
        elif drawn.question == "Which has the highest value?":
            assert values[drawn.answer] == max(values.values())


def test_bars_are_as_high_as_their_numbers() -> None:
    checked = 0
    for index in range(40):
        drawn = draw_chart_row(Random(index), index, split="same", kinds=("value",), side=192)
        assert (np.asarray(drawn.picture)[:, -1] == 255).all()  # no number is cut off
        if drawn.more["chart"] == "bar":
            pixels, values = np.asarray(drawn.picture), drawn.more["values"]
            slot = 0.84 * 192 / len(values)
            beside = [int(0.13 * 192 + slot * (n + 0.25)) for n in range(len(values))]  # not where numbers stand
            heights = [sum(tuple(p) in LIGHT.marks for p in pixels[:, x].tolist()) for x in beside]
            unit = max(heights) / max(values)
            assert all(abs(high - unit * value) <= 2 for high, value in zip(heights, values, strict=True))
            checked += 1
    assert checked > 3


@pytest.mark.parametrize("split", DIAGRAM_SPLITS)
def test_answers_about_diagrams_follow_from_their_arrows(split: str) -> None:
    answers = Counter()
    for index in range(100):
        drawn = draw_diagram_row(Random(index), index, split=split, kinds=(*DIAGRAM_KINDS,), side=112)
        boxes, arrows = drawn.more["boxes"], drawn.more["arrows"]
        assert len(boxes) in range(DIAGRAM_SPLITS[split][0], DIAGRAM_SPLITS[split][1] + 1)
        if found := re.fullmatch(r"To which box does the arrow from (\w) lead\?", drawn.question):
            assert [end for start, end in arrows if start == found[1]] == [drawn.answer]
        elif found := re.fullmatch(r"Is there an arrow from (\w) to (\w)\?", drawn.question):
            assert (drawn.answer == "yes") == ([found[1], found[2]] in arrows)
        elif found := re.fullmatch(r"Can you get from (\w) to (\w) along the arrows\?", drawn.question):
            ways = np.eye(len(boxes), dtype=int)
            for start, end in arrows:
                ways[[*boxes].index(start), [*boxes].index(end)] = 1
            far = np.linalg.matrix_power(ways, len(boxes))[[*boxes].index(found[1]), [*boxes].index(found[2])]
            assert (drawn.answer == "yes") == bool(far)
        answers[drawn.category, drawn.answer] += 1
    assert all(answers[kind, said] >= 3 for kind in ("exist", "reach") for said in ("yes", "no"))


def test_lines_of_a_page_fit_and_what_cannot_be_drawn_is_left_out(tmp_path: Path) -> None:
    text = "Janet sells incomprehensibilities " * 6 + "x" * 80
    for size in (12, 30):
        font = font_of("", size)
        lines = wrapped(text, font.getlength, 200)
        assert max(map(font.getlength, lines)) <= 200 and "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert page(text, Style(size=size), 220).height == 2 * BORDER + round(1.3 * size) * len(lines)
    rows = [
        {"question": "How many?\nSay it.", "answer": "4", "category": None, "system": "Be kind.", "number": "one"},
        {"question": "多少?", "answer": "4"},
        {"question": "Which?", "choices": ["dog", "cat"], "answer": "cat", "category": ["a", "b"]},
        {"question": "word " * 3000, "answer": "4"},
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = saccade(
        "text-pictures", source, tmp_path / "out" / "val.jsonl",
        "data.keys.id=number", "--width", 200, "--reply", "It is {answer}.",
    )  # fmt: skip
    assert "2 rows; 2 rows left out" in said
    first, second = read_lines(tmp_path / "out" / "val.jsonl")
    assert (first["answer"], second["answer"]) == ("4", "B") and "choices" not in second
    assert first["conversations"][1] == {"from": "gpt", "value": "It is 4."} and first["system"] == "Be kind."
    assert (first["id"], first["category"], second["category"]) == ("one", "text", "['a', 'b']")
    assert "rows.jsonl val.jsonl data.keys.id=number --seed 0" in (tmp_path / "out" / "val.md").read_text()
    assert Image.open(tmp_path / "out" / first["images"][0]).width == 200
    assert "no row can be drawn" in saccade("text-pictures", source, tmp_path / "no.jsonl", "--font-size", "300-400")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"Is $\frac{1}{2}$, \(x\le5\), $ \sqrt2 $ more?", "Is #, #, # more?"),
        ("It is:\n\\[x^2\n= 4\\].\n\nSo $$y$$ is", "It is:\n#.\nSo\n#\nis"),
        (r"\begin{align*} a &= b, \\ c &= d \end{align*}", "#\n#"),
        (r"$5 and $6, $5/$6, $2 red pens for 3$ or \$7, 5\%", "$5 and $6, $5/$6, $2 red pens for 3$ or $7, 5%"),
        ("$" + "+".join(["a^2"] * 30) + "$", " ".join("#" * 30)),
        (r"So $\begin{cases} 1 \\ 2 \end{cases}$!", r"there is no \begin{cases}"),
        ("$" + "x" * 200 + "$", "a formula is too wide for the page"),
        ("[asy] label($x$); [/asy]", r"there is no \begin{asy}"),
        (r"$a \not\in b$, $\$$7", "#, #7"),
        (r"$a \not\sim b$", r"Unknown symbol: \struck"),
        ("$多$", "Unknown symbol: 多"),
        ("$" + r"\sqrt{" * 60 + "x" + "}" * 60 + "$", "a formula has too many others inside it"),
    ],
)
def test_formulas_become_signs_or_stay_as_source(text: str, shown: str) -> None:
    changed, formulas, kept = typeset(text, 20, 400)
    assert "".join("#" if sign in formulas else sign for sign in changed) == (text if kept else shown)
    assert kept == ([] if formulas or "$7" in text else [shown])
    assert not logging.getLogger("matplotlib.mathtext").filters  # other users of mathtext keep its warnings
    assert all(one.mask.width <= 400 and one.mask.getbbox() for one in formulas.values())


def test_formulas_stand_on_the_line_of_their_text_and_on_the_page() -> None:
    text, formulas, _ = typeset("H $H$", 40, 400)
    ink = np.asarray(page(text, Style(size=40), 420, formulas=formulas)).min(2) < 128
    rows = [np.flatnonzero(half.any(1)) for half in (ink[:, :44], ink[:, 44:])]
    assert abs(rows[0][-1] - rows[1][-1]) <= 1 and abs(rows[0][0] - rows[1][0]) <= 4  # as high as other letters
    for width in (64, 150, 420):
        text, formulas, _ = typeset(r"So \[\sum_{i=1}^n \frac{a_i}{\sqrt{\frac{b}{c}}} = 2.\] " * 3, 20, width - 20)
        picture = page(text, Style(), width, formulas=formulas)
        ink = np.argwhere(np.asarray(picture).min(2) < 128)
        assert ink.min() >= BORDER and all(np.array(picture.size[::-1]) - ink.max(0) > BORDER - 2)
        assert width == 64 or picture.height > 2 * BORDER + 6 * 26  # a sum takes more than a line


def test_rows_with_formulas_are_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["1+1?", r"$\frac{x}{2}=1$?", r"$\begin{pmatrix}1\end{pmatrix}$?", r"\[\begin{cases}1\end{cases}\]"]
    (source := tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"id": q, "question": q, "answer": "2"}) + "\n" for q in asked)
    )
    said = [saccade("text-pictures", source, tmp_path / name / "train.jsonl") for name in "ab"]
    assert all(f"2 rows show TeX as source, such as {asked[2]}: there is no {asked[2][1:16]}" in one for one in said)
    card = (tmp_path / "a" / "train.md").read_text()
    assert card == (tmp_path / "b" / "train.md").read_text() and f"matplotlib {metadata.version('matplotlib')}" in card

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    said = [saccade("text-pictures", source, tmp_path / "c" / "train.jsonl")]
    assert (
        f"3 rows show TeX as source, such as {asked[1]}: pip install -c constraints.txt -e '.[tex]' typesets it"
        in said[0]
    )
    again, plain = (read_lines(tmp_path / name / "train.jsonl") for name in "ac")
    assert [row["text"] for row in again] == [row["text"] for row in plain] == asked
    same = [
        (tmp_path / "a" / row["images"][0]).read_bytes() == (tmp_path / "c" / row["images"][0]).read_bytes()
        for row in plain
    ]
    assert same == [True, False, True, True]


def test_words_stand_on_their_page() -> None:
    for index in range(60):
        side = (64, 64, 112)[index % 3]
        drawn = draw_words_row(Random(index), index, kinds=WORD_KINDS, side=side)
        pixels = np.asarray(drawn.picture, int)
        assert pixels.shape == (side, side, 3)
        ink = abs(pixels - pixels[0, 0]).sum(2) > 60
        assert ink.sum() > 15 and not (ink[0].any() or ink[-1].any() or ink[:, 0].any() or ink[:, -1].any())
        if drawn.category == "sum":
            a, sign, b, *_ = drawn.more["text"].split()
            assert int(drawn.answer) == int(a) + int(sign + b)


@pytest.mark.parametrize("boxes", [1, 2])
def test_levels_of_sokoban_are_solved_by_their_moves(boxes: int) -> None:
    for seed in range(4):
        state, moves = draw_level(Random(seed), 7, boxes)
        assert sokoban.parse(written(state)) == state and len(state.boxes) == boxes and not state.placed
        for name in moves:
            assert not state.solved
            state, _ = sokoban.move(state, name)
        assert state.solved


def test_low_values_have_a_mark_on_the_smallest_charts() -> None:
    for seed in range(150):
        assert draw_chart_row(Random(seed), 0, split="same", kinds=("value",), side=64).picture.width == 64


def test_a_set_is_the_same_again_and_its_card_says_how(tmp_path: Path) -> None:
    options = ("--rows", 70, "--size", 64, "--seed", 3)
    one, two = tmp_path / "a" / "train.jsonl", tmp_path / "b" / "train.jsonl"
    assert "wrote" in saccade("scenes", one, *options)
    assert "wrote" in saccade("scenes", two, *options, "--workers", 2)
    card = (tmp_path / "a" / "train.md").read_text()
    assert one.read_text() == two.read_text() and card == (two.parent / "train.md").read_text()
    assert "saccade data scenes train.jsonl --rows 70 --seed 3 --split same --kind count" in card
    assert "| exist | 14 |" in card
    samples = datasets.load([DataSource(path=str(one))], DataConfig()).samples
    assert len(samples) == 70 and samples[0].media[0].width == 64 and samples[0].extra["category"] == "count"
    assert read_lines(one)[0]["problem"] == "<image>" + draw_first(seed=3).question
    assert "exists and is not overwritten" in saccade("scenes", one)
    assert "ends in .jsonl; try" in saccade("words", tmp_path / "c.txt")
    assert "use OUT FILE where this user may write" in saccade("words", "/proc/c.jsonl")
    assert "--kind sing: expected one of read, number" in saccade("words", tmp_path / "c.jsonl", "--kind", "sing")
    assert "192" in saccade("charts", tmp_path / "c.jsonl", "--size", 64)


def draw_first(seed: int):
    kinds = tuple(kind for kind in SCENE_KINDS if kind != "describe")
    return partial(draw_scene_row, split="same", kinds=kinds, side=64)(Random(f"scenes/{seed}/0"), 0)
