"""Token lengths are remembered, and only for what they depend on."""

from dataclasses import replace

import pytest

from saccade.config import load
from saccade.plugins.check_data.length_cache import cached_lengths
from saccade.types import Message, Sample


@pytest.fixture
def counted(family_of, image, tmp_path):
    family = family_of("qwen2_5_vl")
    config = load({"run.out": str(tmp_path)})
    calls = []

    def render(messages):
        calls.append(messages)
        return family.render(messages)

    def lengths(samples, kind="prompt"):
        calls.clear()
        with cached_lengths(config, family, kind, lambda sample: sample, render) as length:
            return [length(sample) for sample in samples], len(calls)

    return lengths, image


def test_a_second_start_renders_nothing(counted):
    lengths, image = counted
    rows = [
        Sample(id="a", messages=(Message(role="user", parts=(image(56, 56, 0), "how many?")),)),
        Sample(id="b", messages=(Message(role="user", parts=("2 + 2?",)),)),
    ]
    first, rendered = lengths(rows)
    again, rendered_again = lengths(rows)
    assert first == again and rendered == 2 and rendered_again == 0


def test_another_size_budget_or_wording_is_counted_anew(counted):
    lengths, image = counted
    picture = image(112, 112, 0)
    ask = lambda media, text: Sample(  # noqa: E731
        id="a", messages=(Message(role="user", parts=(media, text)),)
    )
    (full,), _ = lengths([ask(picture, "x")])
    (small,), rendered = lengths([ask(replace(picture, max_pixels=56 * 56), "x")])
    assert rendered == 1 and full - small == 16 - 4
    assert lengths([ask(picture, "xy")])[1] == 1
    assert lengths([ask(picture, "x")], kind="dialogue")[1] == 1
