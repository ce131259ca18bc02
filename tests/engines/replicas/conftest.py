"""Real processes that hold the embedded engine over a copy of a tiny model."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from saccade.engines import Settings
from saccade.media.images import open_media
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.types import Message, Sampling
from tests.engines.asked import requests

SAMPLED = Sampling(temperature=1.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="session")
def family(word_model):
    return load_family(word_model)


@pytest.fixture(scope="session")
def load(family):
    return partial(load_model, family, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="session")
def settings(family):
    return Settings(engine="embedded", folder=family.path, dtype="float32")


@pytest.fixture
def changed(load):
    """A trainer whose weights are no longer those of the folder."""
    model = load()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(1.0 + 0.03 * (index % 5))
    yield SimpleNamespace(model=model, weights=lambda: iter(model.named_parameters()))


@pytest.fixture(scope="session")
def ask(family, image, tmp_path_factory):
    """Requests over 0 to 3 pictures; one lies on disk, the others travel."""
    on_disk = tmp_path_factory.mktemp("pictures") / "one.png"
    on_disk.write_bytes(image(84, 56, 9).data)
    pictures = [image(56, 56, 1), open_media(str(on_disk)), image(140, 84, 2)]
    questions = [f"how many {colour} objects ?" for colour in ("red", "blue", "green", "pink")]
    prompts = [
        family.render([Message(role="user", parts=(*pictures[:n], question))]) for n, question in enumerate(questions)
    ]

    def asked(sampling=SAMPLED, repeats=3):
        return requests(prompts, sampling, repeats)

    return asked
