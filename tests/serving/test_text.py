"""Text as it comes: characters over several tokens, strings that end it."""

import random

import numpy as np
import pytest

from saccade.plugins.serving.text_stream import TextStream

WORDS = "naïve 東京 🦉🦉 a\ufffdb end. ẞ 𐍈"


def bytes_decode(ids):
    return bytes(ids.tolist()).decode("utf-8", "replace")


def shown(ids, stop=(), steps=1):
    stream = TextStream(bytes_decode, stop)
    pieces = [stream.add(ids[:end]) for end in range(0, len(ids), steps)]
    return [*pieces, stream.finish(ids)], stream


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_pieces_are_whole_characters_and_together_the_text(steps):
    ids = np.frombuffer(WORDS.encode(), np.uint8)
    pieces, _ = shown(ids, steps=steps)
    assert "".join(pieces) == WORDS
    assert "\ufffd" not in "".join(pieces).replace("a\ufffdb", "")
    assert sum(map(bool, pieces)) > 3


def test_bytes_that_are_no_text_do_not_hold_up_the_rest():
    draw = random.Random(0)
    for _ in range(200):
        ids = np.array([draw.randrange(256) for _ in range(40)])
        pieces, _ = shown(ids)
        assert "".join(pieces) == bytes_decode(ids)
    pieces, _ = shown(np.full(20, 0x80))
    assert pieces[-1] == "\ufffd" * 4  # no more than the latest tokens


def test_a_stop_string_never_shows():
    ids = np.frombuffer(b"one </answer> two", np.uint8)
    pieces, stream = shown(ids, stop=("</answer>", "three"))
    assert "".join(pieces) == "one " and stream.stopped_by == "</answer>"
    pieces, stream = shown(ids, stop=("</answers>",))
    assert "".join(pieces) == "one </answer> two" and stream.stopped_by is None
    assert not any("<" in piece for piece in pieces[:8])


def test_a_real_tokenizer(family_of):
    family = family_of("qwen3")
    ids = np.array(family.chat.tokenizer.encode(WORDS), np.int64)
    stream = TextStream(family.decode)
    pieces = [stream.add(ids[:end]) for end in range(len(ids))]
    assert "".join([*pieces, stream.finish(ids)]) == WORDS
