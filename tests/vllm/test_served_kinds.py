"""Real vLLM over models without a family of their own, with tiles, or with a video agrees with the trainer."""

from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from saccade.engines import Settings
from saccade.engines.builders import build
from saccade.errors import EnvironmentProblem
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.families import tiny_kinds
from saccade.plugins.families.proof_rows import noise
from saccade.plugins.media.videos import open_video
from saccade.trainer.local import LocalTrainer
from saccade.types import Message, Sample, Sampling
from tests.engines import asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def made(name):
        return tiny_kinds.build(name, tmp_path_factory.mktemp(name))

    return made


@contextmanager
def engine_of(family, most=1_003_520, **args):
    settings = Settings(engine="vllm", folder=family.path, dtype="float32", max_length=512, max_sequences=8)
    with closing(build(replace(settings, max_images=3, max_pixels=most, args=args), family)) as engine:
        yield engine


def agree(family, *pictures, **options):
    """A prompt with these and one with a picture that is larger than its budget."""
    large = replace(noise(300, 200, 2), max_pixels=6_000)
    shown = (pictures, (large,)) if pictures else ((), ())
    messages = [Message(role="user", parts=("See\n", *media, "what?")) for media in shown]
    samples = [Sample(id=str(n), messages=(message,)) for n, message in enumerate(messages)]
    backend = LocalTrainer(load_model(family, dtype=torch.float32, device=torch.device("cpu")), family)
    with engine_of(family, **options) as engine:
        found = asked.probe(engine, backend, samples, sampling=Sampling(temperature=0.8, max_tokens=8))
    assert max(found.gap, found.restored) < 1e-5
    assert min(found.by_weight, found.by_picture or 1) > 0.01


@pytest.mark.parametrize("name", ["qwen3_vl", "smolvlm", "llava_onevision", "internvl", "llava"])
def test_it_agrees(folder, name):
    agree(load_family(folder(name)), noise(60, 50, 0), noise(140, 70, 1))


def test_tokens_of_a_picture_that_see_each_other(folder):
    """Its build for CPUs lacks that, and is refused; all else agrees."""
    family = load_family(folder("gemma3"))
    with pytest.raises(EnvironmentProblem, match=r"see each other both ways in a gemma3 model.*engine=embedded"):
        engine_of(family).__enter__()
    spec = replace(family.spec, prove=lambda model, family: None)
    agree(replace(family, blocks="", spec=spec), noise(60, 50, 0), noise(140, 70, 1))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def test_a_video_beside_a_picture(folder, name):
    """With more pixels in all of its frames than an image may have."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 56, 84, 3), dtype=np.uint8)
    agree(load_family(folder(name)), open_video(pixels, fps=1.5), noise(60, 50, 0), most=16_000)


def test_experts_are_handed_over(folder):
    agree(load_family(folder("qwen3_moe")))


def test_a_processor_that_writes_something_else_is_refused_at_the_start(folder):
    family = load_family(folder("smolvlm"))
    other = {"mm_processor_kwargs": {"do_image_splitting": False}}
    said = r"two pictures: vllm reads \d+ .* of a smolvlm model .* first to differ: it has .*global-img.*, here .*row_1"
    with pytest.raises(EnvironmentProblem, match=said):
        engine_of(family, **other).__enter__()
