"""Rows with candidates: prompt, sides, places of images; two candidates in one prompt, as a judge reads them."""

import json

import numpy as np
import pytest

from saccade.config import DataConfig
from saccade.data.chats import RowError
from saccade.data.formats import FORMATS, detect, read_row
from saccade.data.records import content_hash
from saccade.media.images import open_media
from saccade.plugins.check_data.canonical_rows import to_row
from saccade.plugins.overlong.shorten import shrink
from saccade.plugins.preferences.preference_rows import read_candidates, read_label, verdict_view
from saccade.types import Media, Message, Sample


def said(role, content):
    return {"role": role, "content": content}


ASKED, ANSWER = said("user", "how many?"), said("assistant", "three")
SYSTEM, LOOK = said("system", "be brief"), said("user", "look again")


def read(row, **options) -> Sample:
    def open_image(source, **budget):
        if not isinstance(source, str) or source.startswith("data:"):
            return open_media(source, **budget)
        side = 100 + len(source)  # another name, another size
        return open_media(np.zeros((side, side, 3), np.uint8))

    config = DataConfig(**options)
    return read_row(row, detect(set(row), config), config, open_image=open_image)


def shape(messages):
    return [(m.role, "|".join("*" if isinstance(p, Media) else p for p in m.parts)) for m in messages]


@pytest.mark.parametrize(("prompt", "chosen", "rejected"), [
    ("how many?", "three", "a dog"),
    ([ASKED], [ANSWER], [said("assistant", "a dog")]),
    (None, [ASKED, ANSWER], [ASKED, said("assistant", "a dog")]),
    ("how many?", [ASKED, ANSWER], [ASKED, said("assistant", "a dog")]),
    ("how many?", json.dumps([ASKED, ANSWER]), [ASKED, said("assistant", "a dog")]),
    (None, "\n\nHuman: how many?\n\nAssistant: three", "\n\nHuman: how many?\n\nAssistant: a dog"),
    ([{"from": "human", "value": "how many?"}], {"from": "gpt", "value": "three"}, ["a dog"]),
])  # fmt: skip
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


@pytest.mark.parametrize(("prompt", "replies", "reason"), [
    (None, ["three", "a dog"], "no prompt"),
    ("where?", [[ASKED, ANSWER], [ASKED, ANSWER]], "not of this prompt"),
    ("how many?", [[ASKED, ANSWER], "a dog"], "one candidate repeats the prompt"),
    ("how many?", ["", "a dog"], "a candidate is empty"),
    ("how many?", [[ANSWER, LOOK], "a dog"], "ends with a user message"),
])  # fmt: skip
def test_what_cannot_be_compared(prompt, replies, reason):
    with pytest.raises(RowError, match=reason):
        read_candidates(prompt, replies)


def test_images_are_placed_over_prompt_chosen_and_rejected():
    chosen = [ANSWER, said("user", "<image>look"), said("assistant", "four")]
    rejected = [ANSWER, said("user", "<image>there"), said("assistant", "a dog")]
    shown = {"prompt": "<image>how many?", "images": ["a", "bb", "ccc"]}
    sample = read(shown | {"chosen": chosen, "rejected": rejected})
    assert shape(sample.messages) == [("user", "*|how many?")]
    assert [shape(side)[1] for side in sample.candidates] == [("user", "*|look"), ("user", "*|there")]
    assert [m.width for m in sample.every_media] == [101, 102, 103] and len(sample.media) == 1
    smaller = shrink(sample, lambda s: max(m.max_pixels for m in s.every_media), 5000)
    assert smaller is not None and {m.max_pixels for m in smaller.every_media} == {4737}


def test_labels():
    for value in (1, 1.0, True, "1", "true", " True"):
        sample = read({"input": "how many?", "output": "three", "label": value})
        assert sample.desirable is True and shape(sample.candidates[0]) == [("assistant", "three")]
    assert read({"prompt": "?", "completion": "x", "label": 0}).desirable is False
    for value in (2, 0.5, "good", None, [1]):
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


def test_a_canonical_row_is_the_same_sample_and_the_hash_sees_the_candidates():
    pair = {"id": "a", "prompt": "<image>?", "images": ["a"], "chosen": "x", "rejected": "y"}
    for row in (pair, {"id": "b", "margin": 2, "input": [SYSTEM, ASKED], "output": "three", "label": 0}):
        sample = read(row | {"answer": "3"})
        written = json.loads(json.dumps(to_row(sample)))
        assert detect(set(written), DataConfig()) is FORMATS[detect(set(row), DataConfig()).name]
        again = read(written)
        assert (again.messages, again.candidates) == (sample.messages, sample.candidates)
        assert (again.desirable, again.extra) == (sample.desirable, sample.extra)
    assert content_hash(read(pair)) != content_hash(read(pair | {"chosen": "y", "rejected": "x"}))


def compared(first, second, label: str | None = "B", id: str = "s", **extra) -> Sample:
    labels = {} if label is None else {"labels": {"preference": label}, "sides": {"seed": 0, "swapped": False}}
    asked = (Message(role="system", parts=("Be fair.",)), Message(role="user", parts=("a red cat",)))
    sides = tuple((Message(role="assistant", parts=(side,)),) for side in (first, second))
    return Sample(id=id, messages=asked, candidates=sides, extra={**labels, **extra})


def test_both_candidates_stand_in_one_prompt_under_their_numbers():
    one, two = (open_media(np.full((56, 56, 3), shade, np.uint8)) for shade in (1, 2))
    sample = verdict_view(compared(one, two), seed=0)
    assert sample.answer == "B" and sample.candidates == () and sample.media == (one, two)
    asked = "Two images answer the same request. Compare them and say which one fits it better.\n\n"
    asked += "a red cat\n\nImage 1:\n|*|\n\nImage 2:\n|*|\n\n"
    asked += "The answer is one of: Image 1 is better, Image 2 is better, Both images are equally good."
    verdict = ("assistant", "<answer>Image 2 is better</answer>")
    assert shape(sample.messages) == [("system", "Be fair."), ("user", asked), verdict]
    said = "<think>Sharper.</think><answer>Image 2 is better</answer>"  # with the instruction that it answers
    sample = verdict_view(compared(one, two, critique=said), seed=0)
    assert sample.messages[2].text == said
    assert sample.messages[1].text == "a red cat\n\nImage 1:\n\n\nImage 2:\n"
    sample = verdict_view(compared("four", "5", "C"), seed=0)  # a tie is a verdict, texts are responses
    assert sample.messages[2].text == "<answer>Both responses are equally good</answer>"
    assert "Response 1:\nfour\n\nResponse 2:\n5" in sample.messages[1].text


@pytest.mark.parametrize("labels", [{}, {"labels": {"preference": "A", "colour": "C"}}])
def test_rows_that_name_the_better_one_first_get_sides(labels):
    drawn = [verdict_view(compared("good", "bad", None, str(n), **labels), seed=3) for n in range(40)]
    for sample in drawn:
        better = "AB".index(str(sample.answer)) + 1
        assert f"Response {better}:\ngood" in sample.messages[1].text
        assert sample.extra["sides"] == {"seed": 3, "swapped": better == 2}
        assert sample.extra["labels"] == {**labels.get("labels", {}), "preference": sample.answer}
    assert 10 <= sum(sample.answer == "A" for sample in drawn) <= 30
    for fixed in ({"sides": {"seed": 0, "swapped": True}}, {"critique": "Response 1 is right."}):
        read = [verdict_view(compared("good", "bad", None, str(n), **labels, **fixed), seed=3) for n in range(10)]
        assert {sample.answer for sample in read} == {"A"}
