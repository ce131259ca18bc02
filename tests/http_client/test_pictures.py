"""Images on their way to an endpoint."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from saccade.media.images import ImageError, crop, decode, open_media
from saccade.plugins.judges.http_client.chat_client import encode
from saccade.types import Media


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_what_is_no_image_is_refused_by_name(image, kind):
    still = image(56, 56)
    more = {"frames": (0, 1), "fps": 1.0} if kind == "video" else {}
    with pytest.raises(ImageError, match=f"sent images, and no {kind}"):
        encode(replace(still, kind=kind, **more))


def pixels(media: Media) -> np.ndarray:
    data = base64.b64decode(encode(media)[1])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_a_large_image_shrinks_to_its_budget(image):
    media = replace(image(200, 100), max_pixels=5000)
    height, width, _ = pixels(media).shape
    assert (width, height) == (100, 50)


def test_a_crop_is_what_it_shows(image):
    part = crop(image(100, 80), (10, 20, 60, 70))
    assert np.array_equal(pixels(part), decode(part))


def test_a_turned_photo_is_sent_upright(tmp_path):
    turned = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "a.jpg", exif=exif)
    media = open_media(tmp_path / "a.jpg")
    assert np.array_equal(pixels(media), decode(media)) and media.height == 60


def test_each_image_is_encoded_once(image):
    encode.cache_clear()
    for _ in range(3):
        assert encode(image(56, 56, 1)) != encode(image(56, 56, 2))
    assert encode.cache_info().misses == 2
