"""The counting task: pictures that show what their answers say."""

import hashlib
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.plugins.quickstart import counting
from saccade.plugins.quickstart.counting import TRAINING_COLOURS, counting_scene, counting_split


def connected_regions(mask: np.ndarray) -> int:
    """Regions of touching pixels, diagonals included."""
    left, regions = mask.copy(), 0
    while left.any():
        regions += 1
        waiting = [tuple(np.argwhere(left)[0])]
        while waiting:
            y, x = waiting.pop()
            if left[y, x]:
                left[y, x] = False
                around = left[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2]
                waiting += [(max(y - 1, 0) + v, max(x - 1, 0) + u) for v, u in np.argwhere(around)]
    return regions


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_scene_shows_as_many_separate_regions_as_it_has_shapes_in_reading_order(count: int) -> None:
    for seed in range(10):
        image, shapes = counting_scene(np.random.default_rng(seed), count=count, colours=TRAINING_COLOURS)
        assert image.shape == (56, 56, 3) and image.dtype == np.uint8
        assert len(shapes) == connected_regions((image != counting.MID_GREY).any(axis=2)) == count
        for shape in shapes:
            assert 4 <= shape.radius <= 6
            assert tuple(image[shape.y, shape.x]) == counting.COLOURS[shape.colour]
        places = [(shape.y >= 28, shape.x) for shape in shapes]
        assert places == sorted(places)


def test_a_row_is_a_question_about_one_picture() -> None:
    row = counting_split(1, seed=5, colours=("red", "blue"))[0]
    (message,) = row.messages
    (media,) = row.media
    assert message.role == "user" and message.parts == (media, "how many objects?")
    assert (media.width, media.height) == (56, 56)
    assert media.data is not None and media.hash == hashlib.sha256(media.data).hexdigest()
    assert row.answer == str(len(row.extra["colours"]))
    listed = " ".join(row.extra["colours"])
    assert row.extra["demonstration"] == f"<think> {listed} </think><answer> {row.answer} </answer>"
    assert counting.demonstrated(row).messages[1].text == row.extra["demonstration"]
    image = np.random.default_rng(0).integers(0, 256, size=(7, 5, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(counting.encode_png(image)))), image)


def test_a_split_depends_on_its_seed_alone_and_is_written_as_it_is(tmp_path: Path) -> None:
    rows = counting_split(36, seed=1, colours=TRAINING_COLOURS)
    assert Counter(row.answer for row in rows) == {str(k): 6 for k in range(1, 7)}
    assert rows[:7] == counting_split(7, seed=1, colours=TRAINING_COLOURS)
    other = counting_split(36, seed=2, colours=TRAINING_COLOURS)
    assert {row.media[0].hash for row in rows}.isdisjoint(row.media[0].hash for row in other)
    assert len({row.id for row in rows + other}) == 72
    # The first picture of the quickstart's seed 0, to the bit.
    assert counting_split(1, seed=1, colours=("red", "green", "blue"))[0].media[0].hash[:16] == "72fef0d233535707"
    path = counting.write_jsonl(rows, tmp_path)
    assert path == tmp_path / "train.jsonl"
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written[0]["problem"] == "<image>how many objects?"
    for line, row in zip(written, rows, strict=True):
        assert line["answer"] == row.answer
        assert (tmp_path / line["images"][0]).read_bytes() == row.media[0].data
