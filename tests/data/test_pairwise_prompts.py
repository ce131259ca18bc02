"""Two candidates in one prompt: what a judge reads, and what it should say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from saccade.config import DataConfig, DataSource
from saccade.data.chats import RowError
from saccade.data.datasets import load
from saccade.media.images import open_media
from saccade.plugins.preferences.pairwise_prompts import judged
from saccade.types import Media, Message, Sample


def picture(shade: int) -> Media:
    return open_media(np.full((56, 56, 3), shade, np.uint8))


def shown(candidate: str | Media) -> tuple[Message, ...]:
    return (Message(role="assistant", parts=(candidate,)),)


def compared(first, second, label: str | None = "B", **extra) -> Sample:
    drawn = {"sides": {"seed": 0, "swapped": False}}
    labels = {} if label is None else {"labels": {"preference": label}, **drawn}
    return Sample(
        id="s",
        messages=(Message(role="system", parts=("Be fair.",)), Message(role="user", parts=("a red cat",))),
        candidates=(shown(first), shown(second)),
        extra={**labels, **extra},
    )


def text_of(message: Message) -> str:
    return "".join(part if isinstance(part, str) else f"[{part.hash[:4]}]" for part in message.parts)


def test_both_pictures_stand_in_one_prompt_under_their_numbers():
    one, two = picture(1), picture(2)
    sample = judged(compared(one, two), seed=0)
    assert sample.answer == "B" and sample.candidates == ()
    assert [m.role for m in sample.messages] == ["system", "user", "assistant"]
    assert text_of(sample.messages[1]) == (
        "Two images answer the same request. Compare them and say which one fits it better.\n\n"
        f"a red cat\n\nImage 1:\n[{one.hash[:4]}]\n\nImage 2:\n[{two.hash[:4]}]\n\n"
        "The answer is one of: Image 1 is better, Image 2 is better, Both images are equally good."
    )
    assert sample.messages[2].text == "<answer>Image 2 is better</answer>"


def test_a_tie_is_a_verdict_and_texts_are_responses():
    sample = judged(compared("four", "5", "C"), seed=0)
    assert sample.messages[2].text == "<answer>Both responses are equally good</answer>"
    assert "Response 1:\nfour\n\nResponse 2:\n5" in sample.messages[1].text


def test_a_critique_is_learned_with_the_instruction_that_it_answers():
    said = "<think>Sharper.</think><answer>Image 2 is better</answer>"
    sample = judged(compared(picture(1), picture(2), critique=said), seed=0)
    assert sample.messages[2].text == said
    assert sample.messages[1].text == "a red cat\n\nImage 1:\n\n\nImage 2:\n"


def test_rows_that_name_the_better_one_first_get_sides():
    drawn = {}
    for n in range(40):
        sample = compared("good", "bad", None)
        sample = judged(Sample(**{**vars(sample), "id": str(n)}), seed=3)
        text, better = sample.messages[1].text, "AB".index(str(sample.answer)) + 1
        assert f"Response {better}:\ngood" in text
        assert sample.extra["sides"] == {"seed": 3, "swapped": better == 2}
        drawn[sample.answer] = drawn.get(sample.answer, 0) + 1
    assert min(drawn["A"], drawn["B"]) >= 10
    tied = judged(compared("x", "y", None, tie=True), seed=3)
    assert tied.answer == "C"


def test_rows_with_labels_get_sides_too_unless_they_have_them_or_a_critique_names_them():
    def read(n: int, **extra) -> Sample:
        said = {"labels": {"preference": "A", "colour": "C"}, **extra}
        sample = compared("good", "bad", None, **said)
        return judged(Sample(**{**vars(sample), "id": str(n)}), seed=3)

    drawn = [read(n) for n in range(40)]
    for sample in drawn:
        better = "AB".index(str(sample.answer)) + 1
        assert f"Response {better}:\ngood" in sample.messages[1].text
        assert sample.extra["labels"] == {"preference": sample.answer, "colour": "C"}
    assert 10 <= sum(sample.answer == "A" for sample in drawn) <= 30
    for fixed in ({"sides": {"seed": 0, "swapped": True}}, {"critique": "Response 1 is right."}):
        assert {read(n, **fixed).answer for n in range(10)} == {"A"}
    for label in ("left", ["A"]):
        with pytest.raises(RowError, match="labels must say A, B or C"):
            read(0, labels={"preference": label})


def test_what_has_no_verdict_is_refused_or_left_alone():
    with pytest.raises(RowError, match="no label of the head preference"):
        judged(compared("x", "y", None, labels={"colour": "A"}), seed=0)
    plain = Sample(id="q", messages=(Message(role="user", parts=("2+2?",)),), answer="4")
    assert judged(plain, seed=0) is plain


def test_the_option_of_the_data_makes_such_prompts(tmp_path: Path):
    rows = [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}] * 2 + [{"question": "x", "answer": 1}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row | {"id": str(n)}) + "\n" for n, row in enumerate(rows)))
    config = DataConfig(pair_view="verdict", max_bad_fraction=1.0)
    first = load([DataSource(path=str(path), max_samples=2)], config).samples[0]
    assert first.answer in "AB" and not first.candidates
    apart = load([DataSource(path=str(path), max_samples=2)], DataConfig()).samples[0]
    assert len(apart.candidates) == 2
