"""Qwen2.5-Omni's thinker: what it reads and says of pictures, films and sounds is what transformers makes of them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from saccade.algorithms import select
from saccade.config import TrainConfig
from saccade.errors import EnvironmentProblem
from saccade.forest.attention import forest_plan
from saccade.media.images import open_media
from saccade.media.kinds import decode
from saccade.models.families import load_family
from saccade.models.load import hidden_states, load_model
from saccade.plugins.media import videos
from saccade.recipes.sft import SUPERVISED
from saccade.trainer import MODEL_SCORING
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss
from tests.models.against import (
    CPU,
    ask,
    assert_forests_are_plain_rows,
    film,
    forest_of,
    noise,
    ours,
    pair,
    rows_of,
    theirs,
)

NAME = "qwen2_5_omni"


PICTURES = open_media(film(1, 56, 84)[0]), open_media(film(1, 112, 56, seed=1)[0])
SOUNDS = noise(1.0), noise(5.37, seed=1)  # one window of the tower, and three
FILMS = videos.open_video(film(8), fps=3.0), videos.open_video(film(4, 56, 56, 2), fps=0.7)
ASKED = {
    "text": ask("text only"),
    "picture": ask(PICTURES[0], "how many?"),
    "sound": ask("listen: ", SOUNDS[1], "what is heard?"),
    "video": ask(FILMS[0], "what happens?"),
    "two pictures and a sound": ask(PICTURES[0], "or", SOUNDS[0], PICTURES[1], "which?"),
    "everything": ask(SOUNDS[1], FILMS[1], "x", PICTURES[1], SOUNDS[0], FILMS[0], "why?"),
}


@pytest.fixture(scope="module")
def family(family_of):
    return family_of(NAME)


def processed(family, messages):
    """What transformers' own processor makes of it; layers and sizes of a video are given."""
    processor = Qwen2_5OmniProcessor.__new__(Qwen2_5OmniProcessor)
    processor.tokenizer = family.chat.tokenizer
    processor.feature_extractor = WhisperFeatureExtractor.from_pretrained(family.path)
    limits = {"shortest_edge": PICTURES[0].min_pixels, "longest_edge": PICTURES[0].max_pixels}
    processor.image_processor = Qwen2VLImageProcessorPil(size=limits)

    def film_processor(videos, **options):
        grids = torch.tensor([family.measure(video)[0] for video in videos])
        return {"video_grid_thw": grids}

    film_processor.merge_size = film_processor.temporal_patch_size = 2
    processor.video_processor = film_processor
    for name in ("image", "audio", "video", "vision_bos", "vision_eos", "audio_bos", "audio_eos"):
        setattr(processor, f"{name}_token", getattr(family.chat.tokenizer, f"{name}_token"))
    media = {kind: [m for m in messages[0].media if m.kind == kind] for kind in ("image", "video")}
    heard = [decode(m) for m in messages[0].media if m.kind == "audio"]
    return processor(
        text=[family.chat.text_of(messages, generation=True)],
        images=[Image.fromarray(decode(m)) for m in media["image"]],
        videos=media["video"],
        audio=heard,
        return_tensors="pt",
    )


def test_tokens_and_features_are_those_of_the_processor(family):
    rendered = family.render(ASKED["everything"])
    theirs = processed(family, ASKED["everything"])
    assert theirs["input_ids"][0].tolist() == rendered.ids.tolist()
    ours = family.vision(rendered.media, CPU, torch.float32)
    for grid in ("image_grid_thw", "video_grid_thw"):
        assert torch.equal(ours[grid], theirs[grid])
    assert (ours["pixel_values"] - theirs["pixel_values"]).abs().max() < 1e-6
    heard, known = (made["feature_attention_mask"].bool() for made in (ours, theirs))
    assert torch.equal(heard.sum(1), known.sum(1))
    assert (ours["input_features"].mT[heard] - theirs["input_features"].mT[known]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["picture", "everything"])
def test_positions_and_logits_are_those_of_transformers(family, load, stock, name):
    rendered = family.render(ASKED[name])
    ids = torch.from_numpy(rendered.ids)[None]
    reference, model = stock(NAME), load(NAME)
    given = family.vision(rendered.media, CPU, torch.float32)
    mask = torch.ones_like(ids)
    heard = given.get("feature_attention_mask")
    wanted, _ = reference.get_rope_index(
        ids, given.get("image_grid_thw"), given.get("video_grid_thw"), mask,
        audio_seqlens=None if heard is None else heard.sum(1), second_per_grids=given.get("video_second_per_grid"),
    )  # fmt: skip
    positions = family.positions(rendered.ids, rendered.media)
    assert np.array_equal(positions, wanted[:, 0].numpy())
    with torch.no_grad():
        theirs = reference(input_ids=ids, attention_mask=mask, **given).logits[0]
        plan = forest_plan(np.array([0, len(rendered)]), np.array([-1]), CPU, torch.float32)
        hidden = hidden_states(model, family, ids[0], torch.from_numpy(positions), rendered.media, plan)
        assert (model.lm_head(hidden) - theirs).abs().max() < 1e-4


def test_greedy_answers_are_those_of_transformers(family, load, stock):
    prompts = [family.render(messages) for messages in ASKED.values()]
    assert ours(load(NAME), family, prompts) == theirs(stock(NAME), family, prompts)


PAIR = pair(PICTURES[0], SOUNDS[1], FILMS[1], "what?")


def test_gradients_of_a_forest_are_those_of_transformers_on_rows(family, load, monkeypatch):
    assert_forests_are_plain_rows(load(NAME), family, PAIR)
    backend = LocalTrainer(load(NAME), family, TrainConfig())
    seen = {}
    monkeypatch.setattr(backend.optimizer, "step", lambda lr, norm: seen.update(backend.optimizer.gradients))
    forest = select.write_supervision([forest_of(PAIR, family)])
    update = backend.train_step(forest, PolicyLoss(SUPERVISED, MODEL_SCORING), lr=0.0)
    theirs = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(family.path)
    losses = []
    for row in rows_of(PAIR, family):
        ids = torch.from_numpy(row.ids)[None]
        given = family.vision(row.media, CPU, torch.float32)
        logits = theirs(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0]
        losses.append(-logits.log_softmax(-1)[torch.from_numpy(row.predictors), torch.from_numpy(row.targets)])
    loss = torch.cat(losses).mean()
    loss.backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert update.metrics.means()["policy/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert seen.keys() == wanted.keys() and len(wanted) == 102
    whole = torch.stack([g.norm() for g in wanted.values()]).norm()
    assert max((seen[n] - g).norm() for n, g in wanted.items()) < 1e-5 * whole


def test_of_a_whole_checkpoint_the_thinker_is_loaded_and_saved(family, tmp_path):
    whole = Path(shutil.copytree(family.path, tmp_path / "whole"))
    assert json.loads((whole / "config.json").read_text())["model_type"] == NAME
    stored = load_file(whole / "model.safetensors")
    assert all(name.startswith("thinker.") for name in stored)
    stored |= {"talker.a.weight": torch.ones(2), "token2wav.b.weight": torch.ones(1)}
    save_file(stored, whole / "model.safetensors", metadata={"format": "pt"})
    model = load_model(load_family(str(whole)), dtype=torch.float32, device=CPU)
    model.save_pretrained(tmp_path / "saved")
    stock, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    theirs = dict(stock.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in model.named_parameters())
    save_file(stored | {"thinker.more.weight": torch.ones(2)}, whole / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EnvironmentProblem, match=r"more\.weight"):
        load_model(load_family(str(whole)), dtype=torch.float32, device=CPU)
