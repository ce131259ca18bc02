"""Scenes that can be read after zooming and not before, with the numbers of a matcher."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.config import DataConfig, DataSource
from saccade.data import datasets
from saccade.errors import ConfigError
from saccade.plugins.visual_search.optotypes import MARGIN, TILE, detail, resized
from saccade.plugins.visual_search.search_expert import demonstration, place_boxes
from saccade.plugins.visual_search.search_scenes import KINDS, LEVELS, readability, search_split, write_search


def pixels(sample) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(sample.media[0].data)))


@pytest.mark.parametrize("name", ["7", "A", "ring:up", "spots:red", "bars", "frame"])
@pytest.mark.parametrize("shrink", [2, 4, 8])
def test_nothing_of_an_object_survives_shrinking(name: str, shrink: int) -> None:
    drawn = np.pad(detail(name, MARGIN * shrink + 1, MARGIN * shrink, shrink), 4 * shrink)
    assert abs(resized(drawn, len(drawn) // shrink)).max() < 0.0015  # a tenth of a grey level
    assert drawn.max() - drawn.min() > 0.5  # and yet it is there


@pytest.mark.parametrize(
    ("level", "kind", "zoom"),
    [
        ("easy", "digit", "place"),
        ("medium", "digit", "place"),
        ("medium", "orientation", "place"),
        ("medium", "colour", "place"),
        ("hard", "letter", "quarter"),
    ],
)
def test_a_target_is_read_after_zooming_and_by_chance_before(level: str, kind: str, zoom: str) -> None:
    """Although the matcher is told where the target is; 3 deviations above p are no guess."""
    rows = search_split(40, seed=5, level=level, kind=kind, view=56)
    found = readability(rows)
    chance = 1 / len(KINDS[kind].objects)
    lucky = chance + 3 * (chance * (1 - chance) / len(rows)) ** 0.5
    assert found[zoom] > 0.95
    assert found["whole"] < lucky
    if level == "hard":
        assert found["place"] < lucky


def test_only_an_easy_place_shows_in_the_whole_picture() -> None:
    for level in LEVELS:
        (row,) = search_split(1, seed=3, level=level)
        whole = resized(pixels(row), 112).astype(float)
        x, y = (v * 112 // row.media[0].width for v in row.extra["box"][:2])
        assert (abs(whole[y + 1 : y + 3, x + 1 : x + 3] - 128).mean() > 30) == (level == "easy")


def test_rows_depend_on_seed_and_index_alone() -> None:
    few, many = search_split(3, seed=8), search_split(12, seed=8)
    assert [s.media[0].hash for s in few] == [s.media[0].hash for s in many[:3]]
    assert few[0].media[0].hash != search_split(1, seed=9)[0].media[0].hash
    assert sorted(s.answer for s in search_split(10, seed=0)) == list("0123456789")


@pytest.mark.parametrize(("level", "side"), [("easy", 224), ("medium", 224), ("hard", 448)])
def test_a_row_says_where_its_target_is(level: str, side: int) -> None:
    (row,) = search_split(1, seed=1, level=level, view=56)
    assert (row.media[0].width, row.media[0].max_pixels) == (side, 56 * 56)
    assert row.data_source == f"visual_search_{level}" and row.extra["level"] == level
    x0, y0, x1, y1 = row.extra["box"]
    assert (x1 - x0, y1 - y0) == (TILE, TILE) and min(x0, y0) >= 0 and max(x1, y1) <= side
    assert pixels(row)[y0:y1, x0:x1].std() > 10  # something is drawn there
    assert (row.extra["box"] in row.extra["framed"]) is (level == "hard")


def test_written_rows_are_read_back(tmp_path: Path) -> None:
    rows = search_split(5, seed=2, kind="colour", view=56)
    path = write_search(rows, tmp_path)
    read = datasets.load([DataSource(path=str(path))], DataConfig()).samples
    for before, after in zip(rows, read, strict=True):
        assert (after.id, after.answer, after.data_source) == (*(before.id, before.answer, before.data_source),)
        assert after.media == before.media and after.extra == before.extra
        assert after.messages[0].text == before.messages[0].text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"level": "extreme"}, "easy, medium, hard"),
        ({"kind": "smell"}, "digit, letter"),
        ({"grid": 2}, "from 4 to 16"),
        ({"view": 100}, "multiple of 56"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        search_split(1, seed=0, **options)


# -- the searcher ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "fewest"), [("easy", 2), ("medium", 2), ("hard", 3)])
def test_a_searcher_needs_two_to_six_turns(level: str, fewest: int) -> None:
    rows = search_split(40, seed=4, level=level, view=56)
    rng = np.random.default_rng(0)
    lengths = [len(demonstration(row, rng, turns=6, mistakes=0.1)) for row in rows]
    assert min(lengths) == fewest and max(lengths) <= 6
    if level != "easy":
        assert set(lengths) == set(range(fewest, 7))  # short and long ones


def test_a_searcher_goes_on_row_by_row() -> None:
    row = search_split(1, seed=4, view=56)[0]
    boxes = [f"[{', '.join(f'{edge:g}' for edge in box)}]" for box in place_boxes(4)]
    for seed in range(10):
        turns = demonstration(row, np.random.default_rng(seed), turns=6, mistakes=0.0)
        places = [next(i for i, box in enumerate(boxes) if box in turn) for turn in turns[:-1]]
        assert all((b - a) % 16 == 1 for a, b in pairwise(places))
        assert turns[-1].endswith(f"<answer>{row.answer}</answer>")
