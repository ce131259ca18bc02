"""Image processors that are called alone, once they have shown that the rest of a processor changes nothing."""

import numpy as np
import pytest

from saccade.models.families import load_family
from saccade.plugins.families import picture_processor, tiny_kinds
from saccade.plugins.families.picture_rows import narrowed
from saccade.plugins.families.proof_rows import noise

pytest.importorskip("torchvision")
SIZES = ((60, 50), (90, 70), (120, 40), (200, 300), (60, 50))


@pytest.fixture
def reader_of(tmp_path):
    return lambda kind: load_family(tiny_kinds.build(kind, tmp_path)).reader


@pytest.mark.parametrize("kind", ["internvl", "gemma4", "minicpmv4_6", "idefics2"])
def test_rows_are_those_of_the_whole_processor(kind, reader_of, monkeypatch):
    reader, calls = reader_of(kind), []
    monkeypatch.setattr(reader, "processor", Counted(reader.processor, calls))
    for number, size in enumerate(SIZES):
        media = noise(*size, number)
        reader.blank_row(*reader.size(media))
        calls.clear()
        row, count = reader._row(media), len(calls)
        assert count == (number < 3 or kind == "idefics2")  # a picture's arrays depend on the text around it
        whole = narrowed(reader._made(reader.shown(media)), half=False)
        assert [*row] == [*whole] and all(np.array_equal(row[name], whole[name]) for name in whole)


class Counted:
    def __init__(self, own, calls):
        self.own, self.calls = own, calls

    def __getattr__(self, name):
        return getattr(self.own, name)

    def __call__(self, **options):
        self.calls.append(options)
        return self.own(**options)


def test_a_size_whose_arrays_were_not_kept_goes_through_the_whole_processor(reader_of, monkeypatch):
    """As for a picture of thousands of tokens, whose attention mask is too large to be kept of every size."""
    reader = reader_of("internvl")
    for number, size in enumerate(SIZES):
        reader._row(noise(*size, number))
    monkeypatch.setattr(picture_processor, "SMALL", 1)
    media = noise(300, 200, 9)
    row, whole = reader._row(media), narrowed(reader._made(reader.shown(media)), half=False)
    assert [*row] == [*whole] and all(np.array_equal(row[name], whole[name]) for name in whole)


def test_what_a_processor_adds_of_each_picture_is_not_left_out(reader_of, monkeypatch):
    reader = reader_of("llava")

    class Adds(Counted):
        def __call__(self, **options):
            made = super().__call__(**options)
            if "pixel_values" in made and made["pixel_values"].device.type == "cpu":
                made["brightness"] = made["pixel_values"].mean((1, 2, 3))
            return made

    monkeypatch.setattr(reader, "processor", Adds(reader.processor, []))
    found = {float(reader._row(noise(60, 50 + n, n))["brightness"][0]) for n in range(5)}
    assert len(found) == 5
