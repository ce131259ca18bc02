import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.types import Message, Sample


@pytest.fixture
def picture(tmp_path):
    """Writes a one-colour image and returns its path."""

    def write(name="a.png", colour=(255, 0, 0), size=(40, 30), mode="RGB", **options) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, colour).save(path, **options)
        return path

    return write


@pytest.fixture
def noise(tmp_path):
    """Writes an image that does not compress, so half of its file is not enough."""

    def write(name="noise.png", size=(80, 60)) -> Path:
        pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows as JSON lines and returns the path as text."""

    def write(rows, name="rows.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


@pytest.fixture
def ask():
    """A sample with one user message."""

    def make(*parts, id="s", **fields) -> Sample:
        return Sample(id=id, messages=(Message(role="user", parts=parts),), **fields)

    return make
