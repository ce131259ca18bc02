"""Requests and replies of the two kinds of endpoints; images inside them."""

from __future__ import annotations

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from saccade.errors import ConfigError
from saccade.media.images import ImageError, crop, decode, open_media
from saccade.models.chat import PLAIN_TEMPLATE
from saccade.plugins.engines.http_family import endpoint_family
from saccade.plugins.judges.http_client.chat_client import APIS, encode, read_answer, settings
from saccade.types import Media, Message, Sampling

SAMPLING = Sampling(temperature=0.5, max_tokens=9, stop=("END",), top_k=5)


def talk(media: Media) -> tuple[Message, ...]:
    return (Message(role="system", parts=("Be brief.",)), Message(role="user", parts=(media, "How many?")))


def test_images_travel_as_data_urls(image):
    body = APIS["chat"][1](talk(image()), encode) | settings(SAMPLING, 3)
    part = body["messages"][1]["content"][0]
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert open_media(base64.b64decode(data)).hash == image().hash  # byte by byte
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["top_k"] == 5 and body["stop"] == ["END"] and body["seed"] == 3


def test_completions_ask_as_a_folder_without_a_template(image):
    from jinja2 import Template

    messages = (*talk(image())[:1], Message(role="user", parts=("How many?",)))
    body = APIS["completions"][1](messages, encode)
    plain = [{"role": m.role, "content": m.text} for m in messages]
    template = Template(PLAIN_TEMPLATE)
    assert body["prompt"] == template.render(messages=plain, add_generation_prompt=True)
    with pytest.raises(ConfigError, match=r"rollout\.http\.api=chat"):
        APIS["completions"][1](talk(image()), encode)


def test_a_stop_string_is_put_back_where_the_endpoint_names_it():
    choice = {"message": {"content": "4 "}, "finish_reason": "stop", "stop_reason": "END"}
    assert read_answer({"choices": [choice]}, SAMPLING).text == "4 END"
    choice["stop_reason"] = 151645  # an end-of-turn id
    assert read_answer({"choices": [choice]}, SAMPLING).text == "4 "
    choice = {"message": {"content": None}, "finish_reason": "length"}
    answer = read_answer({"choices": [choice]}, SAMPLING)
    assert (answer.text, answer.finish) == ("", "length")


# -- the family of an endpoint ---------------------------------------------------------------------


def test_a_response_counts_the_tokens_that_were_used(image):
    family = endpoint_family("http://127.0.0.1:9/v1")
    rendered = family.render(talk(image()))
    assert len(rendered) == 1 and len(rendered.media) == 1  # one place for the image, no more
    texts = family.chat.tokenizer
    one, other = texts.record("four apples", tokens=3), texts.record("", tokens=0)
    assert len(one) == 3 and family.decode(one) == "four apples"
    assert len(other) == 1 and family.decode(np.concatenate([other, one])) == "four apples"


# -- images on their way ---------------------------------------------------------------------------


def test_what_is_no_image_is_refused_by_name(image):
    with pytest.raises(ImageError, match="sent images, and no audio"):
        encode(replace(image(56, 56), kind="audio"))


def pixels(media: Media) -> np.ndarray:
    data = base64.b64decode(encode(media)[1])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_what_is_large_a_crop_or_turned_is_written_anew(image, tmp_path):
    assert pixels(replace(image(200, 100), max_pixels=5000)).shape == (50, 100, 3)
    part = crop(image(100, 80), (10, 20, 60, 70))
    assert np.array_equal(pixels(part), decode(part))
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
