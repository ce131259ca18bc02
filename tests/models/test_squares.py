"""Families whose towers see squares, against transformers: tiles, ids, pixels, and what a pixel budget is to them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, InternVLProcessor, LlavaForConditionalGeneration
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from saccade.config import load as load_config
from saccade.errors import ConfigError, DataError, EnvironmentProblem
from saccade.media.images import open_media
from saccade.media.kinds import decode
from saccade.models.families import load_family
from saccade.models.load import load_model, negated
from saccade.plugins.estimate.shapes import shape_of
from saccade.plugins.families import tiny
from saccade.plugins.media import videos
from saccade.recipes.parts import environments_of
from saccade.types import Message
from tests.models.against import CPU, ask, noise, ours
from tests.models.against import theirs as stocks

SIZES = [(97, 61), (33, 500), (1, 1)]


class TilesAlone(InternVLProcessor):
    """The stock one, where no package for its videos is installed."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return None


def internvl_processor(family, **options):
    settings = json.loads((Path(family.path) / "processor_config.json").read_text())
    return TilesAlone(
        image_processor=GotOcr2ImageProcessorPil.from_pretrained(family.path, **options),
        tokenizer=family.chat.tokenizer,
        image_seq_length=settings["image_seq_length"],
        chat_template=family.chat.template,
    )


def llava_processor(family):
    return AutoProcessor.from_pretrained(family.path, backend="pil")


PROCESSORS = {"internvl": internvl_processor, "llava": llava_processor}


def theirs(processor, *parts):
    """What transformers makes of a question."""
    shown = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
    text = processor.apply_chat_template([{"role": "user", "content": shown}], add_generation_prompt=True)
    pictures = [Image.fromarray(decode(p)) for p in parts if not isinstance(p, str)]
    return processor(images=pictures, text=text, return_tensors="pt")


def assert_same(family, processor, *parts):
    rendered = family.render(ask(*parts))
    wanted = theirs(processor, *parts)
    assert rendered.ids.tolist() == wanted["input_ids"][0].tolist()
    assert sum(s.length for s in rendered.media) == (rendered.ids == family.chat.placeholder).sum()
    mine = family.vision(rendered.media, CPU, torch.float32)["pixel_values"]
    assert mine.shape == wanted["pixel_values"].shape
    assert (mine - wanted["pixel_values"]).abs().max() < 1e-5
    assert family.positions(len(rendered), rendered.media).tolist() == [[*range(len(rendered))]]


def test_several_pictures_stand_between_their_own_brackets(family_of, image):
    family = family_of("internvl")
    parts = ("first ", image(140, 84, 1), image(56, 56, 2), " and ", image(84, 56, 3), "?")
    assert_same(family, internvl_processor(family), *parts)
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
    processor = internvl_processor(family, min_patches=least, max_patches=most)
    for size in ((56, 56), (140, 84), (300, 40)):
        media = open_media(decode(image(*size, 4)), **limits)
        assert_same(family, processor, media, "x")
        tiles = family.measure(media)[0][0]
        assert least <= max(1, tiles - 1) <= most


def test_an_internvl_that_does_not_fit_is_refused(family_of, tmp_path):
    for file, old, new, message in (
        ("tokenizer.json", "</img>", "</imp>", r"tokenizer lacks <img> or </img>, around each image"),
        ("preprocessor_config.json", '"width": 56', '"width": 84', r"tiles of 84x56 pixels.*set size to"),
    ):
        folder = shutil.copytree(family_of("internvl").path, tmp_path / file)
        for path in (folder / file, *folder.glob(f"{Path(file).stem}_*.json")):
            path.write_text(path.read_text().replace(old, new))
        with pytest.raises(EnvironmentProblem, match=message):
            load_family(str(folder))


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

    def copy(config=None, vision=None, **images):
        folder = shutil.copytree(family_of("llava").path, tmp_path / "model")
        for name, more in (("config.json", config), ("preprocessor_config.json", images)):
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


@pytest.mark.parametrize(
    "images",
    [
        {"image_processor_type": "LlavaImageProcessor", "do_pad": True},
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 56, "width": 56}},
    ],
)
def test_a_processor_that_shows_all_of_a_picture(changed, image, images):
    if "Siglip" in images["image_processor_type"]:
        images = images | {"crop_size": None, "do_center_crop": None}
    family = load_family(changed(**images))
    for size in ((140, 84), (33, 500), (56, 56)):
        assert_same(family, llava_processor(family), image(*size, 4), "x")


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
    family = load_family(changed(config=settings, vision={"model_type": tower}))
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
    with negated(model, family, "vision") as name, torch.no_grad():
        assert not torch.equal(family.features(model, family.media([span])), made), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision": {"model_type": "pixtral"}}, "tower of type 'pixtral' is not supported; use one wi"),
        ({"crop_size": {"height": 48, "width": 48}}, "crop_size is .*48.* sees squares of 56 pix"),
        ({"resample": 2}, r"resample is 2, and .* with 3 \(bicubic\) here"),
        ({"size": {"shortest_edge": 48}}, "size is .*48.*; set size and crop_size to that"),
    ],
)
def test_a_llava_that_is_not_known_is_refused(changed, changes, message):
    with pytest.raises(EnvironmentProblem, match=message):
        load_family(changed(**changes))


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", SIZES)
def test_ids_and_pixels_are_those_of_transformers(family_of, image, name, size):
    family = family_of(name)
    assert_same(family, PROCESSORS[name](family), image(*size, 4), "how many?")


@pytest.mark.parametrize("name", PROCESSORS)
def test_other_media_and_who_needs_one_size_of_a_picture_are_refused(family_of, name):
    family = family_of(name)
    video = videos.open_video(np.zeros((4, 56, 56, 3), np.uint8), fps=2.0)
    for medium, kinds in ((video, "videos"), (noise(0.1), "audios")):
        with pytest.raises(ConfigError, match=f"use a model that takes {kinds}"):
            family.render(ask(medium, "x"))
        with pytest.raises(DataError, match="takes text and image, but a row holds a"):
            family.measure(medium)
    assert family.size_unit is None and family_of("qwen2_5_vl").size_unit == 28
    config = load_config(None, ["env.name=crop", "env.coordinates=absolute"])
    with pytest.raises(ConfigError, match=r"absolute: .* in squares.*use env.coordinates=milli"):
        environments_of(config, family)
