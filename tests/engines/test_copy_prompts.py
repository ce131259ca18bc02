"""Prompts and weights as engines with a copy of the model take them; tests/vllm runs a real one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.engines.copy_engine import collapsed, require_same_prompt, shown_by, two_pictures
from saccade.plugins.engines.sglang import body_of
from saccade.plugins.engines.weights import folder_shapes, stored_form
from saccade.plugins.families import tiny_kinds
from saccade.plugins.families.proof_rows import noise
from saccade.plugins.media.videos import open_video
from saccade.types import Message, Request

pytest.importorskip("torchvision")


def asked(family, *parts):
    messages = (Message(role="user", parts=parts),)
    prompt = family.render(messages)
    return Request(key="a", ids=prompt.ids, media=prompt.media, messages=messages)


def shown(family, request):
    """Ids of what the chat template writes, before any processor."""
    chat = family.chat
    text = chat.text_of(request.messages, generation=True, expanded=False)
    return [*chat.begin, *chat.tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize("name", ["smolvlm", "gemma3", "mistral3", "llava_onevision"])
def test_what_a_processor_wrote_for_a_picture_is_taken_out(family_of, name):
    """Tiles with markers, newlines that merge with those of the prompt, rows with breaks, a plain run."""
    family = family_of(name)
    request = asked(family, "See\n", noise(60, 50, 0), noise(140, 70, 1), "\nand ", noise(60, 50, 2), ".")
    assert collapsed(request, family) == shown(family, request)
    assert len(request.ids) > 1.5 * len(shown(family, request))
    if name == "gemma3":
        three = family.chat.tokenizer.convert_tokens_to_ids("\n\n\n")
        assert three in request.ids and three not in collapsed(request, family)
    whole = name in ("smolvlm", "gemma3")  # to scale a picture down would save no tokens
    large = asked(family, replace(noise(300, 200, 3), max_pixels=1 << 20 if whole else 6000))
    body = body_of(large, family, lambda media: family.picture(media).shape, version=0)
    assert body["input_ids"] == shown(family, large) and body["image_data"] == [(200, 300, 3) if whole else (63, 94, 3)]


def test_brackets_that_no_template_writes_go_too(family_of):
    family = family_of("internvl")
    request = asked(family, "See ", noise(60, 50, 0), noise(140, 70, 1), "?")
    assert collapsed(request, family) == shown(family, request)
    few, many = (
        replace(span, media=replace(span.media, max_pixels=n))
        for span, n in zip(request.media, (1, 1 << 30), strict=True)
    )
    assert shown_by(replace(request, media=(few,)), family) == {"min_patches": 1, "max_patches": 1}
    with pytest.raises(ConfigError, match=r"request a: its images have different pixel budgets.*max_patches.*embedded"):
        shown_by(replace(request, media=(few, many)), family)


def test_a_video_is_one_placeholder(family_of):
    family = family_of("qwen2_5_vl")
    film = open_video(np.zeros((4, 56, 84, 3), np.uint8), fps=2.0)
    request = asked(family, film, noise(60, 50, 0), "?")
    assert collapsed(request, family) == shown(family, request)
    with pytest.raises(ConfigError, match="request a: the prompt has video, but sglang is sent images only"):
        body_of(request, family, str, version=0)


def test_a_prompt_that_is_read_differently_names_both(family_of):
    family = family_of("qwen2_5_vl")
    request = two_pictures(family, 512, 64)
    sizes = {(span.media.width, span.media.height) for span in request.media}
    assert len(sizes) == 2 and two_pictures(family, 512, 0) is None
    assert len(two_pictures(family, len(request.ids), 64).media) == 1
    require_same_prompt(request, family, "vllm", request.ids, len(request.ids))
    place, count = request.media[1].start, len(request.ids)
    theirs = np.delete(request.ids, place)
    with pytest.raises(
        EnvironmentProblem, match=rf"{count - 1} prompt tokens of a qwen2_5_vl model where we have {count}"
    ):
        require_same_prompt(request, family, "vllm", theirs, len(theirs))
    theirs = request.ids.copy()
    theirs[place] = family.chat.tokenizer.convert_tokens_to_ids("!")
    with pytest.raises(EnvironmentProblem, match=rf"token {place} is .* it has .*start\|>!<.*, here .*start\|><"):
        require_same_prompt(request, family, "vllm", theirs, count)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen3_moe"])
def test_weights_go_back_to_what_the_folder_holds(name, tmp_path):
    """A prefix that transformers drops, tensors that are no weights, experts that it holds as one."""
    folder = tiny_kinds.build(name, tmp_path)
    family = load_family(folder)
    family = replace(family, spec=replace(family.spec, prove=lambda *a: None))
    model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
    stored, constant = stored_form(folder, family.spec.auto_class, folder_shapes(folder))
    held = {part: weight for part, weight in load_file(f"{folder}/model.safetensors").items() if part not in constant}
    found = dict(stored(model.named_parameters()))
    assert found.keys() == held.keys() and all(torch.equal(held[part], weight) for part, weight in found.items())
    as_here = found.keys() == {part for part, _ in model.named_parameters()}
    assert (bool(constant), as_here) == (name == "gemma4",) * 2
