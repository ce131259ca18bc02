"""A tiny model with prompts for it; the engine as it runs on a GPU, with its kernels in plain torch."""

import sys
from types import SimpleNamespace

import pytest

from saccade.config import TrainConfig
from saccade.trainer.local import LocalTrainer
from saccade.types import Message
from tests.engines.asked import NAME

KERNELS = ("kernels", "sampling_kernels", "step_kernels")
NAMES = (*KERNELS, "graphs")


@pytest.fixture(scope="module")
def model(load):
    return load(NAME)


@pytest.fixture(scope="module")
def family(family_of):
    return family_of(NAME)


@pytest.fixture(scope="module")
def trained(load, family):
    """A trainer with weights of its own."""
    return LocalTrainer(load(NAME), family, TrainConfig())


@pytest.fixture(scope="module")
def prompts(family, image):
    """Rendered prompts with 0, 1, 2 and 3 images of several sizes."""
    pictures = [image(56, 56, 1), image(140, 84, 2), image(84, 56, 3)]
    return [family.render([Message(role="user", parts=(*pictures[:n], f"What are these {n}?"))]) for n in range(4)]


@pytest.fixture
def paged(monkeypatch):
    """Engines built while this is in use have kernels; `budget` is the pool in bytes."""
    from saccade.engines.embedded import kv_cache
    from saccade.plugins import gpu
    from tests.engines import reference

    for name in NAMES:  # whatever was imported before is put back at the end
        monkeypatch.delitem(sys.modules, f"{gpu.__name__}.{name}", raising=False)
        monkeypatch.delattr(gpu, name, raising=False)
    for name in KERNELS:
        monkeypatch.setitem(sys.modules, f"{gpu.__name__}.{name}", reference)
        monkeypatch.setattr(gpu, name, reference, raising=False)
    monkeypatch.setattr(kv_cache.KERNELS, "_rows", {})
    settings = SimpleNamespace(budget=1 << 26)
    monkeypatch.setattr(kv_cache.KVCache, "_budget", lambda cache: settings.budget)
    monkeypatch.setattr(kv_cache, "use_kernels", lambda shape: True)
    yield settings
    for name in NAMES[len(KERNELS) :]:
        sys.modules.pop(f"{gpu.__name__}.{name}", None)
