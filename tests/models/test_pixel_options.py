"""Pixel budgets of models whose processor makes as many tokens of a small picture as of a large one; kept pictures."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from saccade.config import load as load_config
from saccade.data import datasets
from saccade.errors import ConfigError
from saccade.media.images import open_media
from saccade.media.kinds import decode
from saccade.media.pixel_cache import ImageCache
from saccade.models.families import load_family
from saccade.models.load import load_model, media_inputs
from saccade.plugins.check_data.check_data import check_data
from saccade.plugins.doctor.agreement import unlimited
from saccade.plugins.engines.copy_engine import shown_by
from saccade.plugins.engines.sglang import body_of
from saccade.plugins.families import proof_rows, tiny_kinds
from saccade.plugins.overlong.shorten import shrink
from saccade.recipes.model_setup import family_of as family_of_config
from saccade.run.checkpoint import copy_processor
from saccade.run.quarantine import Quarantine
from saccade.types import Media, Request, Sample
from tests.models.against import CPU, ask

pytest.importorskip("torchvision")
TILE = 56 * 56
# Options of the image processor in the folder, and for budgets the options of a call and the tokens of 400x300 pixels.
KINDS = {
    "smolvlm": (
        {"size": {"longest_edge": 168}},
        {
            100: ({"size": {"longest_edge": 56}}, 4),
            4 * TILE - 2000: ({"size": {"longest_edge": 112}}, 31),  # the nearest number of tiles
            1 << 20: ({"size": {"longest_edge": 168}}, 62),  # as its folder says, whatever there is to spend
        },
    ),
    "internvl": (
        {},
        {
            100: ({"min_patches": 1, "max_patches": 1}, 4),
            4 * TILE: ({"min_patches": 1, "max_patches": 4}, 20),
            1 << 20: ({"min_patches": 1, "max_patches": 6}, 28),
        },
    ),
    "gemma4": (
        {"max_soft_tokens": 280},
        {
            100: ({"max_soft_tokens": 70}, 63),
            140 * 28**2: ({"max_soft_tokens": 140}, 130),
            1 << 20: ({"max_soft_tokens": 280}, 266),
        },
    ),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A tiny folder whose image processor has these options."""

    def made(name, options):
        folder = Path(tiny_kinds.build(name, tmp_path_factory.mktemp(name)))
        for file in (folder / "processor_config.json", folder / "preprocessor_config.json"):
            settings = json.loads(file.read_text()) if file.is_file() else {}
            if part := settings.get("image_processor", settings if file.name.startswith("pre") else {}):
                part |= options
                file.write_text(json.dumps(settings))
        return load_family(str(folder), name="generic")

    return made


@pytest.mark.parametrize("name", KINDS)
def test_a_budget_becomes_options_of_the_processor(told, name, tmp_path):
    options, rows = KINDS[name]
    family, stock = told(name, options), None
    for budget, (wanted, tokens) in rows.items():
        unread = Media(hash="", width=400, height=300, path="nowhere", max_pixels=budget)
        assert family.measure(unread)[1] == tokens  # known without a look at the file
        picture = replace(proof_rows.noise(400, 300, 0), max_pixels=budget)
        prompt = family.render(ask(picture, "Why?"))
        request = Request(key="a", ids=prompt.ids, media=prompt.media)
        assert shown_by(request, family) == wanted and family.picture(picture).shape == (300, 400, 3)  # not scaled
        stock = stock or transformers.AutoProcessor.from_pretrained(family.path)
        text = family.chat.text_of(ask(picture, "Why?"), generation=True, expanded=False)
        theirs = stock(text=text, images=[Image.fromarray(decode(picture))], images_kwargs=wanted, return_tensors="pt")
        assert prompt.ids.tolist() == theirs["input_ids"][0].tolist()
        mine = family.vision(prompt.media, CPU, torch.float32)["pixel_values"]
        assert torch.equal(mine, theirs["pixel_values"].float())
        assert family.cache(picture).get(picture)["pixel_values"].shape == mine.shape
        # A folder that a run saves shows pictures so by itself, and lets a later run show more again.
        saved = tmp_path / str(budget)
        saved.mkdir()
        shutil.copy(f"{family.path}/config.json", saved)
        config = load_config({"data.max_pixels": budget, "model.family": "generic"})
        copy_processor(family_of_config(config, family.path), saved)
        alone = transformers.AutoProcessor.from_pretrained(saved)
        made = alone(text=text, images=[Image.fromarray(decode(picture))], return_tensors="pt")
        assert made["input_ids"].shape == theirs["input_ids"].shape
        again = load_family(str(saved), name="generic")
        assert again.measure(replace(unread, max_pixels=1 << 20))[1] == rows[1 << 20][1]


def test_a_row_that_is_too_long_is_shrunk(told):
    """Below what a picture has, and above: it is enlarged."""
    family = told("smolvlm", KINDS["smolvlm"][0])

    def length(sample):
        return len(family.render(sample.messages).ids)

    for size in ((640, 480), (20, 15)):
        sample = Sample(id="a", messages=ask(replace(proof_rows.noise(*size, 0), min_pixels=1), "Why?"))
        whole = length(sample)
        assert [length(shrink(sample, length, whole - less)) - whole for less in (1, 32)] == [-31, -58]
        assert shrink(sample, length, whole - 59) is None


def test_pictures_of_two_budgets_are_read_apart_and_refused_in_one_call(told):
    family = told("internvl", {})
    few, many = (replace(proof_rows.noise(400, 300, 0), max_pixels=n) for n in (1, 1 << 20))
    prompt = family.render(ask(few, many, "Why?"))
    assert [span.length for span in prompt.media] == [4, 28]
    features = family.media(prompt.media)
    assert sorted(len(batch["inputs"]["pixel_values"]) for batch in features["batches"].values()) == [1, 7]
    with pytest.raises(ConfigError, match=r"all pictures of a call alike.*give them one pixel budget"):
        family.vision(prompt.media, CPU, torch.float32)
    request = Request(key="a", ids=prompt.ids, media=prompt.media)
    with pytest.raises(ConfigError, match=r"request a: .* different pixel budgets.*max_patches.*env.min_pixels"):
        shown_by(request, family)
    one, other = (replace(request, media=(span,)) for span in prompt.media)
    with pytest.raises(ConfigError, match=r"shown with .*'max_patches': 1.* but sglang shows all as the folder"):
        body_of(one, family, str, version=0)
    assert len(body_of(other, family, str, version=0)["image_data"]) == 1


def test_pictures_are_scaled_where_that_saves_tokens_and_left_alone_where_nothing_does(told):
    pixels = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)
    small = open_media(pixels, min_pixels=1, max_pixels=2500)
    for name, options, shape in (
        ("llama4", {}, (50, 50, 3)),
        ("ovis2", {"crop_to_patches": True}, (50, 50, 3)),
        ("idefics2", {"size": {"shortest_edge": 28, "longest_edge": 980}}, (50, 50, 3)),  # patches, though no tokens
        ("gemma3", {}, (100, 100, 3)),
        ("perception_lm", {}, (100, 100, 3)),  # its processor takes no limit but that of its folder
    ):
        family = told(name, options)
        assert family.picture(small).shape == shape, name
    ((_, note),) = unlimited(family)
    assert note.startswith("data.max_pixels makes no image cheaper: one of 640x480 always has 20 tokens")
    assert not [*unlimited(told("internvl", {}))]


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.7), ("bfloat16", 0.4)])
def test_what_is_kept_of_a_picture_is_narrow_and_read_as_before(told, dtype, share, monkeypatch):
    """Masks are bytes, and numbers have the precision of all models that read them."""
    dtype = getattr(torch, dtype)
    family = told("smolvlm", KINDS["smolvlm"][0])
    family = replace(family, spec=replace(family.spec, prove=lambda model, family: None))
    model = load_model(family, dtype=dtype, device=CPU)
    spans = family.render(ask(proof_rows.noise(400, 300, 0), proof_rows.noise(60, 50, 1), "Why?")).media

    def seen():
        family.reader.kept = ImageCache(1 << 30, make=family.reader._row)
        kept = sum(family.cache(span.media).get(span.media).nbytes for span in spans)
        with torch.no_grad():
            return kept, family.features(model, media_inputs(family, spans, CPU))

    with monkeypatch.context() as patch:
        patch.setattr("saccade.plugins.families.picture_processor.narrowed", lambda row, half: row)
        whole, wanted = seen()
    family.reader.keep_for(dtype)
    kept, found = seen()
    assert torch.equal(found, wanted) and kept < share * whole
    family.reader.keep_for(torch.float32)  # a second model, which reads all of it
    family.reader.keep_for(torch.bfloat16)
    assert family.cache(spans[0].media).get(spans[0].media)["pixel_values"].dtype == np.float32


def test_a_row_whose_picture_the_processor_fails_at_is_left_out(told, tmp_path):
    """A strip that it would make no pixel wide: when lengths are counted, and when it is seen."""
    family = told("mistral3", {})
    for name, size in (("strip", (200, 1)), ("whole", (40, 30))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    rows = [{"id": n, "images": [f"{n}.png"], "problem": "<image>?", "answer": "1"} for n in ("strip", "whole")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config({"data": {"train": str(tmp_path / "rows.jsonl"), "max_bad_fraction": 0.5}})
    report = check_data(config, family=family)
    assert [row.id for row in report.bad] == ["strip"] and report.good == 1
    assert "strip.png: the model's processor fails at it (ValueError: Size must" in report.bad[0].reason
    quarantine, unmeasured = Quarantine(tmp_path, config.data), datasets.load(config.data.train, config.data)
    assert [sample.id for sample in quarantine.whole(unmeasured, family)] == ["whole"]
    assert [row.reason for row in quarantine.found(unmeasured)] == [report.bad[0].reason]
