"""Rows with candidates: what is the prompt, what are the sides, where do images stand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from saccade.config import DataConfig
from saccade.data.chats import RowError
from saccade.data.formats import FORMATS, detect, read_row
from saccade.data.records import content_hash, to_row
from saccade.media.images import open_media
from saccade.plugins.overlong.shorten import shrink
from saccade.plugins.preferences.preference_rows import read_candidates, read_label
from saccade.types import Media, Sample


def said(role, content):
    return {"role": role, "content": content}


ASKED, ANSWER = said("user", "how many?"), said("assistant", "three")
SYSTEM, LOOK = said("system", "be brief"), said("user", "look again")


def read(row, **options) -> Sample:
    def open_image(source, *, min_pixels, max_pixels):
        if not isinstance(source, str) or source.startswith("data:"):
            return open_media(source, min_pixels=min_pixels, max_pixels=max_pixels)
        side = 100 + len(source)  # another name, another size
        return open_media(np.zeros((side, side, 3), np.uint8))

    config = DataConfig(**options)
    return read_row(row, detect(set(row), config), config, open_image=open_image)


def shape(messages):
    return [(m.role, "|".join("*" if isinstance(p, Media) else p for p in m.parts)) for m in messages]


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ("how many?", "three", "a dog"),
        ([ASKED], [ANSWER], [said("assistant", "a dog")]),
        (None, [ASKED, ANSWER], [ASKED, said("assistant", "a dog")]),
        ("how many?", [ASKED, ANSWER], [ASKED, said("assistant", "a dog")]),
        ("how many?", json.dumps([ASKED, ANSWER]), [ASKED, said("assistant", "a dog")]),
        (None, "\n\nHuman: how many?\n\nAssistant: three", "\n\nHuman: how many?\n\nAssistant: a dog"),
        ([{"from": "human", "value": "how many?"}], {"from": "gpt", "value": "three"}, ["a dog"]),
    ],
)
def test_the_ways_to_write_a_pair(prompt, chosen, rejected):
    asked, sides = read_candidates(prompt, [chosen, rejected])
    assert asked == [("user", ["how many?"])]
    assert sides == [[("assistant", ["three"])], [("assistant", ["a dog"])]]


def test_what_conversations_share_is_the_prompt():
    first = [SYSTEM, ASKED, ANSWER, LOOK]
    asked, sides = read_candidates(None, [[*first, said("assistant", "four")], [*first, said("assistant", "five")]])
    assert [role for role, _ in asked] == ["system", "user", "assistant", "user"]
    assert [side[0][1] for side in sides] == [["four"], ["five"]]
    # From the first reply on that differs, all of it is compared.
    asked, sides = read_candidates(
        "how many?", [[ASKED, ANSWER, LOOK, said("assistant", "four")], [ASKED, said("assistant", "a dog")]]
    )
    assert len(asked) == 1 and [len(side) for side in sides] == [3, 1]
    same, ties = read_candidates(None, [[ASKED, ANSWER], [ASKED, ANSWER]])
    assert len(same) == 1 and ties[0] == ties[1]


@pytest.mark.parametrize(
    ("prompt", "replies", "reason"),
    [
        (None, ["three", "a dog"], "no prompt"),
        ("where?", [[ASKED, ANSWER], [ASKED, ANSWER]], "not of this prompt"),
        ("how many?", [[ASKED, ANSWER], "a dog"], "one candidate repeats the prompt"),
        ("how many?", ["", "a dog"], "a candidate is empty"),
        ("how many?", [" \n", "a dog"], "a candidate is empty"),
        ("how many?", [None, "a dog"], "no reply"),
        ("how many?", [[ANSWER, LOOK], "a dog"], "ends with a user message"),
    ],
)
def test_what_cannot_be_compared(prompt, replies, reason):
    with pytest.raises(RowError, match=reason):
        read_candidates(prompt, replies)


def test_images_are_placed_over_prompt_chosen_and_rejected():
    sample = read(
        {
            "prompt": "<image>how many?",
            "chosen": [ANSWER, said("user", "<image>look"), said("assistant", "four")],
            "rejected": [ANSWER, said("user", "<image>there"), said("assistant", "a dog")],
            "images": ["a", "bb", "ccc"],
        }
    )
    assert shape(sample.messages) == [("user", "*|how many?")]
    assert [shape(side)[1] for side in sample.candidates] == [("user", "*|look"), ("user", "*|there")]
    assert [m.width for m in sample.every_media] == [101, 102, 103] and len(sample.media) == 1
    smaller = shrink(sample, lambda s: max(m.max_pixels for m in s.every_media), 5000)
    assert smaller is not None and {m.max_pixels for m in smaller.every_media} == {4344}


def test_a_candidate_may_be_a_picture():
    item = {"type": "image", "image": "a"}
    sample = read({"prompt": "a red cube", "chosen": item, "rejected": [item | {"image": "bb"}]})
    assert [shape(side) for side in sample.candidates] == [[("assistant", "*")]] * 2


@pytest.mark.parametrize("value", [1, 1.0, True, "1", "true", " True"])
def test_labels(value):
    assert read_label(value) is True
    sample = read({"input": "how many?", "output": "three", "label": value})
    assert sample.desirable is True and shape(sample.candidates[0]) == [("assistant", "three")]
    assert read({"prompt": "?", "completion": "x", "label": 0}).desirable is False


@pytest.mark.parametrize("value", [2, 0.5, "good", None, [1]])
def test_what_is_no_label(value):
    with pytest.raises(RowError, match="a label is 1"):
        read_label(value)


def test_columns_decide_whatever_else_they_could_be():
    pair = {"chosen", "rejected"}
    for columns in ({"prompt"}, {"question", "answer"}, {"problem", "solution"}, {"conversations"}):
        assert detect(pair | columns, DataConfig()).name == "pairs"
    assert detect({"input", "output", "label"}, DataConfig()).name == "labels"
    assert detect({"prompt", "label"}, DataConfig()).name == "lightrft"
    keys = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    sample = read({"q": "how many?", "good": "three", "bad": "a dog"}, keys=keys)
    assert shape(sample.candidates[1]) == [("assistant", "a dog")]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a", "prompt": "<image>?", "images": ["a"], "chosen": "x", "rejected": "y"},
        {"id": "b", "margin": 2, "input": [SYSTEM, ASKED], "output": "three", "label": 0},
    ],
)
def test_a_canonical_row_is_the_same_sample(row):
    sample = read(row | {"answer": "3"})
    written = json.loads(json.dumps(to_row(sample)))
    format = detect(set(written), DataConfig())
    assert format is FORMATS[detect(set(row), DataConfig()).name]
    again = read(written)
    assert (again.messages, again.candidates) == (sample.messages, sample.candidates)
    assert (again.desirable, again.extra) == (sample.desirable, sample.extra)


def test_the_hash_sees_the_candidates():
    pair = {"prompt": "?", "chosen": "x", "rejected": "y"}
    swapped = pair | {"chosen": "y", "rejected": "x"}
    assert content_hash(read(pair)) != content_hash(read(swapped))
