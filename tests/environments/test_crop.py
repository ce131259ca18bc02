"""Boxes become crops of the raw picture, and land where they should."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.config import EnvConfig
from saccade.media.images import decode, open_media, resized_size
from saccade.media.pixel_cache import DECODED
from saccade.plugins.tools.calls import CallError
from saccade.plugins.tools.crop import EpisodeImages, zoom
from saccade.types import Media

ENV = EnvConfig(name="crop")


def picture(width: int, height: int, seed: int = 0) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return open_media(pixels)


def look(views: EpisodeImages, box, source="original_image", env=ENV):
    media, facts = zoom({"source": source, "bbox_2d": box}, views, env, 28)
    views.add(media, facts["source"])
    return media, facts


def refused(views: EpisodeImages, box, source="original_image", **options) -> str:
    with pytest.raises(CallError) as caught:
        zoom({"source": source, "bbox_2d": box}, views, EnvConfig(name="crop", **options), 28)
    return caught.value.reason


def test_a_crop_holds_the_raw_pixels_of_its_box():
    root = picture(200, 100)
    views = EpisodeImages([root])
    media, facts = look(views, [0.1, 0.2, 0.55, 0.9])
    assert facts["pixels"] == [20, 20, 110, 90] == list(media.box)
    assert (facts["area"], facts["noop"]) == (pytest.approx(0.315), False)
    assert (decode(media) == decode(root)[20:90, 20:110]).all()
    assert (media.min_pixels, media.max_pixels) == (40_000, 2_000_000)  # shown larger than it is
    assert (decode(media) == DECODED.get(media)).all()


def test_crops_of_crops_stay_raw_and_know_where_they_come_from():
    root = picture(400, 400)
    views = EpisodeImages([root])
    first, _ = look(views, [0.5, 0.5, 1, 1])
    second, facts = look(views, [0.25, 0, 0.75, 0.5], "observation_1")
    third, _ = look(views, [0, 0, 0.5, 1], "observation_2")
    assert first.box == (200, 200, 400, 400) and second.box == (250, 200, 350, 300)
    assert third.box == (250, 200, 300, 300) and third.parent == second.hash
    assert (decode(third) == decode(root)[200:300, 250:300]).all()
    assert facts["source"] == "observation_1" and facts["area"] == pytest.approx(0.25)
    assert views.lineage["observation_3"] == ("original_image", "observation_1", "observation_2")


def test_names_of_pictures():
    one = EpisodeImages([picture(50, 50)])
    assert {one.find(n) for n in ("original_image", "original_image_1", "image_1")} == {"original_image"}
    two = EpisodeImages([picture(50, 50), picture(80, 50, 1)])
    assert two.find("image_2") == "original_image_2" and two.find("original_image") == ("original_image_1")
    for name in ("observation_1", "observation_0", "original_image_3", "", "../x", None, 7, [1], {}):
        assert refused(two, [0, 0, 1, 1], name) == "source"
    assert refused(EpisodeImages([]), [0, 0, 1, 1]) == "source"


def test_three_ways_to_write_the_same_box():
    root = picture(2000, 1000)
    height, width = resized_size(2000, 1000, unit=28, min_pixels=3136, max_pixels=1_003_520)
    assert (width, height) == (1400, 700)
    boxes = {"relative": [0.25, 0.5, 0.75, 0.6], "milli": [250, 500, 750, 600], "absolute": [350, 350, 1050, 420]}
    for coordinates, box in boxes.items():
        env = EnvConfig(name="crop", coordinates=coordinates)
        media, facts = look(EpisodeImages([root]), box, env=env)
        assert media.box == (500, 500, 1500, 600) and facts["box"] == [0.25, 0.5, 0.75, 0.6]


def test_boxes_that_cannot_be_shown():
    views = EpisodeImages([picture(1000, 100)])
    for box in (None, 3, [0, 0, 1], [0, 0, 1, 1, 1], ["0", 0, 1, 1], [True, 0, 1, 1], {}, [[0], 0, 1, 1]):
        assert refused(views, box) == "box"
    assert refused(views, [0, 0, 1.06, 1]) == refused(views, [-0.06, 0, 1, 1]) == "outside"
    assert refused(views, [1e300, 0, 1, 1]) == "outside"
    assert refused(views, [0.5, 0.5, 0.503, 1]) == "too_small"
    assert refused(views, [0.2, 0.2, 0.2, 0.2]) == "too_small"
    assert refused(views, [0, 0, 1, 0.05], min_crop_px=1) == "aspect"  # 1000x5
    assert refused(views, [100, 100, 400, 400], coordinates="milli", min_crop_px=301) == "too_small"


EDGE = st.floats(-0.05, 1.05)


@given(EDGE, EDGE, EDGE, EDGE, st.integers(5, 3000), st.integers(5, 3000))
def test_any_box_inside_gives_a_crop_that_covers_it(x0, y0, x1, y1, width, height):
    media = Media(hash="a", width=width, height=height, path="a")
    try:
        made, _ = zoom({"bbox_2d": [x0, y0, x1, y1], "source": "original_image"}, EpisodeImages([media]), ENV, 28)
    except CallError as error:
        assert error.reason in ("too_small", "aspect")
        return
    left, top, right, bottom = made.box
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert (made.width, made.height) == (right - left, bottom - top)
    near = 1e-5
    assert left <= max(0, min(x0, x1)) * width + near and left + 1 >= min(x0, x1) * width - near
    assert bottom >= min(1, max(y0, y1)) * height - near
