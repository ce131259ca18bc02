from dataclasses import replace

import pytest

from saccade.config import DataConfig, DataSource
from saccade.data.datasets import load
from saccade.errors import DataError
from saccade.media.images import open_media, resized_size
from saccade.plugins.overlong.shorten import drop_turns, shrink, truncate_text
from saccade.types import Media, Message


def tokens_of(media: Media) -> int:
    rows, columns = resized_size(
        media.width, media.height, unit=28, min_pixels=media.min_pixels, max_pixels=media.max_pixels
    )
    return rows * columns // 784


def length(sample) -> int:
    """One token per character, and what the resize rule says for an image."""
    text = sum(len(message.text) for message in sample.messages)
    return text + sum(map(tokens_of, sample.media))


def test_shrink_lowers_the_budget_until_the_row_fits_from_the_largest_image_on(ask, picture):
    media = open_media(str(picture(size=(1120, 840))))
    sample = ask(media, media, "how many?")
    assert length(sample) == 2 * 1200 + 9
    for limit in (2000, 500, 100):
        small = shrink(sample, length, limit)
        assert 0.6 * limit < length(small) <= limit
        assert small.messages[0].parts[2] == "how many?" and len(small.media) == 2
        assert all(item.hash == media.hash for item in small.media)
    assert shrink(sample, length, 10) is None
    assert shrink(ask("x" * 50), length, 10) is None
    big = open_media(str(picture("big.png", size=(1120, 840))))
    small = open_media(str(picture("small.png", size=(112, 84))))
    fitted = shrink(ask(big, small), length, 300)
    assert tokens_of(fitted.media[1]) == tokens_of(small) == 12
    assert tokens_of(fitted.media[0]) <= 288


def test_drop_turns_removes_the_oldest_whole_turns(ask, picture):
    media = open_media(str(picture()))
    said = [("system", "S"), ("user", media, "a" * 50), ("assistant", "b" * 10), ("user", "c" * 10)]
    said += [("assistant", "d" * 10), ("user", media, "e" * 10)]
    turns = tuple(Message(role=role, parts=tuple(parts)) for role, *parts in said)
    sample = replace(ask("x"), messages=turns)
    kept = drop_turns(sample, length, 60)
    assert [m.role for m in kept.messages] == ["system", "user", "assistant", "user"]
    assert kept.messages[-1] == turns[-1] and length(kept) == 31 + tokens_of(media)
    assert drop_turns(sample, length, 5) is None


def test_truncate_text_leaves_media_and_the_end_of_the_question(ask, picture):
    media = open_media(str(picture()))
    sample = ask("0" * 100, media, "1" * 50 + "?")
    fixed = tokens_of(media)
    assert truncate_text(sample, length, fixed + 71).messages[0].parts == ("0" * 20, media, "1" * 50 + "?")
    assert truncate_text(sample, length, fixed + 11).messages[0].parts == (media, "1" * 10 + "?")
    assert truncate_text(sample, length, fixed) is None


@pytest.fixture
def albums(jsonl, picture):
    picture("0.png", size=(280, 280))
    rows = [
        {"id": f"album-{n}", "problem": "<image>" * n + "which?", "answer": "1", "images": ["0.png"] * n}
        for n in (1, 2, 5, 20, 64)
    ]
    return [DataSource(path=jsonl(rows))]


def test_overlong_rows_are_listed_shrunk_or_an_error(albums):
    data = load(albums, DataConfig(max_prompt_tokens=250), length=length)
    assert [sample.id for sample in data.samples] == ["album-1", "album-2"]
    assert [row.id for row in data.overlong] == ["album-5", "album-20", "album-64"]
    assert data.overlong[0].reason == "506 tokens, data.max_prompt_tokens is 250"
    assert data.lengths == (106, 206) and not data.quarantined
    config = DataConfig(max_prompt_tokens=320, overlong="shrink")
    data = load(albums, config, length=length)
    assert [len(sample.media) for sample in data.samples] == [1, 2, 5, 20, 64]
    assert data.shortened == 3
    assert all(length(s) == n <= 320 for s, n in zip(data.samples, data.lengths, strict=True))
    with pytest.raises(DataError, match=r"album-5 .row 3 of rows.: 506 tokens"):
        load(albums, DataConfig(max_prompt_tokens=250, overlong="error"), length=length)
