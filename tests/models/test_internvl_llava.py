"""InternVL and LLaVA, against transformers: tiles, ids, pixels, and what a pixel budget is to them."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from saccade.config import load as load_config
from saccade.errors import ConfigError, DataError, EnvironmentProblem
from saccade.media.images import open_media
from saccade.media.kinds import decode
from saccade.models.families import load_family
from saccade.models.load import load_model, negated_weight
from saccade.plugins.estimate.shapes import shape_of
from saccade.plugins.families import tiny
from saccade.plugins.media import videos
from saccade.recipes.run_parts import environments_of
from saccade.types import Message
from tests.models.against import CPU, ask, noise, ours
from tests.models.against import theirs as stocks

pytest.importorskip("torchvision")
SIZES = [(97, 61), (33, 500), (1, 1)]


def theirs(family, *parts, **options):
    """What transformers makes of a question."""
    processor = AutoProcessor.from_pretrained(family.path)
    shown = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
    text = processor.apply_chat_template([{"role": "user", "content": shown}], add_generation_prompt=True)
    pictures = [Image.fromarray(decode(p)) for p in parts if not isinstance(p, str)]
    return processor(images=pictures, text=text, return_tensors="pt", **options)


def assert_same(family, *parts, **options):
    rendered = family.render(ask(*parts))
    wanted = theirs(family, *parts, **options)
    assert rendered.ids.tolist() == wanted["input_ids"][0].tolist()
    assert sum(s.length for s in rendered.media) == (rendered.ids == family.chat.placeholder).sum()
    mine = family.vision(rendered.media, CPU, torch.float32)["pixel_values"]
    assert mine.shape == wanted["pixel_values"].shape
    assert torch.equal(mine, wanted["pixel_values"])
    assert family.positions(rendered.ids, rendered.media).tolist() == [[*range(len(rendered))]]


def test_several_pictures_stand_between_their_own_brackets(family_of, image):
    family = family_of("internvl")
    parts = ("first ", image(140, 84, 1), image(56, 56, 2), " and ", image(84, 56, 3), "?")
    assert_same(family, *parts, images_kwargs={"max_patches": 6})
    rendered = family.render(ask(*parts))
    start, end = family.chat.tokenizer.convert_tokens_to_ids(["<img>", "</img>"])
    assert [rendered.ids[[s.start - 1, s.end]].tolist() for s in rendered.media] == [[start, end]] * 3
    assert [s.grid for s in rendered.media] == [(7, 4, 4), (1, 4, 4), (7, 4, 4)]
    assert len(rendered.sources) == len(rendered.ids)
    typed = family.render(ask(image(56, 56), "<img><IMG_CONTEXT>"))  # words that look like brackets
    assert (typed.ids == family.chat.placeholder).sum() == 4 and typed.ids.tolist().count(start) == 1


@pytest.mark.parametrize(
    ("limits", "least", "most"),
    [
        ({}, 1, 6),  # what the processor allows
        ({"max_pixels": 4 * 56**2 - 1}, 1, 3),
        ({"max_pixels": 3136, "min_pixels": 10}, 1, 1),
        ({"min_pixels": 3 * 56**2 + 1}, 4, 6),
    ],
)
def test_a_pixel_budget_is_one_of_tiles(family_of, image, limits, least, most):
    family = family_of("internvl")
    options = {"min_patches": least, "max_patches": most}
    for size in ((56, 56), (140, 84), (300, 40)):
        media = open_media(decode(image(*size, 4)), **limits)
        assert_same(family, media, "x", images_kwargs=options)
        tiles = family.measure(media)[0][0]
        assert least <= max(1, tiles - 1) <= most


@pytest.mark.parametrize("decoder", ["qwen3", "llama"])
def test_decoders_of_other_sizes_of_internvl(tmp_path, image, decoder):
    folder = tiny.build("internvl", tmp_path, text={"model_type": decoder})
    family = load_family(folder)
    prompts = [family.render(ask(image(140, 84, 1), "why?"))]
    model = load_model(family, dtype=torch.float32, device=CPU)
    stock = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert ours(model, family, prompts) == stocks(stock, family, prompts)
    assert shape_of(model, family.tower_of).text.head_norms == (decoder == "qwen3")


@pytest.fixture
def changed(family_of, tmp_path):
    """A copy of the tiny LLaVA whose files say something else."""

    def copy(config=None, vision=None, processor=None, **images):
        folder = shutil.copytree(family_of("llava").path, tmp_path / "model")
        files = {"config.json": config, "processor_config.json": processor, "preprocessor_config.json": images}
        for name, more in files.items():
            content = json.loads((folder / name).read_text()) | (more or {})
            if name == "config.json":
                content["vision_config"] |= vision or {}
            (folder / name).write_text(json.dumps(content))
        return str(folder)

    return copy


def test_a_picture_is_its_middle_whatever_its_budget(family_of, image):
    family = family_of("llava")
    wide = decode(image(112, 56, 3))
    grids = {family.measure(open_media(wide, max_pixels=n)) for n in (10_000, 3136, 1_000_000)}
    assert grids == {((1, 4, 4), 16)}
    spans = [family.render(ask(open_media(each))).media[0] for each in (wide, np.ascontiguousarray(wide[:, 28:84]))]
    whole, middle = (family.vision([s], CPU, torch.float32)["pixel_values"] for s in spans)
    assert torch.equal(whole, middle)


def test_only_the_first_turn_begins_as_the_tokenizer_begins_a_text(family_of):
    family, question = family_of("llava"), Message(role="user", parts=("why?",))
    dialogue = family.render_dialogue((question, Message(role="assistant", parts=("so",))) * 2)
    said = "<s>USER: why? ASSISTANT: so<|im_end|> USER: why? ASSISTANT: so<|im_end|>"
    assert family.chat.decode(dialogue.ids, special=True) == said and not family.chat.knows_tools  # it prints any role


@pytest.mark.parametrize(
    ("tower", "strategy", "layer", "tokens"),
    [
        ("clip_vision_model", "full", -1, 17),
        ("clip_vision_model", "default", [1, 2], 16),
        ("siglip_vision_model", "full", -1, 16),
    ],
)
def test_features_are_those_of_the_layers_that_the_config_names(changed, image, tower, strategy, layer, tokens):
    """Layers behind them are not run, and their weights are kept."""
    settings = {"vision_feature_select_strategy": strategy, "vision_feature_layer": layer}
    beside = {"vision_feature_select_strategy": strategy, "num_additional_image_tokens": int("clip" in tower)}
    family = load_family(changed(config=settings, vision={"model_type": tower}, processor=beside))
    stock = LlavaForConditionalGeneration.from_pretrained(family.path, ignore_mismatched_sizes=True)
    stock.save_pretrained(family.path)
    model = load_model(family, dtype=torch.float32, device=CPU)
    (span,) = family.render(ask(image(97, 61, 2))).media
    assert span.length == tokens
    pixels = family.vision([span], CPU, torch.float32)["pixel_values"]
    with torch.no_grad():
        (wanted,) = stock.eval().get_image_features(pixels, return_dict=True).pooler_output
        made = family.features(model, family.media([span]))
    assert made.shape == (tokens, 64) and (made - wanted).abs().max() < 1e-5
    run = [not hasattr(each, "unread") for each in model.model.vision_tower.encoder.layers]
    assert run == [True, True, layer == -1]
    assert model.state_dict().keys() == stock.state_dict().keys()
    with negated_weight(model, family, "vision") as name, torch.no_grad():
        assert not torch.equal(family.features(model, family.media([span])), made), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_size": {"height": 48, "width": 48}}, r"image size .48.48. doesn't match model .56.*use another model"),
        ({"size": {"shortest_edge": 48}, "do_center_crop": False}, r"image size .* doesn't match model .56"),
    ],
)
def test_a_llava_whose_files_do_not_fit_is_refused(changed, changes, message):
    family = load_family(changed(**changes))
    with pytest.raises(EnvironmentProblem, match=message):
        load_model(family, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", ["internvl", "llava"])
@pytest.mark.parametrize("size", SIZES)
def test_ids_and_pixels_are_those_of_transformers(family_of, image, name, size):
    assert_same(family_of(name), image(*size, 4), "how many?")


WITHOUT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("torchvision", "timm") else find(name, *more)
sys.modules["torchvision"] = sys.modules["timm"] = None
from saccade.models.families import load_family
load_family(sys.argv[1])
"""


def test_a_processor_that_needs_torchvision_names_the_extra(family_of):
    made = subprocess.run([sys.executable, "-c", WITHOUT, family_of("internvl").path], capture_output=True, text=True)
    assert "torchvision" in made.stderr and "run: pip install -c constraints.txt -e '.[vision]'" in made.stderr


@pytest.mark.parametrize("name", ["internvl", "llava"])
def test_other_media_and_who_needs_one_size_of_a_picture_are_refused(family_of, name):
    family = family_of(name)
    video = videos.open_video(np.zeros((4, 56, 56, 3), np.uint8), fps=2.0)
    for medium, what in ((video, "a video"), (noise(0.1), "a sound")):
        if name == "internvl" and medium is video:
            assert len(family.render(ask(medium, "x")).media) == 1
            continue
        with pytest.raises(DataError, match=f"takes text and image.*, but a row holds {what}"):
            family.render(ask(medium, "x"))
    assert family.size_unit is None and family_of("qwen2_5_vl").size_unit == 28
    config = load_config(None, ["env.name=crop", "env.coordinates=absolute"])
    with pytest.raises(ConfigError, match=r"absolute: .* tiles.*use env.coordinates=milli"):
        environments_of(config, family)
