"""Families against transformers: positions, pixels, banned ids, unknown models."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from saccade.errors import ConfigError, EnvironmentProblem
from saccade.media.images import open_media
from saccade.media.kinds import decode
from saccade.models.families import FAMILIES, load_family
from saccade.models.load import freeze, load_model, pick_dtype, trainable_table
from saccade.plugins.doctor import model_files
from saccade.plugins.families.tiny import CONFIGS
from saccade.plugins.media import videos
from saccade.types import Message

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_positions_are_those_of_transformers(name, family_of, stock, image):
    family, model = family_of(name), stock(name).model
    sizes = [(56, 56), (140, 84), (84, 280), (280, 56)]
    cases = [(), (0,), (1, 2), (3, 0, 2), (2, 2, 1, 0)]
    for case in cases:
        parts = [p for i in case for p in (image(*sizes[i], 1), f"picture {i} ")]
        rendered = family.render([Message(role="user", parts=(*parts, "end"))])
        mine = family.positions(rendered.ids, rendered.media)
        if not case:
            assert mine.tolist() == [list(range(len(rendered)))] * 3
            continue
        ids = torch.from_numpy(rendered.ids)[None]
        theirs, _ = model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == family.chat.placeholder).long(),
            image_grid_thw=torch.tensor([s.grid for s in rendered.media]),
        )
        assert mine.tolist() == theirs[:, 0].tolist(), case


@pytest.mark.parametrize(
    ("size", "limits"),
    [
        ((97, 61), {}),  # to the next multiple of 28
        ((20, 30), {}),  # scaled up to min_pixels
        ((400, 300), {"max_pixels": 40_000}),  # scaled down to max_pixels
        ((300, 40), {"min_pixels": 30_000}),
    ],
)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_pixels_are_those_of_transformers_pil_processor(family_of, image, name, size, limits):
    family = family_of(name)
    media = open_media(decode(image(*size, 4)), **limits)
    grid, tokens = family.measure(media)
    processor = Qwen2VLImageProcessorPil.from_pretrained(
        family.path, size={"shortest_edge": media.min_pixels, "longest_edge": media.max_pixels}
    )
    theirs = processor(images=[Image.fromarray(decode(media))], return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [list(grid)]
    assert tokens == grid[1] * grid[2] // 4
    rendered = family.render([Message(role="user", parts=(media,))])
    mine = family.vision(rendered.media, CPU, torch.float32)
    assert mine["image_grid_thw"].tolist() == [list(grid)]
    assert (mine["pixel_values"] - theirs["pixel_values"]).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl"])
def test_settings_of_pictures_inside_those_of_a_processor(family_of, image, tmp_path, name):
    """As newer releases of transformers save them."""
    folder = shutil.copytree(family_of(name).path, tmp_path / "newer")
    file = folder / "processor_config.json"
    whole = json.loads(file.read_text()) if file.exists() else {}
    own = folder / "preprocessor_config.json"
    inside = {"image_processor": json.loads(own.read_text())}
    if name == "internvl":
        inside["video_processor"] = {"video_processor_type": "InternVLVideoProcessor"}
    file.write_text(json.dumps(whole | inside))
    own.unlink()
    seen = [
        f.vision(f.render([Message(role="user", parts=(image(97, 61, 2),))]).media, CPU, torch.float32)
        for f in (family_of(name), load_family(str(folder)))
    ]
    assert torch.equal(*(each["pixel_values"] for each in seen))
    assert not [row for row in model_files.check(Path(folder), False) if "preprocessor" in row[1]]


def test_banned_ids(family_of):
    for name in FAMILIES:
        family = family_of(name)
        tokenizer = family.chat.tokenizer
        banned = set(np.flatnonzero(family.banned).tolist())
        marks = ("image_pad", "video_pad", "vision_pad", "vision_start", "vision_end")
        if "omni" in name:
            marks = ("IMAGE", "VIDEO", "vision_pad", "vision_bos", "vision_eos")
        marks += ("AUDIO", "audio_bos", "audio_eos") if "audio" in family.spec.towers else ()
        modal = {tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for mark in marks}
        names = CONFIGS[name].names if CONFIGS[name].merge else ()
        modal |= set(tokenizer.convert_tokens_to_ids(list(names)))
        assert banned == modal | set(range(len(tokenizer), family.vocabulary))
        assert not banned & family.chat.eos_ids and len(family.banned) == family.vocabulary
        assert family.vocabulary > len(tokenizer)


def test_media_that_a_model_does_not_take_are_refused(family_of, image):
    video = videos.open_video(np.zeros((4, 56, 56, 3), np.uint8), fps=2.0)
    for name, media, message in (
        ("qwen3", image(56, 56, 1), "use a model that takes images"),
        ("qwen2_audio", video, "takes videos, model.family=generic, or prompt.chat_template=FILE"),
    ):
        with pytest.raises(ConfigError, match=message):
            family_of(name).render([Message(role="user", parts=(media, "x"))])


@pytest.fixture
def edited(family_of, tmp_path):
    """A copy of a tiny folder whose config.json says something else."""

    def copy(name, **changes):
        folder = tmp_path / "edited"
        shutil.copytree(family_of(name).path, folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return str(folder)

    return copy


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2_5_vl", {"model_type": "newest_vl"}, r"newest_vl.*qwen2_5_vl"),
        ("internvl", {"model_type": "internvl_chat"}, r"internvl_chat.*conversion, whose name ends in -hf"),
        ("qwen2_5_vl", {"vision_config": None}, r"config.json lacks 'vision_config', which"),
        ("llama", {"model_type": "newest", "layer_types": ["full_attention", "conv"]}, "has layers of type conv"),
        ("llama", {"model_type": "olmo_hybrid", "layer_types": ["linear_attention"]}, "of type linear_attention"),
        ("llama", {"model_type": "mamba", "num_attention_heads": None}, "'mamba' has no attention heads"),
    ],
)
def test_a_model_that_is_not_supported_is_refused(edited, tmp_path, name, changes, message):
    with pytest.raises(EnvironmentProblem, match=message):
        load_family(edited(name, **changes))
    with pytest.raises(EnvironmentProblem, match=r"no config\.json"):
        load_family(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "tower"), [("qwen2_5_vl", "saccade_flash"), ("llava", "sdpa"), ("qwen2_audio", "sdpa")]
)
def test_towers_without_segments_keep_the_attention_of_transformers(load, name, tower):
    config = load(name).config
    own = config.audio_config if name == "qwen2_audio" else config.vision_config
    assert (config.get_text_config()._attn_implementation, own._attn_implementation) == ("saccade", tower)


def test_bfloat16_is_picked_where_the_gpu_has_it(monkeypatch):
    def emulated(including_emulation=True):
        return including_emulation

    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", emulated)
    assert pick_dtype("auto", cuda) == torch.float32
    assert pick_dtype("bfloat16", cuda) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert pick_dtype("auto", cuda) == torch.bfloat16
    assert pick_dtype("auto", CPU) == torch.float32


def test_weights_that_do_not_fit_are_refused(edited):
    folder = edited("llama", num_hidden_layers=3)
    with pytest.raises(EnvironmentProblem, match=r"missing: model\.layers\.2"):
        load_model(load_family(folder), dtype=torch.float32, device=CPU)


def test_towers_are_frozen_by_name_prefix_or_pattern(family_of, load):
    family = family_of("qwen2_5_vl")
    towers = {n: family.tower_of(n) for n, _ in load("qwen2_5_vl").named_parameters()}
    assert set(towers.values()) == {"vision", "projector", "llm"}
    assert all(isinstance(prefixes, tuple) for spec in FAMILIES.values() for prefixes in spec.towers.values())
    cases = {
        "full": set(),
        "freeze:vision": {n for n, t in towers.items() if t == "vision"},
        "freeze:vision,projector": {n for n, t in towers.items() if t != "llm"},
        "freeze: vision , llm": {n for n, t in towers.items() if t != "projector"},
        "freeze:model.visual.blocks.0.": {n for n in towers if "visual.blocks.0." in n},
        r"freeze:re:layers\.\d+\.mlp": {n for n in towers if "layers" in n and ".mlp." in n},
    }
    for train, wanted in cases.items():
        model = load("qwen2_5_vl")
        freeze(model, family, train)
        assert {n for n, p in model.named_parameters() if not p.requires_grad} == wanted, train
    table = trainable_table(model, family)
    assert table["vision"][1] == 0 and table["llm"][1] > 0


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("freeze:visoin", "'visoin' matches no parameter.*vision"),
        ("freeze:", "write full, or freeze"),
        ("freeze:vision,projector,llm", "freezes everything"),
    ],
)
def test_what_cannot_be_frozen_is_refused(family_of, load, train, message):
    with pytest.raises(ConfigError, match=message):
        freeze(load("qwen2_5_vl"), family_of("qwen2_5_vl"), train)


def test_a_template_in_chat_template_json_wins_over_the_tokenizers_own(tmp_path, family_of, image):
    """As the published Qwen2.5-VL folders have it: the tokenizer's template knows text only."""
    folder = shutil.copytree(family_of("qwen2_5_vl").path, tmp_path / "published")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    text_only = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": text_only}))
    family = load_family(str(folder))
    message = Message(role="user", parts=(image(56, 56, 0), "how many?"))
    assert len(family.render((message,)).media) == 1


@pytest.mark.parametrize(
    ("file", "written", "why"),
    [
        ("config.json", '{"model_type": "qwen', "config.json is damaged .*; copy or download it again"),
        ("config.json", "[1]", r"config.json holds no settings but \[1\]"),
        ("tokenizer.json", '{"version"', "its tokenizer cannot be used .*; copy or download its tokenizer files"),
        ("tokenizer.json", None, "its tokenizer cannot be used"),
    ],
)
def test_a_damaged_folder_is_named(file, written, why, family_of, tmp_path):
    shutil.copytree(family_of("qwen2_5_vl").path, tmp_path, dirs_exist_ok=True)
    if written is None:
        for one in tmp_path.glob("tokenizer*"):
            one.unlink()
    else:
        (tmp_path / file).write_text(written)
    with pytest.raises(EnvironmentProblem, match=why):
        load_family(str(tmp_path))


@pytest.mark.parametrize(("name", "side"), [("qwen2_5_vl", 84), ("qwen3_vl", 96)])
def test_known_families_agree_with_the_generic_one(name, side, family_of, load):
    """A second opinion: ids, positions, features of a picture that is not resized, which libraries round apart."""
    pytest.importorskip("torchvision")
    known = family_of(name)
    other = load_family(known.path, name="generic")
    picture = open_media(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))
    one, two = (family.render([Message(role="user", parts=("a ", picture, "b?"))]) for family in (known, other))
    assert one.ids.tolist() == two.ids.tolist()
    positions = [family.positions(r.ids, r.media).tolist() for family, r in ((known, one), (other, two))]
    assert positions[0] == positions[1]
    with torch.no_grad():
        features = [family.features(load(name), family.media(r.media)) for family, r in ((known, one), (other, two))]
    assert (features[0] - features[1]).abs().max() < 1e-4 * features[0].abs().max()
